"""The smoothing spline against dense algebra in extended precision and central differences."""

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from toy import F64, normal

from obbo_lightning.core.randomness import Sample
from obbo_lightning.problems import spline
from obbo_lightning.problems.spline import SmoothingSpline, solve_spline, spline_task
from obbo_lightning.testing import central_difference, check_problem

SPLINE = SmoothingSpline()


def solve_in_extended_precision(matrix, right):
    """Return a float64 solve, refined in extended precision: LU alone keeps 9 digits at λ = 1e6."""
    found = np.zeros(len(right), dtype=np.longdouble)
    for _ in range(4):
        found += np.linalg.solve(matrix.astype(float), (right - matrix @ found).astype(float))
    return found


def dense_spline(task, weight):
    """Return β̂, F and F' of one lane by dense algebra in NumPy."""
    sites, values = task["sites"].numpy(), task["values"].numpy()[0].astype(np.longdouble)
    n = len(sites)
    differences = np.diff(np.eye(n), axis=0)
    stiffness = differences.T @ np.diag(1 / np.diff(sites).astype(np.longdouble)) @ differences
    matrix = np.eye(n) + weight * stiffness
    # K is zero on constants: without the mean nothing cancels (compared with 60 digits of mpmath at λ = 1e6)
    centred = solve_in_extended_precision(matrix, values - values.mean())
    solution = values.mean() + centred
    derivative = -solve_in_extended_precision(matrix, stiffness @ centred)
    derivative -= derivative.mean()
    validation_sites = task["validation_sites"].numpy()
    interpolation = np.stack([np.interp(validation_sites, sites, column) for column in np.eye(n)], axis=1)
    residual = interpolation @ solution - task["validation_values"].numpy()[0]
    return solution, float(residual @ residual), float(2 * residual @ (interpolation @ derivative))


@st.composite
def tasks(draw):
    count = draw(st.integers(12, 60))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    gaps = rng.choice([1.0, 1.0, 1.0, 2.0, 7.0, 0.25], size=count) if draw(st.booleans()) else np.ones(count)
    training = rng.random(count) < draw(st.floats(0.3, 0.95))
    training[rng.permutation(count)[:6]] = True  # with two sites F' vanishes, and only rounding errors are compared
    values = np.cumsum(rng.normal(size=count)) + rng.normal(size=count)
    weight = 10.0 ** draw(st.floats(-6, 6))
    arguments = torch.tensor(values).unsqueeze(0), torch.tensor(np.cumsum(gaps)), torch.tensor(training)
    return spline_task(*arguments, standardise=draw(st.booleans())), weight


@given(tasks())
def test_solution_and_hypergradient_are_those_of_dense_algebra_and_central_differences(case):
    task, weight = case
    outer = torch.full((1, 1), weight, dtype=F64)
    slope, solution = SPLINE.hypergradient(outer, task)
    expected_solution, loss, expected_slope = dense_spline(task, weight)
    scale = max(1.0, float(np.abs(expected_solution).max()))
    assert np.abs(solution.numpy()[0] - expected_solution).max() <= 1e-9 * scale
    assert abs(float(slope) - expected_slope) * weight <= 1e-9 * max(abs(weight * expected_slope), 1e-6 * loss)
    assert torch.equal(SPLINE.solution(outer, task), solution)
    assert float(SPLINE.outer_loss(outer, solution, task)) == pytest.approx(loss, rel=1e-9, abs=1e-12)
    # in log λ, so that the relative step is the same for every λ
    difference = central_difference(
        lambda log: SPLINE.outer_loss(outer, SPLINE.solution(log.exp(), task), task), outer.log(), step=1e-2
    )
    assert abs(float(slope) * weight - float(difference)) <= 1e-6 * max(abs(float(difference)), 1e-6 * loss)


TASK = spline_task(normal(5, 40).cumsum(1), training=torch.arange(40) % 5 != 2, standardise=True)


def test_the_spline_keeps_the_contract_of_a_problem():
    outer = torch.logspace(-2, 1, 5, dtype=F64).unsqueeze(-1)
    check_problem(SPLINE, outer, SPLINE.solution(outer, TASK), TASK)
    uniform = spline_task(normal(5, 40).cumsum(1))  # where the bound of the smoothness is nearly attained
    stiffness = np.diff(np.eye(40), axis=0).T @ np.diff(np.eye(40), axis=0)
    largest = 2 * (1 + outer[:, 0] * np.linalg.eigvalsh(stiffness)[-1])
    assert (SPLINE.smoothness(outer, uniform) >= largest).all()
    assert torch.allclose(SPLINE.smoothness(outer, uniform), largest, rtol=0.01)


def test_selected_lanes_share_the_sites():
    outer, inner = torch.logspace(-6, 6, 5, dtype=F64).unsqueeze(-1), normal(5, 32)
    selected, task = SPLINE.select_lanes(TASK, slice(1, 3))
    assert torch.equal(task["sites"], TASK["sites"])
    for name in ("inner_loss", "outer_loss"):
        whole = getattr(SPLINE, name)(outer, inner, TASK)
        assert torch.equal(getattr(selected, name)(outer[1:3], inner[1:3], task), whole[1:3])


def test_the_extremes_are_interpolation_and_the_mean():
    rough, flat = (SPLINE.solution(torch.full((5, 1), w, dtype=F64), TASK) for w in (1e-9, 1e12))
    assert torch.allclose(rough, TASK["values"], atol=1e-7)
    assert torch.allclose(flat, TASK["values"].mean(-1, keepdim=True).expand_as(flat), atol=1e-6)
    assert torch.equal(SPLINE.initial_inner(torch.ones(5, 1), TASK), TASK["values"])


@pytest.mark.parametrize(
    ("training", "predictions", "error"),
    [([0, 1, 1, 0, 0], [2.0, 4.0, 4.0], (1 + 25 + 25) / 3), ([0, 0, 1, 0, 0], [4.0, 4.0, 4.0, 4.0], (9 + 4 + 50) / 4)],
    ids=["two sites", "one site"],
)
def test_beyond_the_outer_sites_the_spline_is_constant(training, predictions, error):
    values = torch.tensor([[1.0, 2.0, 4.0, 9.0, 9.0]], dtype=F64)
    task = spline_task(values, training=torch.tensor(training) > 0)
    assert SPLINE.predict(task["values"], task).tolist() == [predictions]
    assert float(SPLINE.scores(torch.ones(1, 1), task["values"], task)["mse"]) == pytest.approx(error)


def test_samples_are_scaled_to_the_whole_sum():
    outer, inner, sample = torch.logspace(-1, 1, 5, dtype=F64).unsqueeze(-1), normal(5, 32, seed=1), Sample(5, 6)
    rows = sample.indices(32)
    fit = (inner - TASK["values"])[:, rows].square().sum(-1) * 32 / 6
    bend = (inner.diff(dim=-1).square() / TASK["sites"].diff()).sum(-1)
    assert torch.allclose(SPLINE.inner_loss(outer, inner, TASK, sample), fit + outer[:, 0] * bend)
    rows = sample.indices(8)
    validation = (SPLINE.predict(inner, TASK) - TASK["validation_values"])[:, rows].square().sum(-1) * 8 / 6
    assert torch.allclose(SPLINE.outer_loss(outer, inner, TASK, sample), validation)


@pytest.mark.parametrize("price", [37.29, 0.1, 1e-3, 12345.67, 1e9 / 3])
def test_a_constant_series_is_not_divided_by_its_rounding_errors(price):
    values = torch.full((2, 41), price, dtype=F64)
    values[:, 30:] = price + 0.5
    values[1, ::2] += 1.0
    sites = torch.arange(41)  # integers
    task = spline_task(values, sites, training=sites < 30, standardise=True)
    training = values[:, :30]
    assert task["sites"].dtype == F64
    assert torch.allclose(task["validation_values"][0], torch.full((11,), 0.5, dtype=F64), rtol=1e-6)
    expected = (values[1, 30:] - training[1].mean()) / training[1].std(correction=0)
    assert torch.allclose(task["validation_values"][1], expected, rtol=1e-6, atol=1e-6)
    assert bool(SPLINE.hypergradient(torch.ones(2, 1, dtype=F64), task)[0].isfinite().all())


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_every_lane_is_solved_on_its_own_and_in_float64(dtype):
    values, weight = normal(6, 9).to(dtype), torch.tensor([1e-12, 0.2, 0.9, 3.0, 40.0, 1e6], dtype=dtype)
    stiffness = (torch.rand(8, generator=torch.Generator().manual_seed(0)) + 0.2).to(dtype)
    solution, derivative = solve_spline(values, stiffness, weight)
    assert solution.dtype == derivative.dtype == dtype
    differences = torch.eye(9, dtype=F64).diff(dim=0)
    bend = differences.T @ torch.diag(stiffness.double()) @ differences
    for lane, lam in enumerate(weight.double()):
        matrix = torch.eye(9, dtype=F64) + lam * bend
        expected = torch.linalg.solve(matrix, values[lane].double())
        slope = -torch.linalg.solve(matrix, bend @ expected)
        tolerance = {"rtol": 1e-8, "atol": 1e-9} if dtype == F64 else {"rtol": 1e-5, "atol": 1e-7}
        assert torch.allclose(solution[lane].double(), expected, **tolerance)
        assert torch.allclose(derivative[lane].double(), slope, **tolerance)
        alone = solve_spline(values[lane : lane + 1], stiffness, weight[lane : lane + 1])
        assert torch.equal(alone[0][0], solution[lane])
        assert torch.equal(alone[1][0], derivative[lane])


def test_the_solver_works_where_nothing_can_be_cached(monkeypatch):
    compile_function = numba.njit

    def without_cache(*arguments, **options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return compile_function(*arguments, **options)

    monkeypatch.setattr(numba, "njit", without_cache)
    compiled = spline._compiled.__wrapped__()
    solution, _ = compiled(np.ones((3, 1)), np.ones(2), np.ones(1))
    assert np.allclose(solution, 1)


@pytest.mark.parametrize("weight", [1e-3, 0.9, 1.0, 1e6])
def test_the_derivative_sums_to_zero_however_large_the_values_are(weight):
    values = 1e8 + normal(2, 60).cumsum(1)  # Σβ = Σy for every λ
    _, derivative = solve_spline(values, torch.ones(59, dtype=F64), torch.full((2,), weight, dtype=F64))
    assert float(derivative.sum(1).abs().max()) < 1e-14 * float(derivative.abs().sum())
