"""Quadratic problems: constants and solutions by dense linear algebra, noise, lanes, and refusals."""

import pytest
import torch
from toy import F64, normal

from obbo_lightning.core.randomness import Sample
from obbo_lightning.problems.quadratic import Quadratic
from obbo_lightning.testing import check_problem

ROOT = normal(3, 4, 4)
MATRIX = ROOT @ ROOT.mT + torch.eye(4, dtype=F64)
PROBLEM = Quadratic(MATRIX, normal(3, 4, 2, seed=1), ridge=0.4, noise=2.0)
OUTER, INNER = normal(3, 2, seed=2), normal(3, 4, seed=3)
TASK = {"b": normal(3, 4, seed=4), "c": normal(3, 4, seed=5)}


def test_the_problem_keeps_its_contract():
    check_problem(PROBLEM, OUTER, INNER, TASK)
    # the bound on the curvature is attained
    assert torch.allclose(PROBLEM.smoothness(OUTER, TASK), torch.linalg.eigvalsh(MATRIX)[:, -1])


def test_selected_lanes_are_the_same_problem():
    selected, task = PROBLEM.select_lanes(TASK, slice(1, 3))
    for name in ("inner_loss", "outer_loss"):
        for sample in (None, Sample(3, 2)):
            whole = getattr(PROBLEM, name)(OUTER, INNER, TASK, sample)
            assert torch.equal(getattr(selected, name)(OUTER[1:], INNER[1:], task, sample), whole[1:])
    assert torch.allclose(selected.hypergradient(OUTER[1:], task)[0], PROBLEM.hypergradient(OUTER, TASK)[0][1:])


@pytest.mark.parametrize("size", [1, 16])
@pytest.mark.parametrize("loss", [PROBLEM.inner_loss, PROBLEM.outer_loss], ids=["inner", "outer"])
def test_noise_is_that_of_a_mean_of_observations(loss, size):
    exact = loss(OUTER, INNER, TASK)
    draws = torch.stack([loss(OUTER, INNER, TASK, Sample(seed, size)) - exact for seed in range(2000)])
    deviation = draws.std(0)
    assert torch.allclose(deviation, 2.0 / size**0.5 * INNER.norm(dim=-1), rtol=0.08)
    assert (draws.mean(0).abs() < 4 * deviation / 2000**0.5).all()
    assert torch.equal(loss(OUTER, INNER, TASK, Sample(3, None)), exact)
