"""Your algorithm: a discounted window of hypergradients, and a proximal step that makes small coordinates zero."""

from functools import partial

from obbo_lightning import Algorithm, BregmanRule
from obbo_lightning.domains import Domain
from obbo_lightning.geometry import Euclidean
from obbo_lightning.hypergradients import FixedPoint, HypergradientWindow
from obbo_lightning.regularizers import L1
from obbo_lightning.solvers import GradientDescent, InnerSolver


class Sparse(Algorithm):
    """A discounted window and an L1 step.

    Args:
        lr: α, outer step size.
        window: w, window length.
        discount: ν, the weight of a hypergradient falls by this factor every round.
        weight: of the L1 norm.
        inner: inner solver (K, η).
        domain: X.
    """

    def __init__(self, lr: float = 1e-2, window: int = 10, discount: float = 0.9, weight: float = 0.01,
                 inner: InnerSolver | None = None, domain: Domain | None = None):  # fmt: skip
        super().__init__(
            inner=inner or GradientDescent(),
            hypergradient=FixedPoint(),
            memory=partial(HypergradientWindow, window, discount=discount),
            optimizer=BregmanRule(lr, Euclidean(), L1(weight), domain),
        )
