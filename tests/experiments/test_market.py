"""Comparisons of market runs: means over seeds, errors by day, and what is left out."""

import re

import numpy as np
import pytest
from scipy import stats

from obbo_lightning.experiments.market import read_market


def numbers(cell):
    return [float(word) for word in re.findall(r"[-+]?\d+\.?\d*", cell)]


def test_runs_with_other_events_another_seed_or_damaged_files_are_left_out(make_market_run):
    errors = np.arange(2.0, 5.0)
    runs = [make_market_run("adam", 0, errors + 3), make_market_run("obbo", 0, errors), make_market_run("obbo", 1)]
    runs += [make_market_run("sgdm", 0, (1.0, 2.0)), make_market_run("oagd", 0)]
    runs[-1].directory.lanes.write_text("?")
    found, left_out = read_market(runs)
    reason = "it has other events, or another seed, than the first run"
    assert left_out[:2] == [f"{run.directory.path} is left out: {reason}" for run in runs[2:4]]
    assert left_out[2].startswith(f"{runs[4].directory.path} is left out: it is damaged: ")
    assert found.labels == ["obbo", "adam"]
    assert found.column("adam", "test_mse").tolist() == [5.0, 6.0, 7.0]
    with pytest.raises(ValueError, match=r"report needs finished runs, and found none: .* it is damaged"):
        read_market(runs[-1:])


def test_regrets_are_medians_over_events(make_market_run):
    curves = np.random.default_rng(0).exponential(size=(2, 6))
    found, _ = read_market([make_market_run("obbo", 0, np.ones(6), regret=curves, rounds=(30, 60))])
    median = np.median(curves, axis=1)
    assert found.regret["round"].to_list() == [30, 60]
    assert np.allclose(found.regret["median"], median)
    assert np.allclose(found.regret["mad"], np.median(np.abs(curves - median[:, None]), axis=1))


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
