"""The feasible sets X of the outer variable, each lane on its own (over the last axis)."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from obbo_lightning.core.recipes import Part
from obbo_lightning.core.validation import number, positive


class Domain(Part, ABC):
    """A closed convex set with its Euclidean projection."""

    @abstractmethod
    def project(self, outer: Tensor) -> Tensor:
        """The nearest point of X."""

    @abstractmethod
    def contains(self, outer: Tensor) -> Tensor:
        """Which lanes lie in X, up to rounding; a NaN never does."""


@dataclass(frozen=True)
class RealSpace(Domain):
    """X = R^d."""

    def project(self, outer: Tensor) -> Tensor:
        return outer

    def contains(self, outer: Tensor) -> Tensor:
        return outer.isfinite().all(-1)


@dataclass(frozen=True)
class Box(Domain):
    """X = [lower, upper]^d; a bound may be infinite.

    >>> Box(0.0, 1.0).project(torch.tensor([[-1.0, 0.5, 3.0]]))
    tensor([[0.0000, 0.5000, 1.0000]])
    """

    lower: float
    upper: float

    def __post_init__(self) -> None:
        if not number("domain.lower", self.lower) < number("domain.upper", self.upper):
            raise ValueError(f"domain.lower must be smaller than domain.upper, got {self.lower!r} and {self.upper!r}")

    def project(self, outer: Tensor) -> Tensor:
        return outer.clamp(self.lower, self.upper)

    def contains(self, outer: Tensor) -> Tensor:
        inside = (outer >= self.lower) & (outer <= self.upper) & outer.isfinite()
        return inside.all(-1)


class Nonnegative(Box):
    """X = [0, ∞)^d."""

    def __init__(self) -> None:
        super().__init__(0.0, math.inf)


@dataclass(frozen=True)
class L2Ball(Domain):
    """X = {λ : ‖λ‖ ≤ radius}.

    >>> L2Ball(1.0).project(torch.tensor([[3.0, 4.0]]))
    tensor([[0.6000, 0.8000]])
    """

    radius: float

    def __post_init__(self) -> None:
        positive("domain.radius", self.radius)

    def project(self, outer: Tensor) -> Tensor:
        norm = outer.norm(dim=-1, keepdim=True)
        return torch.where(norm > self.radius, outer * (self.radius / norm), outer)

    def contains(self, outer: Tensor) -> Tensor:
        return outer.norm(dim=-1) <= self.radius * (1 + _slack(outer))


@dataclass(frozen=True)
class Simplex(Domain):
    """X = {λ ≥ 0 : Σ λ_i = 1}.

    >>> Simplex().project(torch.tensor([[2.0, 0.0]]))
    tensor([[1., 0.]])
    """

    def project(self, outer: Tensor) -> Tensor:
        return weighted_simplex(outer, torch.ones_like(outer))

    def contains(self, outer: Tensor) -> Tensor:
        return (outer >= 0).all(-1) & ((outer.sum(-1) - 1).abs() <= _slack(outer))


def weighted_simplex(point: Tensor, step: Tensor) -> Tensor:
    """Argmin over the simplex of Σ (x_i − point_i)² / (2 step_i), exactly, by sorting.

    KKT: x_i = max(0, point_i − step_i τ). The coordinates leave zero in the order of point_i / step_i, and with the
    k first of them positive Σ x_i = 1 gives τ_k = (Σ point_i − 1) / Σ step_i.
    """
    # A common shift of point_i / step_i only shifts τ; without it a huge point would swallow the 1.
    point = point - step * (point / step).amax(-1, keepdim=True)
    order = (point / step).argsort(dim=-1, descending=True)
    sorted_point, sorted_step = point.gather(-1, order), step.gather(-1, order)
    threshold = (sorted_point.cumsum(-1) - 1) / sorted_step.cumsum(-1)
    # The right k is the last one whose own coordinate is still positive; k = 1 always is.
    positive_at_k = (sorted_point > sorted_step * threshold).sum(-1, keepdim=True).clamp(min=1)
    tau = threshold.gather(-1, positive_at_k - 1)
    result = (point - step * tau).clamp(min=0)
    return result / result.sum(-1, keepdim=True)


def _slack(outer: Tensor) -> float:
    return float(torch.finfo(outer.dtype).eps) ** 0.5
