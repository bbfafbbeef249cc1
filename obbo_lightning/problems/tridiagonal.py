"""Solver of (I + λK) β = y for many lanes at once, K the stiffness of a chain; one factorisation gives β and dβ/dλ."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]


def solve_chain(values: Tensor, stiffness: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return β and dβ/dλ, exactly.

    K = Dᵀ diag(k) D with the differences D. With s = λ k_i the pivots of I + λK are s + e_i, e_1 = 1 and
    e_{i+1} = 1 + s e_i / (s + e_i): nothing is ever subtracted, so there is no cancellation however large λ is.
    dβ/dλ = −(I + λK)⁻¹ Kβ.

    Args:
        values: y ``[lanes, n]``.
        stiffness: k ``[n − 1]``, shared by the lanes.
        weight: λ ``[lanes]``, positive.
    """
    if values.device.type == "cpu" and values.dtype == torch.float64:
        # [n, lanes]: the recurrence runs along n and vectorises over lanes; copied only where the layout is another.
        y = values.detach().T.contiguous().numpy()
        solution, derivative = _compiled()(y, stiffness.contiguous().numpy(), weight.detach().contiguous().numpy())
        return torch.from_numpy(solution).T, torch.from_numpy(derivative).T
    return _solve_anywhere(values.detach(), stiffness, weight.detach())


@cache
def _compiled() -> Callable[..., Any]:
    import numba  # takes most of a second, and only the spline needs it

    try:
        compiled: Callable[..., Any] = numba.njit(cache=True)(_solve_rows)
    except RuntimeError:  # no writable folder for the cache
        compiled = numba.njit(_solve_rows)
    return compiled


def _solve_rows(values: Array, stiffness: Array, weight: Array) -> Any:
    n, lanes = values.shape
    inverse = np.empty((n, lanes))  # of the pivots
    solution, derivative = np.empty((n, lanes)), np.empty((n, lanes))
    rest = np.ones(lanes)
    solution[0] = values[0]
    for i in range(n - 1):
        for j in range(lanes):
            s = weight[j] * stiffness[i]
            inverse[i, j] = 1 / (s + rest[j])
            ratio = s * inverse[i, j]
            solution[i + 1, j] = values[i + 1, j] + ratio * solution[i, j]
            rest[j] = 1 + ratio * rest[j]
    for j in range(lanes):
        inverse[n - 1, j] = 1 / rest[j]
        solution[n - 1, j] *= inverse[n - 1, j]
    for i in range(n - 2, -1, -1):
        for j in range(lanes):
            s = weight[j] * stiffness[i]
            solution[i, j] = (solution[i, j] + s * solution[i + 1, j]) * inverse[i, j]
    for i in range(n):
        for j in range(lanes):
            # Kβ, from whichever of its two forms does not cancel: (y − β)/λ, or differences of β
            behind = stiffness[i - 1] * (solution[i, j] - solution[i - 1, j]) if i > 0 else 0.0
            ahead = stiffness[i] * (solution[i + 1, j] - solution[i, j]) if i < n - 1 else 0.0
            large = weight[j] >= 1
            derivative[i, j] = (values[i, j] - solution[i, j]) / weight[j] if large else behind - ahead
    for i in range(n - 1):
        for j in range(lanes):
            derivative[i + 1, j] += weight[j] * stiffness[i] * inverse[i, j] * derivative[i, j]
    for j in range(lanes):
        derivative[n - 1, j] *= -inverse[n - 1, j]
    for i in range(n - 2, -1, -1):
        for j in range(lanes):
            s = weight[j] * stiffness[i]
            derivative[i, j] = (s * derivative[i + 1, j] - derivative[i, j]) * inverse[i, j]
    # Σβ = Σy for every λ, so the derivative sums to zero: subtract the common shift that rounding has left
    rest[:] = 0
    for i in range(n):
        for j in range(lanes):
            rest[j] += derivative[i, j]
    for i in range(n):
        for j in range(lanes):
            derivative[i, j] -= rest[j] / n
    return solution, derivative


def _solve_anywhere(values: Tensor, stiffness: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same by torch operations, for other devices and dtypes."""
    n = values.shape[1]
    rest, inverse = torch.ones_like(weight), []
    scaled = weight.unsqueeze(-1) * stiffness.to(values)
    for i in range(n - 1):
        inverse.append(1 / (scaled[:, i] + rest))
        rest = 1 + scaled[:, i] * inverse[i] * rest
    inverse.append(1 / rest)

    def solve(right: Tensor) -> Tensor:
        rows = [right[:, 0]]
        for i in range(n - 1):
            rows.append(right[:, i + 1] + scaled[:, i] * inverse[i] * rows[i])
        rows[-1] = rows[-1] * inverse[-1]
        for i in range(n - 2, -1, -1):
            rows[i] = (rows[i] + scaled[:, i] * rows[i + 1]) * inverse[i]
        return torch.stack(rows, dim=1)

    solution = solve(values)
    force = stiffness.to(values) * solution.diff(dim=1)
    by_differences = torch.nn.functional.pad(force, (1, 0)) - torch.nn.functional.pad(force, (0, 1))
    lane_weight = weight.unsqueeze(-1)
    bent = torch.where(lane_weight >= 1, (values - solution) / lane_weight, by_differences)
    derivative = -solve(bent)
    return solution, derivative - derivative.mean(dim=1, keepdim=True)
