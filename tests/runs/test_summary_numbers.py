"""The numbers of a summary against NumPy, for a run that is longer than what is averaged."""

import numpy as np
import polars as pl
import pytest

from obbo_lightning import Metric
from obbo_lightning.runs.summary import Judgement, summarise

SETTINGS = {"experiment": "by hand", "algorithm": {"name": "obbo"}, "seed": 7}


def rounds(count, seed=0):
    rng = np.random.default_rng(seed)
    columns = ("mse", "regret/euclidean", "regret/generalized", "regret/exact")
    found = {name: rng.uniform(1, 2, count) for name in columns}
    found |= {"round": np.arange(1.0, count + 1), "skipped": rng.integers(0, 3, count).astype(float)}
    return pl.DataFrame(found)


@pytest.mark.parametrize("count", [30, 230])
def test_a_summary_is_what_numpy_makes_of_the_rows_and_the_scores(count):
    table, rng = rounds(count), np.random.default_rng(1)
    before, after = rng.exponential(size=(2, 6))  # an even count, with a long tail
    found = summarise(SETTINGS, table, Judgement(Metric("mse"), before.tolist(), after.tolist()), 12.3456)
    median = np.median(after)
    expected = {
        "rounds": count,
        "test_tasks": 6,
        "untrained_test_mse": before.mean(),
        "untrained_test_mse_se": before.std(ddof=1) / 6**0.5,
        "test_mse": after.mean(),
        "test_mse_se": after.std(ddof=1) / 6**0.5,
        "test_mse_median": median,
        "test_mse_mad": np.median(np.abs(after - median)),
        "gain": (before - after).mean(),
        "gain_se": (before - after).std(ddof=1) / 6**0.5,
        "stream_mse": table["mse"].to_numpy().mean(),
        "stream_mse_last_100": table["mse"].to_numpy()[-100:].mean(),
        "regret_euclidean": table["regret/euclidean"][-1],
        "regret_generalized": table["regret/generalized"][-1],
        "regret_exact": table["regret/exact"][-1],
        "skipped": table["skipped"].to_numpy().sum(),
        "seconds": 12.346,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert (found["seed"], found["algorithm"], found["higher_is_better"]) == (7, "obbo", False)


def test_what_is_not_finite_is_none_in_a_summary():
    table = rounds(4).with_columns(pl.Series("mse", [1.0, None, 2.0, 3.0]), pl.lit(np.inf).alias("regret/exact"))
    found = summarise(SETTINGS, table, Judgement(Metric("mse"), [1.0, 2.0], [np.nan, 1.0]), 1.0)
    for name in ("stream_mse", "stream_mse_last_100", "regret_exact", "test_mse", "test_mse_se", "gain", "gain_se"):
        assert found[name] is None, name
    assert found["untrained_test_mse"] == 1.5
