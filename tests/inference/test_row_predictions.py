"""Predictions of rows: those of the model that the run's next round would fit."""

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


def fit(kind, rounds=7, count=66):
    """Run on all rows but the last block, which is written to another file."""
    table = rows(kind)
    table[:count].write_csv("rows.csv")
    table[count:].write_csv("tomorrow.csv")
    assert cli.main(["fit", *SMALL, "--rounds", str(rounds)]) == 0
    return RunDirectory.newest("runs")


def loss_of(file, kind, deviation):
    """Return the loss of predictions in a CSV file as a round reports it: log loss, or squared error over variance."""
    with open(file) as file:
        table = list(csv.DictReader(file))
    if kind == "numbers":
        return np.mean([(float(row["predicted"]) - float(row["actual"])) ** 2 for row in table]) / deviation**2
    correct = [row["predicted"] == row["actual"] for row in table]
    probabilities = [float(row["probability"]) for row in table]
    return -np.mean([math.log(p if ok else 1 - p) for p, ok in zip(probabilities, correct, strict=True)])


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_predictions_are_those_of_the_next_round(kind, capsys):
    run = fit(kind)
    assert cli.main(["predict", str(run.path), "--query", "tomorrow.csv"]) == 0
    printed = capsys.readouterr().out
    assert f"y, fitted to the last {BLOCK * PAST} rows" in " ".join(printed.split())
    assert ("accuracy" if kind == "classes" else "mean absolute error") in printed
    rows(kind).write_csv("rows.csv")
    assert cli.main(["resume", str(run.path), "--rounds", "8"]) == 0
    expected = read_rounds(run.metrics)["loss"][-1]
    deviation = 1.0 if kind == "classes" else rows(kind)["y"][:66].to_numpy().std()
    assert loss_of("predictions.csv", kind, deviation) == pytest.approx(expected, rel=1e-5)


def test_classes_are_those_of_a_weighted_logistic_regression():
    run = fit("classes")
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

    probability = 1 / (1 + np.exp(-scaled[1] @ minimize(g, np.zeros(3), tol=1e-12).x))
    assert found.table.columns == ["row", "predicted", "probability"]
    assert found.table["row"].to_list() == [1, 2, 3, 4, 5, 6]
    assert found.table["predicted"].to_list() == ["up" if p > 0.5 else "down" for p in probability]
    assert found.table["probability"].to_numpy() == pytest.approx(np.maximum(probability, 1 - probability), abs=1e-5)
    assert (found.accuracy, found.mean_absolute_error) == (None, None)


def test_numbers_are_predicted_in_their_own_units():
    fit("numbers")
    found = predict_rows("runs", "tomorrow.csv", csv="rows.csv")
    actual = rows("numbers")["y"][66:]
    assert found.table["actual"].to_list() == actual.to_list()
    errors = np.abs(found.table["predicted"].to_numpy() - actual.to_numpy())
    assert found.mean_absolute_error == pytest.approx(errors.mean())
    assert found.mean_absolute_error < 8
    assert found.accuracy is None


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
    fit("classes", rounds=1, count=30)
    if text is not None:
        with open("query.csv", "w") as file:
            file.write(text)
    capsys.readouterr()
    assert cli.main(["predict", "runs", "--query", "query.csv"]) == 2
    assert message in capsys.readouterr().err


def test_only_runs_on_a_table_predict_rows(capsys):
    synthetic = ["--config", "forgetting", "--rounds", "1", "--output", "synthetic", "--evaluation.baselines", "false"]
    assert cli.main(["fit", *synthetic, "--trainer.accelerator", "cpu"]) == 0
    with pytest.raises(ValueError, match=r"predict_rows needs a run with data\.csv, got .*, whose rows are synthetic"):
        predict_rows("synthetic", "tomorrow.csv")
    assert cli.main(["fit", "--config", "quadratic", "--rounds", "1", "--evaluation.tasks", "2"]) == 0
    capsys.readouterr()
    assert cli.main(["predict", "runs", "--query", "x.csv"]) == 2
    error = capsys.readouterr().err
    assert "predict_rows needs a run on a table (--config forgetting), got runs/quadratic" in error
    assert "with the data QuadraticStream" in error
    assert cli.main(["predict", "runs", "--query", "x.csv", "--steps", "3"]) == 2
    assert "predict: --steps needs a few-shot run, got runs" in capsys.readouterr().err


def test_code_that_a_run_names_is_imported_only_if_trusted(tmp_path):
    own = tmp_path / "own.py"
    own.write_text("from obbo_lightning.streams import ForgettingStream\nclass Own(ForgettingStream): pass\n")
    rows("classes")[:30].write_csv("rows.csv")
    rows("classes")[66:].write_csv("query.csv")
    assert cli.main(["fit", *SMALL, "--rounds", "1", "--data", f"{own}:Own"]) == 0
    own.write_text(own.read_text() + "# so that it is not loaded yet\n")
    with pytest.raises(ValueError, match=r"own\.py:Own.*predict_rows\('runs', …, trust=True\)"):
        predict_rows("runs", "query.csv")
    with pytest.warns(UserWarning, match=r"own\.py has changed since this run began"):
        assert len(predict_rows("runs", "query.csv", trust=True).table) == 6
