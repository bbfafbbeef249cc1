"""Outer rules: they make the optimizer of an outer variable, and refuse impossible settings before there is one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from obbo_lightning.core.auto_step import SCALE, auto_step
from obbo_lightning.core.block_step import BlockStep, Wishes
from obbo_lightning.core.blocks import Blocks, LearningRate
from obbo_lightning.core.domains import Domain, RealSpace
from obbo_lightning.core.geometry import AdaptiveDiagonal
from obbo_lightning.core.optimizer import BregmanProx, auto_names, require_start
from obbo_lightning.core.regularizers import ElasticNet


class BregmanRule(Wishes):
    """Makes the `BregmanProx` of an outer variable, with or without blocks."""

    def __call__(self, outer: Parameter, blocks: Blocks | None = None) -> Optimizer:
        steps = self.steps(blocks)
        if blocks is not None:
            blocks.require_size(outer)
            return BregmanProx([outer], 1.0, blocks=steps)
        (alone,) = steps
        return BregmanProx([outer], alone.lr, alone.geometry, alone.regularizer, alone.domain, alone.scale)


@dataclass(frozen=True)
class ProjectedRule:
    """Makes a torch optimizer of an outer variable that is projected on X after every step.

    With ``auto`` the optimizer sees directions over their typical size, and its steps are those of `AdaptiveDiagonal`:
    s times the size of λ in all coordinates together.

    Attributes:
        optimizer: makes the optimizer from a list of parameters and ``lr``. Its steps must be proportional to ``lr``
            and must not depend on λ, where λ has blocks or ``lr`` is ``auto``: no weight decay.
        lr: α, or ``auto``.
        regularizer: must be none: a torch optimizer takes no composite step.
        domain: X.
        scale: s, where α is ``auto``.
        blocks: ``lr``, ``scale`` and ``domain`` of some blocks, by name.
    """

    optimizer: Callable[..., Optimizer]
    lr: LearningRate | None = None
    regularizer: ElasticNet | None = None
    domain: Domain | None = None
    scale: float = SCALE
    blocks: Mapping[str, Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        wishes = self._wishes()
        if wishes.regularizer is not None:
            _require_none("regularizer", wishes.regularizer)

    def __call__(self, outer: Parameter, blocks: Blocks | None = None) -> Optimizer:
        steps = self._wishes().steps(blocks)
        for step in steps:
            _require_none(f"algorithm.blocks.{step.name}.regularizer", step.regularizer)
        if blocks is not None:
            blocks.require_size(outer)
        for step in steps:
            require_start(outer.detach()[..., step.where], step.domain)
        if blocks is None and steps[0].lr != "auto":
            optimizer = self.optimizer([outer], lr=steps[0].lr)
            if not isinstance(steps[0].domain, RealSpace):
                optimizer.register_step_post_hook(partial(_project, steps[0].domain))
            return optimizer
        optimizer = self.optimizer([outer], lr=1.0)
        for group in optimizer.param_groups:
            group.update(auto_names(steps))
        hooks = _StepsOfBlocks(steps)
        optimizer.register_step_pre_hook(hooks.before)
        optimizer.register_step_post_hook(hooks.after)
        return optimizer

    def _wishes(self) -> Wishes:
        decided = ("geometry", "regularizer")
        return Wishes(
            self.lr, AdaptiveDiagonal(), self.regularizer, self.domain, self.scale, self.blocks, decided=decided
        )


class _StepsOfBlocks:
    """Lets a torch optimizer with ``lr`` 1 step from zero, and takes α times that step from λ_t, block by block."""

    def __init__(self, steps: list[BlockStep]) -> None:
        self.steps = steps
        self._from: list[tuple[Parameter, Tensor, list[Tensor | float], dict[str, dict[str, Tensor]]]] = []

    @torch.no_grad()
    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Directions over their typical size, where a step is auto; what is remembered waits for torch's own state."""
        self._from = []
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            parameter.grad = parameter.grad.clone()  # it belongs to whoever has set it
            units = {step.name: self._state(optimizer, parameter, step) for step in self.steps if step.lr == "auto"}
            rates: list[Tensor | float] = [step.rate for step in self.steps]
            for i, step in enumerate(self.steps):
                outer, direction = (x[..., step.where] for x in (parameter, parameter.grad))
                if step.lr == "auto":
                    taken = auto_step(step.geometry, step.domain, outer, direction, step.scale, units[step.name])
                    direction.copy_(taken.relative)
                    rates[i] = (step.scale * step.geometry.reach(outer, step.domain)).where(taken.moves, 0.0)
            self._from.append((parameter, parameter.detach().clone(), rates, units))
            parameter.zero_()

    @torch.no_grad()
    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """λ_t + α times the step, projected on X."""
        for parameter, start, rates, units in self._from:
            for step, rate in zip(self.steps, rates, strict=True):
                moved = start[..., step.where] + rate * parameter[..., step.where]
                parameter[..., step.where] = step.domain.project(moved)
            state: dict[str, Any] = optimizer.state[parameter]  # torch fills it only where it is empty: after its step
            for name, seen in units.items():
                state.update({name: seen} if name else seen)
        self._from = []

    def _state(self, optimizer: Optimizer, parameter: Parameter, step: BlockStep) -> dict[str, Tensor]:
        state: dict[str, Any] = optimizer.state.get(parameter, {})
        own = state.get(step.name, {}) if step.name else state
        return {name: own[name] for name in ("units", "lr") if name in own}


@torch.no_grad()
def _project(domain: Domain, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.copy_(domain.project(parameter))


def _require_none(name: str, regularizer: ElasticNet) -> None:
    if regularizer.l1 or regularizer.l2:
        raise ValueError(
            f"{name} must be none for an outer rule of torch.optim, which takes no composite step, got {regularizer!r}"
        )
