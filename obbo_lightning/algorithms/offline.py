"""What the paper's offline benchmarks share: an optimizer of torch on the hypergradient of the newest task."""

from collections.abc import Callable
from typing import Any, ClassVar

from torch.optim import Optimizer

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.auto_step import SCALE
from obbo_lightning.core.blocks import LearningRate
from obbo_lightning.core.domains import Domain
from obbo_lightning.core.hypergradients import Estimator, FixedPoint
from obbo_lightning.core.inner import GradientDescent, InnerSolver
from obbo_lightning.core.memory import NoMemory
from obbo_lightning.core.regularizers import ElasticNet
from obbo_lightning.core.rules import ProjectedRule


class Offline(Algorithm):
    """A step of ``rule`` on d_t, then the projection on X; no window.

    Args:
        lr: α, outer step size, or ``auto``: a step in the geometry's own units. None: 1e-4, or each block's own.
        inner: inner solver (K, η).
        hypergradient: estimator.
        regularizer: must be none.
        domain: X.
        clip: largest norm of d_t.
        scale: s, a typical change a round where ``lr`` is ``auto``.
        blocks: where λ has blocks, lr, scale, domain of some of them, by name.
    """

    rule: ClassVar[Callable[..., Optimizer]]

    def __init__(
        self,
        lr: LearningRate | None = None,
        inner: InnerSolver | None = None,
        hypergradient: Estimator | None = None,
        regularizer: ElasticNet | None = None,
        domain: Domain | None = None,
        clip: float | None = None,
        scale: float = SCALE,
        blocks: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            inner=inner or GradientDescent(),
            hypergradient=hypergradient or FixedPoint(),
            memory=NoMemory,
            optimizer=ProjectedRule(self.rule, lr, regularizer, domain, scale, blocks),
            clip=clip,
        )
