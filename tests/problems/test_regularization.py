"""Learned weight decay and label smoothing, against torch."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from toy import F64, normal

from obbo_lightning.problems.regularization import Regularized, accuracy_and_loss
from obbo_lightning.testing import check_problem

SIZES = {"train": 7, "validation": 6, "test": 5}
TASK = {f"{kind}_x": normal(count, 2, seed=count) for kind, count in SIZES.items()}
TASK |= {f"{kind}_y": torch.arange(count) % 3 for kind, count in SIZES.items()}


def test_losses_are_those_of_torch():
    problem = Regularized(nn.Linear(2, 3))
    inner, outer = normal(2, 9), torch.tensor([[3e-3, 0.25], [1e-4, 0.0]], dtype=F64)
    training, validation = problem.inner_loss(outer, inner, TASK), problem.outer_loss(outer, inner, TASK)
    for lane, (decay, smoothing) in enumerate(outer.tolist()):
        weight, bias = inner[lane, :6].reshape(3, 2), inner[lane, 6:]
        logits = functional.linear(TASK["train_x"], weight, bias)
        fit = functional.cross_entropy(logits, TASK["train_y"], label_smoothing=smoothing)
        expected = fit + decay / 2 * (weight.square().sum() + bias.square().sum())
        assert float(training[lane]) == pytest.approx(float(expected), rel=1e-12)
        plain = functional.cross_entropy(functional.linear(TASK["validation_x"], weight, bias), TASK["validation_y"])
        assert float(validation[lane]) == pytest.approx(float(plain), rel=1e-12)


def test_lambda_starts_in_a_range_of_useful_values_and_stays_there():
    groups = Regularized(nn.Linear(2, 3)).groups
    assert groups.start().tolist()[0] == pytest.approx([1e-3, 0.1])
    for far, nearest in ((9.0, (1e-2, 0.3)), (-9.0, (1e-4, 0.0))):
        projected = [float(group.domain.project(torch.tensor([[far]]))) for group in groups.named.values()]
        assert projected == pytest.approx(nearest)


def test_scores_are_accuracy_and_cross_entropy():
    predicted = torch.tensor([0, 0, 1, 2])
    batch = {"x": functional.one_hot(predicted).to(F64), "y": torch.tensor([0, 0, 1, 1])}
    found = accuracy_and_loss(nn.Identity(), batch, {})
    assert float(found["accuracy"]) == 0.75
    assert float(found["cross_entropy"]) == pytest.approx(float(functional.cross_entropy(batch["x"], batch["y"])))


def test_the_problem_keeps_its_contract():
    problem = Regularized(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 3)))
    check_problem(problem, torch.tensor([[3e-3, 0.25], [9e-4, 0.1]], dtype=F64), normal(2, 15), TASK)
