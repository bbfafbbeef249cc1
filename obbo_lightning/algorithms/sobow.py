"""SOBOW: the single-loop online bilevel optimizer with window averaging."""

from dataclasses import dataclass, field

from obbo_lightning.core.algorithm import BregmanAlgorithm
from obbo_lightning.core.geometry import Euclidean, Geometry
from obbo_lightning.core.hypergradients import ConjugateGradient, Estimator
from obbo_lightning.core.inner_solvers import GradientDescent, InnerSolver
from obbo_lightning.core.memory import HypergradientWindow, Memory


@dataclass(frozen=True, eq=False, kw_only=True)
class SOBOW(BregmanAlgorithm):
    """One warm-started inner step, a warm-started linear solve, a discounted window, one projected gradient step.

    Reference: Lin, Sow, Ji, Liang, Shroff, "Non-Convex Bilevel Optimization with Time-Varying Objective Functions",
    2023. The defaults are that paper's; matched comparisons pass the inner solver and estimator of the others and
    ``discount=1``. SOBOW's own paper has no regularizer.

    Args:
        discount: ν, the weight of a hypergradient falls by this factor every round.

    >>> SOBOW().inner.steps, SOBOW().hypergradient.warm_start, SOBOW().memory().discount
    (1, True, 0.9)
    """

    inner: InnerSolver = GradientDescent(steps=1)
    hypergradient: Estimator = ConjugateGradient(warm_start=True)
    geometry: Geometry | None = field(default=Euclidean(), init=False)
    discount: float = 0.9

    fixed = ("geometry",)

    def memory(self) -> Memory:
        return HypergradientWindow(self.window, self.discount)
