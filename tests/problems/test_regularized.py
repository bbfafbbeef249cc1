"""Weight decay and label smoothing."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from toy import F64, newton_solution

from obbo_lightning import ConjugateGradient, GradientDescent
from obbo_lightning.checks import check_problem
from obbo_lightning.checks.differences import central_difference
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.problems.regularization import Regularized, accuracy_and_loss


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


@pytest.fixture
def task():
    kinds = {"train": 7, "validation": 6, "test": 5}
    labels = {f"{kind}_y": torch.arange(count) % 3 for kind, count in kinds.items()}
    return {f"{kind}_x": drawn(count, 2, seed=count) for kind, count in kinds.items()} | labels


def test_losses_are_those_of_torch(task):
    problem = Regularized(nn.Linear(2, 3))
    inner, outer = drawn(2, 9), torch.tensor([[3e-3, 0.25], [1e-4, 0.0]], dtype=F64)
    trained, judged = problem.inner_loss(outer, inner, task), problem.outer_loss(outer, inner, task)
    for lane, (decay, smoothing) in enumerate(outer.tolist()):
        weight, bias = inner[lane, :6].reshape(3, 2), inner[lane, 6:]
        logits = functional.linear(task["train_x"], weight, bias)
        fit = functional.cross_entropy(logits, task["train_y"], label_smoothing=smoothing)
        wanted = fit + decay / 2 * (weight.square().sum() + bias.square().sum())
        assert float(trained[lane]) == pytest.approx(float(wanted), rel=1e-12)
        plain = functional.cross_entropy(functional.linear(task["validation_x"], weight, bias), task["validation_y"])
        assert float(judged[lane]) == pytest.approx(float(plain), rel=1e-12)


def test_lambda_stays_where_it_does_something_and_no_harm():
    blocks = Regularized(nn.Linear(2, 3)).blocks
    assert blocks.start().tolist()[0] == pytest.approx([1e-3, 0.1])
    for far, nearest in ((9.0, (1e-2, 0.3)), (-9.0, (1e-4, 0.0))):
        projected = [float(block.domain.project(torch.tensor([[far]]))) for block in blocks.named.values()]
        assert projected == pytest.approx(nearest)


def test_scores_are_accuracy_and_cross_entropy():
    says = torch.tensor([0, 0, 1, 2])
    batch = {"x": functional.one_hot(says).to(F64), "y": torch.tensor([0, 0, 1, 1])}
    found = accuracy_and_loss(nn.Identity(), batch, {})
    assert float(found["accuracy"]) == 0.75
    assert float(found["cross_entropy"]) == pytest.approx(float(functional.cross_entropy(batch["x"], batch["y"])))


def test_the_problem_keeps_its_contract(task):
    problem = Regularized(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 3)))
    check_problem(problem, torch.tensor([[3e-3, 0.25], [9e-4, 0.1]], dtype=F64), drawn(2, 15), task)


def test_the_hypergradient_is_that_of_central_differences_where_the_inner_problem_is_solved(task):
    problem, outer = Regularized(nn.Linear(2, 3)), torch.tensor([[5e-3, 0.2]], dtype=F64)
    inner = newton_solution(problem, outer, task, torch.zeros(1, 9, dtype=F64), steps=12)
    found = ConjugateGradient(steps=9).differentiate(Oracle(problem, outer, task), GradientDescent(), inner, None)
    solved = lambda at: problem.outer_loss(at, newton_solution(problem, at, task, inner, steps=6), task)  # noqa: E731
    assert torch.allclose(found.value, central_difference(solved, outer, step=1e-4), rtol=1e-6, atol=1e-8)
    assert found.value.abs().min() > 1e-3  # of both blocks
