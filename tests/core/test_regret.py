"""Bilevel local regret against its definition in NumPy."""

import numpy as np
import pytest
import torch
from toy import normal

from obbo_lightning.core.regret import Regret


def regret_from_definition(vectors, window):
    """Return Σ_t ‖(1/w) Σ_{i<w} x_{t−i}‖² per lane."""
    total = np.zeros(vectors.shape[1])
    for t in range(len(vectors)):
        mean = vectors[max(0, t - window + 1) : t + 1].sum(0) / window
        total += (mean**2).sum(-1)
    return total


@pytest.mark.parametrize("window", [1, 5, 40])
def test_regret_is_its_definition_per_lane_and_per_group(window):
    vectors = normal(23, 3, 4)
    regret = Regret(window, {"first": slice(0, 1), "rest": slice(1, 4)})
    for vector in vectors:
        total = regret.add(vector)
    assert np.allclose(total, regret_from_definition(vectors.numpy(), window), rtol=1e-13)
    for name, where in regret.groups.items():
        expected = regret_from_definition(vectors[..., where].numpy(), window)
        assert np.allclose(regret.group_totals[name], expected, rtol=1e-13)


def test_float32_vectors_are_squared_and_summed_in_float64():
    regret = Regret(1)
    for size in [1e4, *[1e-2] * 1000]:
        total = regret.add(torch.full((1, 1), size))
    assert total.dtype == torch.float64
    assert abs(float(total) - (1e8 + 0.1)) < 1e-5
    assert float(Regret(1).add(torch.full((1, 1), 1e30))) == pytest.approx(1e60)
