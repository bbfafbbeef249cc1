"""Means, their standard errors, and medians: the same for rounds, test tasks, seeds and events."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard error; one value has none."""
    numbers = torch.tensor(values, dtype=torch.float64)
    mean = float(numbers.mean()) if values else math.nan
    error = float(numbers.std()) / len(values) ** 0.5 if len(values) > 1 else math.nan
    return mean, error if math.isfinite(error) else None


def median(values: Tensor) -> Tensor:
    """The mean of the two in the middle, also where they are infinite; NaN sorts last."""
    ordered = values.double().sort().values
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
