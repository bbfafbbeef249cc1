"""Predictions for files: classes of images and vectors, and targets of the next rows of a table."""

import math
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from PIL import Image
from small_runs import read_table, save_few_shot_checkpoint, write_image_classes, write_labelled_table

from obbo_lightning import cli, load_model, predict_rows
from obbo_lightning.inference.inputs import ExampleInputs, ImageInputs, Inputs
from obbo_lightning.inference.predictions import Predictions, draw_predictions, read_query, read_support
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.runs.table import read_rounds

GREY = ImageInputs([1, 16, 16], [0.25], [0.5])
BLOCK, PAST = 6, 4
TABLE_FLAGS = ["--config", "forgetting", "--data.block", str(BLOCK), "--data.past", str(PAST), "--data.csv", "rows.csv"]
TABLE_FLAGS += ["--data.target", "y", "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]
VECTORS = ExampleInputs([2], "label", None, [0, 0], [1, 1])


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Support and query images of three new classes, in the working directory."""
    monkeypatch.chdir(tmp_path)
    write_image_classes(tmp_path / "support", (11, 12, 13), 4, seed=1)
    write_image_classes(tmp_path / "query", (11, 12, 13), 5, seed=2)
    return tmp_path


@pytest.fixture
def in_folder(tmp_path, monkeypatch, no_figures):
    """Work in a folder of its own, without figures of runs."""
    monkeypatch.chdir(tmp_path)


def predict(run, *flags, support="support", query="query"):
    return cli.main(["predict", str(run), "--support", support, "--query", query, *flags])


def read_rows():
    return read_table(Path("predictions.csv"))


def test_class_folders_give_accuracy_confusion_table_and_figure(image_run, folders, capsys):
    assert predict(image_run) == 0
    printed = capsys.readouterr().out
    assert "actual in rows" in printed
    assert "3 classes, and 2 in training: more --steps may help" in printed
    rows = read_rows()
    assert list(rows[0]) == ["file", "actual", "predicted", "p(stripes11)", "p(stripes12)", "p(stripes13)"]
    hits = sum(row["actual"] == row["predicted"] for row in rows)
    assert f"accuracy {hits / 15:.3f} on 15 queries" in printed
    for row in rows:
        probabilities = {name: float(row[f"p({name})"]) for name in ("stripes11", "stripes12", "stripes13")}
        assert max(probabilities, key=probabilities.get) == row["predicted"]
        assert sum(probabilities.values()) == pytest.approx(1, abs=1e-5)
    with Image.open("predictions.png") as figure:
        assert figure.size[0] > 300
    assert sorted(path.name for path in folders.iterdir()) == ["predictions.csv", "predictions.png", "query", "support"]


def test_flags_change_predictions_and_npz_files_do_not(image_run, folders, monkeypatch):
    monkeypatch.setattr("obbo_lightning.cli.predict.draw_predictions", lambda *arguments: None)
    probabilities = []
    for flags in ([], ["--transductive"], ["--steps", "9"], ["--lr", "0.3"]):
        assert predict(image_run, *flags) == 0
        probabilities.append([row["p(stripes12)"] for row in read_rows()])
    assert all(one != probabilities[0] for one in probabilities[1:])
    for name, labels in (("support", {"labels": np.repeat([11, 12, 13], 4)}), ("query", {})):
        images = [np.asarray(Image.open(file)) for file in sorted((folders / name).rglob("*.png"))]
        np.savez(f"{name}.npz", images=np.stack(images), **labels)
    assert predict(image_run, support="support.npz", query="query.npz") == 0
    assert [row["p(12)"] for row in read_rows()] == probabilities[0]


@pytest.mark.parametrize("suffix", ["csv", "npz"])
def test_vectors_are_read_from_files_by_column_name(vector_run, tmp_path, in_folder, suffix):
    if suffix == "csv":
        support = write_labelled_table(tmp_path / "s.csv", (0, 5, 9), 3, columns=("label", "b", "id", "a"), seed=3)
        query = write_labelled_table(tmp_path / "q.csv", (0, 5, 9), 2, columns=("b", "a"), seed=4)
    else:
        rng = np.random.default_rng(0)
        examples = np.array([[100 + 10 * c + rng.normal(), -c] for c in (0, 5, 9) for _ in range(3)])
        support, query = tmp_path / "s.npz", tmp_path / "q.npz"
        np.savez(support, examples=examples, labels=np.repeat(["c0", "c5", "c9"], 3))
        np.savez(query, examples=examples[::2])
    assert predict(vector_run, "--steps", "50", support=str(support), query=str(query)) == 0
    rows = read_rows()
    assert list(rows[0]) == ["row", "predicted", "p(c0)", "p(c5)", "p(c9)"]
    expected = ["c0", "c0", "c5", "c5", "c9", "c9"] if suffix == "csv" else ["c0", "c0", "c5", "c9", "c9"]
    assert [row["predicted"] for row in rows] == expected
    assert not (tmp_path / "predictions.png").exists()  # vectors have no figure


def test_more_steps_are_recommended_for_more_classes(in_folder, capsys):
    save_few_shot_checkpoint("x.ckpt")
    for classes, steps, hint in ((2, [], False), (3, [], True), (3, ["--steps", "4"], False)):
        x = np.random.default_rng(0).normal(size=(4 * classes, 2))
        np.savez("s.npz", examples=x, labels=np.arange(4 * classes) % classes)
        np.savez("q.npz", examples=x)
        assert predict("x.ckpt", *steps, support="s.npz", query="q.npz") == 0
        assert ("more --steps may help" in capsys.readouterr().out) == hint


def test_scores_are_known_where_the_actual_values_are(tmp_path):
    classes = pl.DataFrame({"row": ["1", "2"], "actual": ["a", "=b"], "predicted": ["a", "a"], "p(a)": [0.7, 0.6]})
    assert Predictions(classes, "").accuracy == 0.5
    assert Predictions(classes, "").mean_absolute_error is None
    assert Predictions(classes.drop("actual"), "").accuracy is None
    numbers = pl.DataFrame({"actual": [1.0, 2.0], "predicted": [2.0, 0.0]})
    assert Predictions(numbers, "").mean_absolute_error == 1.5
    assert Predictions(numbers, "").accuracy is None
    Predictions(classes, "").write(tmp_path / "p.csv")
    assert (tmp_path / "p.csv").read_text() == "row,actual,predicted,p(a)\n1,a,a,0.7\n2,'=b,a,0.6\n"


def test_figure_prints_dollar_signs(tmp_path):
    name = r"$\frac{mine$"  # matplotlib would fail to typeset it
    table = pl.DataFrame({"file": ["x.png"], "predicted": [name], f"p({name})": [0.9]})
    draw_predictions(Predictions(table, ""), [np.zeros((8, 8, 1), np.uint8)], tmp_path / "x.png")
    assert (tmp_path / "x.png").is_file()


def write_images(root, *places):
    for i, place in enumerate(places):
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((16, 16), i + 1, np.uint8)).save(root / place)
    return root


def test_examples_are_named_after_their_files_or_rows(tmp_path):
    places = ("b/2.png", "a/x/1.PNG", ".old/0.png", "a/.hidden/3.png", "a/.4.png")
    support = read_support(write_images(tmp_path / "support", *places), GREY)
    assert (support.unit, support.names, support.labels) == ("file", ["a/x/1.PNG", "b/2.png"], ["a", "b"])
    assert [int(image[0, 0, 0]) for image in support.examples] == [2, 1]
    known = read_query(tmp_path / "support", GREY, {"a", "b", "c"})
    assert (known.names, known.labels) == (support.names, support.labels)
    assert read_query(tmp_path / "support", GREY, {"z"}).labels is None  # no folder has the name of a class
    flat = read_query(write_images(tmp_path / "flat", "2.png", "1.png", ".0.png"), GREY, {"a"})
    assert (flat.names, flat.labels) == (["1.png", "2.png"], None)
    np.savez(tmp_path / "q.npz", examples=np.ones((3, 2)), labels=np.array([7, 8, 7]))
    rows = read_query(tmp_path / "q.npz", VECTORS, {"7", "8"})
    assert (rows.unit, rows.names, rows.labels) == ("row", ["1", "2", "3"], ["7", "8", "7"])


@pytest.mark.parametrize(
    ("arrays", "read", "message"),
    [
        ({"examples": np.ones((2, 2))}, read_support, "must have labels to adapt to, and has none"),
        ({"examples": np.ones((2, 2)), "labels": [7, 7]}, read_support, "must hold 2 classes or more, and has '7'"),
        ({"examples": np.ones((2, 2)), "labels": [7, 8]}, read_query, "of the classes 7, 9, got '8' for row 2"),
        ({"examples": np.ones((3, 4))}, read_query, r"must hold examples of shape \[2\], got \[4\]"),
    ],
)
def test_unusable_vectors_are_refused(tmp_path, arrays, read, message):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "x.npz", VECTORS, *([{"7", "9"}] if read is read_query else []))


def empty(path):
    shutil.rmtree(path)
    path.mkdir()


MISTAKES = {
    "no class": (lambda d: empty(d / "support"), [], "support must hold 2 classes or more, and has none"),
    "empty class": (lambda d: empty(d / "support/stripes12"), [], "support/stripes12 must hold images"),
    "unreadable": (lambda d: (d / "support/stripes12/0.png").write_text("no"), [], "stripes12/0.png cannot be read"),
    "no queries": (lambda d: empty(d / "query"), [], "query must hold images"),
    "no support": (lambda d: shutil.rmtree(d / "support"), [], "--support must be a folder of images or an npz file"),
    "unknown class": (
        lambda d: (d / "query/stripes13").rename(d / "query/z"),
        [],
        "query must have examples of the classes stripes11, stripes12, stripes13, got 'z' for file z/0.png",
    ),
    "outside classes": (lambda d: shutil.copy(d / "query/stripes12/0.png", d / "query"), [], "got '' for file 0.png"),
    "steps": (lambda d: None, ["--steps", "0"], "inner.steps must be an integer of at least 1, got 0"),
    "lr": (lambda d: None, ["--lr", "-1"], "inner.lr must be a positive finite number, got -1.0"),
    "output": (lambda d: None, ["--output", "no/where.csv"], "--output must be a csv file in a folder that can be"),
    "output of another kind": (lambda d: None, ["--output", "x.png"], "--output must be a csv file"),
    "table": (lambda d: None, ["--data.csv", "x.csv"], "predict: --data.csv needs a run on a table, got"),
    "unknown flag": (lambda d: None, ["--shots", "3"], "predict: unrecognized arguments: --shots 3"),
}


@pytest.mark.parametrize(("change", "flags", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_one_line_and_nothing_is_written(image_run, folders, change, flags, message, capsys):
    change(folders)
    before = sorted(folders.rglob("*"))
    assert predict(image_run, *flags) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert sorted(folders.rglob("*")) == before


def test_missing_flags_and_columns_are_named(image_run, vector_run, tmp_path, capsys):
    assert cli.main(["predict", str(image_run), "--query", "x"]) == 2
    assert "predict: the following arguments are required: --support" in capsys.readouterr().err
    file = write_labelled_table(tmp_path / "s.csv", classes=range(2), each=2, columns=("label", "a"))
    assert predict(vector_run, support=str(file), query=str(file)) == 2
    assert "s.csv must have the column 'b', which the run was trained with" in capsys.readouterr().err


def test_run_whose_stream_does_not_describe_its_inputs_takes_tensors_only(tmp_path):
    save_few_shot_checkpoint(tmp_path / "x.ckpt", inputs=None)
    model = load_model(tmp_path / "x.ckpt")
    assert len(model.adapt(torch.randn(4, 2), [0, 1, 0, 1]).predict(torch.randn(3, 2))) == 3
    with pytest.raises(ValueError, match="--support needs a run whose stream describes its inputs"):
        read_support(tmp_path, Inputs())


def table_of(kind):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(72, 2)) * [1.0, 50.0] + [0.0, 300.0]
    signal = x[:, 0] - (x[:, 1] - 300) / 50 + 0.5 * rng.normal(size=72)
    y = np.where(signal > 0, "up", "down") if kind == "classes" else 20 + 7 * signal
    return pl.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": y})


def fit_table(kind, rounds=7, count=66):
    """Run on all rows but the last block, which is written to another file."""
    table = table_of(kind)
    table[:count].write_csv("rows.csv")
    table[count:].write_csv("tomorrow.csv")
    assert cli.main(["fit", *TABLE_FLAGS, "--rounds", str(rounds)]) == 0
    return RunDirectory.newest("runs")


def loss_of_predictions(kind, deviation):
    """Return the loss of predictions.csv as a round reports it: log loss, or squared error over variance."""
    table = read_rows()
    if kind == "numbers":
        return np.mean([(float(row["predicted"]) - float(row["actual"])) ** 2 for row in table]) / deviation**2
    correct = [row["predicted"] == row["actual"] for row in table]
    probabilities = [float(row["probability"]) for row in table]
    return -np.mean([math.log(p if ok else 1 - p) for p, ok in zip(probabilities, correct, strict=True)])


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_predictions_are_those_of_the_next_round(kind, in_folder, capsys):
    run = fit_table(kind)
    assert cli.main(["predict", str(run.path), "--query", "tomorrow.csv"]) == 0
    printed = capsys.readouterr().out
    assert f"y, fitted to the last {BLOCK * PAST} rows" in " ".join(printed.split())
    assert ("accuracy" if kind == "classes" else "mean absolute error") in printed
    found = predict_rows("runs", "tomorrow.csv", csv="rows.csv")
    table_of(kind)[66:].drop("y").write_csv("query.csv")
    without = predict_rows("runs", "query.csv")
    assert without.table.equals(found.table.drop("actual"))
    assert (without.accuracy, without.mean_absolute_error) == (None, None)
    if kind == "classes":
        assert without.table.columns == ["row", "predicted", "probability"]
        assert without.table["row"].to_list() == [1, 2, 3, 4, 5, 6]
        assert without.table["probability"].min() >= 0.5
    else:  # in their own units
        actual = table_of("numbers")["y"][66:]
        assert found.table["actual"].to_list() == actual.to_list()
        errors = np.abs(found.table["predicted"].to_numpy() - actual.to_numpy())
        assert found.mean_absolute_error == pytest.approx(errors.mean())
        assert found.mean_absolute_error < 8
        assert found.accuracy is None
    table_of(kind).write_csv("rows.csv")
    assert cli.main(["resume", str(run.path), "--rounds", "8"]) == 0
    expected = read_rounds(run.metrics)["loss"][-1]
    deviation = 1.0 if kind == "classes" else table_of(kind)["y"][:66].to_numpy().std()
    assert loss_of_predictions(kind, deviation) == pytest.approx(expected, rel=1e-5)


def test_queries_that_cannot_be_read_are_refused_in_one_line(in_folder, capsys):
    fit_table("classes", rounds=1, count=30)
    for text, message in (
        (None, "--query must be a CSV file that exists, got 'query.csv'"),
        ("a,y\n1,up\n", "--query must have the columns 'a', 'b', got query.csv without 'b'"),
        ("a,b\n1,2\n1,x\n", "--query query.csv, row 2: 'b' must be a finite number, got 'x'"),
        ("a;b\n1;2\n", "--query must have its columns separated by commas, got query.csv with 'a;b'"),
        ("a,b\n", "--query must have rows"),
    ):
        if text is not None:
            Path("query.csv").write_text(text)
        capsys.readouterr()
        assert cli.main(["predict", "runs", "--query", "query.csv"]) == 2
        assert message in capsys.readouterr().err


def test_only_runs_on_a_table_predict_rows(capsys, in_folder):
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


def test_code_that_a_run_names_is_imported_only_if_trusted(tmp_path, in_folder):
    own = tmp_path / "own.py"
    own.write_text("from obbo_lightning.streams import ForgettingStream\nclass Own(ForgettingStream): pass\n")
    table_of("classes")[:30].write_csv("rows.csv")
    table_of("classes")[66:].write_csv("query.csv")
    assert cli.main(["fit", *TABLE_FLAGS, "--rounds", "1", "--data", f"{own}:Own"]) == 0
    own.write_text(own.read_text() + "# so that it is not loaded yet\n")
    with pytest.raises(ValueError, match=r"own\.py:Own.*predict_rows\('runs', …, trust=True\)"):
        predict_rows("runs", "query.csv")
    with pytest.warns(UserWarning, match=r"own\.py has changed since this run began"):
        assert len(predict_rows("runs", "query.csv", trust=True).table) == 6
