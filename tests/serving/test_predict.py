"""`predict` as a user meets it: folders and files in, a table, a picture and a CSV out."""

import csv
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from served import write_classes, write_table

from obbo_lightning import cli, load
from obbo_lightning.runs.checkpoints import newest_checkpoint


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Three new classes, and queries of them."""
    monkeypatch.chdir(tmp_path)
    write_classes(tmp_path / "support", (11, 12, 13), 4, seed=1)
    write_classes(tmp_path / "query", (11, 12, 13), 5, seed=2)
    return tmp_path


def predict(run, *flags):
    return cli.main(["predict", str(run), "--support", "support", "--query", "query", *flags])


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_class_folders_give_accuracy_confusion_a_csv_and_a_picture(image_run, folders, capsys):
    assert predict(image_run) == 0
    printed = capsys.readouterr().out
    assert "actual in rows" in printed
    assert "3 classes, and 2 in training: more --steps may help" in printed
    rows = rows_of("predictions.csv")
    assert list(rows[0]) == ["file", "actual", "predicted", "p(stripes11)", "p(stripes12)", "p(stripes13)"]
    hits = sum(row["actual"] == row["predicted"] for row in rows)
    assert f"accuracy {hits / 15:.3f} on 15 queries" in printed
    for row in rows:
        chances = {name: float(row[f"p({name})"]) for name in ("stripes11", "stripes12", "stripes13")}
        assert max(chances, key=chances.get) == row["predicted"]
        assert sum(chances.values()) == pytest.approx(1, abs=1e-5)
    with Image.open("predictions.png") as picture:
        assert picture.size[0] > 300
    assert sorted(p.name for p in folders.iterdir()) == ["predictions.csv", "predictions.png", "query", "support"]


def test_unlabelled_images_get_the_same_predictions_in_any_company(image_run, folders):
    assert predict(image_run) == 0
    every = {row["file"]: row["p(stripes12)"] for row in rows_of("predictions.csv")}
    (folders / "flat").mkdir()
    for name in ("stripes11/0.png", "stripes13/4.png"):
        shutil.copy(folders / "query" / name, folders / "flat" / name.replace("/", "-"))
    assert cli.main(["predict", str(image_run), "--support", "support", "--query", "flat", "--output", "f.csv"]) == 0
    rows = rows_of("f.csv")
    assert [row["file"] for row in rows] == ["stripes11-0.png", "stripes13-4.png"]
    assert "actual" not in rows[0]
    for row in rows:
        assert float(row["p(stripes12)"]) == pytest.approx(float(every[row["file"].replace("-", "/")]), abs=2e-6)


def test_steps_and_company_change_predictions_where_they_are_asked_to(image_run, folders, monkeypatch):
    monkeypatch.setattr("obbo_lightning.serving.predictions.draw_predictions", lambda found, path: path)
    chances = []
    for flags in ([], ["--transductive"], ["--steps", "9"], ["--lr", "0.3"]):
        assert predict(image_run, *flags) == 0
        chances.append([row["p(stripes11)"] for row in rows_of("predictions.csv")])
    assert all(one != chances[0] for one in chances[1:])


@pytest.mark.parametrize("suffix", ["csv", "npz"])
def test_vectors_come_in_files_with_their_columns_in_any_order(table_run, tmp_path, monkeypatch, suffix, capsys):
    monkeypatch.chdir(tmp_path)
    if suffix == "csv":
        write_table(tmp_path / "support.csv", classes=(0, 5, 9), each=3, columns=("label", "b", "id", "a"), seed=3)
        write_table(tmp_path / "query.csv", classes=(0, 5, 9), each=2, columns=("b", "a"), seed=4)
    else:
        rng = np.random.default_rng(0)
        examples = np.array([[100 + 10 * c + rng.normal(), -c] for c in (0, 5, 9) for _ in range(3)])
        np.savez(tmp_path / "support.npz", examples=examples, labels=np.repeat(["c0", "c5", "c9"], 3))
        np.savez(tmp_path / "query.npz", examples=examples[::2])
    files = ["--support", f"support.{suffix}", "--query", f"query.{suffix}"]
    assert cli.main(["predict", str(table_run), *files, "--steps", "50"]) == 0
    rows = rows_of("predictions.csv")
    assert list(rows[0]) == ["row", "predicted", "p(c0)", "p(c5)", "p(c9)"]
    expected = ["c0", "c0", "c5", "c5", "c9", "c9"] if suffix == "csv" else ["c0", "c0", "c5", "c9", "c9"]
    assert [row["predicted"] for row in rows] == expected


def test_images_in_an_npz_file_are_taken_too(image_run, folders):
    images = {name: np.stack([np.asarray(Image.open(f)) for f in sorted((folders / name).rglob("*.png"))])
              for name in ("support", "query")}  # fmt: skip
    np.savez("support.npz", images=images["support"], labels=np.repeat([11, 12, 13], 4))
    np.savez("query.npz", images=images["query"])
    files = ["--support", "support.npz", "--query", "query.npz", "--output", "n.csv"]
    assert cli.main(["predict", str(image_run), *files]) == 0
    assert predict(image_run) == 0
    assert [r["p(12)"] for r in rows_of("n.csv")] == [r["p(stripes12)"] for r in rows_of("predictions.csv")]


def empty(path):
    shutil.rmtree(path)
    path.mkdir()


def keep_one(path):
    for folder in sorted(path.iterdir())[1:]:
        shutil.rmtree(folder)


MISTAKES = {
    "one class": (
        lambda d: [shutil.rmtree(d / f"support/stripes{n}") for n in (12, 13)],
        [],
        "support must hold 2 classes",
    ),
    "no class": (lambda d: empty(d / "support"), [], "support must hold 2 classes or more, and has none"),
    "empty class": (lambda d: empty(d / "support/stripes12"), [], "support/stripes12 must hold images"),
    "unreadable": (
        lambda d: (d / "support/stripes12/0.png").write_text("no"),
        [],
        "support/stripes12/0.png cannot be read",
    ),
    "unreadable query": (
        lambda d: (d / "query/stripes12/0.png").write_text("no"),
        [],
        "query/stripes12/0.png cannot be",
    ),
    "no queries": (lambda d: empty(d / "query"), [], "query must hold images"),
    "no support": (lambda d: shutil.rmtree(d / "support"), [], "--support must be a folder of images or an npz file"),
    "unknown class": (lambda d: (d / "query/stripes13").rename(d / "query/z"), [], "stripes13, got 'z'"),
    "steps": (lambda d: None, ["--steps", "0"], "--steps must be an integer of at least 1, got 0"),
    "lr": (lambda d: None, ["--lr", "-1"], "--lr must be a positive finite number, got -1.0"),
    "output": (lambda d: None, ["--output", "no/where.csv"], "--output must be a csv file in a folder that can be"),
    "output of another kind": (lambda d: None, ["--output", "x.png"], "--output must be a csv file"),
    "beside classes": (lambda d: shutil.copy(d / "query/stripes12/0.png", d / "query"), [], "and has 0.png"),
    "flag": (lambda d: None, ["--shots", "3"], "predict: unrecognized arguments: --shots 3"),
}


@pytest.mark.parametrize(("spoil", "flags", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_bad_input_is_one_line_with_code_2_and_nothing_is_written(image_run, folders, spoil, flags, message, capsys):
    spoil(folders)
    before = sorted(folders.rglob("*"))
    assert predict(image_run, *flags) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert sorted(folders.rglob("*")) == before


def test_missing_flags_and_columns_are_asked_for(image_run, table_run, tmp_path, capsys):
    assert cli.main(["predict", str(image_run), "--support", "x"]) == 2
    assert "predict: the following arguments are required: --query" in capsys.readouterr().err
    file = write_table(tmp_path / "s.csv", classes=range(2), each=2, columns=("label", "a"))
    assert cli.main(["predict", str(table_run), "--support", str(file), "--query", str(file)]) == 2
    assert "s.csv must have the column 'b', which the run was trained with" in capsys.readouterr().err


def test_a_run_that_does_not_say_what_its_inputs_are_takes_tensors_only(image_run, folders, capsys):
    checkpoint = torch.load(newest_checkpoint(image_run / "checkpoints"), weights_only=True)
    del checkpoint["inputs"]  # as of an older version
    torch.save(checkpoint, "old.ckpt")
    assert predict("old.ckpt") == 2
    assert "does not say how 'support' becomes what its network takes" in capsys.readouterr().err
    assert len(load("old.ckpt").adapt(torch.randn(4, 1, 16, 16), [0, 1, 0, 1]).predict(torch.randn(3, 1, 16, 16))) == 3
