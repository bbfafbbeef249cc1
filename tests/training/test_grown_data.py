"""Data that have grown since a run began, and data whose past has changed."""

import json
import shutil

import numpy as np
import polars as pl
import pytest

from obbo_lightning import cli
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.runs.table import read_rounds
from obbo_lightning.streams.market import simulate_market
from obbo_lightning.training import run as runs

SMALL = ["--config", "market", "--data.events", "events.csv", "--data.subset", "20", "--data.subsets", "6"]
SMALL += ["--data.horizon", "4", "--evaluation.every", "4", "--checkpoint.every", "5", "--trainer.accelerator", "cpu"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "draw_figures", lambda *arguments: [])
    return tmp_path


@pytest.fixture
def prices():
    """Of three events, each with 26 bars up to it and 12 after it; the file ends four bars after the events."""
    table, events = simulate_market(3, 26, 12, seed=1)
    events.drop("row").write_csv("events.csv")
    bar = pl.int_range(pl.len()).over("ticker")
    table.drop("row").filter(bar < 30).write_csv("prices.csv")
    table.drop("row").write_csv("grown.csv")
    return table.drop("row")


def play(*flags, output="runs"):
    assert cli.main(["fit", *SMALL, *map(str, flags), "--output", output]) == 0
    (path,) = (p for p in (RunDirectory.create(output, "market", "x").path.parent).glob("obbo-*"))
    return RunDirectory(path)


@pytest.mark.filterwarnings("ignore:the test tasks are others")
def test_new_bars_extend_the_stream_of_every_event(prices, capsys):
    run = play("--data.prices", "prices.csv", "--rounds", 6)
    assert cli.main(["resume", str(run.path), "--rounds", "10"]) == 2  # which would begin to play what is forecast
    assert "rounds must be at most the stream's 6 tasks" in capsys.readouterr().err
    more = ["--data.prices", "grown.csv", "--data.beyond", "8", "--rounds", "14"]
    assert cli.main(["resume", str(run.path), *more]) == 0
    whole = play("--data.prices", "grown.csv", "--data.beyond", 8, "--rounds", 14, output="whole")
    one, other = (read_rounds(r.metrics) for r in (run, whole))
    tests = pl.selectors.starts_with("test_")  # of before are judged on the bars that followed then
    assert one.drop(tests).equals(other.drop(tests))
    assert one[8:].equals(other[8:])
    summaries = [json.loads(r.summary.read_text()) for r in (run, whole)]
    assert summaries[0] | {"seconds": 0} == summaries[1] | {"seconds": 0}
    assert run.events.read_bytes() == whole.events.read_bytes()


@pytest.mark.parametrize(
    ("ticker", "bar", "where"),
    [("SIM001", 23, "bar 24 of every event, in round 5"), ("SIM002", 3, "one of the first 20 bars of an event")],
)
def test_a_price_of_the_past_that_has_changed_is_named(prices, ticker, bar, where, capsys):
    run = play("--data.prices", "prices.csv", "--rounds", 6)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    changed = pl.when((pl.col("ticker") == ticker) & (pl.int_range(pl.len()).over("ticker") == bar)).then(1.01)
    prices.with_columns(pl.col("close") * changed.otherwise(1.0)).write_csv("changed.csv")
    flags = ["--data.prices", "changed.csv", "--data.beyond", "8", "--rounds", "14"]
    assert cli.main(["resume", str(run.path), *flags]) == 2
    error = capsys.readouterr().err
    assert f"data must begin with what {run.path} played, but they differ from {where}" in error
    assert f"'{ticker} 2021-01-05 10:30:00' has changed" in error
    assert error.count("\n") == 1
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_what_lies_under_the_same_name_is_compared_too(prices, capsys):
    run = play("--data.prices", "prices.csv", "--rounds", 5)
    run.summary.unlink()
    table = pl.read_csv("prices.csv")
    table.with_columns(pl.col("close") * 2).write_csv("prices.csv")
    assert cli.main(["resume", str(run.path), "--rounds", "6"]) == 2
    assert "but they differ from one of the first 20 bars" in capsys.readouterr().err


def test_a_class_whose_examples_changed_is_named(capsys):
    names = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu"]
    examples = np.random.default_rng(0).normal(size=(70, 3))
    np.savez("one.npz", examples=examples, labels=np.repeat(names, 10))
    flags = ["--data", "examples", "--data.path", "one.npz", "--data.train_classes", "[ant, bee, cat]"]
    flags += ["--data.ratios", "[0, 1, 1]", "--data.ways", "2", "--data.shots", "2", "--data.queries", "2"]
    flags += ["--problem.network.widths", "[4]", "--evaluation.tasks", "1", "--rounds", "4"]
    assert cli.main(["fit", *flags, "--trainer.accelerator", "cpu"]) == 0
    (path,) = (p for p in RunDirectory.create("runs", "default", "x").path.parent.glob("obbo-*"))
    examples[15] += 1
    np.savez("two.npz", examples=examples, labels=np.repeat(names, 10))
    capsys.readouterr()
    assert cli.main(["resume", str(path), "--rounds", "6", "--data.path", "two.npz"]) == 2
    assert "'bee' has changed" in capsys.readouterr().err
    shutil.copy("two.npz", "one.npz")
    (path / "sources.json").write_text("{")
    assert cli.main(["resume", str(path), "--rounds", "6"]) == 2
    assert "sources.json is damaged: delete it" in capsys.readouterr().err
    (path / "sources.json").unlink()  # the tasks know it all the same
    assert cli.main(["resume", str(path), "--rounds", "6"]) == 2
    assert "data must begin with what" in capsys.readouterr().err
