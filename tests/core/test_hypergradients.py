import pytest
import torch
from toy import (
    F64,
    Nonlinear,
    Proximal,
    dense_hessian,
    dense_outer_gradients,
    newton_solution,
    toy_point,
    toy_task,
)

from obbo_lightning import (
    ClosedForm,
    ConjugateGradient,
    ExactSolution,
    FixedPoint,
    GradientDescent,
    Key,
    Problem,
    StochasticNeumann,
    Unrolled,
)
from obbo_lightning.checks.differences import central_difference
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.streams.quadratic import QuadraticStream


def descend_by_hand(problem, outer, start, task, steps, lr):
    """ω^0..ω^K, written out again with nothing of the package."""
    path = [start]
    for _ in range(steps):
        inner = path[-1].detach().requires_grad_()
        (gradient,) = torch.autograd.grad(problem.inner_loss(outer, inner, task).sum(), inner)
        path.append((inner - lr * gradient).detach())
    return path


def run(estimator, solver, problem, outer, task, inner=None, solve=None, key=None):
    oracle = Oracle(problem, outer, task, key)
    return estimator(oracle, solver, inner, solve), oracle


@pytest.mark.parametrize("start", ["previous", "outer"])
@pytest.mark.parametrize("problem", [Nonlinear(), Proximal()])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_unrolled_is_the_derivative_of_the_unrolled_loss(problem, start, steps):
    task, outer, first = toy_task(), toy_point(), toy_point(seed=2)
    solver = GradientDescent(steps=steps, lr=0.3, start=start)

    def unrolled_loss(point):
        path = descend_by_hand(problem, point, point if start == "outer" else first, task, steps, 0.3)
        return problem.outer_loss(point, path[-1], task)

    found, _ = run(Unrolled(), solver, problem, outer, task, first)
    expected = central_difference(unrolled_loss, outer)
    assert (found.value - expected).abs().max() <= 1e-10
    assert torch.allclose(found.loss, unrolled_loss(outer), rtol=1e-14)


@pytest.mark.parametrize("start", ["previous", "outer"])
def test_unrolled_is_the_papers_analytical_formula(start):
    problem, task, outer, first = Nonlinear(), toy_task(), toy_point(), toy_point(seed=2)
    steps, lr = 5, 0.3
    path = descend_by_hand(problem, outer, outer if start == "outer" else first, task, steps, lr)
    by_outer, by_inner = dense_outer_gradients(problem, outer, path[-1], task)
    eye = torch.eye(3, dtype=F64)
    dense = [dense_hessian(problem, outer, point, task) for point in path]
    expected = by_outer.clone()
    for k in range(steps):
        # ∇²_λω g(ω^k) ∏_{j=k+1}^{K−1} (I − η ∇²_ωω g(ω^j)) ∇_ω f(ω^K)
        vector = by_inner.unsqueeze(-1)
        for j in reversed(range(k + 1, steps)):
            vector = (eye - lr * dense[j][0]) @ vector
        expected -= lr * (dense[k][1] @ vector).squeeze(-1)
    if start == "outer":
        vector = by_inner.unsqueeze(-1)
        for j in reversed(range(steps)):
            vector = (eye - lr * dense[j][0]) @ vector
        expected += vector.squeeze(-1)
    found, _ = run(Unrolled(), GradientDescent(steps=steps, lr=lr, start=start), problem, outer, task, first)
    assert (found.value - expected).abs().max() <= 1e-10


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_fixed_point_is_its_series_at_any_inner_variable(steps):
    problem, task, outer, first = Nonlinear(), toy_task(), toy_point(), toy_point(seed=2)
    solver = GradientDescent(steps=2, lr=0.3)
    inner = descend_by_hand(problem, outer, first, task, 2, 0.3)[-1]
    by_outer, by_inner = dense_outer_gradients(problem, outer, inner, task)
    hessian, mixed = dense_hessian(problem, outer, inner, task)
    contraction = torch.eye(3, dtype=F64) - 0.3 * hessian
    series = sum(torch.linalg.matrix_power(contraction, j) for j in range(steps))
    expected = by_outer - 0.3 * (mixed @ series @ by_inner.unsqueeze(-1)).squeeze(-1)
    found, _ = run(FixedPoint(steps), solver, problem, outer, task, first)
    assert (found.value - expected).abs().max() <= 1e-12
    # the residual is the last difference, (I − ηH)^{J−1} ∇_β f
    left = (torch.linalg.matrix_power(contraction, steps - 1) @ by_inner.unsqueeze(-1)).squeeze(-1)
    assert torch.allclose(found.residual, left.norm(dim=-1) / by_inner.norm(dim=-1), rtol=1e-10)


def implicit_truth(problem, outer, task, start):
    """∇F by a dense solve at the Newton solution, and by central differences of F."""
    solution = newton_solution(problem, outer, task, start)
    by_outer, by_inner = dense_outer_gradients(problem, outer, solution, task)
    hessian, mixed = dense_hessian(problem, outer, solution, task)
    dense = by_outer - (mixed @ torch.linalg.solve(hessian, by_inner.unsqueeze(-1))).squeeze(-1)
    differences = central_difference(
        lambda point: problem.outer_loss(point, newton_solution(problem, point, task, solution, 6), task), outer
    )
    return dense, differences


@pytest.mark.parametrize("estimator", [FixedPoint(500), ConjugateGradient(10)])
@pytest.mark.parametrize("problem", [Nonlinear(), Proximal(4.0)])
def test_implicit_estimators_give_the_true_hypergradient_at_a_converged_inner_variable(problem, estimator):
    task, outer, first = toy_task(), toy_point(), toy_point(seed=2)
    dense, differences = implicit_truth(problem, outer, task, first)
    found, _ = run(estimator, GradientDescent(steps=500, lr=0.15), problem, outer, task, first)
    assert (found.value - dense).abs().max() <= 1e-8
    assert (found.value - differences).abs().max() <= 1e-8
    assert found.residual.max() <= 1e-8


@pytest.mark.parametrize("estimator", [FixedPoint(400, lr=1.0), ConjugateGradient(10), ClosedForm()])
def test_estimators_agree_with_central_differences_on_a_quadratic(estimator):
    stream = QuadraticStream(condition_number=[3.0, 10.0], lanes=2)
    outer = toy_point(dim=4)
    found, _ = run(estimator, ExactSolution(), stream.problem, outer, stream[3])
    expected = central_difference(
        lambda point: stream.problem.outer_loss(
            point, newton_solution(stream.problem, point, stream[3], torch.zeros(2, 8, dtype=F64), 1), stream[3]
        ),
        outer,
    )
    assert (found.value - expected).abs().max() <= 1e-8


def test_conjugate_gradient_finishes_each_lane_on_its_own():
    stream = QuadraticStream(condition_number=[1.0, 50.0], lanes=2)
    outer = toy_point(dim=4)
    solver = ExactSolution()
    few, _ = run(ConjugateGradient(1), solver, stream.problem, outer, stream[0])
    assert few.residual[0] <= 1e-10  # one eigenvalue: one step
    assert few.residual[1] > 1e-3
    many, _ = run(ConjugateGradient(30), solver, stream.problem, outer, stream[0])
    exact, _ = stream.problem.hypergradient(outer, stream[0])
    assert (many.value - exact).abs().max() <= 1e-8
    assert torch.allclose(few.value[0], many.value[0], rtol=1e-12)


def test_conjugate_gradient_stops_at_its_tolerance():
    stream = QuadraticStream(condition_number=100.0, inner_dim=60)
    outer = toy_point(lanes=1, dim=4)
    loose, _ = run(ConjugateGradient(60, tol=1e-2), ExactSolution(), stream.problem, outer, stream[0])
    tight, _ = run(ConjugateGradient(60, tol=1e-6), ExactSolution(), stream.problem, outer, stream[0])
    assert 1e-6 < float(loose.residual) <= 1e-2
    assert 1e-12 < float(tight.residual) <= 1e-6


class RootCurvature(Problem):
    """∇²g is infinite at β = 0, where the solver stands."""

    def inner_loss(self, outer, inner, task, sample=None):
        return (inner.abs() ** 1.5).sum(-1) + 0.25 * (outer - inner).square().sum(-1)

    def outer_loss(self, outer, inner, task, sample=None):
        return inner.sum(-1)

    def mixed_term(self, outer, inner, task, vector, sample=None):
        return -0.5 * vector


def test_conjugate_gradient_does_not_hide_products_that_are_not_finite():
    solver = GradientDescent(1, 0.1, start="outer")
    found, _ = run(ConjugateGradient(3), solver, RootCurvature(), torch.zeros(1, 2, dtype=F64), {})
    assert found.value.isnan().all()


def test_neumann_reports_the_loss_of_the_whole_task():
    problem, task, outer, inner = Nonlinear(), toy_task(), toy_point(), toy_point(seed=2)
    found, _ = run(StochasticNeumann(3, 4.0), GradientDescent(2, 0.1), problem, outer, task, inner)
    assert torch.allclose(found.loss, problem.outer_loss(outer, found.inner, task))


def test_conjugate_gradient_warm_start_continues():
    stream = QuadraticStream(condition_number=30.0)
    outer = toy_point(lanes=1, dim=4)
    estimator = ConjugateGradient(3, warm_start=True)
    cold, _ = run(estimator, ExactSolution(), stream.problem, outer, stream[0])
    warm, _ = run(estimator, ExactSolution(), stream.problem, outer, stream[0], solve=cold.solve)
    assert float(warm.residual) < float(cold.residual)
    ignored, _ = run(ConjugateGradient(3), ExactSolution(), stream.problem, outer, stream[0], solve=cold.solve)
    assert torch.equal(ignored.value, cold.value)
    assert ignored.solve is None


class Saddle(Problem):
    """Lane 0 is convex, lane 1 has a direction of negative curvature."""

    curvature = torch.tensor([[1.0, 2.0], [1.0, -2.0]], dtype=F64)

    def inner_loss(self, outer, inner, task, sample=None):
        return 0.5 * (self.curvature * inner.square()).sum(-1) - (outer * inner).sum(-1)

    def outer_loss(self, outer, inner, task, sample=None):
        return (inner * torch.tensor([0.1, 1.0], dtype=F64)).sum(-1)

    def initial_inner(self, outer, task):
        return torch.zeros_like(outer)


def test_conjugate_gradient_stops_at_negative_curvature():
    found, _ = run(
        ConjugateGradient(20),
        GradientDescent(1, 0.1),
        Saddle(),
        torch.ones(2, 2, dtype=F64),
        {},
        torch.zeros(2, 2, dtype=F64),
    )
    assert found.value.isfinite().all()
    assert torch.allclose(found.value[0], torch.tensor([0.1, 0.5], dtype=F64))
    assert float(found.residual[1]) == 1.0  # nothing was solved there, and the residual says so


def test_neumann_on_the_whole_task_averages_to_the_fixed_point():
    problem, task, outer, inner = Nonlinear(), toy_task(), toy_point(), toy_point(seed=2)
    solver, smoothness, terms = GradientDescent(steps=2, lr=0.3), 4.0, 5
    by_value = {}
    estimator = StochasticNeumann(terms, smoothness, batch_size=None)
    for t in range(60):
        found, oracle = run(estimator, solver, problem, outer, task, inner, key=Key(0, t))
        by_value[oracle.calls["products"] - 1] = found.value  # m̃ Hessian products and one mixed
    assert sorted(by_value) == list(range(terms))
    mean = torch.stack(list(by_value.values())).mean(0)
    expected, _ = run(FixedPoint(terms, lr=1 / smoothness), solver, problem, outer, task, inner)
    assert (mean - expected.value).abs().max() <= 1e-12


class Rows(Problem):
    """Every observation has its own curvature a_i: g = mean_i a_i β²/2 − λβ a_i, f = β + mean_i c_i λ."""

    curvature = torch.tensor([0.1, 0.5, 1.0, 2.0], dtype=F64)

    def inner_loss(self, outer, inner, task, sample=None):
        a = self.curvature if sample is None else self.curvature[sample.indices(4)]
        return (a.mean() * (0.5 * inner.square() - outer * inner)).sum(-1)

    def outer_loss(self, outer, inner, task, sample=None):
        a = self.curvature if sample is None else self.curvature[sample.indices(4)]
        return (inner * (0.5 + a.mean())).sum(-1)


def test_neumann_mean_over_many_draws_is_the_truncated_series():
    problem, smoothness, terms, draws = Rows(), 2.0, 4, 8_000
    outer = inner = torch.ones(1, 1, dtype=F64)
    a = problem.curvature
    # ∇_λ f − ∇²_λβ g (1/ℓ) Σ_{j<m} (1 − E a/ℓ)^j ∇_β f, every factor with its own mean
    scale = float(a.mean() * (0.5 + a.mean()) / smoothness)
    expected = scale * sum(float(1 - a.mean() / smoothness) ** j for j in range(terms))
    reused = scale * sum(float(((1 - a / smoothness) ** j).mean()) for j in range(terms))
    estimator = StochasticNeumann(terms, smoothness, batch_size=1)
    values = torch.cat(
        [
            estimator.differentiate(Oracle(problem, outer, {}, Key(7, t)), ExactSolution(), inner, None).value
            for t in range(draws)
        ]
    )
    standard_error = float(values.std()) / draws**0.5
    assert abs(float(values.mean()) - expected) <= 4 * standard_error
    assert abs(reused - expected) > 8 * standard_error  # one sample for all factors would have been caught


def test_analytic_mixed_term_is_free_and_one_graph_serves_all_products():
    class Counting(Proximal):
        evaluations = 0

        def inner_loss(self, *args, **kwargs):
            self.evaluations += 1
            return super().inner_loss(*args, **kwargs)

    task, outer = toy_task(), toy_point()
    solver = GradientDescent(steps=4, lr=0.3, start="outer")
    problem = Counting()
    analytic, oracle = run(FixedPoint(5), solver, problem, outer, task)
    assert problem.evaluations == 4 + 1
    assert oracle.calls == {"gradients": 4 + 1 + 1, "products": 4}

    class Differentiated(Proximal):
        def mixed_term(self, *args):
            return None

    automatic, oracle = run(FixedPoint(5), solver, Differentiated(), outer, task)
    assert oracle.calls == {"gradients": 4 + 1 + 1, "products": 5}
    assert torch.allclose(analytic.value, automatic.value, rtol=1e-13, atol=1e-15)


def test_sampled_inner_steps_draw_afresh_every_step_and_every_round():
    problem, task, outer, first = Nonlinear(), toy_task(rows=50), toy_point(), toy_point(seed=2)
    seen = []

    class Watching(Nonlinear):
        def inner_loss(self, outer, inner, task, sample=None):
            seen.append(sample)
            return super().inner_loss(outer, inner, task, sample)

    solver = GradientDescent(steps=3, lr=0.1, batch_size=4)
    one = solver(Oracle(Watching(), outer, task, Key(0, 1)), first)
    assert len({s.seed for s in seen}) == 3
    assert all(s.size == 4 for s in seen)
    assert torch.equal(one, solver(Oracle(problem, outer, task, Key(0, 1)), first))
    assert not torch.equal(one, solver(Oracle(problem, outer, task, Key(0, 2)), first))
    assert not torch.equal(one, solver(Oracle(problem, outer, task, Key(1, 1)), first))


def test_estimates_work_where_gradients_are_switched_off():
    problem, task, outer, first = Nonlinear(), toy_task(), toy_point(), toy_point(seed=2)
    solver = GradientDescent(steps=3, lr=0.3)
    for estimator in (Unrolled(), FixedPoint(3), ConjugateGradient(3), StochasticNeumann(3, 4.0)):
        expected, _ = run(estimator, solver, problem, outer, task, first)
        with torch.no_grad():
            found, _ = run(estimator, solver, problem, outer, task, first)
        assert torch.equal(found.value, expected.value)
        assert not found.value.requires_grad
        assert not found.inner.requires_grad
