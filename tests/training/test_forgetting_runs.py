"""Whole runs on a table in time: from a file to λ by name, further, with more rows, and by every algorithm."""

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from obbo_lightning import cli
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.runs.table import read_rounds
from obbo_lightning.training import run as runs

SMALL = ["--config", "forgetting", "--data.block", "6", "--data.past", "4", "--checkpoint.every", "4"]
SMALL += ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]
TABLE = ["--data.csv", "rows.csv", "--data.target", "y"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "draw_figures", lambda *arguments: [])


def write(rows, name="rows.csv", change=None):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 2))
    truth = np.where(np.arange(200) < 60, 1.0, -1.0)  # it turns round
    y = truth * x[:, 0] + 0.3 * rng.normal(size=200) > 0
    frame = pl.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": np.where(y, "up", "down")})[:rows]
    if change is not None:
        frame = frame.with_columns(a=pl.when(pl.int_range(rows) == change).then(9.0).otherwise(pl.col("a")))
    frame.write_csv(name)


def play(*flags, experiment="one"):
    assert cli.main(["fit", *SMALL, *flags, "--experiment", experiment]) == 0
    (path,) = Path("runs", experiment).iterdir()
    return RunDirectory(path)


def test_a_run_goes_on_when_rows_have_come(capsys):
    write(72)
    run = play(*TABLE, "--rounds", "8")
    assert cli.main(["resume", str(run.path), "--rounds", "20"]) == 2
    assert "rounds must be at most the stream's 8 tasks" in capsys.readouterr().err
    write(150)
    assert cli.main(["resume", str(run.path), "--rounds", "20"]) == 0
    whole = play(*TABLE, "--rounds", "20", experiment="whole")
    for file in ("metrics.csv", "outer.csv", "tasks.csv", "sources.json", "baselines.csv"):
        assert (run.path / file).read_bytes() == (whole.path / file).read_bytes(), file
    outer = read_rounds(run.path / "outer.csv")
    assert outer.columns == ["round", *(f"past[{age}]" for age in range(4))]
    assert np.allclose(outer.drop("round").sum_horizontal(), 1.0)
    assert outer["past[0]"][-1] == max(outer.drop("round").row(-1))  # the truth has turned: the newest is right first


@pytest.mark.parametrize(("row", "where"), [(3, "rows 1 to 30, in round 1"), (40, "rows 37 to 42, in round 3")])
def test_rows_that_were_played_and_have_changed_are_named(row, where, capsys):
    write(72)
    run = play(*TABLE, "--rounds", "8")
    write(72, change=row)
    assert cli.main(["resume", str(run.path), "--data.csv", "rows.csv", "--rounds", "8"]) == 0  # it has them already
    write(150, change=row)
    assert cli.main(["resume", str(run.path), "--rounds", "20"]) == 2
    error = capsys.readouterr().err
    assert f"but they differ from {where} on" in error
    assert "'b'" not in error  # all columns have grown: that does not say which of them has another past
    assert error.count("\n") == 1


@pytest.mark.parametrize("algorithm", ["obbo", "sobow", "oagd", "adam", "sgdm", "sobbo"])
def test_every_algorithm_plays_it_with_the_shipped_settings(algorithm):
    write(150)
    run = play(*TABLE, "--rounds", "6", "--algorithm", algorithm)
    summary = json.loads(run.summary.read_text())
    assert summary["metric"] == "loss"
    assert summary["skipped"] == 0
    assert 0 < summary["stream_loss"] < 1
    assert list(summary["baselines"])[1:] == ["equal weights", "last block only", "majority class"]


def test_numbers_are_predicted_without_a_file():
    run = play("--rounds", "5", "--data.kind", "regression", "--problem.ridge", "0.1")
    assert read_rounds(run.metrics)["loss"].is_between(0, 5).all()
    assert not run.sources.exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--data.csv", "nowhere.csv"], "data.csv must be a CSV file that exists, got 'nowhere.csv'"),
        (["--data.csv", "rows.csv"], "data.target must be a column of rows.csv, which are a, b, y, got None"),
        (["--problem.past", "5"], "unknown key 'problem.past' (value 5); the tasks decide it"),
        (["--problem.ridge", "-1"], "problem.ridge must be a positive finite number, got -1.0"),
        ([*TABLE, "--rounds", "50"], "rounds must be at most the stream's 8 tasks, 1 a round, got 50: say --rounds 8"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_written(flags, said, capsys):
    write(72)
    assert cli.main(["fit", *SMALL, *flags]) == 2
    assert capsys.readouterr().err == f"obbo: {said}\n"
    assert not Path("runs").exists()
