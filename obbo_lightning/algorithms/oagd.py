"""OAGD: online alternating gradient descent."""

from functools import partial

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.domains import Domain, RealSpace
from obbo_lightning.core.geometry import Euclidean
from obbo_lightning.core.hypergradients import Estimator, FixedPoint
from obbo_lightning.core.inner import GradientDescent, InnerSolver
from obbo_lightning.core.memory import TaskWindow
from obbo_lightning.core.optimizer import BregmanRule
from obbo_lightning.core.regularizers import ElasticNet, NoRegularizer


class OAGD(Algorithm):
    """The last w tasks are solved again at the current λ in every round: w times the work of a stored window.

    Reference: Tarzanagh, Nazari, Hou, Shen, Balzano, "Online Bilevel Optimization: Regret Analysis of Online
    Alternating Gradient Methods", 2024.

    Args:
        lr: α, outer step size.
        window: w, how many tasks are solved in a round.
        inner: inner solver (K, η).
        hypergradient: estimator.
        regularizer: h; OAGD's own paper has none.
        domain: X.
        clip: largest norm of q_t.
    """

    def __init__(
        self,
        lr: float = 1e-4,
        window: int = 10,
        inner: InnerSolver | None = None,
        hypergradient: Estimator | None = None,
        regularizer: ElasticNet | None = None,
        domain: Domain | None = None,
        clip: float | None = None,
    ) -> None:
        super().__init__(
            inner=inner or GradientDescent(),
            hypergradient=hypergradient or FixedPoint(),
            memory=partial(TaskWindow, window),
            optimizer=BregmanRule(lr, Euclidean(), regularizer or NoRegularizer(), domain or RealSpace()),
            clip=clip,
        )
