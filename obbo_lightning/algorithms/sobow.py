"""SOBOW: the single-loop online bilevel optimizer with window averaging."""

from functools import partial

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.domains import Domain, RealSpace
from obbo_lightning.core.geometry import Euclidean
from obbo_lightning.core.hypergradients import ConjugateGradient, Estimator
from obbo_lightning.core.inner import GradientDescent, InnerSolver
from obbo_lightning.core.memory import HypergradientWindow
from obbo_lightning.core.optimizer import BregmanRule
from obbo_lightning.core.regularizers import ElasticNet, NoRegularizer


class SOBOW(Algorithm):
    """One warm-started inner step, a warm-started linear solve, a discounted window, one projected gradient step.

    Reference: Lin, Sow, Ji, Liang, Shroff, "Non-Convex Bilevel Optimization with Time-Varying Objective Functions",
    2023. The defaults are that paper's; matched comparisons pass the inner solver and estimator of the others and
    ``discount=1``.

    Args:
        lr: α, outer step size.
        window: w, window length.
        inner: inner solver (K, η).
        hypergradient: estimator.
        discount: ν, the weight of a hypergradient falls by this factor every round.
        regularizer: h; SOBOW's own paper has none.
        domain: X.
        clip: largest norm of q_t.
    """

    def __init__(
        self,
        lr: float = 1e-4,
        window: int = 10,
        inner: InnerSolver | None = None,
        hypergradient: Estimator | None = None,
        discount: float = 0.9,
        regularizer: ElasticNet | None = None,
        domain: Domain | None = None,
        clip: float | None = None,
    ) -> None:
        super().__init__(
            inner=inner or GradientDescent(steps=1),
            hypergradient=hypergradient or ConjugateGradient(warm_start=True),
            memory=partial(HypergradientWindow, window, discount),
            optimizer=BregmanRule(lr, Euclidean(), regularizer or NoRegularizer(), domain or RealSpace()),
            clip=clip,
        )
