"""Learned weights of past blocks: against SciPy, central differences and a loop over blocks."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from toy import F64

from obbo_lightning import Forgetting
from obbo_lightning.core.randomness import Sample
from obbo_lightning.problems import forgetting
from obbo_lightning.testing import check_problem

KINDS = ("classification", "regression")
INNER = torch.tensor([[0.5, -1.0, 0.2], [2.0, 0.1, -0.3]], dtype=F64)


def random_task(kind, past=5, rows=8, features=3, seed=0):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(past + 1, rows, features, generator=draw, dtype=F64)
    x[..., -1] = 1.0
    signal = x[..., 0] - 0.5 * x[..., 1] + torch.randn(past + 1, rows, generator=draw, dtype=F64)
    y = (signal > 0).double() if kind == "classification" else signal
    return {"x": x[:-1], "y": y[:-1], "x_new": x[-1], "y_new": y[-1]}


def weights(lanes=2, past=5, seed=1):
    positive = torch.rand(lanes, past, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return positive / positive.sum(-1, keepdim=True)


def loss_by_block(kind, ridge, outer, inner, task):
    """Return g of one lane, block by block in NumPy."""
    total = 0.5 * ridge * float(inner @ inner)
    for weight, rows, targets in zip(outer, task["x"].numpy(), task["y"].numpy(), strict=True):
        fitted = rows @ inner
        chance = 1 / (1 + np.exp(-fitted))
        log_loss = -(targets * np.log(chance) + (1 - targets) * np.log(1 - chance))
        total += float(weight) * float(np.mean(log_loss if kind == "classification" else (fitted - targets) ** 2))
    return total


@pytest.mark.parametrize("kind", KINDS)
def test_the_problem_keeps_its_contract(kind):
    check_problem(Forgetting(5, kind, ridge=0.01), weights(), INNER, random_task(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_the_inner_loss_is_that_of_numpy_block_by_block_and_the_solution_scipys_minimiser(kind):
    problem, outer, task = Forgetting(5, kind, ridge=0.02), weights(), random_task(kind)
    losses, solution = problem.inner_loss(outer, INNER, task), problem.solution(outer, task).numpy()
    for lane in range(2):

        def loss(inner, at=outer[lane]):
            return loss_by_block(kind, 0.02, at, inner, task)

        assert float(losses[lane]) == pytest.approx(loss(INNER[lane].numpy()), rel=1e-12)
        scipys = minimize(loss, np.zeros(3), options={"gtol": 1e-10})
        assert np.allclose(solution[lane], scipys.x, atol=1e-5)
        assert loss(solution[lane]) <= scipys.fun + 1e-14


def outliers():
    """Return rows of very different sizes with random classes, on which full Newton steps diverge."""
    draw = torch.Generator().manual_seed(11)
    x = torch.randn(5, 6, 3, generator=draw, dtype=F64)
    x = x * torch.exp(3 * torch.randn(5, 6, 1, generator=draw, dtype=F64))
    y = (torch.rand(5, 6, generator=draw) < 0.5).double()
    return {"x": x, "y": y, "x_new": x[0], "y_new": y[0]}


def largest_gradient(problem, outer, task):
    inner = problem.solution(outer, task).requires_grad_()
    (gradient,) = torch.autograd.grad(problem.inner_loss(outer, inner, task).sum(), inner)
    return float(gradient.abs().max())


@pytest.mark.parametrize("ridge", [1e-2, 1e-6])
def test_newton_converges_where_only_the_ridge_bounds_the_solution(ridge):
    """Separable blocks, blocks of one class, outliers."""
    task, problem = random_task("classification"), Forgetting(5, ridge=ridge)
    separable = {**task, "y": (task["x"][..., 0] > 0).double()}
    outer = torch.cat([weights(), torch.eye(5, dtype=F64)])  # each block alone, too
    for hard in (separable, {**task, "y": torch.ones_like(task["y"])}, outliers()):
        assert largest_gradient(problem, outer, hard) < 1e-9


def test_full_newton_steps_alone_would_not_converge(monkeypatch):
    monkeypatch.setattr(forgetting, "HALVINGS", 1)
    assert largest_gradient(Forgetting(5), weights(), outliers()) > 1


def test_a_lane_does_not_depend_on_its_neighbours():
    problem, task = Forgetting(5, ridge=1e-6), random_task("classification")
    outer = torch.cat([weights(), torch.eye(5, dtype=F64)])
    together, inner = problem.hypergradient(outer, task)
    for lane in range(len(outer)):
        alone, own = problem.hypergradient(outer[lane : lane + 1], task)
        assert torch.allclose(inner[lane], own[0], rtol=1e-12, atol=1e-12)
        assert torch.allclose(together[lane], alone[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_mixed_term_of_a_sample_is_that_of_its_loss_and_f_takes_its_rows(kind):
    problem, task, sample = Forgetting(5, kind), random_task(kind), Sample(seed=3, size=7)
    outer, inner = weights().requires_grad_(), INNER.clone().requires_grad_()
    vector = torch.ones_like(inner)
    loss = problem.inner_loss(outer, inner, task, sample).sum()
    (gradient,) = torch.autograd.grad(loss, inner, create_graph=True)
    (expected,) = torch.autograd.grad(gradient, outer, vector)
    found = problem.mixed_term(outer.detach(), inner.detach(), task, vector, sample)
    assert torch.allclose(found, expected, rtol=1e-12)
    rows = sample.indices(8)
    selected = task | {name: task[name][rows] for name in ("x_new", "y_new")}
    assert torch.equal(problem.outer_loss(outer, inner, task, sample), problem.outer_loss(outer, inner, selected))


def test_scores_are_accuracy_or_the_mean_absolute_error():
    inner = torch.tensor([[1.0, 0.0, 0.0]], dtype=F64)
    task = random_task("classification")
    right = ((task["x_new"][:, 0] > 0) == (task["y_new"] == 1)).double().mean()
    assert float(Forgetting(5).scores(weights(1), inner, task)["accuracy"]) == float(right)
    task = random_task("regression")
    error = (task["x_new"][:, 0] - task["y_new"]).abs().mean()
    found = Forgetting(5, "regression").scores(weights(1), inner, task)
    assert float(found["absolute_error"]) == pytest.approx(float(error), rel=1e-12)


def test_a_float32_outer_variable_is_solved_in_float64():
    problem, task = Forgetting(5, ridge=1e-4), random_task("classification")
    exact, inner = problem.hypergradient(weights(), task)
    gradient, found = problem.hypergradient(weights().float(), task)
    assert found.dtype == gradient.dtype == torch.float32
    assert torch.equal(problem.solution(weights().float(), task), found)
    assert torch.allclose(found.double(), inner, rtol=1e-5)
    assert torch.allclose(gradient.double(), exact, rtol=1e-4, atol=1e-5)
