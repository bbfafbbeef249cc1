"""OBBO: the online Bregman bilevel optimizer."""

from obbo_lightning.core.algorithm import BregmanAlgorithm


class OBBO(BregmanAlgorithm):
    """K inner steps, a hypergradient, the mean of the last w of them, one Bregman proximal step (Algorithm 1).

    Reference: "Online Nonconvex Bilevel Optimization with Bregman Divergences", section 4.1.

    >>> from obbo_lightning import online
    >>> from obbo_lightning.hypergradients import ClosedForm
    >>> from obbo_lightning.streams.quadratic import QuadraticTasks
    >>> stream = QuadraticTasks(rounds=100, drift=0.1)
    >>> algorithm = OBBO(lr=0.05, window=5, hypergradient=ClosedForm())
    >>> rounds = list(online(stream.problem, algorithm, stream, stream.initial_outer()))
    >>> bool(rounds[-1].loss < rounds[0].loss)
    True
    """
