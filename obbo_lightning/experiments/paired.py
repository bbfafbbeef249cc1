"""Paired comparison: on the same seeds or events, is the difference larger than chance?"""

from typing import NamedTuple

import numpy as np
from scipy.stats import binomtest

from obbo_lightning.core.statistics import clustered_error, mean_and_error
from obbo_lightning.experiments.tables import plain


class Paired(NamedTuple):
    """Differences of pairs, second minus first.

    Attributes:
        pairs: how many.
        difference: their mean.
        error: its standard error; None for one pair.
        larger: pairs in which the second is larger; ties count in neither.
        smaller: pairs in which it is smaller.
        p: of the two-sided sign test; None where all are ties.
    """

    pairs: int
    difference: float
    error: float | None
    larger: int
    smaller: int
    p: float | None


def compare_pairs(first: np.ndarray, second: np.ndarray) -> Paired:
    """``second`` against ``first``.

    >>> compare_pairs(np.array([1.0, 2.0, 3.0, 4.0]), np.array([2.0, 3.0, 4.0, 4.0]))
    Paired(pairs=4, difference=0.75, error=0.25, larger=3, smaller=0, p=0.25)
    """
    differences = second - first
    mean, error = mean_and_error(differences)
    larger, smaller = int((differences > 0).sum()), int((differences < 0).sum())
    p = float(binomtest(larger, larger + smaller).pvalue) if larger + smaller else None
    return Paired(len(differences), mean, error, larger, smaller, p)


def compare_clusters(first: np.ndarray, second: np.ndarray, clusters: np.ndarray) -> Paired:
    """The same where pairs of one cluster (events of one day) go together: its error, and the sign of each cluster.

    >>> days = np.array(["mon", "mon", "tue"])
    >>> compare_clusters(np.array([1.0, 2.0, 3.0]), np.array([2.0, 2.0, 2.0]), days)
    Paired(pairs=2, difference=0.0, error=0.6666666666666666, larger=1, smaller=1, p=1.0)
    """
    differences = second - first
    names, index = np.unique(clusters, return_inverse=True)
    means = np.bincount(index, differences) / np.bincount(index)
    signs = compare_pairs(np.zeros(len(names)), means)
    return signs._replace(difference=float(differences.mean()), error=clustered_error(differences, clusters))


def as_cells(paired: Paired | None, digits: int) -> tuple[str, str]:
    """Difference ± standard error; pairs in which the second is larger / smaller, with the sign test's p.

    >>> as_cells(Paired(4, 0.75, 0.25, 3, 0, 0.25), 2)
    ('+0.75 ± 0.25', '3 / 0, p = 0.25')
    """
    if paired is None:
        return "", ""
    error = "" if paired.error is None else f" ± {plain(paired.error, digits)}"
    p = "" if paired.p is None else ", p < 0.0001" if paired.p < 1e-4 else f", p = {paired.p:.2g}"
    difference = round(paired.difference, digits) + 0.0  # no -0.0
    return plain(difference, digits, "+") + error, f"{paired.larger} / {paired.smaller}{p}"
