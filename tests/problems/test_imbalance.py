"""Learned offsets and scales of the logits of rare classes, against NumPy."""

import numpy as np
import pytest
import torch
from torch import nn
from toy import F64, normal

from obbo_lightning.problems.imbalance import VectorScaling, recalls
from obbo_lightning.testing import check_problem

FREQUENCY = torch.tensor([0.6, 0.3, 0.1], dtype=F64)
TASK = {f"{kind}_x": normal(6, 2, seed=i) for i, kind in enumerate(("train", "validation", "test"))}
TASK |= {"train_y": torch.tensor([0, 0, 0, 1, 1, 2]), "frequency": FREQUENCY}
TASK |= {f"{kind}_y": torch.arange(3).repeat(2) for kind in ("validation", "test")}


def cross_entropy_in_numpy(inner, x, y, scale=1.0, offset=0.0):
    """Return the mean over examples of log Σ_c exp(scale_c z_c + offset_c) minus the entry of the correct class."""
    weight, bias = inner[:6].reshape(3, 2).numpy(), inner[6:].numpy()
    logits = scale * (x.numpy() @ weight.T + bias) + offset
    return np.mean(np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(y)), y.numpy()])


def test_losses_are_those_of_numpy():
    problem = VectorScaling(nn.Linear(2, 3), ways=3)
    inner, offset, scale = normal(2, 9), normal(2, 3, seed=5), 0.5 + normal(2, 3, seed=6).square().clamp(max=1)
    outer = torch.cat([offset, scale], -1)
    training, validation = problem.inner_loss(outer, inner, TASK), problem.outer_loss(outer, inner, TASK)
    for lane in range(2):
        settings = scale[lane].numpy(), offset[lane].numpy()
        expected = cross_entropy_in_numpy(inner[lane], TASK["train_x"], TASK["train_y"], *settings)
        assert float(training[lane]) == pytest.approx(expected, rel=1e-12)
        expected = cross_entropy_in_numpy(inner[lane], TASK["validation_x"], TASK["validation_y"])
        assert float(validation[lane]) == pytest.approx(expected, rel=1e-12)


def test_lambda_starts_at_plain_training_and_stays_within_its_bounds():
    groups = VectorScaling(nn.Linear(2, 3), ways=3, reach=4.0, factor=3.0).groups
    assert groups.start().tolist() == [[0, 0, 0, 1, 1, 1]]
    far = torch.tensor([[9.0, -9.0, 0.0]])
    assert groups.named["offset"].domain.project(far).tolist() == [[4, -4, 0]]
    assert groups.named["scale"].domain.project(far).tolist()[0] == pytest.approx([3, 1 / 3, 1 / 3])


def test_scores_are_mean_recalls_over_classes_and_over_frequencies():
    predicted = torch.tensor([0, 0, 0, 1, 2, 0])  # correct: all three of class 0, one of two of class 1, none of 2
    batch = {"x": nn.functional.one_hot(predicted).to(F64), "y": torch.tensor([0, 0, 0, 1, 1, 2])}
    found = recalls(nn.Identity(), batch | {"frequency": FREQUENCY}, {})
    assert float(found["balanced_accuracy"]) == pytest.approx((1 + 0.5 + 0) / 3)
    assert float(found["accuracy"]) == pytest.approx(0.6 * 1 + 0.3 * 0.5 + 0.1 * 0)


def test_the_problem_keeps_its_contract():
    problem = VectorScaling(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 3)), ways=3)
    outer = problem.groups.start(lanes=2, dtype=F64) + 0.1 * normal(2, 6)
    check_problem(problem, outer, normal(2, 15), TASK)
