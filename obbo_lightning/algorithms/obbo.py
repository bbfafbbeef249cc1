"""OBBO: the online Bregman bilevel optimizer."""

from obbo_lightning.core.algorithm import BregmanAlgorithm


class OBBO(BregmanAlgorithm):
    """K inner steps, a hypergradient, the mean of the last w of them, one Bregman proximal step (Algorithm 1).

    Reference: "Online Nonconvex Bilevel Optimization with Bregman Divergences", section 4.1.

    >>> from obbo_lightning import online
    >>> from obbo_lightning.streams.quadratic import QuadraticTasks
    >>> stream, algorithm = QuadraticTasks(rounds=100), OBBO(lr=0.01, window=5)
    >>> first, *_, last = online(stream.problem, algorithm, stream, stream.initial_outer())
    >>> bool(last.loss < first.loss)
    True
    """
