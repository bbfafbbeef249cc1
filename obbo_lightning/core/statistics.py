"""Means, standard errors and medians, in double precision: computed in one way wherever they are reported."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def mean_and_error(values: Sequence[float] | np.ndarray) -> tuple[float, float | None]:
    """Mean and standard error; there is no error of one value, nor one that is not finite.

    >>> mean_and_error([1.0, 2.0, 3.0, 4.0, 5.0])
    (3.0, 0.7071067811865476)
    >>> mean_and_error([1.0]), mean_and_error([])
    ((1.0, None), (nan, None))
    """
    numbers = torch.tensor(values, dtype=torch.float64)
    mean, error = float(numbers.mean()), float(standard_error(numbers))
    return mean, error if math.isfinite(error) else None


def standard_error(values: Tensor | np.ndarray, dim: int = 0) -> Tensor:
    """σ̂/√n along ``dim``, with n − 1 in the variance; NaN for fewer than two values."""
    # torch.tensor copies: an array that polars lends is read-only, which torch.as_tensor warns of
    numbers = values.double() if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.float64)
    rows = numbers.movedim(dim, -1)
    n = rows.shape[-1]
    if n < 2:
        return rows.new_full(rows.shape[:-1], math.nan)
    # One by one, because over several rows torch rounds in another way than over one.
    deviations = [row.std() for row in rows.reshape(-1, n)]
    return torch.stack(deviations).reshape(rows.shape[:-1]) / n**0.5


def median(values: Tensor) -> Tensor:
    """The mean of the two in the middle, also where they are infinite; NaN sorts last.

    >>> median(torch.tensor([3.0, 1.0, 2.0, 10.0]))
    tensor(2.5000, dtype=torch.float64)
    """
    ordered = values.double().sort().values
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
