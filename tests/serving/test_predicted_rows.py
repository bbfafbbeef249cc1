"""Rows whose target is not known yet, predicted by the model that a run's next round would fit."""

import csv
import math

import numpy as np
import polars as pl
import pytest
from scipy.optimize import minimize

from obbo_lightning import cli, predict_rows
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.runs.table import read_rounds
from obbo_lightning.training import run as runs

BLOCK, PAST, RIDGE = 6, 4, 5e-3
SMALL = ["--config", "forgetting", "--data.block", str(BLOCK), "--data.past", str(PAST), "--data.csv", "rows.csv"]
SMALL += ["--data.target", "y", "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "draw_figures", lambda *arguments: [])


def rows(kind):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(72, 2)) * [1.0, 50.0] + [0.0, 300.0]
    signal = x[:, 0] - (x[:, 1] - 300) / 50 + 0.5 * rng.normal(size=72)
    y = np.where(signal > 0, "up", "down") if kind == "classes" else 20 + 7 * signal
    return pl.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": y})


def play(kind, rounds=7, count=66):
    """A run on all rows but the last block's, which come tomorrow."""
    table = rows(kind)
    table[:count].write_csv("rows.csv")
    table[count:].write_csv("tomorrow.csv")
    assert cli.main(["fit", *SMALL, "--rounds", str(rounds)]) == 0
    return RunDirectory.newest("runs")


def loss(found, kind, scale):
    """Of the predictions in a CSV file, as the stream judges a round: log loss, or squared error over the variance."""
    with open(found) as file:
        table = list(csv.DictReader(file))
    if kind == "numbers":
        return np.mean([(float(row["predicted"]) - float(row["actual"])) ** 2 for row in table]) / scale**2
    right = [row["predicted"] == row["actual"] for row in table]
    chances = [float(row["probability"]) for row in table]
    return -np.mean([math.log(c if ok else 1 - c) for c, ok in zip(chances, right, strict=True)])


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_predictions_are_those_that_the_next_round_is_judged_by(kind, capsys):
    run = play(kind)
    assert cli.main(["predict", str(run.path), "--query", "tomorrow.csv"]) == 0
    printed = capsys.readouterr().out
    assert f"from the last {BLOCK * PAST} rows" in " ".join(printed.split())
    assert ("accuracy" if kind == "classes" else "mean absolute error") in printed
    rows(kind).write_csv("rows.csv")  # tomorrow has come
    assert cli.main(["resume", str(run.path), "--rounds", "8"]) == 0
    judged = read_rounds(run.metrics)["loss"][-1]
    deviation = 1.0 if kind == "classes" else rows(kind)["y"][:66].to_numpy().std()
    assert loss("predictions.csv", kind, deviation) == pytest.approx(judged, rel=1e-5)


def test_a_prediction_is_that_of_a_weighted_logistic_regression():
    run = play("classes")
    weights = read_rounds(run.outer).row(-1)[1:]
    table, query = rows("classes")[:66], rows("classes")[66:].drop("y")
    query.write_csv("query.csv")
    found = predict_rows("runs", "query.csv")
    x = table.select("a", "b").to_numpy()
    mean, deviation = x.mean(0), x.std(0)
    scaled = [np.column_stack([np.clip((z - mean) / deviation, -3, 3), np.ones(len(z))]) for z in (x, query.to_numpy())]
    last, y = scaled[0][-BLOCK * PAST :], (table["y"] == "up").to_numpy()[-BLOCK * PAST :]
    each = np.repeat(weights[::-1], BLOCK) / BLOCK  # the newest block has the first weight

    def g(beta):
        z = last @ beta
        return (each * (np.logaddexp(0, z) - y * z)).sum() + RIDGE / 2 * beta @ beta

    chance = 1 / (1 + np.exp(-scaled[1] @ minimize(g, np.zeros(3), tol=1e-12).x))
    assert found.table.columns == ["row", "predicted", "probability"]
    assert found.table["row"].to_list() == [1, 2, 3, 4, 5, 6]
    assert found.table["predicted"].to_list() == ["up" if c > 0.5 else "down" for c in chance]
    assert found.table["probability"].to_numpy() == pytest.approx(np.maximum(chance, 1 - chance), abs=1e-5)
    assert found.right is None
    assert found.error is None
    assert (found.target, found.learned_from) == ("y", 24)


def test_numbers_come_back_in_their_own_units_and_are_scored():
    play("numbers")
    found = predict_rows("runs", "tomorrow.csv", csv="rows.csv")
    actual = rows("numbers")["y"][66:]
    assert found.table["actual"].to_list() == actual.to_list()
    errors = np.abs(found.table["predicted"].to_numpy() - actual.to_numpy())
    assert found.error == pytest.approx(errors.mean())
    assert found.error < 8
    assert found.right is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,y\n1,up\n", "--query must have the columns a, b, got query.csv without 'b'"),
        ("a,b\n1,2\n1,x\n", "--query query.csv, row 2, line 3: 'b' must be a finite number, got 'x'"),
        ("a;b\n1;2\n", "--query must have its columns separated by commas, got query.csv with 'a;b'"),
        ("a,b\n", "--query must have rows"),
        (None, "--query must be a CSV file that exists, got 'query.csv'"),
    ],
)
def test_queries_that_cannot_be_read_are_refused_in_one_line(text, message, capsys):
    play("classes", rounds=1, count=30)
    if text is not None:
        with open("query.csv", "w") as file:
            file.write(text)
    capsys.readouterr()
    assert cli.main(["predict", "runs", "--query", "query.csv"]) == 2
    assert message in capsys.readouterr().err


def test_of_drawn_rows_and_of_other_runs_nothing_is_predicted(capsys):
    drawn = ["--config", "forgetting", "--rounds", "1", "--trainer.accelerator", "cpu", "--output", "drawn"]
    assert cli.main(["fit", *drawn, "--evaluation.baselines", "false"]) == 0
    with pytest.raises(ValueError, match=r"predict_rows needs a run with data\.csv, and .* drew its rows"):
        predict_rows("drawn", "tomorrow.csv")


def test_columns_of_words_are_named_and_left_out():
    from obbo_lightning import ForgettingStream

    table = rows("classes").with_columns(when=pl.lit("monday"), where=pl.lit("here"))
    table.write_csv("words.csv")
    with pytest.warns(UserWarning, match="no features, for they are words: when, where"):
        stream = ForgettingStream("words.csv", "y", block=6, past=4)
    assert stream.columns == ("a", "b")
