"""Learned weights of past blocks of rows, for a linear or logistic model that is fitted to them."""

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from obbo_lightning.core.parameter_groups import OnSimplex, ParameterGroups
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import Sample
from obbo_lightning.core.validation import at_least, one_of, positive

KINDS = ("classification", "regression")
CONVERGED = 1e-14  # squared Newton decrement at which the iteration stops; convergence is quadratic
STEPS = 100  # of Newton at most; about 8 are taken
HALVINGS = 40  # of one step at most


class Forgetting(Problem):
    """g(λ, β) = Σ_b λ_b · (mean of ℓ over block b) + (ridge/2) ‖β‖², f(λ, β) = mean of ℓ over the next block.

    λ lies on the simplex, one weight for each of the last n blocks, the newest first. ℓ is the log loss of a logistic
    model (targets 0 and 1), or the squared error of a linear one. A task has ``x`` ``[n, rows, p]``, ``y``
    ``[n, rows]``, ``x_new`` ``[rows, p]`` and ``y_new`` ``[rows]``; all lanes share it. p is small: solution and
    hypergradient are exact, from p × p systems in float64.

    Args:
        past: n, number of past blocks.
        kind: ``classification`` or ``regression``.
        ridge: weight of ½ ‖β‖² in g, the intercept's included; it keeps β̂ finite where a block has only one class.

    >>> Forgetting(past=4).initial_outer(0)
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """

    def __init__(self, past: int = 30, kind: str = "classification", ridge: float = 5e-3) -> None:
        self.past = at_least("past", past, 2)
        self.kind = one_of("kind", kind, KINDS)
        self.ridge = positive("ridge", ridge)
        self.groups = ParameterGroups(past=OnSimplex(past))

    def inner_loss(self, outer: Tensor, inner: Tensor, task: Task, sample: Sample | None = None) -> Tensor:
        return self._objective(*self._weighted(outer, task, sample), inner)

    def outer_loss(self, outer: Tensor, inner: Tensor, task: Task, sample: Sample | None = None) -> Tensor:
        x, y = task["x_new"].to(inner), task["y_new"].to(inner)
        rows = _sampled_rows(sample, y)
        return self._loss(_fitted(x[rows], inner), y[rows]).mean(-1)

    def initial_inner(self, outer: Tensor, task: Task) -> Tensor:
        return outer.new_zeros(len(outer), task["x"].shape[-1])

    def scores(self, outer: Tensor, inner: Tensor, task: Task) -> dict[str, Tensor]:
        """Return the accuracy on the next block, or the mean absolute error."""
        fitted, y = _fitted(task["x_new"].to(inner), inner), task["y_new"].to(inner)
        if self.kind == "regression":
            return {"absolute_error": (fitted - y).abs().mean(-1)}
        return {"accuracy": ((fitted > 0) == (y > 0.5)).to(inner).mean(-1)}

    def notes(self) -> dict[str, str | int]:
        if self.kind == "classification":
            return {"loss": "log loss: 0.693 is guessing, 0 is certain and correct"}
        return {"loss": "squared error over the target's variance so far: 1 is no better than its mean"}

    def solution(self, outer: Tensor, task: Task) -> Tensor:
        return self._solve(outer.double(), _double(task))[0].to(outer)

    def hypergradient(self, outer: Tensor, task: Task) -> tuple[Tensor, Tensor]:
        exact = _double(task)
        inner, hessian = self._solve(outer.double(), exact)
        x, y = exact["x_new"], exact["y_new"]
        by_inner = self._slope(_fitted(x, inner), y) @ x / len(y)
        # ∇F(λ) = −∇²_λβ g · v with ∇²_ββ g · v = ∇_β f; f does not depend on λ itself
        vector = torch.linalg.solve(hessian, by_inner)
        return -self.mixed_term(outer.double(), inner, exact, vector).to(outer), inner.to(outer)

    def mixed_term(
        self, outer: Tensor, inner: Tensor, task: Task, vector: Tensor, sample: Sample | None = None
    ) -> Tensor:
        x, y, places = self._rows(task, inner, sample)
        # coordinate b: the mean over block b of ℓ'(xβ) (x v); of a sample n/s times the sum over its rows in b
        along = self._slope(_fitted(x, inner), y) * _fitted(x, vector)
        return inner.new_zeros(outer.shape).index_add_(1, places, along * (self.past / len(y)))

    def smoothness(self, outer: Tensor, task: Task) -> Tensor:
        # ℓ'' is at most 1/4 for the log loss, and 2 for the squared error
        x, _, weights = self._weighted(outer.double(), _double(task))
        most = 0.25 if self.kind == "classification" else 2.0
        return (torch.linalg.eigvalsh(_gram(x, most * weights))[:, -1] + self.ridge).to(outer)

    def _rows(self, task: Task, like: Tensor, sample: Sample | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return past rows ``[rows, p]``, their targets and the block of each; all, or those of a sample."""
        x, y = task["x"].to(like).flatten(0, 1), task["y"].to(like).flatten()
        rows, places = _sampled_rows(sample, y), torch.arange(len(y), device=y.device) // task["y"].shape[-1]
        return x[rows], y[rows], places[rows]

    def _weighted(self, outer: Tensor, task: Task, sample: Sample | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows, targets and the weight of each row in g ``[lanes, rows]``; unbiased for a sample."""
        x, y, places = self._rows(task, outer, sample)
        # Σ_b λ_b mean_b ℓ = n · mean over all rows of λ_b(i) ℓ_i
        return x, y, outer[:, places] * (self.past / len(y))

    def _objective(self, x: Tensor, y: Tensor, weights: Tensor, inner: Tensor) -> Tensor:
        return (weights * self._loss(_fitted(x, inner), y)).sum(-1) + 0.5 * self.ridge * inner.square().sum(-1)

    def _loss(self, fitted: Tensor, y: Tensor) -> Tensor:
        if self.kind == "regression":
            return (fitted - y).square()
        # −y log s − (1 − y) log(1 − s) with s = 1/(1 + e^−z); softplus is linear from 40 on, exact in float64
        return softplus(fitted, threshold=40) - y * fitted

    def _slope(self, fitted: Tensor, y: Tensor) -> Tensor:
        return 2 * (fitted - y) if self.kind == "regression" else fitted.sigmoid() - y

    def _solve(self, outer: Tensor, task: Task) -> tuple[Tensor, Tensor]:
        """Return β̂ and ∇²_ββ g at β̂; Newton's method halves a step that does not decrease g enough, per lane."""
        x, y, weights = self._weighted(outer, task)
        ridge = self.ridge * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        if self.kind == "regression":
            hessian = _gram(x, 2 * weights) + ridge
            return torch.linalg.solve(hessian, (2 * weights * y) @ x), hessian
        inner = x.new_zeros(len(weights), x.shape[-1])
        value, left = self._objective(x, y, weights, inner), math.inf
        for _ in range(STEPS):
            chance = _fitted(x, inner).sigmoid()
            hessian = _gram(x, weights * chance * (1 - chance)) + ridge
            if not left > CONVERGED:
                break
            gradient = (weights * (chance - y)) @ x + self.ridge * inner
            step = torch.linalg.solve(hessian, gradient)
            decrement = (gradient * step).sum(-1)
            size = torch.ones_like(decrement)
            for _ in range(HALVINGS):
                after = inner - size.unsqueeze(-1) * step
                found = self._objective(x, y, weights, after)
                # Armijo's rule, up to rounding
                short = found > value - 0.25 * size * decrement + 1e-14 * value
                if not bool(short.any()):
                    break
                size = torch.where(short, size / 2, size)
            inner, value, left = after, found, float(decrement.max())
        return inner, hessian


def _fitted(x: Tensor, inner: Tensor) -> Tensor:
    """Return rows ``[rows, p]`` times coefficients ``[lanes, p]``: ``[lanes, rows]``."""
    return inner @ x.T


def _gram(x: Tensor, weights: Tensor) -> Tensor:
    """Return Σ_i w_i x_i x_iᵀ, one matrix per lane."""
    return x.T @ (weights.unsqueeze(-1) * x)


def _double(task: Task) -> Task:
    return {name: values.double() for name, values in task.items()}


def _sampled_rows(sample: Sample | None, y: Tensor) -> Tensor | slice:
    """Return the rows of a sample; all of them where there is none."""
    return slice(None) if sample is None or sample.size is None else sample.indices(len(y), y.device)
