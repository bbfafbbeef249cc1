"""SOBBO: the stochastic online Bregman bilevel optimizer."""

from functools import partial
from typing import Any

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.auto_step import SCALE
from obbo_lightning.core.blocks import LearningRate
from obbo_lightning.core.domains import Domain
from obbo_lightning.core.geometry import AdaptiveDiagonal, Geometry
from obbo_lightning.core.hypergradients import Estimator, StochasticNeumann
from obbo_lightning.core.inner import GradientDescent, InnerSolver
from obbo_lightning.core.memory import HypergradientWindow
from obbo_lightning.core.regularizers import ElasticNet
from obbo_lightning.core.rules import BregmanRule
from obbo_lightning.core.validation import at_least


class SOBBO(Algorithm):
    """K inner steps on s fresh samples each, a stochastic hypergradient, then as OBBO (Algorithm 2).

    Reference: "Online Nonconvex Bilevel Optimization with Bregman Divergences", section 4.2. Its theorem asks for
    s = w and m = log(w)/log(1/(1 − μ_g/ℓ_{g,1})) + 1 (the paper prints the logarithm with the wrong sign).

    Args:
        lr: α, outer step size, or ``auto``: a step in the geometry's own units. None: 1e-4, or each block's own.
        window: w, window length.
        inner: inner solver (K, η, s).
        hypergradient: stochastic estimator (m, ℓ_{g,1}).
        geometry: φ_t.
        regularizer: h.
        domain: X.
        clip: largest norm of q_t.
        scale: s, a typical change a round where ``lr`` is ``auto``.
        blocks: where λ has blocks, lr, scale, geometry, regularizer, domain of some of them, by name.
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
        at_least("window", window, 1)  # s = w by default: the complaint must be about w
        super().__init__(
            inner=inner or GradientDescent(batch_size=window),
            hypergradient=hypergradient or StochasticNeumann(),
            memory=partial(HypergradientWindow, window),
            optimizer=BregmanRule(lr, geometry, regularizer, domain, scale, blocks, usual=AdaptiveDiagonal()),
            clip=clip,
        )
