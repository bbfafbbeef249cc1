"""SOBBO: the stochastic online Bregman bilevel optimizer."""

from functools import partial

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.domains import Domain, RealSpace
from obbo_lightning.core.geometry import AdaptiveDiagonal, Geometry
from obbo_lightning.core.hypergradients import Estimator, StochasticNeumann
from obbo_lightning.core.inner import GradientDescent, InnerSolver
from obbo_lightning.core.memory import HypergradientWindow
from obbo_lightning.core.optimizer import BregmanRule
from obbo_lightning.core.regularizers import ElasticNet, NoRegularizer
from obbo_lightning.core.validation import at_least


class SOBBO(Algorithm):
    """K inner steps on s fresh samples each, a stochastic hypergradient, then as OBBO (Algorithm 2).

    Reference: "Online Nonconvex Bilevel Optimization with Bregman Divergences", section 4.2. Its theorem asks for
    s = w and m = log(w)/log(1/(1 − μ_g/ℓ_{g,1})) + 1 (the paper prints the logarithm with the wrong sign).

    Args:
        lr: α, outer step size.
        window: w, window length.
        inner: inner solver (K, η, s).
        hypergradient: stochastic estimator (m, ℓ_{g,1}).
        geometry: φ_t.
        regularizer: h.
        domain: X.
        clip: largest norm of q_t.
    """

    def __init__(
        self,
        lr: float = 1e-4,
        window: int = 10,
        inner: InnerSolver | None = None,
        hypergradient: Estimator | None = None,
        geometry: Geometry | None = None,
        regularizer: ElasticNet | None = None,
        domain: Domain | None = None,
        clip: float | None = None,
    ) -> None:
        at_least("window", window, 1)  # s = w by default: the complaint must be about w
        super().__init__(
            inner=inner or GradientDescent(batch_size=window),
            hypergradient=hypergradient or StochasticNeumann(),
            memory=partial(HypergradientWindow, window),
            optimizer=BregmanRule(
                lr, geometry or AdaptiveDiagonal(), regularizer or NoRegularizer(), domain or RealSpace()
            ),
            clip=clip,
        )
