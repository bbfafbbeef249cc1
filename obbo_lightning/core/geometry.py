"""Distance generating functions φ_t, and the outer step that each of them solves exactly.

A `Geometry` determines φ_t of every round from the directions it has seen; a `Distance` is one such φ, held fixed.
A geometry that never changes is both.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from obbo_lightning.core.configurable import Configurable
from obbo_lightning.core.domains import Box, Domain, L2Ball, Simplex, entropic_simplex, weighted_ball, weighted_simplex
from obbo_lightning.core.regularizers import ElasticNet, NoRegularizer
from obbo_lightning.core.validation import decay, positive

Rate = float | Tensor  # α: one for all lanes, or one per lane ``[lanes, 1]``
SUPPORTED_STEPS = """\
  Euclidean, AdaptiveDiagonal: every regularizer; every domain
  NegativeEntropy: NoRegularizer or L1; Nonnegative, Box with lower >= 0, or Simplex
  Burg: every regularizer; Box with lower >= 0 and finite upper"""


class Distance(ABC):
    """A distance generating function φ, per lane over the last axis."""

    @abstractmethod
    def value(self, outer: Tensor) -> Tensor:
        """Return φ(λ) ``[lanes]``."""

    @abstractmethod
    def mirror(self, outer: Tensor) -> Tensor:
        """Return the mirror map ∇φ(λ)."""

    @abstractmethod
    def strong_convexity(self, domain: Domain) -> float:
        """Return ρ with D_φ(x, λ) ≥ (ρ/2) ‖x − λ‖² on ``domain``; 0 where there is none."""

    @abstractmethod
    def step(self, outer: Tensor, direction: Tensor, lr: Rate, regularizer: ElasticNet, domain: Domain) -> Tensor:
        """Return the argmin over x in X of ⟨q, x⟩ + h(x) + D_φ(x, λ)/α   (eq. outer_step_minimization)."""

    def divergence(self, outer: Tensor, reference: Tensor) -> Tensor:
        """Return D_φ(x, λ) = φ(x) − φ(λ) − ⟨∇φ(λ), x − λ⟩ ``[lanes]`` of x = ``outer`` and λ = ``reference``."""
        linear = (self.mirror(reference) * (outer - reference)).sum(-1)
        return self.value(outer) - self.value(reference) - linear

    def accepts(self, outer: Tensor) -> Tensor:
        """Return which lanes φ is differentiable at."""
        return outer.isfinite().all(-1)

    def inner_weights(self, outer: Tensor, domain: Domain) -> Tensor:
        """Return w of the inner product Σ w_i x_i y_i of directions at λ ``[lanes, d]``: the inverse of ∇²φ."""
        return torch.ones_like(outer)


class Geometry(Configurable, ABC):
    """Rule for φ_t; its state is a dict of tensors that the optimizer keeps."""

    def supports(self, regularizer: ElasticNet, domain: Domain) -> bool:
        """Return whether the step is solved exactly for this h and X."""
        return True

    def initial_state(self, outer: Tensor) -> dict[str, Tensor]:
        """Return the state of φ_t before the first round."""
        return {}

    @abstractmethod
    def distance(self, direction: Tensor, state: dict[str, Tensor]) -> Distance:
        """Return φ_t after q_t was seen; updates ``state`` in place."""

    def auto_direction(self, outer: Tensor, direction: Tensor, domain: Domain) -> Tensor:
        """Return what ``lr: auto`` steps along ``[lanes, d]``: q, centred on the simplex."""
        return direction - direction.mean(-1, keepdim=True) if isinstance(domain, Simplex) else direction

    def auto_regularizer(
        self, outer: Tensor, regularizer: ElasticNet, domain: Domain
    ) -> tuple[Tensor | float, ElasticNet]:
        """Return what h adds to `auto_direction`, and what is left of it for the step."""
        return 0.0, regularizer

    def unit(self, outer: Tensor, direction: Tensor, domain: Domain) -> Tensor:
        """Return the size of q ``[lanes, 1]``; ``lr: auto`` divides by it, so rescaling f changes no step."""
        return self.auto_direction(outer, direction, domain).abs().amax(-1, keepdim=True)

    def reach(self, outer: Tensor, domain: Domain) -> Tensor:
        """Return the length of a typical step of ``lr: auto`` with s = 1 ``[lanes, 1]``: the size of λ or of X."""
        return domain.extent(outer)


class FixedGeometry(Geometry, Distance):
    """φ_t = φ in every round."""

    def distance(self, direction: Tensor, state: dict[str, Tensor]) -> Distance:
        return self


@dataclass(frozen=True, eq=False)
class DiagonalQuadratic(Distance):
    """φ(λ) = ½ λᵀ diag(scale) λ.

    Args:
        scale: positive numbers ``[lanes, d]``, or one for all.

    >>> DiagonalQuadratic(torch.tensor([[1.0, 4.0]])).value(torch.ones(1, 2))
    tensor([2.5000])
    """

    scale: Tensor | float

    def value(self, outer: Tensor) -> Tensor:
        return 0.5 * (self.scale * outer.square()).sum(-1)

    def mirror(self, outer: Tensor) -> Tensor:
        return self.scale * outer

    def divergence(self, outer: Tensor, reference: Tensor) -> Tensor:
        return self.value(outer - reference)

    def strong_convexity(self, domain: Domain) -> float:
        return float(torch.as_tensor(self.scale).min())

    def inner_weights(self, outer: Tensor, domain: Domain) -> Tensor:
        return torch.ones_like(outer) / self.scale

    def step(self, outer: Tensor, direction: Tensor, lr: Rate, regularizer: ElasticNet, domain: Domain) -> Tensor:
        # Coordinate i minimises q x + l1 |x| + (l2/2) x² + (x − λ)²/(2s) with its own step s = α / scale.
        step = lr / self.scale
        if isinstance(domain, Simplex):  # Σ x = 1: a constant in q changes nothing but the rounding
            direction = direction - direction.amin(-1, keepdim=True)
        point = outer - step * direction
        shrink = 1 + step * regularizer.l2
        if isinstance(domain, Simplex):  # ‖x‖₁ = 1 on the simplex: l1 changes nothing
            return weighted_simplex(point / shrink, (step / shrink) * torch.ones_like(point), domain.floor)
        if regularizer.l1:
            # soft threshold: sign(z) max(|z| − s l1, 0)
            point = point.sign() * (point.abs() - step * regularizer.l1).clamp(min=0)
        if regularizer.l2:
            point = point / shrink
        if isinstance(domain, L2Ball):
            return weighted_ball(point, step / shrink, domain)
        return domain.project(point)  # separable: the clipped minimiser is the minimiser of the clipped problem


class Euclidean(FixedGeometry, DiagonalQuadratic):
    """φ(λ) = ½ ‖λ‖², ρ = 1: the step is the proximal gradient step.

    >>> Euclidean().divergence(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2))
    tensor([12.5000])
    """

    def __init__(self) -> None:
        super().__init__(scale=1.0)


@dataclass(frozen=True)
class AdaptiveDiagonal(Geometry):
    """φ_t(λ) = ½ λᵀ H_t λ with H_t = diag(√v_t + ρ), v_t = decay v_{t−1} + (1 − decay) q_t², v_0 = 0.

    The paper's choice for both experiments. No bias correction: with w = 1 and no constraint this is RMSprop.

    Args:
        decay: weight of the past in the average of squares.
        rho: ρ, the strong convexity that remains where no gradient was ever seen. The theorems ask for
            α ≤ 3ρ/(4ℓ_F); with the default ρ such an α is too small to move λ.
        bias_correction: use v_t / (1 − decay^t): the first step is α per coordinate, not α/√(1 − decay).

    >>> geometry, outer = AdaptiveDiagonal(decay=0.75), torch.zeros(1, 2)
    >>> geometry.distance(torch.tensor([[2.0, 8.0]]), geometry.initial_state(outer)).scale  # √(0.25 q²) + ρ
    tensor([[1., 4.]])
    """

    decay: float = 0.9
    rho: float = 1e-8
    bias_correction: bool = False

    def __post_init__(self) -> None:
        positive("geometry.rho", self.rho)
        decay("geometry.decay", self.decay)

    def initial_state(self, outer: Tensor) -> dict[str, Tensor]:
        state = {"second_moment": torch.zeros_like(outer)}
        return {**state, "rounds": outer.new_zeros(())} if self.bias_correction else state

    def reach(self, outer: Tensor, domain: Domain) -> Tensor:
        # H_t removes the size of every coordinate, and a step of α in each of d coordinates has length α √d. A step of
        # a tenth of the size of the coordinates is not too long for a network either.
        return domain.extent(outer) / min(outer.shape[-1] ** 0.5, 10.0)

    def distance(self, direction: Tensor, state: dict[str, Tensor]) -> Distance:
        # v_t = decay v_{t−1} + (1 − decay) q_t²
        second_moment = state["second_moment"]
        second_moment.mul_(self.decay).addcmul_(direction, direction, value=1 - self.decay)
        second_moment.clamp_(max=torch.finfo(direction.dtype).max)  # an overflow would never decay again
        if self.bias_correction:
            state["rounds"] += 1
            second_moment = second_moment / (1 - self.decay ** state["rounds"])  # v̂_t = v_t / (1 − decay^t)
        # H_t = diag(√v_t + ρ)
        return DiagonalQuadratic(second_moment.sqrt().add_(self.rho))


class Entropy(FixedGeometry):
    """φ on positive numbers whose step changes log λ: a q of unit 1 changes it by α."""

    def accepts(self, outer: Tensor) -> Tensor:
        return ((outer > 0) & outer.isfinite()).all(-1)

    def reach(self, outer: Tensor, domain: Domain) -> Tensor:
        return torch.ones_like(outer[..., :1])


@dataclass(frozen=True)
class NegativeEntropy(Entropy):
    """φ(λ) = Σ λ_i log λ_i − λ_i: the multiplicative update, computed in log space.

    ρ is 1 on the simplex and 1/U on (0, U]^d. Coordinates are clamped at the smallest normal number, so none becomes
    zero for good, and at the largest, so none overflows.

    >>> NegativeEntropy().mirror(torch.tensor([[1.0]]))  # log λ
    tensor([[0.]])
    """

    def supports(self, regularizer: ElasticNet, domain: Domain) -> bool:
        return regularizer.l2 == 0 and (isinstance(domain, Simplex) or _is_positive_box(domain))

    def value(self, outer: Tensor) -> Tensor:
        return (torch.xlogy(outer, outer) - outer).sum(-1)

    def mirror(self, outer: Tensor) -> Tensor:
        return outer.log()

    def divergence(self, outer: Tensor, reference: Tensor) -> Tensor:
        return (torch.xlogy(outer, outer / reference) - outer + reference).sum(-1)

    def strong_convexity(self, domain: Domain) -> float:
        return 1.0 if isinstance(domain, Simplex) else 1 / _upper(domain)

    def auto_direction(self, outer: Tensor, direction: Tensor, domain: Domain) -> Tensor:
        if isinstance(domain, Simplex):
            return super().auto_direction(outer, direction, domain)
        return outer * direction  # ∂f/∂ log λ: it vanishes with λ, so that λ does not collapse

    def auto_regularizer(
        self, outer: Tensor, regularizer: ElasticNet, domain: Domain
    ) -> tuple[Tensor | float, ElasticNet]:
        if isinstance(domain, Simplex):
            return super().auto_regularizer(outer, regularizer, domain)
        return regularizer.l1 * outer, NoRegularizer()  # ∂h/∂ log λ, as for f

    def inner_weights(self, outer: Tensor, domain: Domain) -> Tensor:
        return outer if isinstance(domain, Simplex) else torch.ones_like(outer)

    def step(self, outer: Tensor, direction: Tensor, lr: Rate, regularizer: ElasticNet, domain: Domain) -> Tensor:
        # log λ⁺ = log λ − α (q + l1), normalised on the simplex
        change = -lr * (direction + regularizer.l1)
        log = outer.log() + change
        if isinstance(domain, Simplex):
            weights = _floor(log.log_softmax(-1).exp())
            return entropic_simplex(weights, domain.floor) if domain.floor else weights
        # Small changes by the product: in log λ they would be rounded away where |log λ| is large.
        after = torch.where(change.abs() < 1, outer * change.exp(), log.exp())
        return _floor(domain.project(after.clamp(max=torch.finfo(outer.dtype).max)))


@dataclass(frozen=True)
class Burg(Entropy):
    """φ(λ) = −Σ log λ_i, ρ = 1/U² on (0, U]^d.

    >>> Burg().divergence(torch.tensor([[2.0]]), torch.tensor([[2.0]]))
    tensor([0.])
    """

    def supports(self, regularizer: ElasticNet, domain: Domain) -> bool:
        return _is_positive_box(domain) and math.isfinite(_upper(domain))

    def value(self, outer: Tensor) -> Tensor:
        return -outer.log().sum(-1)

    def mirror(self, outer: Tensor) -> Tensor:
        return -1 / outer

    def divergence(self, outer: Tensor, reference: Tensor) -> Tensor:
        relative = (outer - reference) / reference
        return (relative - relative.log1p()).sum(-1)

    def strong_convexity(self, domain: Domain) -> float:
        return 1 / _upper(domain) ** 2

    def unit(self, outer: Tensor, direction: Tensor, domain: Domain) -> Tensor:
        return (outer * direction).abs().amax(-1, keepdim=True)  # Δ log λ ≈ −α λ q

    def inner_weights(self, outer: Tensor, domain: Domain) -> Tensor:
        return outer.square()

    def step(self, outer: Tensor, direction: Tensor, lr: Rate, regularizer: ElasticNet, domain: Domain) -> Tensor:
        # q + l1 + l2 x + (1/λ − 1/x)/α = 0, times α λ x:  α l2 λ x² + b x − λ = 0 with b = 1 + α λ (q + l1).
        b = 1 + lr * outer * (direction + regularizer.l1)
        root = b.hypot(2 * (lr * regularizer.l2) ** 0.5 * outer)
        # No cancellation for either sign of b; without a positive root (l2 = 0, b ≤ 0) the minimum is at the bound.
        rising = 2 * outer / (b + root)
        falling = (root - b) / (2 * lr * regularizer.l2 * outer) if regularizer.l2 else torch.full_like(b, math.inf)
        return _floor(domain.project(torch.where(b > 0, rising, falling)))


def _floor(outer: Tensor) -> Tensor:
    return outer.clamp(min=torch.finfo(outer.dtype).tiny)


def _is_positive_box(domain: Domain) -> bool:
    return isinstance(domain, Box) and domain.lower >= 0


def _upper(domain: Domain) -> float:
    return domain.upper if isinstance(domain, Box) else math.inf
