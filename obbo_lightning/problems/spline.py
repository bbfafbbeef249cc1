"""Linear smoothing spline with a learned smoothing weight: solution and hypergradient in closed form."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import Sample

Array = NDArray[np.float64]


class SmoothingSpline(Problem):
    """g(λ, β) = Σ (y_i − β_i)² + λ Σ (β_{i+1} − β_i)²/Δ_i, f(λ, β) = Σ over validation of (y − the spline of β)².

    λ > 0 is one number per lane, β the spline at the training sites, linear between them and constant beyond. All lanes
    share their sites. Solution and hypergradient cost O(n) per lane, from one factorisation.

    >>> values = torch.tensor([[0.0, 1.0, 0.0, 1.0]])
    >>> SmoothingSpline().solution(torch.tensor([[1e6]]), spline_task(values)).round(decimals=3)  # nearly the mean
    tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """

    coordinate_names = ("weight",)

    def inner_loss(self, outer: Tensor, inner: Tensor, task: Task, sample: Sample | None = None) -> Tensor:
        # Σ (y_i − β_i)² + λ Σ (β_{i+1} − β_i)²/Δ_i
        bend = (inner.diff(dim=-1).square() * _stiffness(task)).sum(-1)
        return _sum_of_squares(inner - task["values"], sample) + outer[:, 0] * bend

    def outer_loss(self, outer: Tensor, inner: Tensor, task: Task, sample: Sample | None = None) -> Tensor:
        return _sum_of_squares(self.predict(inner, task) - task["validation_values"], sample)

    def predict(self, inner: Tensor, task: Task) -> Tensor:
        """Return the spline at the validation sites ``[lanes, m]``."""
        sites, wanted = task["sites"], task["validation_sites"]
        if len(sites) == 1:
            return inner.expand(-1, len(wanted))
        # the training site left of each validation site, and the fraction of the way to the next one
        left = (torch.searchsorted(sites, wanted, right=True) - 1).clamp(0, len(sites) - 2)
        share = ((wanted - sites[left]) / (sites[left + 1] - sites[left])).clamp(0, 1)
        rows = inner.T  # sites first, as the solver returns them
        return torch.lerp(rows[left], rows[left + 1], share.unsqueeze(-1)).T

    def select_lanes(self, task: Task, lanes: slice) -> tuple[Problem, Task]:
        # sites are shared by all lanes
        return self, {name: values[lanes] if values.ndim == 2 else values for name, values in task.items()}

    def initial_inner(self, outer: Tensor, task: Task) -> Tensor:
        return task["values"]

    def scores(self, outer: Tensor, inner: Tensor, task: Task) -> dict[str, Tensor]:
        """Return the mean squared error at the validation sites."""
        return {"mse": (self.predict(inner, task) - task["validation_values"]).square().mean(-1)}

    def solution(self, outer: Tensor, task: Task) -> Tensor:
        return solve_spline(task["values"], _stiffness(task), outer[:, 0])[0]

    def hypergradient(self, outer: Tensor, task: Task) -> tuple[Tensor, Tensor]:
        solution, derivative = solve_spline(task["values"], _stiffness(task), outer[:, 0])
        residual = self.predict(solution, task) - task["validation_values"]
        # F'(λ) = 2 Σ (prediction − y) · d(prediction)/dλ, and predictions are linear in β
        slope = 2 * (residual * self.predict(derivative, task)).sum(-1, keepdim=True)
        return slope, solution

    def mixed_term(
        self, outer: Tensor, inner: Tensor, task: Task, vector: Tensor, sample: Sample | None = None
    ) -> Tensor:
        # ∂/∂λ of ∇_β g · v = 2 (Kβ) · v
        return 2 * (inner.diff(dim=-1) * vector.diff(dim=-1) * _stiffness(task)).sum(-1, keepdim=True)

    def smoothness(self, outer: Tensor, task: Task) -> Tensor:
        stiffness = _stiffness(task)
        # Gershgorin: no row of K sums to more than twice two neighbours
        return 2 * (1 + 4 * outer[:, 0] * (stiffness.max() if len(stiffness) else 0.0))


def spline_task(
    values: Tensor, sites: Tensor | None = None, training: Tensor | None = None, standardise: bool = False
) -> Task:
    """Return a task from series ``[lanes, n]`` that share their sites ``[n]``: 0, 1, 2, … where not given.

    ``training`` is the mask of the training sites; the others are for validation. ``standardise`` subtracts the mean of
    the training values and divides by their deviation, in every lane.
    """
    count = values.shape[-1]
    sites = torch.arange(count, dtype=values.dtype) if sites is None else sites.to(values.dtype)
    training = torch.ones(count, dtype=torch.bool) if training is None else training
    if values.ndim != 2 or sites.shape != (count,) or training.shape != (count,):
        raise ValueError(
            f"values must be [lanes, n] with sites and training [n], got {tuple(values.shape)}, {tuple(sites.shape)} "
            f"and {tuple(training.shape)}"
        )
    if not bool((sites.diff() > 0).all()):
        raise ValueError("sites must increase, got some that do not")
    if not bool(training.any()):
        raise ValueError("training must choose at least one site, got none")
    rows = values.T  # sites first: whole rows are selected
    fitted, validation = rows[training], rows[~training]
    if standardise:
        mean = fitted.mean(0)
        fitted, validation = fitted - mean, validation - mean
        deviation = fitted.square().mean(0).sqrt()
        # the deviation of a constant series is rounding error
        deviation = deviation.where(deviation > 1e-12 * mean.abs(), 1.0)
        fitted, validation = fitted / deviation, validation / deviation
    return {
        "sites": sites[training],
        "values": fitted.T,
        "validation_sites": sites[~training],
        "validation_values": validation.T,
    }


def _stiffness(task: Task) -> Tensor:
    return 1 / task["sites"].diff()


def _sum_of_squares(residual: Tensor, sample: Sample | None) -> Tensor:
    if sample is None or sample.size is None:
        return residual.square().sum(-1)
    count = residual.shape[-1]
    rows = sample.indices(count, residual.device)
    return residual[:, rows].square().mean(-1) * count


def solve_spline(values: Tensor, stiffness: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return β with (I + λK) β = y, and dβ/dλ = −(I + λK)⁻¹ Kβ, exactly, from one factorisation.

    K = Dᵀ diag(k) D with the differences D is tridiagonal. With s = λ k_i the pivots of I + λK are s + e_i, e_1 = 1 and
    e_{i+1} = 1 + s e_i / (s + e_i): nothing is ever subtracted, so there is no cancellation however large λ is. y is
    ``[lanes, n]``, k ``[n − 1]`` is shared by the lanes, and λ ``[lanes]`` is positive.
    """
    # [n, lanes]: the recurrence runs along n and vectorises over lanes. Other devices and precisions are converted: 3n
    # kernels of one row each would take longer on a GPU than the transfer.
    y, k, w = (x.detach().to("cpu", torch.float64) for x in (values.T, stiffness, weight))
    solution, derivative = _compiled()(*(x.contiguous().numpy() for x in (y, k, w)))
    return torch.from_numpy(solution).T.to(values), torch.from_numpy(derivative).T.to(values)


@cache
def _compiled() -> Callable[..., Any]:
    import numba  # takes most of a second, and only the spline needs it

    try:
        return numba.njit(cache=True)(_solve_rows)
    except RuntimeError:  # no writable folder for the cache
        return numba.njit(_solve_rows)


def _solve_rows(values: Array, stiffness: Array, weight: Array) -> Any:
    n, lanes = values.shape
    inverse = np.empty((n, lanes))  # of the pivots
    rest = np.ones(lanes)
    for i in range(n):
        for j in range(lanes):
            s = weight[j] * stiffness[i] if i < n - 1 else 0.0
            inverse[i, j] = 1 / (s + rest[j])
            rest[j] = 1 + s * inverse[i, j] * rest[j]

    def substitute(rows: Array) -> None:  # overwrites right-hand sides by solutions
        for i in range(n - 1):
            for j in range(lanes):
                rows[i + 1, j] += weight[j] * stiffness[i] * inverse[i, j] * rows[i, j]
        rows[n - 1] *= inverse[n - 1]
        for i in range(n - 2, -1, -1):
            for j in range(lanes):
                rows[i, j] = (rows[i, j] + weight[j] * stiffness[i] * rows[i + 1, j]) * inverse[i, j]

    solution, derivative = values.copy(), np.empty((n, lanes))
    substitute(solution)
    for i in range(n):
        for j in range(lanes):
            # −Kβ, from whichever of its two forms does not cancel: (β − y)/λ, or differences of β
            behind = stiffness[i - 1] * (solution[i, j] - solution[i - 1, j]) if i > 0 else 0.0
            ahead = stiffness[i] * (solution[i + 1, j] - solution[i, j]) if i < n - 1 else 0.0
            derivative[i, j] = (solution[i, j] - values[i, j]) / weight[j] if weight[j] >= 1 else ahead - behind
    substitute(derivative)
    # Σβ = Σy for every λ, so the derivative sums to zero: subtract the common shift that rounding has left
    return solution, derivative - derivative.sum(0) / n
