"""Comparisons of market runs: means over seeds, errors by day, and what is left out."""

import re

import numpy as np
import polars as pl
import pytest
from scipy import stats

from obbo_lightning.experiments.market import read_market


def numbers(cell):
    return [float(word) for word in re.findall(r"[-+]?\d+\.?\d*", cell)]


def test_numbers_are_means_over_the_seeds_that_all_have(make_market_run):
    errors = np.arange(2.0, 5.0)
    runs = [make_market_run("obbo", seed, errors + seed) for seed in (0, 1, 2)]
    runs += [make_market_run("adam", seed, errors + 3 + seed) for seed in (1, 2)]
    runs += [make_market_run("sgdm", 1, (1.0, 2.0)), make_market_run("oagd", 1)]
    runs[-1].directory.lanes.write_text("?")
    found, left_out = read_market(runs)
    reasons = {one.path.name.partition("-")[0]: one.reason for one in left_out}
    assert reasons["sgdm"] == "it has other events than the first run"
    assert reasons["oagd"].startswith("it is damaged: ")
    assert reasons["obbo"] == "not all algorithms have the seed 0"
    assert found.labels == ["obbo", "adam"]
    assert found.column("obbo", "test_mse").tolist() == [3.5, 4.5, 5.5]
    assert found.column("adam", "weight").tolist() == [6.5, 7.5, 8.5]


def test_what_cannot_be_compared_is_refused(make_market_run):
    with pytest.raises(ValueError, match=r"needs a seed that all have, got \[0\] for obbo; \[1\] for adam"):
        read_market([make_market_run("obbo", 0), make_market_run("adam", 1)])
    with pytest.raises(ValueError, match=r"one seed where each has its own simulated prices, got \[0, 1\]"):
        read_market([make_market_run("obbo", seed, naive=np.arange(3.0) + seed) for seed in (0, 1)])
    damaged = make_market_run()
    damaged.directory.lanes.write_text("?")
    with pytest.raises(ValueError, match=r"report needs finished runs, and found none: .* it is damaged"):
        read_market([damaged])


def test_regrets_are_medians_over_events_of_means_over_seeds(make_market_run):
    rng = np.random.default_rng(0)
    regrets = {label: rng.exponential(size=(2, 2, 6)) for label in ("obbo", "adam")}
    errors = {label: rng.exponential(size=(2, 6)) for label in regrets}
    runs = [
        make_market_run(label, seed, errors[label][seed], regret=regrets[label][seed], rounds=(30, 60))
        for label in regrets
        for seed in (0, 1)
    ]
    found, left_out = read_market(runs)
    assert left_out == []
    for label in regrets:
        assert np.allclose(found.column(label, "test_mse"), errors[label].mean(0))
        curves = regrets[label].mean(0)
        middle = found.regret.filter(pl.col("label") == label)
        median = np.median(curves, axis=1)
        assert middle["round"].to_list() == [30, 60]
        assert np.allclose(middle["median"], median)
        assert np.allclose(middle["mad"], np.median(np.abs(curves - median[:, None]), axis=1))


def test_errors_intervals_and_p_values_are_by_day(make_market_run):
    rng, count = np.random.default_rng(3), 60
    days = np.sort(rng.integers(1, 13, count))
    shared = rng.exponential(size=13)[days]
    errors = {label: shared + rng.exponential(0.3, count) for label in ("obbo", "adam")}
    market, _ = read_market([make_market_run(label, 0, values, shared, days) for label, values in errors.items()])
    table, paired = market.tables()

    def by_day(x):
        sums = np.array([(x[days == day] - x.mean()).sum() for day in np.unique(days)])
        return np.sqrt(len(sums) / (len(sums) - 1) * (sums**2).sum()) / len(x)

    for row, values in zip(table.rows, (*errors.values(), shared), strict=True):
        middle = np.median(values)
        expected = [values.mean(), by_day(values), middle, np.median(np.abs(values - middle))]
        assert [float(cell) for cell in row[1:5]] == pytest.approx(expected, abs=0.00006)
        assert by_day(values) > 1.3 * stats.sem(values)
    measure, higher, scores = market.scores()
    assert (measure, higher) == ("forecast error (mse), by day; lower is better", False)
    assert scores["adam"] == pytest.approx((errors["adam"].mean(), by_day(errors["adam"])))
    for row, values in zip(paired.rows, (errors["adam"], shared), strict=True):
        difference = values - errors["obbo"]
        assert numbers(row[1]) == pytest.approx([difference.mean(), by_day(difference)], abs=0.00006)
        groups = [difference[days == day] for day in np.unique(days)]
        chosen = np.random.default_rng(0).integers(0, len(groups), (4000, len(groups)))
        means = [np.concatenate([groups[i] for i in one]).mean() for one in chosen]
        assert numbers(row[2]) == pytest.approx(np.percentile(means, [2.5, 97.5]).tolist(), abs=0.00006)
        assert numbers(row[3]) == [(difference > 0).sum(), (difference < 0).sum()]
        signs = [group.mean() > 0 for group in groups]
        larger, smaller, p = numbers(row[4].replace("p <", "p ="))
        assert (larger, smaller) == (sum(signs), len(signs) - sum(signs))
        assert p == pytest.approx(max(stats.binomtest(sum(signs), len(signs)).pvalue, 1e-4), rel=0.05)
