"""An algorithm is a composition of four parts, and has no state of its own."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from torch.nn import Parameter
from torch.optim import Optimizer

from obbo_lightning.core.blocks import Blocks
from obbo_lightning.core.hypergradients.base import Estimator
from obbo_lightning.core.inner import InnerSolver
from obbo_lightning.core.memory import Memory
from obbo_lightning.core.problem import Problem
from obbo_lightning.core.recipes import Part
from obbo_lightning.core.validation import instance_of, positive


@dataclass(frozen=True)
class Algorithm(Part):
    """What is done in a round, and with what.

    Attributes:
        inner: how β̂_t is approached.
        hypergradient: how ∇F_t is estimated.
        memory: makes the empty memory that turns estimates into q_t.
        optimizer: makes the outer rule for λ; where λ has blocks it is given them, too.
        clip: largest norm of q_t, per lane; None for no limit.
    """

    inner: InnerSolver
    hypergradient: Estimator
    memory: Callable[[], Memory]
    optimizer: Callable[..., Optimizer]
    clip: float | None = None

    def __post_init__(self) -> None:
        instance_of("inner", self.inner, InnerSolver)
        instance_of("hypergradient", self.hypergradient, Estimator)
        self.memory()  # refuses an impossible window here, not in the first round
        if self.clip is not None:
            positive("clip", self.clip)

    def outer_rule(self, outer: Parameter, blocks: Blocks | None = None) -> Optimizer:
        """The optimizer of λ; refuses a start outside of X, and blocks that do not fit."""
        if blocks is None:
            return self.optimizer(outer)
        try:
            inspect.signature(self.optimizer).bind(outer, blocks)
        except TypeError:
            raise ValueError(
                f"algorithm must have an outer rule that takes blocks (BregmanRule, ProjectedRule) for a problem that "
                f"has them, got {type(self).__name__}"
            ) from None
        return self.optimizer(outer, blocks)

    def require_fit(self, problem: Problem) -> None:
        """Refuse a problem that lacks what this algorithm asks for, before the first round."""
        self.hypergradient.require_fit(problem, self.inner)

    @property
    def takes_lanes(self) -> bool:
        """Whether tasks can be solved as lanes of one: not with samples, which lanes share and tasks do not."""
        return self.hypergradient.takes_lanes and not (self.inner.samples or self.hypergradient.samples)
