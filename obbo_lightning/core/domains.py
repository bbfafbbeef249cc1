"""Feasible sets X of the outer variable, per lane (over the last axis)."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from obbo_lightning.core.configurable import Configurable
from obbo_lightning.core.validation import nonnegative, number, positive


class Domain(Configurable, ABC):
    """Closed convex set with its Euclidean projection."""

    @abstractmethod
    def project(self, outer: Tensor) -> Tensor:
        """Return the nearest point of X."""

    @abstractmethod
    def contains(self, outer: Tensor) -> Tensor:
        """Return which lanes lie in X, up to rounding; a NaN never does."""

    def extent(self, outer: Tensor) -> Tensor:
        """Return the size of λ ``[lanes, 1]`` for relative steps: its root mean square, at least 0.001."""
        return outer.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-3)


@dataclass(frozen=True)
class RealSpace(Domain):
    """X = R^d.

    >>> RealSpace().contains(torch.tensor([[5.0, torch.nan]]))
    tensor([False])
    """

    def project(self, outer: Tensor) -> Tensor:
        return outer

    def contains(self, outer: Tensor) -> Tensor:
        return outer.isfinite().all(-1)


@dataclass(frozen=True)
class Box(Domain):
    """X = [lower, upper]^d.

    Args:
        lower: smallest value; may be infinite.
        upper: largest value; may be infinite.

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
        return ((outer >= self.lower) & (outer <= self.upper) & outer.isfinite()).all(-1)

    def extent(self, outer: Tensor) -> Tensor:
        """Return a tenth of the width; the size of λ where it is infinite or positive bounds are 1,000-fold apart."""
        if self.upper >= 1000 * self.lower > 0:
            return outer.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6)
        if math.isinf(self.upper - self.lower):
            return super().extent(outer)
        return torch.full_like(outer[..., :1], (self.upper - self.lower) / 10)


class Nonnegative(Box):
    """X = [0, ∞)^d.

    >>> Nonnegative().project(torch.tensor([[-1.0, 3.0]]))
    tensor([[0., 3.]])
    """

    def __init__(self) -> None:
        super().__init__(0.0, math.inf)


@dataclass(frozen=True)
class L2Ball(Domain):
    """X = {λ : ‖λ‖ ≤ radius}.

    Args:
        radius: of the ball, around zero.

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

    def extent(self, outer: Tensor) -> Tensor:
        """Return a tenth of the diameter."""
        return torch.full_like(outer[..., :1], self.radius / 5)


@dataclass(frozen=True)
class Simplex(Domain):
    """X = {λ_i ≥ floor : Σ λ_i = 1}.

    With a floor, a weight that was small for long recovers quickly.

    Args:
        floor: smallest weight; less than one over their number.

    >>> Simplex().project(torch.tensor([[2.0, 0.0]])), Simplex(0.1).project(torch.tensor([[2.0, 0.0]]))
    (tensor([[1., 0.]]), tensor([[0.9000, 0.1000]]))
    """

    floor: float = 0.0

    def __post_init__(self) -> None:
        nonnegative("domain.floor", self.floor)

    def project(self, outer: Tensor) -> Tensor:
        return weighted_simplex(outer, torch.ones_like(outer), self.floor)

    def contains(self, outer: Tensor) -> Tensor:
        least = self.floor * (1 - _slack(outer))
        return (outer >= least).all(-1) & ((outer.sum(-1) - 1).abs() <= _slack(outer))

    def extent(self, outer: Tensor) -> Tensor:
        """Return 1/d, a coordinate at the centre."""
        return torch.full_like(outer[..., :1], 1 / outer.shape[-1])


def weighted_simplex(point: Tensor, step: Tensor, floor: float = 0.0) -> Tensor:
    """Return the argmin over the simplex of Σ (x_i − point_i)² / (2 step_i), exactly, by sorting.

    Without a floor, KKT: x_i = max(0, point_i − step_i τ). The coordinates leave zero in the order of point_i / step_i,
    and with the k first of them positive Σ x_i = 1 gives τ_k = (Σ point_i − 1) / Σ step_i. With a floor, x_i − floor
    solves the same problem with the sum 1 − d floor.
    """
    mass = above_floors(floor, point.shape[-1])
    point = point - floor
    # A common shift of point_i / step_i only shifts τ; without it a huge point would swallow the 1.
    point = point - step * (point / step).amax(-1, keepdim=True)
    order = (point / step).argsort(dim=-1, descending=True)
    sorted_point, sorted_step = point.gather(-1, order), step.gather(-1, order)
    threshold = (sorted_point.cumsum(-1) - mass) / sorted_step.cumsum(-1)
    # The right k is the last one whose own coordinate is still positive; k = 1 always is.
    positive_at_k = (sorted_point > sorted_step * threshold).sum(-1, keepdim=True).clamp(min=1)
    tau = threshold.gather(-1, positive_at_k - 1)
    result = (point - step * tau).clamp(min=0)
    total = result.sum(-1, keepdim=True)
    return floor + mass * result / total if floor else result / total


def entropic_simplex(weights: Tensor, floor: float) -> Tensor:
    """Return the argmin over the simplex of Σ x_i log(x_i / weights_i) − x_i, exactly, by sorting; weights > 0.

    KKT: x_i = max(floor, c weights_i). With the k largest above the floor, c_k = (1 − (d − k) floor) / Σ weights_i of
    those; the right k is the last one whose own coordinate c_k weights_k is still above the floor.
    """
    d = weights.shape[-1]
    above_floors(floor, d)
    ordered = weights.sort(-1, descending=True).values
    left = 1 - floor * torch.arange(d - 1, -1, -1, dtype=weights.dtype, device=weights.device)
    factor = left / ordered.cumsum(-1)
    above = (factor * ordered > floor).sum(-1, keepdim=True).clamp(min=1)
    return (factor.gather(-1, above - 1) * weights).clamp(min=floor)


def above_floors(floor: float, count: int) -> float:
    """Return 1 − count · floor; refuse a floor of 1/count or more."""
    if floor * count >= 1:
        raise ValueError(f"domain.floor must be less than 1/{count} for {count} weights, got {floor!r}")
    return 1 - floor * count


def weighted_ball(point: Tensor, step: Tensor | float, domain: L2Ball) -> Tensor:
    """Return the argmin over the ball of Σ (x_i − point_i)² / (2 step_i).

    x = point / (1 + step μ) with ‖x‖ = radius or μ = 0.
    """
    if not isinstance(step, Tensor) or step.shape[-1] == 1:  # the same for all coordinates
        return domain.project(point)
    radius = domain.radius
    if bool((point.norm(dim=-1) <= radius).all()):  # μ = 0
        return point
    multiplier = torch.zeros_like(point[..., :1])
    # Newton on 1/‖x(μ)‖ − 1/radius, which is increasing and concave: from μ = 0 it never passes the root.
    for _ in range(20):
        damping = 1 + step * multiplier
        x = point / damping
        norm = x.norm(dim=-1, keepdim=True)
        slope = (x.square() * step / damping).sum(-1, keepdim=True)
        advance = (norm / radius - 1) * norm.square() / slope
        multiplier = torch.where(norm > radius, multiplier + advance, multiplier)
    return domain.project(point / (1 + step * multiplier))


def _slack(outer: Tensor) -> float:
    return float(torch.finfo(outer.dtype).eps) ** 0.5
