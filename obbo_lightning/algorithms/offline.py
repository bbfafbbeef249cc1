"""What the paper's offline benchmarks share: an optimizer of torch on the hypergradient of the newest task."""

from collections.abc import Callable
from typing import ClassVar

from torch.optim import Optimizer

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.domains import Domain, RealSpace
from obbo_lightning.core.hypergradients import Estimator, FixedPoint
from obbo_lightning.core.inner import GradientDescent, InnerSolver
from obbo_lightning.core.memory import NoMemory
from obbo_lightning.core.optimizer import ProjectedRule
from obbo_lightning.core.regularizers import ElasticNet, NoRegularizer


class Offline(Algorithm):
    """A step of ``rule`` on d_t, then the projection on X; no window.

    Args:
        lr: α, outer step size.
        inner: inner solver (K, η).
        hypergradient: estimator.
        regularizer: must be none.
        domain: X.
        clip: largest norm of d_t.
    """

    rule: ClassVar[Callable[..., Optimizer]]

    def __init__(
        self,
        lr: float = 1e-4,
        inner: InnerSolver | None = None,
        hypergradient: Estimator | None = None,
        regularizer: ElasticNet | None = None,
        domain: Domain | None = None,
        clip: float | None = None,
    ) -> None:
        super().__init__(
            inner=inner or GradientDescent(),
            hypergradient=hypergradient or FixedPoint(),
            memory=NoMemory,
            optimizer=ProjectedRule(self.rule, lr, regularizer or NoRegularizer(), domain or RealSpace()),
            clip=clip,
        )
