"""Linear smoothing spline with a learned smoothing weight: solution and hypergradient in closed form."""

import torch
from torch import Tensor

from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import Sample
from obbo_lightning.problems.tridiagonal import solve_chain


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
        return solve_chain(task["values"], _stiffness(task), outer[:, 0])[0]

    def hypergradient(self, outer: Tensor, task: Task) -> tuple[Tensor, Tensor]:
        solution, derivative = solve_chain(task["values"], _stiffness(task), outer[:, 0])
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
