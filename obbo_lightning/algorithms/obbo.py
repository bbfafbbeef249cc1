"""OBBO: the online Bregman bilevel optimizer."""

from obbo_lightning.core.algorithm import BregmanAlgorithm


class OBBO(BregmanAlgorithm):
    """K inner steps, a hypergradient, the mean of the last w of them, one Bregman proximal step (Algorithm 1).

    Reference: "Online Nonconvex Bilevel Optimization with Bregman Divergences", section 4.1.
    """
