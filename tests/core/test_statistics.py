"""Means, standard errors and medians against NumPy."""

import math
import statistics

import numpy as np
import pytest
import torch

from obbo_lightning.core.statistics import mean_and_error, median, standard_error


@pytest.mark.parametrize("n", [2, 3, 7, 100])
def test_mean_and_error_are_those_of_numpy(n):
    values = np.random.default_rng(n).normal(5, 3, n)
    mean, error = mean_and_error(values.tolist())
    assert mean == pytest.approx(values.mean(), rel=1e-14)
    assert error == pytest.approx(values.std(ddof=1) / n**0.5, rel=1e-14)
    assert mean_and_error(values) == (mean, error)


def test_mean_and_error_have_the_bits_that_runs_were_summarised_with():
    values = np.random.default_rng(0).normal(size=40).tolist()
    numbers = torch.tensor(values, dtype=torch.float64)
    assert mean_and_error(values) == (float(numbers.mean()), float(numbers.std()) / 40**0.5)


def test_what_has_no_error_says_none():
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


def test_standard_errors_are_in_double_precision_and_nan_for_one_value():
    assert standard_error(torch.ones(3, dtype=torch.float32)).dtype == torch.float64
    assert standard_error(np.ones((1, 5))).isnan().tolist() == [True] * 5


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_median_is_that_of_numpy_also_beside_infinity(n):
    values = torch.tensor(np.random.default_rng(n).normal(size=n), dtype=torch.float32)
    assert float(median(values)) == statistics.median(values.double().tolist())
    assert float(median(torch.tensor([-math.inf, 1.0, math.inf]))) == 1.0
    assert float(median(torch.tensor([math.inf, math.inf]))) == math.inf
    assert float(median(torch.tensor([1.0, 2.0, math.nan]))) == 2.0  # NaN sorts last
