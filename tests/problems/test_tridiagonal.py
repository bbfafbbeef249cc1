"""The solver of (I + λK) β = y against dense linear algebra, in every precision and path."""

import numba
import numpy as np
import pytest
import torch
from toy import F64, normal

from obbo_lightning.problems import tridiagonal
from obbo_lightning.problems.tridiagonal import _solve_anywhere, solve_chain

WEIGHTS = torch.tensor([1e-6, 0.2, 0.9, 3.0, 40.0, 1e6], dtype=F64)


@pytest.mark.parametrize(
    ("solve", "dtype"),
    [(solve_chain, F64), (_solve_anywhere, F64), (solve_chain, torch.float32)],
    ids=["compiled", "torch", "float32"],
)
def test_solution_and_derivative_are_those_of_dense_algebra_in_every_lane(solve, dtype):
    values = normal(6, 9).to(dtype)
    stiffness = (torch.rand(8, generator=torch.Generator().manual_seed(0)) + 0.2).to(dtype)
    weight = WEIGHTS if dtype == F64 else WEIGHTS.clamp(0.01, 100).to(dtype)
    solution, derivative = solve(values, stiffness, weight)
    assert solution.dtype == derivative.dtype == dtype
    differences = torch.eye(9, dtype=F64).diff(dim=0)
    bend = differences.T @ torch.diag(stiffness.double()) @ differences
    for lane, lam in enumerate(weight.double()):
        matrix = torch.eye(9, dtype=F64) + lam * bend
        expected = torch.linalg.solve(matrix, values[lane].double())
        slope = -torch.linalg.solve(matrix, bend @ expected)
        tolerance = {"rtol": 1e-8, "atol": 1e-9} if dtype == F64 else {"rtol": 1e-3, "atol": 2e-5}
        assert torch.allclose(solution[lane].double(), expected, **tolerance)
        assert torch.allclose(derivative[lane].double(), slope, **tolerance)
        alone = solve(values[lane : lane + 1], stiffness, weight[lane : lane + 1])
        assert torch.equal(alone[0][0], solution[lane])
        assert torch.equal(alone[1][0], derivative[lane])


def test_the_derivative_sums_to_zero_in_single_precision():
    values, stiffness = (1e4 + normal(3, 60)).float(), torch.rand(59) + 0.1
    _, derivative = _solve_anywhere(values, stiffness, torch.tensor([0.3, 2.0, 50.0]))
    assert float(derivative.double().sum(1).abs().max()) < 1e-5 * float(derivative.abs().max())


def test_the_solver_works_where_nothing_can_be_cached(monkeypatch):
    compile_function = numba.njit

    def without_cache(*arguments, **options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return compile_function(*arguments, **options)

    monkeypatch.setattr(numba, "njit", without_cache)
    compiled = tridiagonal._compiled.__wrapped__()
    solution, _ = compiled(np.ones((3, 1)), np.ones(2), np.ones(1))
    assert np.allclose(solution, 1)
