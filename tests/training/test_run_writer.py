"""RunWriter: evaluations, rows, provenance and checkpoints of a run, in this order."""

import signal
from types import SimpleNamespace
from unittest.mock import Mock

import lightning as L
import numpy as np
import polars as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from small_runs import QUIET, Shrinkage, read_table
from toy import F64, Nonlinear, toy_point, toy_task

from obbo_lightning import (
    OBBO,
    ExactCheckpoints,
    OnlineBilevelModule,
    OnSimplex,
    ParameterGroups,
    Stream,
    StreamDataModule,
    Tasks,
)
from obbo_lightning.core.memory import InnerState
from obbo_lightning.hypergradients import FixedPoint
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.runs.provenance import list_checkpoints, read_provenance
from obbo_lightning.runs.status import RunStatus, describe_run
from obbo_lightning.runs.table import RoundTable
from obbo_lightning.solvers import GradientDescent
from obbo_lightning.streams.fingerprints import fingerprint_of
from obbo_lightning.training import run_writer
from obbo_lightning.training.evaluation import evaluate
from obbo_lightning.training.run_writer import RunWriter
from obbo_lightning.training.signals import Stopped

ALGORITHM = OBBO(lr=0.05, window=2, inner=GradientDescent(steps=3, lr=0.2), hypergradient=FixedPoint(3, lr=0.2))


class Toy(Stream):
    """Toy tasks, by their seeds."""

    problem_type = Nonlinear

    def __init__(self):
        self.train = Tasks(lambda t: toy_task(lanes=1, seed=t), 50)

    def start(self, problem, seed):
        return toy_point(1)


def make_writer(folder, test=(), rounds=None, validation=(), every=100, saves=2, stream=None):
    folder.mkdir(exist_ok=True)
    stream = Toy() if stream is None else stream
    data = StreamDataModule(stream, rounds, test=test, record_fingerprints=True)
    config = {"evaluation": {"every": every}, "checkpoint": {"every": saves}, "threads": 1, "rounds": rounds}
    return RunWriter(RunDirectory(folder), config, stream, data, validation, RunStatus())


def train(writer, checkpoint=None, callbacks=(), problem=None, algorithm=ALGORITHM, **options):
    """Run the stream of a writer; return the module."""
    outer = toy_point(1) if problem is None else problem.groups.start(dtype=F64)
    module = OnlineBilevelModule(problem or Nonlinear(), algorithm, outer)
    usual = {**QUIET, "enable_checkpointing": True, "plugins": [ExactCheckpoints()]}
    usual |= {"limit_val_batches": 0, "num_sanity_val_steps": 0}
    trainer = L.Trainer(**{**usual, **options}, callbacks=[*callbacks, writer], default_root_dir=writer.run.path)
    with writer.status.own(writer.run):
        trainer.fit(module, writer.data, ckpt_path=checkpoint)
    return module


def saved_rounds(folder):
    return [int(path.stem.removeprefix("round-")) for path in list_checkpoints(folder / "checkpoints")]


def newest(folder):
    return list_checkpoints(folder / "checkpoints")[-1]


def losses(outer, tasks, start):
    return {"loss": [float(evaluate(Nonlinear(), ALGORITHM, outer, task, start)["loss"]) for task in tasks]}


class EndAfter(L.Callback):
    """Ends a run after a round, as EarlyStopping does; never where this is None."""

    def __init__(self, rounds):
        self.rounds = rounds

    def on_train_batch_end(self, trainer, *arguments):
        trainer.should_stop = trainer.global_step == self.rounds


@pytest.mark.parametrize(("ended", "evaluated"), [(None, [3, 6, 7]), (5, [3, 5]), (6, [3, 6])])
def test_rows_evaluations_and_checkpoints_come_when_they_are_due_and_at_the_end(ended, evaluated, tmp_path):
    test, finished = [toy_task(lanes=1, seed=100)], ended or 7
    writer = make_writer(tmp_path, test, every=3, rounds=7)
    module = train(writer, callbacks=[EndAfter(ended)])
    rows, timings = read_table(tmp_path / "metrics.csv"), read_table(tmp_path / "timings.csv")
    assert [int(row["round"]) for row in rows] == [int(row["round"]) for row in timings] == [*range(1, finished + 1)]
    assert [int(row["round"]) for row in rows if row["test_loss"]] == evaluated
    assert [int(row["round"]) for row in timings if row["evaluation_seconds"]] == evaluated
    last = losses(module.outer.detach(), test, module.states[0])
    assert {"loss": [float(rows[-1]["test_loss"])]} == writer.latest == last
    assert writer.initial == losses(toy_point(1), test, InnerState())
    assert saved_rounds(tmp_path) == sorted({*range(2, finished + 1, 2), finished})[-2:]
    content = torch.load(newest(tmp_path), weights_only=True)
    assert content["ended"] == (ended is not None)
    assert content["provenance"] == read_provenance(writer.run)._asdict()
    state = content["callbacks"]["RunWriter"]
    due = [float(row["test_loss"]) for row in rows if row["test_loss"] and int(row["round"]) % 3 == 0][-1]
    assert state["last_due"] == {"loss": [due]}
    spent = sum(int(row["gradients"]) + int(row["products"]) for row in rows)
    assert state["evaluations"] == writer.evaluations == spent


def test_every_rows_tables_and_provenance_are_complete_before_their_checkpoint(tmp_path, monkeypatch):
    events, sync, save = [], RoundTable.sync, run_writer.save_checkpoint

    def saved(trainer, folder):
        save(trainer, folder)
        events.append(f"saved {trainer.global_step}")

    monkeypatch.setattr(RoundTable, "sync", lambda table: (events.append(table.path.name), sync(table)))
    monkeypatch.setattr(run_writer, "save_checkpoint", saved)
    users = L.Callback()
    users.on_train_batch_end = lambda trainer, *arguments: events.append(f"user {trainer.global_step}")
    writer = make_writer(tmp_path, rounds=2)
    train(writer, callbacks=[users])
    assert events == ["user 1", "user 2", "timings.csv", "metrics.csv", "fingerprints.csv", "saved 2"]
    marks = torch.load(newest(tmp_path), weights_only=True)["provenance"]["tables"]
    assert marks == {table.path.name: table.mark() for table in writer.tables}
    assert set(marks) == {"metrics.csv", "fingerprints.csv"}  # no two runs have the same timings
    expected = [fingerprint_of(toy_task(lanes=1, seed=t)) for t in range(2)]
    assert [row["tasks"] for row in read_table(tmp_path / "fingerprints.csv")] == expected


def test_a_run_that_continues_from_an_older_checkpoint_forgets_the_marks_of_dropped_rows(tmp_path):
    train(make_writer(tmp_path, rounds=4))
    older, _ = list_checkpoints(tmp_path / "checkpoints")
    known, look = [], L.Callback()
    look.on_train_batch_start = lambda *arguments: known.append(read_provenance(RunDirectory(tmp_path)))
    train(make_writer(tmp_path, rounds=4), older, callbacks=[look])
    assert (known[0].rounds, known[0].tables) == (2, {})
    assert read_provenance(RunDirectory(tmp_path)).tables["metrics.csv"]["rows"] == 4


@pytest.mark.filterwarnings("ignore:the test tasks are others than before round 4")
def test_on_other_test_tasks_the_first_outer_variable_is_evaluated_again(tmp_path):
    before, now = ([toy_task(lanes=1, seed=s) for s in seeds] for seeds in ((100, 101), (200, 201, 202)))
    first, second, third = (make_writer(tmp_path, *given) for given in ((before, 4), (now, 6), (now, 8)))
    train(first)
    assert first.initial == losses(toy_point(1), before, InnerState())
    module = train(second, newest(tmp_path))
    assert second.initial == losses(toy_point(1), now, InnerState())
    assert second.latest == losses(module.outer.detach(), now, module.states[0])
    assert second.latest != losses(module.outer.detach(), now, InnerState())
    train(third, newest(tmp_path))
    assert third.initial == second.initial


class Wide(Shrinkage):
    """Has a λ of any size on a simplex."""

    def __init__(self, size):
        self.groups = ParameterGroups(x=OnSimplex(size))


@pytest.mark.parametrize(("size", "rounds", "more"), [(100, [*range(1, 8)], [8, 9]), (101, [3, 6], [9])])
def test_many_coordinates_are_written_with_the_evaluations_only(size, rounds, more, tmp_path):
    stream = Toy()
    stream.train = Tasks(lambda t: {"x": toy_point(1), "y": toy_point(1, seed=t)}, 50)
    module = train(make_writer(tmp_path, every=3, rounds=7, stream=stream), problem=Wide(size))
    rows = read_table(tmp_path / "outer.csv")
    assert [int(row["round"]) for row in rows] == rounds
    assert list(rows[0]) == ["round", *(f"x[{i}]" for i in range(size))]
    if size == 100:
        assert [float(rows[-1][f"x[{i}]"]) for i in range(size)] == module.outer.detach()[0].tolist()
    train(make_writer(tmp_path, every=3, rounds=9, stream=stream), newest(tmp_path), problem=Wide(size))
    assert [int(row["round"]) for row in read_table(tmp_path / "outer.csv")] == [*rounds, *more]


def raise_signal(signum, at):
    """Return a callback that gets a signal in the round after ``at`` finished ones."""
    callback = L.Callback()
    callback.on_train_batch_start = lambda trainer, *rest: trainer.global_step == at and signal.raise_signal(signum)
    return callback


def test_a_signal_in_a_round_ends_the_run_after_it_with_a_checkpoint(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    writer = make_writer(tmp_path, saves=100, rounds=7)
    with pytest.raises(Stopped, match="stopped by SIGINT after round 3"):
        train(writer, callbacks=[raise_signal(signal.SIGINT, 2)])
    assert signal.getsignal(signal.SIGINT) is before
    assert saved_rounds(tmp_path) == [3]
    assert len(read_table(tmp_path / "metrics.csv")) == 3
    assert "  stopped by SIGINT after round 3  round 3 of 7  " in describe_run(writer.run)


@pytest.mark.parametrize("signalled", [None, signal.SIGTERM])
@pytest.mark.parametrize("ended", [None, 5])
def test_a_signal_in_the_last_round_changes_nothing(ended, signalled, tmp_path):
    """A run without test tasks is saved at the same rounds as one with them."""
    writer, last = make_writer(tmp_path, every=3, rounds=7), ended or 7
    callbacks = [raise_signal(signalled, last - 1)] if signalled else []
    train(writer, callbacks=[*callbacks, EndAfter(ended)])
    assert saved_rounds(tmp_path) == [last - 1, last]
    assert writer.last_row["round"] == last
    assert writer.latest == {"loss": []}


@pytest.mark.parametrize("finished", [0, 3])
def test_a_signal_while_a_run_waits_for_a_task_saves_the_finished_rounds(finished, tmp_path):
    def wait():
        yield from (toy_task(lanes=1, seed=t) for t in range(finished))
        lines.append(describe_run(writer.run))
        signal.raise_signal(signal.SIGTERM)
        yield toy_task(lanes=1)

    lines, stream = [], Toy()
    stream.train = wait()
    writer = make_writer(tmp_path, saves=100, rounds=9, stream=stream)
    with pytest.raises(Stopped, match=f"stopped by SIGTERM after round {finished}"):
        train(writer)
    assert saved_rounds(tmp_path) == ([3] if finished else [])
    if finished:
        assert "  waiting for the next task  round 3 of 9  " in lines[0]


@pytest.mark.parametrize(("method", "finished"), [("_show_test_score", 0), ("_write_row", 1)])
def test_a_signal_just_before_a_run_waits_is_not_lost(method, finished, tmp_path, monkeypatch):
    stream = Toy()
    stream.train = iter([toy_task(lanes=1, seed=t) for t in range(9)])
    writer = make_writer(tmp_path, saves=100, rounds=9, stream=stream)
    monkeypatch.setattr(RunWriter, method, lambda *arguments: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Stopped, match=f"stopped by SIGTERM after round {finished}"):
        train(writer)
    assert saved_rounds(tmp_path) == [1] * finished


def test_the_signal_of_another_process_ends_this_one_too(tmp_path, monkeypatch):
    monkeypatch.setattr("obbo_lightning.training.distributed.Processes.largest", lambda *arguments: signal.SIGTERM)
    writer = make_writer(tmp_path, rounds=7)
    with pytest.raises(Stopped, match="stopped by SIGTERM after round 1"):
        train(writer)
    assert writer._signals.rounds == 1  # what a second signal would name


def test_another_exception_is_in_the_status_and_closes_the_tables(tmp_path):
    broken = L.Callback()
    broken.on_train_batch_start = lambda trainer, *rest: 1 / (2 - trainer.global_step)
    writer = make_writer(tmp_path, rounds=7)
    with pytest.raises(ZeroDivisionError):
        train(writer, callbacks=[broken])
    assert "  stopped by ZeroDivisionError: division by zero  round 2 of 7" in describe_run(writer.run)
    assert all(table._file is None for table in (writer.timings, *writer.tables))


@pytest.mark.parametrize(
    ("saves", "tasks", "order"), [(2, 1, "V S2 V S4 S5"), (3, 1, "V S3 V S5"), (4, 1, "V V S4 S5"), (2, 0, "S2 S4 S5")]
)
def test_a_checkpoint_waits_for_the_validation_of_its_round(saves, tasks, order, tmp_path, monkeypatch):
    """A callback that monitors the validation must be saved after it."""
    events = []
    monkeypatch.setattr(run_writer, "save_checkpoint", lambda trainer, _: events.append(f"S{trainer.global_step}"))
    monitor = L.Callback()
    monitor.on_validation_end = lambda *arguments: events.append("V")
    writer = make_writer(tmp_path, saves=saves, rounds=5)
    writer.data.validation = [toy_task(lanes=1, seed=50)] * tasks
    train(writer, callbacks=[monitor], limit_val_batches=1.0, val_check_interval=2)
    assert " ".join(events) == order


def test_loggers_get_each_round_in_one_call_with_its_evaluation_and_what_was_spent(tmp_path):
    logs = [CSVLogger(tmp_path / name) for name in "ab"]
    for log in logs:
        log.log_metrics = Mock()
    writer = make_writer(tmp_path, [toy_task(lanes=1)], 5, [toy_task(lanes=1, seed=9)], every=3)
    train(writer, logger=logs, log_every_n_steps=2)
    first, second = (log.log_metrics.call_args_list for log in logs)
    assert first == second
    calls = [(call.kwargs["step"], *call.args) for call in first]
    assert [step for step, _ in calls] == [2, 3, 4, 5]  # evaluations are logged in any case
    rows = read_table(tmp_path / "metrics.csv")
    for step, metrics in calls:
        row = {name: float(value) for name, value in rows[step - 1].items() if value}
        assert row.items() <= metrics.items()
        spent = sum(int(one["gradients"]) + int(one["products"]) for one in rows[:step])
        assert metrics["evaluations"] == spent
        assert metrics["seconds"] > 0
        assert {"test_loss", "validation/loss"} <= metrics.keys() if step in (3, 5) else "test_loss" not in metrics


@pytest.mark.parametrize(("size", "names"), [(2, ["hyper/x[0]", "hyper/x[1]"]), (101, [])])
def test_loggers_get_the_values_of_named_groups_as_they_change(size, names, tmp_path):
    log, other = CSVLogger(tmp_path / "log"), CSVLogger(tmp_path / "other")
    log.log_metrics, other.log_metrics = Mock(), Mock()
    stream = Toy()
    stream.train = Tasks(lambda t: {"x": toy_point(1), "y": toy_point(1, seed=t)}, 50)
    options = {"algorithm": OBBO(inner=ALGORITHM.inner), "logger": [log, other], "log_every_n_steps": 1}
    train(make_writer(tmp_path, rounds=3, stream=stream), problem=Wide(size), **options)
    assert log.log_metrics.call_args_list == other.log_metrics.call_args_list
    logged = [call.args[0] for call in log.log_metrics.call_args_list]
    assert [[name for name in one if name.startswith("hyper/")] for one in logged] == [names] * 3
    assert all({"lr/x", "scale/x", "agreement/x", "held_out_gain/x"} <= one.keys() for one in logged)
    if names:
        rows = read_table(tmp_path / "outer.csv")
        values = [[float(row[name.removeprefix("hyper/")]) for name in names] for row in rows]
        assert [[one[name] for name in names] for one in logged] == values
        assert values[0] != values[-1]


def test_another_process_than_the_first_writes_nothing_and_knows_the_path_and_the_last_row(tmp_path, monkeypatch):
    monkeypatch.setattr(L.Trainer, "is_global_zero", False)
    saved, answers = [], {str(tmp_path / "mine"): str(tmp_path / "theirs"), "{}": {"round": "0"}}
    monkeypatch.setattr(SingleDeviceStrategy, "broadcast", lambda _, value, src=0: answers.get(str(value), value))
    monkeypatch.setattr(run_writer, "save_checkpoint", lambda trainer, folder: saved.append(folder))
    writer = make_writer(tmp_path / "mine", [toy_task(lanes=1)], rounds=2)
    train(writer)
    assert writer.run.path == tmp_path / "theirs"
    assert [path.name for path in (tmp_path / "mine").iterdir() if path.suffix != ".json"] == [".lock"]
    assert writer.evaluations > 0
    assert saved == [tmp_path / "theirs" / "checkpoints"]


def lanes_writer(folder, test=()):
    """Return a writer of a run whose three lanes have names."""
    stream = Toy()
    stream.lanes = pl.DataFrame({"ticker": ["=a", "b", "c"]})
    return make_writer(folder, test, stream=stream)


def add_rounds(writer, rounds):
    for t in rounds:
        finished = SimpleNamespace(
            evaluations={},
            hypergradient=torch.tensor([[3.0, 4.0], [0.0, float(t)], [1.0, 0.0]]),
            regret={"euclidean": torch.tensor([1.0, 2.0, 3.0]) * t},
        )
        writer._write_row(SimpleNamespace(global_step=t, is_global_zero=False), finished)


@pytest.mark.parametrize(("last", "kept"), [(250, [100, 200, 250]), (200, [100, 200]), (130, [100, 130])])
def test_regrets_of_lanes_are_kept_every_100_rounds_and_at_the_end_also_after_a_resume(last, kept, tmp_path):
    first, second = (lanes_writer(tmp_path, [toy_task(lanes=1)]) for _ in range(2))
    first.seconds = 1000.0
    add_rounds(first, range(1, 131))
    second.load_state_dict(first.state_dict())
    assert 1000 <= second.seconds <= second.elapsed()
    add_rounds(second, range(131, last + 1))
    second.latest = {"loss": [0.5, 0.25, 0.125, 0.0, 0.75, 0.375]}  # of two tasks
    second.write_closing_files(torch.zeros(3, 2))
    with np.load(tmp_path / "lanes.npz") as arrays:
        assert arrays["rounds"].tolist() == kept
        assert arrays["regret"].tolist() == [[t, 2 * t, 3 * t] for t in kept]
    events = pl.read_csv(tmp_path / "events.csv")
    assert events["ticker"].to_list() == ["'=a", "b", "c"]  # no formula
    assert events.columns == ["ticker", "regret", "gradient_norm", "test_loss"]  # λ has two numbers per lane
    assert events["regret"].to_list() == [last, 2.0 * last, 3.0 * last]
    assert events["gradient_norm"].to_list() == [5.0, last, 1.0]
    assert events["test_loss"].to_list() == [0.25, 0.5, 0.25]


def test_a_lane_of_one_number_has_its_weight(tmp_path):
    writer = lanes_writer(tmp_path)
    add_rounds(writer, [1])
    writer.latest = {"loss": []}
    writer.write_closing_files(torch.tensor([[1.0], [2.0], [3.0]]))
    events = pl.read_csv(tmp_path / "events.csv")
    assert events.columns == ["ticker", "weight", "regret", "gradient_norm"]  # no test tasks
    assert events["weight"].to_list() == [1.0, 2.0, 3.0]
