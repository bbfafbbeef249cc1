"""SOBBO: the stochastic online Bregman bilevel optimizer."""

from dataclasses import dataclass

from obbo_lightning.core.algorithm import BregmanAlgorithm
from obbo_lightning.core.hypergradients import Estimator, StochasticNeumann
from obbo_lightning.core.inner_solvers import GradientDescent, InnerSolver
from obbo_lightning.core.validation import at_least


@dataclass(frozen=True, eq=False, kw_only=True)
class SOBBO(BregmanAlgorithm):
    """K inner steps on s fresh samples each, a stochastic hypergradient, then as OBBO (Algorithm 2).

    Reference: "Online Nonconvex Bilevel Optimization with Bregman Divergences", section 4.2. Its theorem asks for
    s = w and m = log(w)/log(1/(1 − μ_g/ℓ_{g,1})) + 1 (the paper prints the logarithm with the wrong sign).

    Args:
        inner: inner solver (K, η, s); None: gradient descent with s = w.
        hypergradient: stochastic estimator (m, ℓ_{g,1}).

    >>> SOBBO(window=7).inner.batch_size
    7
    """

    inner: InnerSolver = None  # type: ignore[assignment]
    hypergradient: Estimator = StochasticNeumann()

    def __post_init__(self) -> None:
        if self.inner is None:
            object.__setattr__(self, "inner", GradientDescent(batch_size=at_least("window", self.window, 1)))
        super().__post_init__()
