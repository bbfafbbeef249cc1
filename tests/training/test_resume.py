"""Resumed runs equal undisturbed ones: after a crash, with more rounds, and with data that have grown."""

import contextlib
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import lightning as L
import numpy as np
import polars as pl
import pytest
import torch
import yaml
from small_runs import TINY, config_of, read_summary, read_table
from torch.utils._pytree import tree_flatten
from toy import SIX

from obbo_lightning import OnlineBilevelModule, cli
from obbo_lightning.config.parse import complete_config
from obbo_lightning.runs.directory import RunDirectory, read_config
from obbo_lightning.runs.provenance import list_checkpoints, newest_checkpoint
from obbo_lightning.streams.market import simulate_market
from obbo_lightning.training import run as run_file
from obbo_lightning.training.resume import require_rounds

pytestmark = [
    pytest.mark.filterwarnings("ignore:the fixed point of the hypergradient:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:no rounds are left"),
    pytest.mark.usefixtures("here", "no_figures"),
]
# Evaluations are due in rounds 8 and 16; other rounds are evaluated where they are the last.
QUADRATIC = ["--config", "quadratic", "--evaluation.every", "8", "--evaluation.tasks", "2", "--checkpoint.every", "7"]
QUADRATIC += ["--trainer.accelerator", "cpu", "--algorithm.inner.steps", "2"]


def fit(*flags, rounds=18, name="run", callbacks=()):
    """Return the directory of a run; it may end with an exception."""
    config = config_of("--rounds", rounds, *flags)
    directory = RunDirectory.create("runs", config["experiment"], name)
    run_file.fit(config, directory, callbacks=callbacks, quiet=True)
    return directory


def resume(run, *flags):
    return cli.main(["resume", str(run.path), *map(str, flags)])


class Crash(L.Callback):
    """Ends a run without a word, as a power cut does."""

    class Error(BaseException):
        """Nothing catches it."""

    def __init__(self, at):
        self.at = at

    def on_train_batch_end(self, trainer, *arguments):
        if trainer.global_step == self.at:
            raise self.Error


def crash(*flags, at, name="crashed"):
    """Return the directory of a run that crashed in a round."""
    with pytest.raises(Crash.Error):
        fit(*flags, name=name, callbacks=[Crash(at)])
    (path,) = Path("runs").glob(f"*/{name}-*")
    return RunDirectory(path)


def read_files(run):
    return {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file() and path.name != ".lock"}


def require_equal(run, other):
    assert run.metrics.read_bytes() == other.metrics.read_bytes()
    assert run.fingerprints.read_bytes() == other.fingerprints.read_bytes()
    assert read_summary(run) == read_summary(other)
    assert yaml.safe_load(run.config.read_text()) == yaml.safe_load(other.config.read_text())


def require_same_values(one, other):
    (values, shape), (others, other_shape) = tree_flatten(one), tree_flatten(other)
    assert shape == other_shape
    for value, another in zip(values, others, strict=True):
        assert torch.equal(value, another) if isinstance(value, torch.Tensor) else value == another


def without_seconds(checkpoint):
    """Return the state in a checkpoint without what may differ: seconds, and how far the run was planned."""
    content = torch.load(checkpoint, weights_only=True)
    del content["callbacks"]["RunWriter"]["seconds"]
    return {name: value for name, value in content.items() if name not in ("loops", "provenance")}


# After a crash.


@pytest.mark.parametrize("algorithm", SIX)
@pytest.mark.parametrize(("at", "every", "precision"), [(6, 5, "64-true"), (9, 4, "32-true")])
def test_a_crashed_run_continues_bit_for_bit(few_shot, algorithm, at, every, precision):
    """At 9 an evaluation was due in the round of the last checkpoint."""
    flags = [*few_shot, "--rounds", 10, "--algorithm", algorithm, "--evaluation.every", every]
    flags += ["--trainer.precision", precision]
    whole, crashed = fit(*flags, name="whole"), crash(*flags, at=at)
    assert not crashed.finished
    moved = RunDirectory(shutil.move(crashed.path, crashed.path.with_name("moved")))
    assert resume(moved) == 0
    require_equal(moved, whole)
    require_same_values(*(without_seconds(newest_checkpoint(one.checkpoints)) for one in (whole, moved)))


@pytest.mark.parametrize("at", [3, 6])
def test_a_crashed_run_with_parameter_groups_has_the_same_summary_and_one_that_was_extended(at):
    """After round 6, the last one, everything but the summary is there."""
    flags = ["--data", "small_runs.EveryFile", *TINY, "--algorithm.lr", "auto"]
    whole = fit(*flags, rounds=6, name="whole")
    crashed = crash(*flags, "--rounds", 6, at=at)
    assert resume(crashed, "--trust") == 0
    require_equal(crashed, whole)
    shorter = fit(*flags, rounds=4, name="shorter")
    assert resume(shorter, "--rounds", 6, "--trust") == 0
    require_equal(shorter, whole)
    assert read_summary(whole)["tuning"]["weight"]["moved"]


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_continues_the_run(capsys):
    run = crash(*QUADRATIC, at=15)
    older, newest = list_checkpoints(run.checkpoints)
    newest.write_bytes(newest.read_bytes()[:-100])
    assert resume(run) == 2
    error = capsys.readouterr().err
    assert f"{newest} is damaged" in error
    assert f"--checkpoint {older}" in error
    assert resume(run, "--checkpoint", older) == 0
    require_equal(run, fit(*QUADRATIC, name="whole"))


STOPPING = "{name: EarlyStopping, monitor: validation/loss, patience: 0, min_delta: 1.0e+9}"
SAVING = "{name: ModelCheckpoint, monitor: validation/loss, save_top_k: -1, filename: '{step}', dirpath: DIR}"
VALIDATED = [*QUADRATIC, "--rounds", "40", "--trainer.val_check_interval", "5"]


@pytest.mark.parametrize(("at", "code"), [(5, 143), (10, 0)], ids=["first validation", "the one that ends it"])
def test_a_signal_in_the_round_of_a_validation_changes_nothing(here, monkeypatch, at, code):
    training_step = OnlineBilevelModule.training_step

    def step(self, *arguments):
        outputs = training_step(self, *arguments)
        if self.trainer.global_step == at:
            signal.raise_signal(signal.SIGTERM)
        return outputs

    runs, saved = [], []
    for name in ("whole", "stopped"):
        callbacks = f"[{STOPPING}, {SAVING.replace('DIR', name)}]"
        flags = [*VALIDATED, "--checkpoint.every", "3", "--trainer.callbacks", callbacks, "--output", f"out-{name}"]
        with monkeypatch.context() as patch:
            if name == "stopped":
                patch.setattr(OnlineBilevelModule, "training_step", step)
            assert cli.main(["fit", *flags]) == (code if name == "stopped" else 0)
        (path,) = Path(f"out-{name}").glob("*/*")
        runs.append(RunDirectory(path))
        if name == "stopped" and code:
            assert resume(runs[-1], "--trust") == 0  # its callback writes outside of the run
        saved.append(sorted(path.name for path in Path(name).glob("*.ckpt")))
    assert runs[0].metrics.read_bytes() == runs[1].metrics.read_bytes()
    assert saved[0] == saved[1] == ["step=10.ckpt", "step=5.ckpt"]


def test_a_run_that_a_callback_ended_stays_ended_where_its_summary_is_lost():
    run = fit(*VALIDATED, "--trainer.callbacks", STOPPING)
    rows = run.metrics.read_bytes()
    run.summary.unlink()
    assert resume(run) == 0
    assert run.metrics.read_bytes() == rows


def test_a_file_of_a_model_checkpoint_continues_a_run():
    saves = "{name: ModelCheckpoint, every_n_train_steps: 13, save_top_k: -1, filename: '{step}'}"
    run = fit(
        *VALIDATED, "--trainer.callbacks", saves, "--trainer.val_check_interval", "20", "--checkpoint.every", "20"
    )
    assert (run.checkpoints / "round-00000020.ckpt").is_file()  # after the validation that was due then
    whole = run.metrics.read_bytes()
    run.summary.unlink()
    (file,) = run.path.rglob("step=13.ckpt")
    assert resume(run, "--checkpoint", file) == 0
    assert run.metrics.read_bytes() == whole


# More rounds.


@pytest.mark.parametrize("algorithm", SIX)
def test_nine_rounds_and_nine_more_are_eighteen(algorithm, monkeypatch):
    drawn = []
    monkeypatch.setattr(run_file, "draw_figures", lambda *arguments: drawn.append(arguments) or [])
    whole = fit(*QUADRATIC, "--algorithm", algorithm, name="whole")
    run = fit(*QUADRATIC, "--algorithm", algorithm, rounds=9)
    assert len(read_table(run.metrics)) == 9
    assert resume(run, "--rounds", 18) == 0
    require_equal(run, whole)
    require_same_values(*(without_seconds(list_checkpoints(one.checkpoints)[0]) for one in (run, whole)))  # round 14
    assert [(figures, len(rounds["loss"])) for figures, rounds, *_ in drawn] == [
        (whole.figures, 18), (run.figures, 9), (run.figures, 18),
    ]  # fmt: skip


@pytest.mark.parametrize("split", ["test", "validation", "both"])
def test_extending_a_run_discards_its_final_evaluation(split):
    flags = [*QUADRATIC, "--evaluation.split", split]
    whole, run = fit(*flags, rounds=12, name="whole"), fit(*flags, rounds=10)
    column = "validation/loss" if split == "validation" else "test_loss"
    assert [row["round"] for row in read_table(run.metrics) if row[column]] == ["8", "10"]
    assert resume(run, "--rounds", 12) == 0
    assert [row["round"] for row in read_table(run.metrics) if row[column]] == ["8", "12"]
    require_equal(run, whole)
    assert (read_summary(run)["test_loss"] is None) == (split == "validation")


def test_an_extension_that_was_killed_is_resumed_or_has_changed_nothing(monkeypatch):
    whole, run = fit(*QUADRATIC, rounds=20, name="whole"), fit(*QUADRATIC, rounds=10)
    before = run.metrics.read_bytes(), read_summary(run)

    with monkeypatch.context() as patch:  # before its configuration is written
        patch.setattr("obbo_lightning.training.run_writer.write_atomically", Mock(side_effect=Crash.Error))
        with pytest.raises(Crash.Error):
            resume(run, "--rounds", 20)
    assert resume(run) == 0
    assert (run.metrics.read_bytes(), read_summary(run)) == before
    with monkeypatch.context() as patch:
        patch.setattr(run_file.RoundProgress, "on_train_batch_end", Crash(13).on_train_batch_end)
        with pytest.raises(Crash.Error):
            resume(run, "--rounds", 20)
    assert not run.finished
    assert resume(run) == 0
    require_equal(run, whole)


def test_an_impossible_continuation_is_one_line_and_changes_nothing(capsys):
    run = fit(*QUADRATIC, rounds=10)
    before = read_files(run)
    assert resume(run, "--rounds", 10) == 0
    assert "has its 10 rounds already" in capsys.readouterr().out
    for flags, message in {
        ("--rounds", 9): "rounds must be more than the 10 finished ones, got 9",
        ("--rounds", 2_000_000): "rounds must be at most the stream's 1000000 tasks, 1 per round, got 2000000",
        (): "--rounds N runs more rounds",
        ("--data", "synthetic"): "data must stay quadratic when a run is continued, got 'synthetic'",
        ("--rounds", 12, "--devices", 2): "tasks_per_round must be a multiple of the 2 processes, got 1",
    }.items():
        assert resume(run, *flags) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    after = read_files(run)
    changed = {path.name for path in after if before.get(path) != after[path]} - {"status.json"}
    assert not changed


def test_an_unfinished_run_may_have_fewer_rounds_than_planned_but_more_than_finished(capsys):
    run = fit(*QUADRATIC, rounds=20)
    before = run.metrics.read_text().splitlines()
    run.summary.unlink()  # as if it had been stopped in round 14
    (run.checkpoints / "round-00000020.ckpt").unlink()
    assert resume(run, "--rounds", 14) == 2
    assert "rounds must be more than the 14 finished ones, got 14" in capsys.readouterr().err
    assert resume(run, "--rounds", 17) == 0
    assert read_summary(run)["rounds"] == 17
    assert run.metrics.read_text().splitlines()[:17] == before[:17]


@pytest.mark.parametrize(
    ("finished", "ended", "done", "limit", "interval", "asked", "message"),
    [
        (True, False, 10, None, None, None, "here is finished"),
        (True, False, 6, 6, None, None, "here is finished"),
        (True, False, 10, 20, None, None, "here is finished"),
        (True, False, 10, -1, None, None, "here is finished"),
        (True, True, 7, None, None, None, "here is finished"),
        (True, False, 7, None, None, None, None),  # its tasks ended before its rounds
        (True, False, 5, 6, None, None, None),
        (False, False, 10, None, None, None, None),
        (False, True, 7, None, None, None, None),
        (True, False, 10, None, None, 20, None),
        (True, False, 10, -1, 5, 20, None),
        (True, False, 10, 20, 1.0, 20, None),
        (False, False, 10, None, None, 10, None),  # killed between its last checkpoint and its summary
        (False, False, 6, None, 0.5, 10, None),
        (True, True, 7, None, None, 20, "a callback or a limit of its trainer ended it after round 7"),
        (True, False, 10, 19, None, 20, "rounds must be at most trainer.max_steps of the run, 19, got 20"),
        (True, False, 10, None, 0.5, 20, "rounds must stay 10, of which trainer.val_check_interval is a fraction"),
        (True, False, 10, None, None, 9, "rounds must be more than the 10 finished ones, got 9"),
        (False, False, 8, None, None, 8, "rounds must be more than the 8 finished ones, got 8"),
    ],
)
def test_a_run_of_ten_rounds_continues_where_it_would_have_had_them(
    finished, ended, done, limit, interval, asked, message
):
    run = SimpleNamespace(finished=finished, path="here", summary=SimpleNamespace(name="summary.json"))
    config = {"rounds": 10, "trainer": {"max_steps": limit, "val_check_interval": interval}}
    with contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message):
        assert require_rounds(run, config, done, ended, asked) == (asked or 10)


def test_only_devices_data_and_rounds_are_changed(monkeypatch, capsys):
    run, built = fit(*QUADRATIC, rounds=4), []

    def build(config):
        built.append(config)
        raise ValueError("enough")

    monkeypatch.setattr("obbo_lightning.training.resume.build", build)
    assert resume(run, "--rounds", 5) == resume(run, "--rounds", 5, "--devices", 2, "--data.drift", 0.5) == 2
    plain, changed = built
    assert plain == complete_config(read_config(run)) | {"rounds": 5}
    assert (changed["trainer"].pop("devices"), changed["data"].pop("drift")) == (2, 0.5)
    plain["trainer"].pop("devices"), plain["data"].pop("drift")
    assert changed == plain


# Data that have grown.

MARKET = ["--config", "market", "--data.events", "events.csv", "--data.subset", "20", "--data.subsets", "6"]
MARKET += ["--data.horizon", "4", "--evaluation.every", "4", "--checkpoint.every", "5", "--trainer.accelerator", "cpu"]


@pytest.fixture
def prices(here):
    """Write prices of three events, each with 26 bars up to it and 12 after it; prices.csv ends four bars after it."""
    table, events = simulate_market(3, 26, 12, seed=1)
    events.drop("row").write_csv("events.csv")
    table = table.drop("row")
    table.filter(pl.int_range(pl.len()).over("ticker") < 30).write_csv("prices.csv")
    table.write_csv("grown.csv")
    return table


@pytest.mark.filterwarnings("ignore:the test tasks are others")
def test_new_bars_extend_the_stream_of_every_event(prices, capsys):
    run = fit(*MARKET, "--data.prices", "prices.csv", rounds=6)
    assert resume(run, "--rounds", 10) == 2  # its next bars are those that it forecasts
    assert "rounds must be at most the stream's 6 tasks" in capsys.readouterr().err
    more = ["--data.prices", "grown.csv", "--data.beyond", "8", "--rounds", "14"]
    assert resume(run, *more) == 0
    whole = fit(*MARKET, *more, name="whole")
    rows, others = (read_table(one.metrics) for one in (run, whole))
    assert rows[8:] == others[8:]
    for row, other in zip(rows[:8], others, strict=False):  # earlier tests were on the bars that followed then
        assert {k: v for k, v in row.items() if "test" not in k} == {k: v for k, v in other.items() if "test" not in k}
    assert read_summary(run) == read_summary(whole)
    assert run.events.read_bytes() == whole.events.read_bytes()


@pytest.mark.parametrize(
    ("ticker", "bar", "where"),
    [("SIM001", 23, "bar 24 of every event, in round 5"), ("SIM002", 3, "one of the first 20 bars of an event")],
)
def test_a_changed_price_of_a_finished_round_is_named(prices, ticker, bar, where, capsys):
    run = fit(*MARKET, "--data.prices", "prices.csv", rounds=6)
    before = read_files(run)
    changed = pl.when((pl.col("ticker") == ticker) & (pl.int_range(pl.len()).over("ticker") == bar)).then(1.01)
    prices.with_columns(pl.col("close") * changed.otherwise(1.0)).write_csv("changed.csv")
    assert resume(run, "--data.prices", "changed.csv", "--data.beyond", "8", "--rounds", "14") == 2
    error = capsys.readouterr().err
    assert f"data must begin with those of {run.path}, but they differ from {where}" in error
    assert f"'{ticker} 2021-01-05 10:30:00' has changed" in error
    assert error.count("\n") == 1
    assert read_files(run) == before


FORGETTING = ["--config", "forgetting", "--data.block", "6", "--data.past", "4", "--checkpoint.every", "4"]
FORGETTING += ["--trainer.accelerator", "cpu", "--data.csv", "rows.csv", "--data.target", "y"]


def write_rows(count, changed=None):
    """Write a table whose truth changes its sign after 60 rows."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 2))
    truth = np.where(np.arange(200) < 60, 1.0, -1.0)
    y = truth * x[:, 0] + 0.3 * rng.normal(size=200) > 0
    table = pl.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": np.where(y, "up", "down")})[:count]
    if changed is not None:
        table = table.with_columns(a=pl.when(pl.int_range(count) == changed).then(9.0).otherwise(pl.col("a")))
    table.write_csv("rows.csv")


def test_a_run_on_a_table_continues_with_new_rows(capsys):
    write_rows(72)
    run = fit(*FORGETTING, rounds=8)
    assert resume(run, "--rounds", "20") == 2
    assert "rounds must be at most the stream's 8 tasks, 1 per round, got 20: use --rounds 8" in capsys.readouterr().err
    write_rows(150)
    assert resume(run, "--rounds", "20") == 0
    whole = fit(*FORGETTING, rounds=20, name="whole")
    require_equal(run, whole)
    for name in ("outer.csv", "baselines.csv"):
        assert (run.path / name).read_bytes() == (whole.path / name).read_bytes()
    outer = read_table(run.outer)
    assert list(outer[0]) == ["round", *(f"past[{age}]" for age in range(4))]
    weights = [[float(row[f"past[{age}]"]) for age in range(4)] for row in outer]
    assert np.allclose(np.sum(weights, axis=1), 1.0)
    assert weights[-1][0] > weights[-1][2] > weights[-1][3]  # after the change the newest blocks are right first


@pytest.mark.parametrize(("row", "where"), [(3, "rows 1 to 30, in round 1"), (40, "rows 37 to 42, in round 3")])
def test_changed_rows_of_finished_rounds_are_named(row, where, capsys):
    write_rows(72)
    run = fit(*FORGETTING, rounds=8)
    write_rows(72, changed=row)
    assert resume(run, "--data.csv", "rows.csv", "--rounds", "8") == 0  # it has them already
    write_rows(150, changed=row)
    assert resume(run, "--rounds", "20") == 2
    error = capsys.readouterr().err
    assert f"but they differ from {where} on" in error
    assert "'b'" not in error  # all columns have grown, which does not tell which of them has another past
    assert error.count("\n") == 1
