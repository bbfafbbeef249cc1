"""Offsets and scales of the logits of rare classes."""

import numpy as np
import pytest
import torch
from torch import nn
from toy import F64, newton_solution

from obbo_lightning import ConjugateGradient, GradientDescent
from obbo_lightning.checks import check_problem
from obbo_lightning.checks.differences import central_difference
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.problems.imbalance import VectorScaling, recalls


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


@pytest.fixture
def task():
    return {
        "train_x": drawn(7, 2),
        "train_y": torch.tensor([0, 0, 0, 0, 1, 1, 2]),
        "validation_x": drawn(6, 2, seed=1),
        "validation_y": torch.arange(3).repeat(2),
        "test_x": drawn(6, 2, seed=2),
        "test_y": torch.arange(3).repeat(2),
        "frequency": torch.tensor([0.6, 0.3, 0.1], dtype=F64),
    }


def by_hand(inner, x, y, scale=1.0, offset=0.0):
    """The mean over examples of log Σ_c exp(scale_c z_c + offset_c) minus that of the right class."""
    weight, bias = inner[:6].reshape(3, 2).numpy(), inner[6:].numpy()
    logits = scale * (x.numpy() @ weight.T + bias) + offset
    return np.mean(np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(y)), y.numpy()])


def test_losses_are_those_of_numpy(task):
    problem = VectorScaling(nn.Linear(2, 3), ways=3)
    inner, offset, scale = drawn(2, 9), drawn(2, 3, seed=5), 0.5 + drawn(2, 3, seed=6).square().clamp(max=1)
    outer = torch.cat([offset, scale], -1)
    trained, judged = problem.inner_loss(outer, inner, task), problem.outer_loss(outer, inner, task)
    for lane in range(2):
        wanted = by_hand(inner[lane], task["train_x"], task["train_y"], scale[lane].numpy(), offset[lane].numpy())
        assert float(trained[lane]) == pytest.approx(wanted, rel=1e-12)
        wanted = by_hand(inner[lane], task["validation_x"], task["validation_y"])
        assert float(judged[lane]) == pytest.approx(wanted, rel=1e-12)


def test_lambda_starts_at_plain_training_and_stays_within_its_bounds():
    blocks = VectorScaling(nn.Linear(2, 3), ways=3, reach=4.0, factor=3.0).blocks
    assert blocks.start().tolist() == [[0, 0, 0, 1, 1, 1]]
    far = torch.tensor([[9.0, -9.0, 0.0]])
    assert blocks.named["offset"].domain.project(far).tolist() == [[4, -4, 0]]
    assert blocks.named["scale"].domain.project(far).tolist()[0] == pytest.approx([3, 1 / 3, 1 / 3])


def test_scores_are_means_of_recalls_over_classes_and_over_what_comes():
    says = torch.tensor([0, 0, 0, 1, 2, 0])  # three of class 0, all right; one of two of class 1; none of class 2
    batch = {"x": nn.functional.one_hot(says).to(F64), "y": torch.tensor([0, 0, 0, 1, 1, 2])}
    found = recalls(nn.Identity(), batch | {"frequency": torch.tensor([0.6, 0.3, 0.1], dtype=F64)}, {})
    assert float(found["balanced_accuracy"]) == pytest.approx((1 + 0.5 + 0) / 3)
    assert float(found["accuracy"]) == pytest.approx(0.6 * 1 + 0.3 * 0.5 + 0.1 * 0)


def test_the_problem_keeps_its_contract(task):
    problem = VectorScaling(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 3)), ways=3)
    outer = problem.blocks.start(lanes=2, dtype=F64) + 0.1 * drawn(2, 6)
    check_problem(problem, outer, drawn(2, 15), task)


class Shrunk(VectorScaling):
    """With a penalty, so that there is a minimum to be exact at."""

    def inner_loss(self, outer, inner, task, sample=None):
        return super().inner_loss(outer, inner, task, sample) + 0.05 * inner.square().sum(-1)


def test_the_hypergradient_is_that_of_central_differences_where_the_inner_problem_is_solved(task):
    problem = Shrunk(nn.Linear(2, 3), ways=3)
    outer = torch.tensor([[0.5, -0.2, -0.4, 1.2, 0.9, 0.7]], dtype=F64)
    inner = newton_solution(problem, outer, task, torch.zeros(1, 9, dtype=F64), steps=12)
    found = ConjugateGradient(steps=9).differentiate(Oracle(problem, outer, task), GradientDescent(), inner, None)
    solved = lambda at: problem.outer_loss(at, newton_solution(problem, at, task, inner, steps=6), task)  # noqa: E731
    assert torch.allclose(found.value, central_difference(solved, outer), atol=1e-8)
    assert found.value.abs().min() > 1e-3  # of both blocks


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reach": 0.0}, r"^problem.reach must be a positive finite number, got 0.0$"),
        ({"factor": 1.0}, r"^problem.factor must be more than 1, got 1.0$"),
        ({"ways": 1}, r"^ways must be an integer of at least 2, got 1$"),
    ],
)
def test_a_mistake_is_one_line(settings, message):
    with pytest.raises(ValueError, match=message):
        VectorScaling(nn.Linear(2, 3), **{"ways": 3} | settings)
