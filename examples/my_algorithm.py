"""Your algorithm: a discounted window of hypergradients, and a proximal step that sets small coordinates to zero."""

from dataclasses import dataclass, field

from obbo_lightning import BregmanAlgorithm
from obbo_lightning.geometry import Euclidean, Geometry
from obbo_lightning.hypergradients import HypergradientWindow
from obbo_lightning.regularizers import L1, ElasticNet


@dataclass(frozen=True, eq=False, kw_only=True)
class Sparse(BregmanAlgorithm):
    """A discounted window and an L1 step.

    Args:
        lr: α, outer step size.
        regularizer: h.
        discount: ν, the weight of a hypergradient falls by this factor every round.
    """

    lr: float = 1e-2
    geometry: Geometry = field(default=Euclidean(), init=False)  # no setting
    regularizer: ElasticNet = field(default=L1(0.01))
    discount: float = 0.9

    def memory(self):
        """Return the empty window."""
        return HypergradientWindow(self.window, self.discount)
