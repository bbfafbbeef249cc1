"""Several comparisons on one page: places, errors, and who is told apart."""

import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from obbo_lightning import cli
from obbo_lightning.experiments.leaderboard import Score, Standing, leaderboard_table, standing

COMMITTED = Path(__file__).parents[2] / "docs" / "experiments"


def test_places_follow_what_is_better_and_what_blew_up_is_last():
    scores = {"a": Score(0.5, 0.01), "b": Score(0.7, 0.02), "c": Score(math.nan, None), "d": Score(0.7, 0.02)}
    assert Standing("x", "", True, scores).places == {"b": 1, "d": 1, "a": 3, "c": 4}
    assert Standing("x", "", False, scores).places == {"a": 1, "b": 2, "d": 2, "c": 4}


def test_those_within_two_standard_errors_of_the_difference_are_not_told_from_the_first():
    scores = {"first": Score(1.0, 0.3), "near": Score(1.99, 0.4), "far": Score(2.01, 0.4), "alone": Score(1.1, None)}
    assert Standing("x", "", False, scores).not_told_apart == {"first", "near"}  # 2 √(0.3² + 0.4²) = 1
    assert Standing("x", "", False, {"first": Score(1.0, None), "near": Score(1.0, 0.4)}).not_told_apart == {"first"}


def test_methods_of_all_comparisons_come_first_in_the_order_of_their_mean_place():
    one = Standing("one", "", True, {"adam": Score(0.9, 0.01), "obbo": Score(0.8, 0.01), "sgdm": Score(0.95, None)})
    two = Standing("two", "", False, {"adam": Score(0.5, 0.2), "obbo": Score(0.1, 0.01)})
    table = leaderboard_table([one, two])
    assert table.columns == ["method", "one", "two", "mean place"]
    assert table.rows == [
        ["obbo", "0.800 ± 0.010 (3)", "• 0.100 ± 0.010 (1)", "2.0"],
        ["adam", "0.900 ± 0.010 (2)", "• 0.500 ± 0.200 (2)", "2.0"],
        ["sgdm", "• 0.950 (1)", "", "1.0 (in 1)"],
    ]


def test_scores_are_those_of_the_test_tasks_and_of_the_market_by_day():
    runs = pl.read_csv(COMMITTED / "default" / "runs.csv").filter(pl.col("label") == "adam")["test"].to_numpy()
    found = standing("default", COMMITTED / "default")
    assert found.scores["adam"] == pytest.approx((runs.mean(), runs.std(ddof=1) / len(runs) ** 0.5))
    assert found.higher
    market = standing("market", COMMITTED / "market")
    events = pl.read_csv(COMMITTED / "market" / "events.csv").filter(pl.col("label") == "sobbo")
    sums = events.with_columns(
        d=pl.col("test_mse") - pl.col("test_mse").mean(), day=pl.col("timestamp").str.slice(0, 10)
    )
    days = sums.group_by("day").agg(pl.col("d").sum())["d"].to_numpy()
    error = np.sqrt(len(days) / (len(days) - 1) * (days**2).sum()) / len(events)
    assert market.scores["sobbo"] == pytest.approx((events["test_mse"].mean(), error))
    assert not market.higher


def test_a_page_of_two_reports_and_folders_of_the_same_name_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert (
        cli.main(["leaderboard", str(COMMITTED / "default"), str(COMMITTED / "fc100"), "--title", "All <of> them"]) == 0
    )
    page = (tmp_path / "leaderboard" / "leaderboard.html").read_text()
    assert "All &lt;of&gt; them" in page
    assert "accuracy on test tasks; higher is better" in page
    assert "python -m obbo_lightning leaderboard" in page
    assert (tmp_path / "leaderboard" / "leaderboard.png").stat().st_size > 10_000
    capsys.readouterr()
    assert cli.main(["leaderboard", str(COMMITTED / "default"), str(COMMITTED / "default")]) == 2
    assert "leaderboard needs folders of different names, got default, default" in capsys.readouterr().err
    assert cli.main(["leaderboard", str(COMMITTED / "quadratic")]) == 2
    assert "is one of rates" in capsys.readouterr().err
