"""OBBO: the online Bregman bilevel optimizer."""

from functools import partial
from typing import Any

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.auto_step import SCALE
from obbo_lightning.core.blocks import LearningRate
from obbo_lightning.core.domains import Domain
from obbo_lightning.core.geometry import AdaptiveDiagonal, Geometry
from obbo_lightning.core.hypergradients import Estimator, FixedPoint
from obbo_lightning.core.inner import GradientDescent, InnerSolver
from obbo_lightning.core.memory import HypergradientWindow
from obbo_lightning.core.regularizers import ElasticNet
from obbo_lightning.core.rules import BregmanRule


class OBBO(Algorithm):
    """K inner steps, any hypergradient, the mean of the last w of them, one Bregman proximal step (Algorithm 1).

    Reference: "Online Nonconvex Bilevel Optimization with Bregman Divergences", section 4.1.

    Args:
        lr: α, outer step size, or ``auto``: a step in the geometry's own units. None: 1e-4, or each block's own.
        window: w, window length.
        inner: inner solver (K, η).
        hypergradient: estimator; the paper analyses `Unrolled` and runs `FixedPoint` on FC100.
        geometry: φ_t; the paper's experiments use `AdaptiveDiagonal`.
        regularizer: h.
        domain: X.
        clip: largest norm of q_t.
        scale: s, a typical change a round where ``lr`` is ``auto``.
        blocks: where λ has blocks, lr, scale, geometry, regularizer, domain of some of them, by name.

    >>> OBBO(lr=1e-3, window=25).hypergradient
    FixedPoint(steps=5, lr=None)
    """

    def __init__(
        self,
        lr: LearningRate | None = None,
        window: int = 10,
        inner: InnerSolver | None = None,
        hypergradient: Estimator | None = None,
        geometry: Geometry | None = None,
        regularizer: ElasticNet | None = None,
        domain: Domain | None = None,
        clip: float | None = None,
        scale: float = SCALE,
        blocks: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            inner=inner or GradientDescent(),
            hypergradient=hypergradient or FixedPoint(),
            memory=partial(HypergradientWindow, window),
            optimizer=BregmanRule(lr, geometry, regularizer, domain, scale, blocks, usual=AdaptiveDiagonal()),
            clip=clip,
        )
