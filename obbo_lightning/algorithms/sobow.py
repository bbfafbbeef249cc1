"""SOBOW: the single-loop online bilevel optimizer with window averaging."""

from functools import partial
from typing import Any

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.auto_step import SCALE
from obbo_lightning.core.blocks import LearningRate
from obbo_lightning.core.domains import Domain
from obbo_lightning.core.geometry import Euclidean
from obbo_lightning.core.hypergradients import ConjugateGradient, Estimator
from obbo_lightning.core.inner import GradientDescent, InnerSolver
from obbo_lightning.core.memory import HypergradientWindow
from obbo_lightning.core.regularizers import ElasticNet
from obbo_lightning.core.rules import BregmanRule


class SOBOW(Algorithm):
    """One warm-started inner step, a warm-started linear solve, a discounted window, one projected gradient step.

    Reference: Lin, Sow, Ji, Liang, Shroff, "Non-Convex Bilevel Optimization with Time-Varying Objective Functions",
    2023. The defaults are that paper's; matched comparisons pass the inner solver and estimator of the others and
    ``discount=1``.

    Args:
        lr: α, outer step size, or ``auto``: a step in the geometry's own units. None: 1e-4, or each block's own.
        window: w, window length.
        inner: inner solver (K, η).
        hypergradient: estimator.
        discount: ν, the weight of a hypergradient falls by this factor every round.
        regularizer: h; SOBOW's own paper has none.
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
        discount: float = 0.9,
        regularizer: ElasticNet | None = None,
        domain: Domain | None = None,
        clip: float | None = None,
        scale: float = SCALE,
        blocks: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            inner=inner or GradientDescent(steps=1),
            hypergradient=hypergradient or ConjugateGradient(warm_start=True),
            memory=partial(HypergradientWindow, window, discount),
            optimizer=BregmanRule(lr, Euclidean(), regularizer, domain, scale, blocks, decided=("geometry",)),
            clip=clip,
        )
