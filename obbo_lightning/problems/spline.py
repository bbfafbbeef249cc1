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

    >>> t = torch.arange(200, dtype=torch.float64)
    >>> noisy = torch.sin(t / 20) + 0.3 * torch.randn(200, dtype=t.dtype, generator=torch.Generator().manual_seed(0))
    >>> task = spline_task(noisy.unsqueeze(0), training=t % 5 != 2)
    >>> spline, weight = SmoothingSpline(), torch.full((1, 1), 0.1, dtype=t.dtype)
    >>> from obbo_lightning import OBBO, online
    >>> from obbo_lightning.domains import Box
    >>> from obbo_lightning.hypergradients import ClosedForm
    >>> obbo = OBBO(lr=0.2, window=5, hypergradient=ClosedForm(), domain=Box(1e-6, 1e6))
    >>> rounds = list(online(spline, obbo, [task] * 40, weight))
    >>> bool(rounds[-1].loss < rounds[0].loss)
    True
    """

    coordinate_names = ("weight",)

    def inner_loss(self, outer: Tensor, inner: Tensor, task: Task, sample: Sample | None = None) -> Tensor:
        # Σ (y_i − β_i)² + λ Σ (β_{i+1} − β_i)²/Δ_i
        residual = inner - task["values"]
        bend = (inner.diff(dim=-1).square() * _stiffness(task)).sum(-1)
        return _sum_of_squares(residual, sample) + outer[:, 0] * bend

    def outer_loss(self, outer: Tensor, inner: Tensor, task: Task, sample: Sample | None = None) -> Tensor:
        return _sum_of_squares(self.predict(inner, task) - task["validation_values"], sample)

    def predict(self, inner: Tensor, task: Task) -> Tensor:
        """Return the spline at the validation sites ``[lanes, m]``."""
        left, share = _places(task)
        if inner.shape[-1] == 1:
            return inner.expand(-1, len(left))
        rows, share = inner.T, share.unsqueeze(-1)  # sites first, as the solver returns them
        return torch.lerp(rows[left], rows[left + 1], share).T

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
    """Return a task from series that share their sites.

    Args:
        values: ``[lanes, n]``.
        sites: increasing ``[n]``; 0, 1, 2, … where not given.
        training: mask of the training sites ``[n]``; the others are for validation.
        standardise: subtract the mean of the training values and divide by their deviation, in every lane.
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


def _places(task: Task) -> tuple[Tensor, Tensor]:
    """Return the training site left of each validation site, and the fraction of the way to the next one."""
    sites, wanted = task["sites"], task["validation_sites"]
    left = (torch.searchsorted(sites, wanted, right=True) - 1).clamp(0, max(len(sites) - 2, 0))
    if len(sites) == 1:
        return left, torch.zeros_like(wanted)
    return left, ((wanted - sites[left]) / (sites[left + 1] - sites[left])).clamp(0, 1)


def _sum_of_squares(residual: Tensor, sample: Sample | None) -> Tensor:
    if sample is None or sample.size is None:
        return residual.square().sum(-1)
    count = residual.shape[-1]
    rows = sample.indices(count, residual.device)
    return residual[:, rows].square().mean(-1) * count


def solve_spline(values: Tensor, stiffness: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return β with (I + λK) β = y, and dβ/dλ = −(I + λK)⁻¹ Kβ, exactly, from one factorisation.

    K = Dᵀ diag(k) D with the differences D is tridiagonal. With s = λ k_i the pivots of I + λK are s + e_i, e_1 = 1 and
    e_{i+1} = 1 + s e_i / (s + e_i): nothing is ever subtracted, so there is no cancellation however large λ is.

    Args:
        values: y ``[lanes, n]``.
        stiffness: k ``[n − 1]``, shared by the lanes.
        weight: λ ``[lanes]``, positive.
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
