"""The smoothing spline against dense algebra, central differences and SciPy."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from toy import F64

from obbo_lightning.checks import check_problem
from obbo_lightning.checks.differences import central_difference
from obbo_lightning.problems.spline import SmoothingSpline, spline_task
from obbo_lightning.problems.tridiagonal import _solve_anywhere, solve_chain

SPLINE = SmoothingSpline()


def solve_exactly(matrix, right):
    """A dense float64 solve, with its residual removed in extended precision: LU alone keeps 9 digits at λ = 1e6."""
    found = np.zeros(len(right), dtype=np.longdouble)
    for _ in range(4):
        found += np.linalg.solve(matrix.astype(float), (right - matrix @ found).astype(float))
    return found


def dense(task, weight):
    """β̂, F and F' of one lane by dense algebra in NumPy."""
    sites, values = task["sites"].numpy(), task["values"].numpy()[0].astype(np.longdouble)
    asked, held = task["validation_sites"].numpy(), task["validation_values"].numpy()[0]
    n = len(sites)
    differences = np.diff(np.eye(n), axis=0)
    stiffness = differences.T @ np.diag(1 / np.diff(sites).astype(np.longdouble)) @ differences
    matrix = np.eye(n) + weight * stiffness
    # K knows nothing of the mean: without it nothing cancels (checked with 60 digits of mpmath at λ = 1e6)
    centred = solve_exactly(matrix, values - values.mean())
    solution = values.mean() + centred
    derivative = -solve_exactly(matrix, stiffness @ centred)
    derivative -= derivative.mean()
    at = np.stack([np.interp(asked, sites, column) for column in np.eye(n)], axis=1)  # interpolation as a matrix
    residual = at @ solution - held
    return solution, float(residual @ residual), float(2 * residual @ (at @ derivative))


@st.composite
def tasks(draw):
    count = draw(st.integers(12, 60))
    seed = draw(st.integers(0, 10**6))
    rng = np.random.default_rng(seed)
    gaps = rng.choice([1.0, 1.0, 1.0, 2.0, 7.0, 0.25], size=count) if draw(st.booleans()) else np.ones(count)
    training = rng.random(count) < draw(st.floats(0.3, 0.95))
    training[rng.permutation(count)[:6]] = True  # with two, F' vanishes and only rounding is left to compare
    values = np.cumsum(rng.normal(size=count)) + rng.normal(size=count)
    weight = 10.0 ** draw(st.floats(-6, 6))
    standardise = draw(st.booleans())
    task = spline_task(
        torch.tensor(values).unsqueeze(0), torch.tensor(np.cumsum(gaps)), torch.tensor(training), standardise
    )
    return task, weight


@given(tasks())
def test_solution_and_hypergradient_are_those_of_dense_algebra(case):
    task, weight = case
    outer = torch.full((1, 1), weight, dtype=F64)
    slope, solution = SPLINE.hypergradient(outer, task)
    expected_solution, loss, expected_slope = dense(task, weight)
    scale = max(1.0, float(np.abs(expected_solution).max()))
    assert np.abs(solution.numpy()[0] - expected_solution).max() <= 1e-9 * scale
    assert abs(float(slope) - expected_slope) * weight <= 1e-9 * max(abs(weight * expected_slope), 1e-6 * loss)
    assert torch.equal(SPLINE.solution(outer, task), solution)
    assert float(SPLINE.outer_loss(outer, solution, task)) == pytest.approx(loss, rel=1e-9, abs=1e-12)


@given(tasks())
def test_the_hypergradient_is_the_derivative_of_the_loss(case):
    task, weight = case
    outer = torch.full((1, 1), weight, dtype=F64)

    def loss(logarithm):  # by log λ: the same relative step for every λ
        return SPLINE.outer_loss(outer, SPLINE.solution(logarithm.exp(), task), task)

    expected = float(central_difference(loss, outer.log(), step=1e-2)) / weight
    found = float(SPLINE.hypergradient(outer, task)[0])
    value = float(loss(outer.log()))
    assert abs(found - expected) * weight <= 1e-6 * max(abs(weight * expected), 1e-6 * value)


@given(tasks())
def test_the_path_for_other_devices_is_the_same(case):
    task, weight = case
    stiffness, lanes = 1 / task["sites"].diff(), torch.full((1,), weight, dtype=F64)
    for compiled, anywhere in zip(
        solve_chain(task["values"], stiffness, lanes), _solve_anywhere(task["values"], stiffness, lanes), strict=True
    ):
        assert torch.allclose(compiled, anywhere, rtol=1e-10, atol=1e-13)


def lanes_task(lanes=5, count=40):
    rng = np.random.default_rng(0)
    values = torch.tensor(np.cumsum(rng.normal(size=(lanes, count)), axis=1))
    return spline_task(values, training=torch.arange(count) % 5 != 2, standardise=True)


def test_the_spline_meets_the_contract_of_a_problem():
    task = lanes_task()
    outer = torch.logspace(-2, 1, 5, dtype=F64).unsqueeze(-1)
    check_problem(SPLINE, outer, SPLINE.solution(outer, task), task)


def test_a_lane_alone_equals_the_lane_in_the_batch():
    task, outer = lanes_task(), torch.logspace(-6, 6, 5, dtype=F64).unsqueeze(-1)
    slope, solution = SPLINE.hypergradient(outer, task)
    for lane in range(5):
        alone = {k: v[lane : lane + 1] if v.ndim == 2 else v for k, v in task.items()}
        one_slope, one_solution = SPLINE.hypergradient(outer[lane : lane + 1], alone)
        assert torch.equal(one_slope[0], slope[lane])
        assert torch.equal(one_solution[0], solution[lane])


def test_the_extremes_are_interpolation_and_the_mean():
    task = lanes_task()
    rough, flat = (SPLINE.solution(torch.full((5, 1), w, dtype=F64), task) for w in (1e-9, 1e12))
    assert torch.allclose(rough, task["values"], atol=1e-7)
    assert torch.allclose(flat, task["values"].mean(-1, keepdim=True).expand_as(flat), atol=1e-6)


def test_beyond_the_last_site_the_spline_is_constant():
    task = spline_task(torch.tensor([[1.0, 2.0, 4.0, 9.0, 9.0]], dtype=F64), training=torch.tensor([0, 1, 1, 0, 0]) > 0)
    inner = torch.tensor([[2.0, 4.0]], dtype=F64)
    assert SPLINE.predict(inner, task).tolist() == [[2.0, 4.0, 4.0]]


def test_sites_may_be_integers_and_a_series_constant():
    values = torch.full((2, 10), 4.7, dtype=F64)
    values[1, ::2] = 5.0
    task = spline_task(values, sites=torch.arange(10), training=torch.arange(10) % 3 != 1, standardise=True)
    assert task["sites"].dtype == F64
    assert float(task["validation_values"][0].abs().max()) < 1e-12
    slope, _ = SPLINE.hypergradient(torch.ones(2, 1, dtype=F64), task)
    assert bool(slope.isfinite().all())


def test_the_solver_works_where_nothing_can_be_cached(monkeypatch):
    import numba

    from obbo_lightning.problems import tridiagonal

    real = numba.njit

    def without_folder(*arguments, **options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return real(*arguments, **options)

    monkeypatch.setattr(numba, "njit", without_folder)
    compiled = tridiagonal._compiled.__wrapped__()
    solution, _ = compiled(np.ones((3, 1)), np.ones(2), np.ones(1))
    assert np.allclose(solution, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sites": torch.tensor([0.0, 2.0, 1.0])}, "sites must increase"),
        ({"training": torch.zeros(3, dtype=torch.bool)}, "training must choose at least one site"),
        ({"sites": torch.zeros(2)}, r"values must be \[lanes, n\]"),
    ],
)
def test_impossible_tasks_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        spline_task(torch.zeros(1, 3), **changes)


def test_a_spline_of_one_site_is_its_value_everywhere():
    values = torch.tensor([[1.0, 5.0, 2.0], [3.0, 0.0, 4.0]], dtype=torch.float64)
    task = spline_task(values, training=torch.tensor([False, True, False]))
    found = SmoothingSpline().predict(task["values"], task)
    assert found.tolist() == [[5.0, 5.0], [0.0, 0.0]]
    assert SmoothingSpline().scores(torch.ones(2, 1), task["values"], task)["mse"].tolist() == [12.5, 12.5]
