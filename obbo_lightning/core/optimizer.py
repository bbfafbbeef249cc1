"""The outer step as a torch optimizer."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from obbo_lightning.core.auto_step import SCALE, auto_step
from obbo_lightning.core.block_step import BlockStep
from obbo_lightning.core.blocks import LearningRate
from obbo_lightning.core.domains import Domain, RealSpace
from obbo_lightning.core.geometry import Distance, Euclidean, Geometry, Rate, require_support
from obbo_lightning.core.regularizers import ElasticNet, NoRegularizer
from obbo_lightning.core.validation import positive


class BregmanProx(Optimizer):
    r"""λ⁺ = argmin_{λ ∈ X} ⟨q, λ⟩ + h(λ) + D_{φ_t}(λ, λ_t)/α, solved exactly       (eq. outer_step_minimization).

    The gradient of a parameter is q; the last axis is the vector, all others are lanes. Usable in any torch loop. The
    group's ``lr`` is α, or s where α is ``auto``, or a factor for the steps of all blocks.

    Attributes:
        lengths: ‖G_X‖ of the last step in the geometry's own norm, of each block ``[lanes, blocks]``: √(2 D)/α with
            D = D_{φ_t}(λ_{t+1}, λ_t), which is √⟨G, H_t G⟩ for φ_t = ½ λᵀ H_t λ.

    Args:
        params: parameters, as for any torch optimizer. Their values must lie in ``domain``.
        lr: α, or ``auto`` (`auto_step`).
        geometry: φ_t.
        regularizer: h.
        domain: X.
        scale: s, where ``lr`` is ``auto``.
        blocks: the steps of a λ that has blocks, instead of one of the above for all of it.

    Example: one ISTA step.

    >>> from obbo_lightning.core.regularizers import L1
    >>> outer = torch.nn.Parameter(torch.tensor([[1.0, 0.05]]))
    >>> outer.grad = torch.tensor([[1.0, 0.0]])
    >>> BregmanProx([outer], lr=0.1, regularizer=L1(1.0)).step()
    >>> outer.data
    tensor([[0.8000, 0.0000]])
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: LearningRate,
        geometry: Geometry | None = None,
        regularizer: ElasticNet | None = None,
        domain: Domain | None = None,
        scale: float = SCALE,
        blocks: Sequence[BlockStep] | None = None,
    ) -> None:
        alone = BlockStep(lr, geometry or Euclidean(), regularizer or NoRegularizer(), domain or RealSpace(), scale)
        self.blocks = tuple(blocks or [alone])
        self.lengths: Tensor | None = None
        super().__init__(params, {"lr": lr if blocks else alone.rate, **auto_names(self.blocks)})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a step size or a start that is impossible, also for groups added later."""
        super().add_param_group(param_group)
        positive("lr", self.param_groups[-1]["lr"])
        for parameter in self.param_groups[-1]["params"]:
            for block in self.blocks:
                require_start(parameter.detach()[..., block.where], block.domain, block.geometry)

    def __getstate__(self) -> dict[str, Any]:
        # torch keeps only what it knows of
        return {**super().__getstate__(), "blocks": self.blocks}

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Replace every parameter that has a gradient by the solution of its step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    taken = [self._taken(parameter, block, group["lr"]) for block in self.blocks]
                    self.lengths = torch.stack([one.length for one in taken], -1)
                    for block, one in zip(self.blocks, taken, strict=True):
                        parameter[..., block.where].copy_(one.outer)
        return loss

    def _taken(self, parameter: Tensor, block: BlockStep, lr: float) -> "_Taken":
        outer, direction = (x[..., block.where] for x in (parameter, parameter.grad) if x is not None)
        return _minimiser(block, outer, direction, lr, self._state(parameter, block))

    def generalized(self, before: Tensor, parameter: Tensor) -> Tensor:
        """G_X(λ_t, q_t, α) = (λ_t − λ_{t+1})/α of the step that was taken, each block with its own α."""
        difference = before - parameter.detach()
        for block in self.blocks:
            lr: Rate = self.param_groups[0]["lr"] * block.factor
            if block.lr == "auto":
                lr = self._state(parameter, block)["lr"]
                lr = lr.where(lr > 0, 1.0)  # nothing has moved
            difference[..., block.where] /= lr
        return difference

    def _state(self, parameter: Tensor, block: BlockStep) -> dict[str, Tensor]:
        """What a block remembers; a λ without blocks keeps it as torch's optimizers do."""
        state: dict[str, Any] = self.state[parameter]
        own: dict[str, Tensor] = state.setdefault(block.name, {}) if block.name else state
        if not own:
            own.update(block.geometry.initial_state(parameter.detach()[..., block.where]))
        return own


class _Taken(NamedTuple):
    """A step of a block: λ_{t+1} ``[lanes, d]``, and the length of G_X in the geometry's own norm ``[lanes]``."""

    outer: Tensor
    length: Tensor


def _minimiser(block: BlockStep, outer: Tensor, direction: Tensor, lr: float, state: dict[str, Tensor]) -> _Taken:
    h, domain = block.regularizer, block.domain
    if block.lr != "auto":
        distance, rate = block.geometry.distance(direction, state), lr * block.factor
        after = distance.step(outer, direction, rate, h, domain)
        return _Taken(after, _length(distance, outer, after, rate))
    taken = auto_step(block.geometry, domain, outer, direction, lr * block.factor, state)
    distance = block.geometry.distance(taken.relative, state)
    after = distance.step(outer, taken.direction, taken.rate, h, domain).where(taken.moves, outer)
    return _Taken(after, _length(distance, outer, after, taken.rate.squeeze(-1)))


def _length(distance: Distance, before: Tensor, after: Tensor, rate: Rate) -> Tensor:
    """√(2 D_φ(λ⁺, λ))/α, in double precision: an entropy's D is a difference of numbers that are nearly equal."""
    divergence = distance.divergence(after.double(), before.double())
    return (2 * divergence.clamp(min=0)).sqrt() / rate


def auto_names(blocks: Sequence[BlockStep]) -> dict[str, list[str]]:
    """What a parameter group says of steps that are ``auto``; nothing where none is."""
    names = [block.name for block in blocks if block.lr == "auto"]
    return {"auto": names} if names else {}


def auto_rates(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """α_t of the last step by block ``[lanes]``, where it is ``auto``; a λ without blocks has the name ''."""
    state: dict[str, Any] = optimizer.state[parameter]
    names = optimizer.param_groups[0].get("auto", [])
    return {name: (state[name] if name else state)["lr"].squeeze(-1) for name in names}


def generalized_gradient(
    distance: Distance,
    outer: Tensor,
    direction: Tensor,
    lr: float,
    regularizer: ElasticNet | None = None,
    domain: Domain | None = None,
) -> Tensor:
    """G_X(λ, q, α) = (λ − λ⁺)/α                                                (eq. generalized_gradient).

    >>> generalized_gradient(Euclidean(), torch.ones(1, 2), torch.tensor([[2.0, 3.0]]), lr=0.5)
    tensor([[2., 3.]])
    """
    positive("lr", lr)
    if isinstance(distance, Geometry):
        require_support(distance, regularizer or NoRegularizer(), domain or RealSpace())
    after = distance.step(outer, direction, lr, regularizer or NoRegularizer(), domain or RealSpace())
    return (outer - after) / lr


def require_start(outer: Tensor, domain: Domain, geometry: Geometry | None = None) -> None:
    """Refuse an outer start that is not in X, or at which φ has no gradient."""
    if not outer.is_floating_point():
        raise ValueError(f"outer start must be floating-point, got {outer.dtype}")
    _require_lanes(outer, domain.contains(outer), f"lie in {domain!r}")
    if isinstance(geometry, Distance):
        _require_lanes(outer, geometry.accepts(outer), f"lie inside {domain!r}, where {geometry!r} is smooth")


def _require_lanes(outer: Tensor, good: Tensor, rule: str) -> None:
    if not bool(good.all()):
        lane = int((~good).reshape(-1).nonzero()[0])
        first = outer.reshape(-1, outer.shape[-1])[lane][:4].tolist()
        raise ValueError(f"outer start must {rule}; lane {lane} begins with {first}")
