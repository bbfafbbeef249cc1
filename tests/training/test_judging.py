"""Which tasks a run is judged on."""

import json

import polars as pl
import pytest
import yaml

from obbo_lightning import cli
from obbo_lightning.training import run as runs

TINY = ["--config", "quadratic", "--evaluation.every", "4", "--evaluation.tasks", "3", "--checkpoint.every", "3"]
TINY += ["--algorithm.inner.steps", "2", "--data.outer_dim", "3", "--data.inner_dim", "3", "--output", "runs"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "draw_figures", lambda *arguments: [])  # they take longer than the runs
    return tmp_path / "runs"


def fitted(folder, *flags):
    assert cli.main(["fit", *TINY, *flags]) == 0
    return max(folder.glob("*/*"), key=lambda path: (path.stat().st_mtime, path.name))


def test_a_run_is_judged_on_both_splits_and_validate_agrees_and_keeps_it(here):
    run = fitted(here, "--rounds", "6", "--evaluation.split", "both")
    rows, summary = pl.read_csv(run / "metrics.csv"), json.loads((run / "summary.json").read_text())
    for name in ("test_loss", "validation/loss"):
        assert rows[name].is_not_null().to_list() == [False, False, False, True, False, True]
    assert rows["validation/loss"][-1] != rows["test_loss"][-1]
    assert (summary["validation_loss"], summary["validation_tasks"]) == (rows["validation/loss"][-1], 3)
    assert cli.main(["validate", str(run)]) == 0
    kept = json.loads((run / "validation.json").read_text())
    assert kept["checkpoint"] == "round-00000006.ckpt"
    assert kept["tasks"] == 3
    assert kept["loss"] == pytest.approx(summary["validation_loss"], rel=1e-12)
    assert kept["loss_se"] == pytest.approx(summary["validation_loss_se"], rel=1e-12)


def test_a_run_that_goes_on_has_the_validations_of_one_that_was_long_from_the_start(here):
    long = fitted(here, "--rounds", "8", "--evaluation.split", "validation")
    short = fitted(here, "--rounds", "6", "--evaluation.split", "validation")
    assert long != short
    assert cli.main(["resume", str(short), "--rounds", "8"]) == 0
    assert (short / "metrics.csv").read_bytes() == (long / "metrics.csv").read_bytes()
    assert "test_loss" not in {name for name, value in json.loads((long / "summary.json").read_text()).items() if value}


def test_a_run_without_test_tasks_can_be_tested_later(here, capsys):
    run = fitted(here, "--rounds", "2", "--evaluation.split", "none")
    assert cli.main(["test", str(run)]) == 0
    assert "test/loss" in capsys.readouterr().out


def test_a_stream_without_validation_tasks_is_refused(here, capsys):
    stream = ["--config", "forgetting", "--evaluation.split", "validation", "--output", "runs"]
    assert cli.main(["fit", *stream]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "evaluation.split must be test or none for" in line
    assert not here.exists()


def test_what_is_neither_is_refused(here, capsys):
    assert cli.main(["fit", *TINY, "--evaluation.split", "train"]) == 2
    assert "evaluation.split" in capsys.readouterr().err


def test_the_default_is_the_test_tasks(here, capsys):
    assert cli.main(["fit", *TINY, "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["evaluation"]["split"] == "test"
