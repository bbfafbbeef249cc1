"""Means, standard errors, intervals and medians against NumPy and repeated draws."""

import math
import statistics

import numpy as np
import pytest
import torch

from obbo_lightning.core.statistics import (
    clustered_error,
    clustered_interval,
    mean_and_error,
    median,
    standard_error,
    two_way_error,
)


@pytest.mark.parametrize("n", [2, 3, 7, 100])
def test_mean_and_error_are_those_of_numpy(n):
    values = np.random.default_rng(n).normal(5, 3, n)
    mean, error = mean_and_error(values.tolist())
    assert mean == pytest.approx(values.mean(), rel=1e-14)
    assert error == pytest.approx(values.std(ddof=1) / n**0.5, rel=1e-14)
    assert mean_and_error(values) == (mean, error)
    numbers = torch.tensor(values)
    assert (float(numbers.mean()), float(numbers.std()) / n**0.5) == (mean, error)  # to the last bit


def test_an_error_that_cannot_be_computed_is_none():
    assert mean_and_error([3.0]) == (3.0, None)
    mean, error = mean_and_error([])
    assert math.isnan(mean)
    assert error is None
    assert mean_and_error([1.0, math.inf]) == (math.inf, None)
    assert mean_and_error([1.0, math.nan])[1] is None


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_standard_errors_are_those_of_numpy_along_any_dimension(dim):
    values = np.random.default_rng(1).normal(size=(4, 6))
    expected = values.std(axis=dim, ddof=1) / values.shape[dim] ** 0.5
    assert np.allclose(standard_error(values, dim), expected, rtol=1e-14)
    assert torch.equal(standard_error(torch.tensor(values), dim), standard_error(values, dim))
    assert float(standard_error(values, dim)[2]) == mean_and_error(values.take(2, axis=1 if dim == 0 else 0))[1]
    assert standard_error(torch.ones(3, dtype=torch.float32)).dtype == torch.float64
    assert standard_error(np.ones((1, 5))).isnan().tolist() == [True] * 5


def test_the_two_way_error_is_right_on_average_where_that_of_seeds_is_too_small():
    rng, seeds, tasks = np.random.default_rng(0), 4, 10
    draws = [
        rng.normal(0, 0.3, (seeds, 1)) + rng.normal(0, 1.0, tasks) + rng.normal(0, 0.5, (seeds, tasks))
        for _ in range(2000)
    ]
    true = np.std([values.mean() for values in draws])
    two_way = np.sqrt(np.mean([two_way_error(values) ** 2 for values in draws]))
    of_seeds = np.sqrt(np.mean([mean_and_error(values.mean(1))[1] ** 2 for values in draws]))
    assert two_way == pytest.approx(true, rel=0.05)
    assert of_seeds < 0.6 * true


def test_the_two_way_error_is_that_of_an_analysis_of_variance():
    values = np.random.default_rng(1).normal(size=(3, 7)) + np.arange(7) + 2 * np.arange(3)[:, None]
    grand, a, b = values.mean(), values.mean(1), values.mean(0)
    of_seeds, of_tasks = 7 * ((a - grand) ** 2).sum() / 2, 3 * ((b - grand) ** 2).sum() / 6
    noise = sum((values[s, t] - a[s] - b[t] + grand) ** 2 for s in range(3) for t in range(7)) / 12
    assert two_way_error(values) == pytest.approx(math.sqrt((of_seeds + of_tasks - noise) / 21), rel=1e-12)
    # no variance between seeds or tasks: the estimate is that of the noise alone, not a negative number
    assert two_way_error(np.array([[1.0, 0.0], [0.0, 1.0]])) == pytest.approx(0.5)
    assert two_way_error(values[:1]) is two_way_error(values[:, :1]) is None
    assert two_way_error(np.full((2, 2), np.nan)) is None


def test_the_clustered_error_is_that_of_resampling_whole_days():
    rng = np.random.default_rng(0)
    days = rng.integers(0, 40, 150)
    values = rng.normal(size=40)[days] + 0.3 * rng.normal(size=150)
    names = np.unique(days)
    means = []
    for _ in range(3000):
        resampled = [values[days == day] for day in rng.choice(names, len(names))]
        means.append(np.concatenate(resampled).mean())
    assert clustered_error(values, days) == pytest.approx(np.std(means), rel=0.07)
    assert clustered_interval(values, days) == pytest.approx(np.percentile(means, [2.5, 97.5]).tolist(), abs=0.04)
    assert clustered_error(values, days) > 1.5 * mean_and_error(values)[1]
    assert clustered_error(values, np.arange(150)) == pytest.approx(mean_and_error(values)[1], rel=1e-12)
    assert clustered_error(values, np.zeros(150)) is clustered_interval(values, np.zeros(150)) is None


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_the_median_is_right_also_next_to_infinite_values(n):
    values = torch.tensor(np.random.default_rng(n).normal(size=n), dtype=torch.float32)
    assert float(median(values)) == statistics.median(values.double().tolist())
    assert float(median(torch.tensor([-math.inf, 1.0, math.inf]))) == 1.0
    assert float(median(torch.tensor([math.inf, math.inf]))) == math.inf
    assert float(median(torch.tensor([1.0, 2.0, math.nan]))) == 2.0  # NaN sorts last
