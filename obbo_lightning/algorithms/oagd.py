"""OAGD: online alternating gradient descent."""

from functools import partial
from typing import Any

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.auto_step import SCALE
from obbo_lightning.core.blocks import LearningRate
from obbo_lightning.core.domains import Domain
from obbo_lightning.core.geometry import Euclidean
from obbo_lightning.core.hypergradients import Estimator, FixedPoint
from obbo_lightning.core.inner import GradientDescent, InnerSolver
from obbo_lightning.core.memory import TaskWindow
from obbo_lightning.core.regularizers import ElasticNet
from obbo_lightning.core.rules import BregmanRule


class OAGD(Algorithm):
    """The last w tasks are solved again at the current λ in every round: w times the work of a stored window.

    Reference: Tarzanagh, Nazari, Hou, Shen, Balzano, "Online Bilevel Optimization: Regret Analysis of Online
    Alternating Gradient Methods", 2024.

    Args:
        lr: α, outer step size, or ``auto``: a step in the geometry's own units. None: 1e-4, or each block's own.
        window: w, how many tasks are solved in a round.
        inner: inner solver (K, η).
        hypergradient: estimator.
        regularizer: h; OAGD's own paper has none.
        domain: X.
        clip: largest norm of q_t.
        scale: s, a typical change a round where ``lr`` is ``auto``.
        blocks: where λ has blocks, lr, scale, regularizer, domain of some of them, by name.
    """

    def __init__(
        self,
        lr: LearningRate | None = None,
        window: int = 10,
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
            memory=partial(TaskWindow, window),
            optimizer=BregmanRule(lr, Euclidean(), regularizer, domain, scale, blocks, decided=("geometry",)),
            clip=clip,
        )
