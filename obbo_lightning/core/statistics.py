"""Means, standard errors, intervals and medians, in double precision."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def mean_and_error(values: Sequence[float] | np.ndarray) -> tuple[float, float | None]:
    """Return mean and standard error; the error is None for fewer than two values, or where it is not finite.

    >>> mean_and_error([1.0, 2.0, 3.0, 4.0, 5.0]), mean_and_error([1.0])
    ((3.0, 0.7071067811865476), (1.0, None))
    """
    numbers = torch.tensor(values, dtype=torch.float64)
    mean, error = float(numbers.mean()), float(standard_error(numbers))
    return mean, error if math.isfinite(error) else None


def standard_error(values: Tensor | np.ndarray, dim: int = 0) -> Tensor:
    """Return σ̂/√n along ``dim``, with n − 1 in the variance; NaN for fewer than two values."""
    # torch.tensor copies: torch.as_tensor warns of the read-only arrays of polars
    numbers = values.double() if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.float64)
    rows = numbers.movedim(dim, -1)
    n = rows.shape[-1]
    if n < 2:
        return rows.new_full(rows.shape[:-1], math.nan)
    # Row by row, because torch rounds differently over several rows.
    deviations = [row.std() for row in rows.reshape(-1, n)]
    return torch.stack(deviations).reshape(rows.shape[:-1]).div(n**0.5)


def two_way_error(values: np.ndarray) -> float | None:
    """Return the standard error of the mean of ``values [seeds, tasks]`` over the choice of both seeds and tasks.

    x_st = μ + a_s + b_t + e_st, all three random, so Var x̄ = σ_a²/S + σ_b²/n + σ_e²/(S n). Mean squares estimate it
    without bias: (MS_a + MS_b − MS_e)/(S n); negative variance components count as zero. None for fewer than two seeds
    or tasks, or values that are not finite.
    """
    seeds, tasks = values.shape
    if min(seeds, tasks) < 2 or not np.isfinite(values).all():
        return None
    by_seed, by_task, mean = values.mean(1), values.mean(0), values.mean()
    of_seeds, of_tasks = tasks * by_seed.var(ddof=1), seeds * by_task.var(ddof=1)
    rest = values - by_seed[:, None] - by_task + mean
    noise = (rest**2).sum() / ((seeds - 1) * (tasks - 1))
    variance = max(of_seeds, noise) + max(of_tasks, noise) - noise
    return math.sqrt(variance / (seeds * tasks))


def clustered_error(values: np.ndarray, clusters: np.ndarray) -> float | None:
    """Return the standard error of the mean where values of one cluster (events of one day) are dependent.

    √(C/(C−1) Σ_c (Σ_{i∈c} (x_i − x̄))²)/n, the limit of a bootstrap of whole clusters. With one value in each cluster it
    is `standard_error`. None for fewer than two clusters, or values that are not finite.
    """
    names, index = np.unique(clusters, return_inverse=True)
    count = len(names)
    if count < 2 or not np.isfinite(values).all():
        return None
    sums = np.bincount(index, values - values.mean())
    return math.sqrt(count / (count - 1) * float((sums**2).sum())) / len(values)


def clustered_interval(values: np.ndarray, clusters: np.ndarray, draws: int = 4000) -> tuple[float, float] | None:
    """Return the 95 % percentile interval of the mean from a bootstrap of whole clusters, with a fixed seed."""
    names, index = np.unique(clusters, return_inverse=True)
    count = len(names)
    if count < 2 or not np.isfinite(values).all():
        return None
    sums, sizes = np.bincount(index, values), np.bincount(index)
    resampled = np.random.default_rng(0).integers(0, count, (draws, count))
    low, high = np.percentile(sums[resampled].sum(1) / sizes[resampled].sum(1), [2.5, 97.5])
    return float(low), float(high)


def median(values: Tensor) -> Tensor:
    """Return the mean of the two middle values, also where they are infinite; NaN sorts last."""
    ordered = values.double().sort().values
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
