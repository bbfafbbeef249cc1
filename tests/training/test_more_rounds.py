"""More rounds than were asked for at first, and data that have grown."""

import json
from functools import cache

import lightning as L
import pytest
import yaml
from toy import SIX

from obbo_lightning import cli
from obbo_lightning.config.parse import complete_config, parse_arguments
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.training import run as runs


class Killed(BaseException):
    """As kill -9 is: nothing catches it."""


pytestmark = pytest.mark.filterwarnings("ignore:the fixed point of the hypergradient:RuntimeWarning")

# Evaluations are not due in rounds 9 and 10, which are judged all the same where they are the last.
TINY = ["--config", "quadratic", "--evaluation.every", "8", "--evaluation.tasks", "2", "--checkpoint.every", "7"]
TINY += ["--trainer.accelerator", "cpu", "--algorithm.inner.steps", "2"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    drawn = []  # figures take longer than the runs
    monkeypatch.setattr(runs, "draw_figures", lambda *arguments: drawn.append(arguments) or [])
    return drawn


@cache
def settings_of(*flags):
    return complete_config(parse_arguments([*TINY, *flags])[0])


def fit(rounds, *flags, name="run"):
    settings = settings_of(*flags) | {"rounds": rounds}
    directory = RunDirectory.create("runs", "quadratic", name)
    runs.fit(settings, directory, quiet=True)
    return directory


def summary_of(run):
    return {key: value for key, value in json.loads(run.summary.read_text()).items() if key != "seconds"}


def assert_equal(run, other):
    assert run.metrics.read_bytes() == other.metrics.read_bytes()
    assert summary_of(run) == summary_of(other)
    assert yaml.safe_load(run.config.read_text()) == yaml.safe_load(other.config.read_text())


def resume(run, *flags):
    return cli.main(["resume", str(run.path), *map(str, flags)])


@pytest.mark.parametrize("algorithm", SIX)
def test_nine_rounds_and_nine_more_are_eighteen(algorithm, here):
    whole = fit(18, "--algorithm", algorithm, name="whole")
    run = fit(9, "--algorithm", algorithm)
    assert len(run.metrics.read_text().splitlines()) == 10
    assert resume(run, "--rounds", 18) == 0
    assert_equal(run, whole)
    assert [drawn[0] for drawn in here] == [whole.metrics, run.metrics, run.metrics]  # the figures are drawn again


def test_the_last_round_of_before_loses_the_evaluation_that_was_not_due():
    run = fit(10)
    assert json.loads(run.summary.read_text())["rounds"] == 10
    judged = [bool(line.split(",")[3]) for line in run.metrics.read_text().splitlines()[1:]]
    assert judged == [False] * 7 + [True, False, True]
    assert resume(run, "--rounds", 12) == 0
    judged = [bool(line.split(",")[3]) for line in run.metrics.read_text().splitlines()[1:]]
    assert judged == [False] * 7 + [True, False, False, False, True]


class Kill(L.Callback):
    """Ends a run without a word."""

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 13:
            raise Killed


def test_an_extension_that_was_killed_is_resumed(monkeypatch):
    whole, run = fit(20, name="whole"), fit(10)
    with monkeypatch.context() as patched:
        patched.setattr(runs.RoundProgress, "on_train_batch_end", Kill.on_train_batch_end)
        with pytest.raises(Killed):
            resume(run, "--rounds", 20)
    assert not run.finished
    assert resume(run) == 0
    assert_equal(run, whole)


@pytest.mark.filterwarnings("ignore:nothing is left to play")
def test_a_run_that_was_killed_before_its_configuration_said_more_is_what_it_was(monkeypatch):
    run = fit(10)
    before = run.metrics.read_bytes(), summary_of(run)

    def killed(*args):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("obbo_lightning.training.run.write_atomically", killed)
        with pytest.raises(Killed):
            resume(run, "--rounds", 20)
    assert resume(run) == 0
    assert (run.metrics.read_bytes(), summary_of(run)) == before


def test_what_cannot_be_played_on_is_one_line(capsys):
    run = fit(10)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    assert resume(run, "--rounds", 10) == 0
    assert "has its 10 rounds already" in capsys.readouterr().out
    for flags, said in {
        ("--rounds", 9): "rounds must be at least the 10 that were played, got 9",
        ("--rounds", 2_000_000): "rounds must be at most the stream's 1000000 tasks, 1 a round, got 2000000",
        (): "--rounds N plays more",
        ("--algorithm.lr", 1): "--data.KEY, --checkpoint and --devices, got --algorithm.lr",
        ("--data", "synthetic"): "data must stay quadratic when a run goes on, got 'synthetic'",
        ("--data.drift",): "--data.drift needs a value, got none",
        ("--rounds", "many"): "argument --rounds: invalid int value: 'many'",
    }.items():
        assert resume(run, *flags) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_what_ended_by_itself_would_have_with_more_rounds_too(capsys):
    limited = fit(10, "--trainer.max_steps", "6")
    assert resume(limited, "--rounds", 20) == 2
    assert "rounds must be at most trainer.max_steps of the run, 6, got 20" in capsys.readouterr().err
    stop = "[{name: EarlyStopping, monitor: round, mode: min, patience: 1, check_on_train_epoch_end: false}]"
    ended = fit(10, "--trainer.callbacks", stop, "--trainer.val_check_interval", "2")
    assert summary_of(ended)["rounds"] < 10
    assert resume(ended, "--rounds", 20) == 2
    assert "a callback or a limit of its trainer ended it after round" in capsys.readouterr().err


def test_a_run_with_fewer_rounds_than_it_was_to_have(capsys):
    run = fit(20)
    before = run.metrics.read_text().splitlines()
    run.summary.unlink()  # as if it had been stopped in round 14
    (run.checkpoints / "round-00000020.ckpt").unlink()
    assert resume(run, "--rounds", 14) == 2
    assert "rounds must be more than the 14 that were played, or 20, got 14" in capsys.readouterr().err
    assert resume(run, "--rounds", 17) == 0
    assert summary_of(run)["rounds"] == 17
    assert run.metrics.read_text().splitlines()[:17] == before[:17]
