"""Hypergradient estimators against central differences, dense linear algebra and each other."""

import pytest
import torch
from toy import F64, FromLosses, Nonlinear, Proximal, toy_point, toy_task

from obbo_lightning import Problem
from obbo_lightning.core.hypergradients import relative_norm
from obbo_lightning.core.memory import InnerState
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.randomness import Key
from obbo_lightning.hypergradients import ConjugateGradient, FixedPoint, StochasticNeumann, Unrolled
from obbo_lightning.solvers import ExactSolution, GradientDescent
from obbo_lightning.streams.quadratic import QuadraticTasks
from obbo_lightning.testing import central_difference


def dense_hessian(problem, outer, inner, task):
    """Return ∇²_ββ g and ∇²_λβ g (as d x p), lane by lane."""

    def gradient(lam, beta):
        return torch.autograd.functional.jacobian(
            lambda b: problem.inner_loss(lam, b, task).sum(), beta, create_graph=True
        )

    by_outer, by_inner = torch.autograd.functional.jacobian(gradient, (outer, inner))
    lanes = range(outer.shape[0])
    hessian = torch.stack([by_inner[i, :, i] for i in lanes])
    mixed = torch.stack([by_outer[i, :, i].mT for i in lanes])
    return hessian, mixed


def dense_outer_gradients(problem, outer, inner, task):
    return torch.autograd.functional.jacobian(lambda o, i: problem.outer_loss(o, i, task).sum(), (outer, inner))


def newton_solution(problem, outer, task, start, steps=50):
    """Return β̂(λ) by dense Newton steps, independent of every solver of the package."""
    inner = start
    for _ in range(steps):
        hessian, _ = dense_hessian(problem, outer, inner, task)
        gradient = torch.autograd.functional.jacobian(lambda b: problem.inner_loss(outer, b, task).sum(), inner)
        inner = inner - torch.linalg.solve(hessian, gradient)
    return inner


def gradient_descent(problem, outer, inner, task, steps, lr):
    """Return ω^K without any solver of the package."""
    for _ in range(steps):
        inner = inner.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(problem.inner_loss(outer, inner, task).sum(), inner)
        inner = (inner - lr * gradient).detach()
    return inner


def estimate(estimator, solver, problem, outer, task, inner=None, linear_solution=None, key=None):
    return estimator(Oracle(problem, outer, task, key), solver, InnerState(inner, linear_solution))


def product(matrix, vector):
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("start", ["previous", "outer"])
@pytest.mark.parametrize("problem", [Nonlinear(), Proximal()], ids=["nonlinear", "proximal"])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_unrolled_is_the_derivative_of_the_unrolled_loss(problem, start, steps):
    task, outer, first = toy_task(), toy_point(), toy_point(seed=2)

    def unrolled_loss(point):
        last = gradient_descent(problem, point, point if start == "outer" else first, task, steps, 0.3)
        return problem.outer_loss(point, last, task)

    found = estimate(Unrolled(), GradientDescent(steps, 0.3, start), problem, outer, task, first)
    assert (found.value - central_difference(unrolled_loss, outer)).abs().max() <= 1e-10
    assert torch.allclose(found.loss, unrolled_loss(outer), rtol=1e-14)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_fixed_point_is_its_series_at_any_inner_variable(steps):
    problem, task, outer, first = Nonlinear(), toy_task(), toy_point(), toy_point(seed=2)
    inner = gradient_descent(problem, outer, first, task, 2, 0.3)
    by_outer, by_inner = dense_outer_gradients(problem, outer, inner, task)
    hessian, mixed = dense_hessian(problem, outer, inner, task)
    contraction = torch.eye(3, dtype=F64) - 0.3 * hessian
    series = sum(torch.linalg.matrix_power(contraction, j) for j in range(steps))
    expected = by_outer - 0.3 * product(mixed @ series, by_inner)
    found = estimate(FixedPoint(steps), GradientDescent(2, 0.3), problem, outer, task, first)
    assert (found.value - expected).abs().max() <= 1e-12
    # the residual is the last difference, (I − ηH)^{J−1} ∇_β f
    left = product(torch.linalg.matrix_power(contraction, steps - 1), by_inner)
    assert torch.allclose(found.residual, left.norm(dim=-1) / by_inner.norm(dim=-1), rtol=1e-10)


@pytest.mark.parametrize("estimator", [FixedPoint(500), ConjugateGradient(10)], ids=["fixed_point", "cg"])
@pytest.mark.parametrize("problem", [Nonlinear(), Proximal(4.0)], ids=["nonlinear", "proximal"])
def test_implicit_estimators_give_the_true_hypergradient_at_a_converged_inner_variable(problem, estimator):
    task, outer, first = toy_task(), toy_point(), toy_point(seed=2)
    solution = newton_solution(problem, outer, task, first)
    by_outer, by_inner = dense_outer_gradients(problem, outer, solution, task)
    hessian, mixed = dense_hessian(problem, outer, solution, task)
    dense = by_outer - product(mixed, torch.linalg.solve(hessian, by_inner))
    differences = central_difference(
        lambda point: problem.outer_loss(point, newton_solution(problem, point, task, solution, 6), task), outer
    )
    found = estimate(estimator, GradientDescent(500, 0.15), problem, outer, task, first)
    assert (found.value - dense).abs().max() <= 1e-8
    assert (found.value - differences).abs().max() <= 1e-8
    assert found.residual.max() <= 1e-8


def test_conjugate_gradient_finishes_each_lane_on_its_own():
    stream = QuadraticTasks(condition_number=[1.0, 50.0], lanes=2)
    outer = toy_point(dim=4)
    few, many = (
        estimate(ConjugateGradient(steps), ExactSolution(), stream.problem, outer, stream[0]) for steps in (1, 30)
    )
    assert few.residual[0] <= 1e-10  # one eigenvalue: one step
    assert few.residual[1] > 1e-3
    exact, _ = stream.problem.hypergradient(outer, stream[0])
    assert (many.value - exact).abs().max() <= 1e-8
    assert torch.allclose(few.value[0], many.value[0], rtol=1e-12)


@pytest.mark.parametrize("tol", [1e-2, 1e-6])
def test_conjugate_gradient_stops_at_its_tolerance(tol):
    stream = QuadraticTasks(condition_number=100.0, inner_dim=60)
    estimator = ConjugateGradient(60, tol=tol)
    found = estimate(estimator, ExactSolution(), stream.problem, toy_point(lanes=1, dim=4), stream[0])
    assert 1e-4 * tol < float(found.residual) <= tol


def test_conjugate_gradient_does_not_hide_products_that_are_not_finite():
    # ∇²g is infinite at β = 0, where the solver starts
    problem = FromLosses(
        lambda outer, inner: (inner.abs() ** 1.5).sum(-1) + 0.25 * (outer - inner).square().sum(-1),
        lambda outer, inner: inner.sum(-1),
    )
    solver = GradientDescent(1, 0.1, start="outer")
    found = estimate(ConjugateGradient(3), solver, problem, torch.zeros(1, 2, dtype=F64), {})
    assert found.value.isnan().all()


def test_conjugate_gradient_stops_at_negative_curvature():
    # lane 0 is convex, lane 1 has a direction of negative curvature
    curvature, slope = torch.tensor([[1.0, 2.0], [1.0, -2.0]], dtype=F64), torch.tensor([0.1, 1.0], dtype=F64)
    problem = FromLosses(
        lambda outer, inner: (0.5 * curvature * inner.square() - outer * inner).sum(-1),
        lambda outer, inner: (inner * slope).sum(-1),
    )
    outer, start = torch.ones(2, 2, dtype=F64), torch.zeros(2, 2, dtype=F64)
    found = estimate(ConjugateGradient(20), GradientDescent(1, 0.1), problem, outer, {}, start)
    assert found.value.isfinite().all()
    assert torch.allclose(found.value[0], torch.tensor([0.1, 0.5], dtype=F64))
    assert float(found.residual[1]) == 1.0  # nothing was solved there


def test_conjugate_gradient_continues_from_the_previous_linear_solution():
    stream = QuadraticTasks(condition_number=30.0)
    estimator, outer = ConjugateGradient(3, warm_start=True), toy_point(lanes=1, dim=4)

    def solve(estimator, linear_solution=None):
        return estimate(estimator, ExactSolution(), stream.problem, outer, stream[0], None, linear_solution)

    cold = solve(estimator)
    assert float(solve(estimator, cold.state.linear_solution).residual) < float(cold.residual)
    ignored = solve(ConjugateGradient(3), cold.state.linear_solution)
    assert torch.equal(ignored.value, cold.value)
    assert ignored.state.linear_solution is None


def test_neumann_on_the_whole_task_averages_to_the_fixed_point():
    problem, task, outer, inner = Nonlinear(), toy_task(), toy_point(), toy_point(seed=2)
    solver, smoothness, terms = GradientDescent(steps=2, lr=0.3), 4.0, 5
    by_terms = {}
    estimator = StochasticNeumann(terms, smoothness, batch_size=None)
    for t in range(60):
        oracle = Oracle(problem, outer, task, Key(0, t))
        found = estimator(oracle, solver, InnerState(inner))
        by_terms[oracle.evaluations["products"] - 1] = found.value  # m̃ Hessian products and one mixed
    assert sorted(by_terms) == list(range(terms))
    mean = torch.stack(list(by_terms.values())).mean(0)
    expected = estimate(FixedPoint(terms, lr=1 / smoothness), solver, problem, outer, task, inner)
    assert (mean - expected.value).abs().max() <= 1e-12
    assert torch.allclose(found.loss, problem.outer_loss(outer, found.inner, task))


class RowCurvatures(Problem):
    """Every observation has its own curvature a_i: g = mean_i a_i (β²/2 − λβ), f = (½ + mean_i a_i) β."""

    curvature = torch.tensor([0.1, 0.5, 1.0, 2.0], dtype=F64)

    def inner_loss(self, outer, inner, task, sample=None):
        a = self.curvature if sample is None else self.curvature[sample.indices(4)]
        return (a.mean() * (0.5 * inner.square() - outer * inner)).sum(-1)

    def outer_loss(self, outer, inner, task, sample=None):
        a = self.curvature if sample is None else self.curvature[sample.indices(4)]
        return (inner * (0.5 + a.mean())).sum(-1)


def test_the_mean_of_neumann_over_many_draws_is_the_truncated_series():
    problem, smoothness, terms, draws = RowCurvatures(), 2.0, 4, 8_000
    outer = inner = torch.ones(1, 1, dtype=F64)
    a = problem.curvature
    # ∇_λ f − ∇²_λβ g (1/ℓ) Σ_{j<m} (1 − E a/ℓ)^j ∇_β f, every factor with its own mean
    scale = float(a.mean() * (0.5 + a.mean()) / smoothness)
    expected = scale * sum(float(1 - a.mean() / smoothness) ** j for j in range(terms))
    with_one_sample = scale * sum(float(((1 - a / smoothness) ** j).mean()) for j in range(terms))
    estimator = StochasticNeumann(terms, smoothness, batch_size=1)
    values = torch.cat(
        [estimator(Oracle(problem, outer, {}, Key(7, t)), lambda *_: inner, InnerState()).value for t in range(draws)]
    )
    standard_error = float(values.std()) / draws**0.5
    assert abs(float(values.mean()) - expected) <= 4 * standard_error
    assert abs(with_one_sample - expected) > 8 * standard_error  # so this test tells the two apart


@pytest.mark.parametrize(
    "estimator",
    [Unrolled(), FixedPoint(3), ConjugateGradient(3), StochasticNeumann(3, 4.0)],
    ids=lambda estimator: type(estimator).__name__,
)
def test_estimates_are_the_same_where_gradients_are_disabled(estimator):
    arguments = GradientDescent(steps=3, lr=0.3), Nonlinear(), toy_point(), toy_task(), toy_point(seed=2)
    expected = estimate(estimator, *arguments)
    with torch.no_grad():
        found = estimate(estimator, *arguments)
    assert torch.equal(found.value, expected.value)
    assert not found.value.requires_grad
    assert not found.inner.requires_grad


def test_relative_norms_are_zero_of_zero_and_infinite_after_an_overflow():
    zero, one = torch.zeros(1, 2, dtype=F64), torch.tensor([[3.0, 4.0]], dtype=F64)
    nan = torch.full((1, 2), torch.nan, dtype=F64)
    assert relative_norm(zero, zero).tolist() == [0.0]
    assert relative_norm(one, zero).tolist() == [1.0]
    assert relative_norm(one, 2 * one).tolist() == [0.5]
    assert relative_norm(nan, one).tolist() == [torch.inf]
    assert relative_norm(nan, nan).isnan().tolist() == [True]  # the task itself is NaN
