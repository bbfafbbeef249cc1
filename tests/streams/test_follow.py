"""Streams that are still being written."""

import json
import os
import random
import signal
import sys
import time
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import torch
from processes import Forked

from obbo_lightning import cli
from obbo_lightning.streams.arriving import arrivals, follow
from obbo_lightning.streams.arriving.follow import Following, FollowStream
from obbo_lightning.streams.arriving.task_files import DamagedTaskError
from obbo_lightning.training import run as runs


class Killed(BaseException):
    """As kill -9 is: nothing catches it."""


FLAGS = ["fit", "--data", "follow", "--problem", "few_shot", "--problem.network", "mlp", "--evaluation.every", "4"]
FLAGS += ["--problem.network.widths", "[4]", "--checkpoint.every", "3", "--trainer.accelerator", "cpu"]
FLAGS += ["--algorithm.inner.steps", "1"]


def task(t):
    rng = np.random.default_rng(t)
    labels = np.repeat([0, 1], 2)
    draw = lambda: rng.normal(size=(4, 3)) + labels[:, None]  # noqa: E731
    return {"support": draw(), "support_labels": labels, "query": draw(), "query_labels": labels}


def line(t):
    return json.dumps({name: values.tolist() for name, values in task(t).items()}) + "\n"


def write(folder, *numbers):
    folder.mkdir(exist_ok=True)
    for t in numbers:
        np.savez(folder / f".{t:04d}.npz", **task(t))
        (folder / f".{t:04d}.npz").rename(folder / f"{t:04d}.npz")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "draw_figures", lambda *arguments: [])
    monkeypatch.setattr(follow, "POLL", 0.001)
    return tmp_path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """metrics.csv of ten tasks that were there at once."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write(folder / "tasks", *range(10))
    assert cli.main([*FLAGS, "--data.path", str(folder / "tasks"), "--rounds", "10", "--output", str(folder)]) == 0
    return only_run(folder).joinpath("metrics.csv").read_bytes()


def only_run(folder):
    (run,) = (path.parent for path in Path(folder).glob("*/*/config.yaml"))
    return run


def following(path, few_shot=True, timeout=0.01):
    stream = FollowStream(str(path), timeout)
    stream.train.few_shot = few_shot
    return stream.train


def test_files_are_played_in_the_order_of_their_names_whatever_holds_them(here):
    folder = here / "tasks"
    write(folder, 2)
    (folder / "0001.json").write_text(line(1))
    pl.DataFrame({name: [values.tolist()] for name, values in task(3).items()}).write_parquet(folder / "0003.parquet")
    (folder / ".0000.npz").write_bytes(b"not yet")
    (folder / "0000.npz.part").write_bytes(b"not yet")
    (folder / "notes.txt").write_text("no task")
    (here / "tasks.jsonl").write_text("".join(map(line, (1, 2, 3))))
    for path in (folder, here / "tasks.jsonl"):
        found = list(following(path))
        for t, one in enumerate(found, 1):
            assert one["support_labels"].tolist() == [0, 0, 1, 1]
            assert torch.equal(one["query"], torch.tensor(task(t)["query"]).float())
        assert len(found) == 3


def test_a_parquet_of_many_rows_has_an_array_a_column(here):
    (here / "tasks").mkdir()
    pl.DataFrame({"x": [[1.0, 2.0], [3.0, 4.0]], "y": [5, 6]}).write_parquet(here / "tasks" / "1.parquet")
    (found,) = following(here / "tasks", few_shot=False)
    assert found["x"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert found["y"].tolist() == [5, 6]


class Writer:
    """Waits by doing the next of what a producer would do."""

    def __init__(self, monkeypatch, *steps):
        self.steps = list(steps)
        for kind in (arrivals.Folder, arrivals.LinesOfAFile):
            monkeypatch.setattr(kind, "wait", self)

    def __call__(self, seconds):
        if self.steps:
            self.steps.pop(0)()


def test_what_is_half_written_is_waited_for(here, monkeypatch):
    folder, whole = here / "tasks", here / "whole"
    write(folder, 0)
    write(whole, 1)
    content = (whole / "0001.npz").read_bytes()
    half = lambda: (folder / "0001.npz").write_bytes(content[:100])  # noqa: E731
    Writer(monkeypatch, half, lambda: None, lambda: (folder / "0001.npz").write_bytes(content))
    _, second = islice(following(folder, timeout=None), 2)
    assert torch.equal(second["query"], torch.tensor(task(1)["query"]).float())
    lines = here / "tasks.jsonl"
    lines.write_text(line(0) + line(1)[:50])
    Writer(monkeypatch, lambda: lines.write_text(line(0) + line(1)[:-1]), lambda: lines.write_text(line(0) + line(1)))
    assert torch.equal(list(islice(following(lines, timeout=None), 2))[1]["query"], second["query"])


DAMAGED = {
    "names": (lambda one: one.pop("query"), "must have support, support_labels, query and query_labels, and has no"),
    "more names": (lambda one: one.update(x=[1]), "must have the arrays support, support_labels, query, query_labels"),
    "shape": (lambda one: one.update(query=[[1.0, 2.0]] * 4), "'query' must be float32 [4, 3] as in the first task"),
    "number of labels": (lambda one: one.update(query_labels=[0]), "for each of the query examples [4, 3], got int64"),
    "labels": (lambda one: one.update(support_labels=[0, 0, 2, 2]), "labels must be the classes 0, 1, …"),
    "not finite": (lambda one: one["query"][0].__setitem__(0, float("nan")), "'query' must be finite"),
    "words": (lambda one: one.update(query="five"), "'query' must be numbers, got <U4"),
    "ragged": (lambda one: one.update(query=[[1.0], [1.0, 2.0]]), "'query' must be an array, and its lists have"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_task_is_named_with_its_rule(here, kind):
    change, rule = DAMAGED[kind]
    one = json.loads(line(1))
    change(one)
    (here / "tasks.jsonl").write_text(line(0) + json.dumps(one) + "\n")
    with pytest.raises(DamagedTaskError) as damage:
        list(following(here / "tasks.jsonl"))
    assert str(damage.value).startswith(f"{here / 'tasks.jsonl'}, line 2: ")
    assert rule in str(damage.value)


def test_what_can_never_be_complete_is_damaged(here):
    write(here / "tasks", 0, 2)
    (here / "tasks" / "0001.npz").write_bytes(b"nonsense")
    with pytest.raises(DamagedTaskError, match=r"0001\.npz cannot be read as an npz file"):
        list(following(here / "tasks", timeout=None))  # there is a later one
    (here / "tasks" / "0002.npz").unlink()
    with pytest.raises(DamagedTaskError, match=r"0001\.npz cannot be read as an npz file"):
        list(following(here / "tasks"))  # it was waited for
    (here / "tasks.jsonl").write_text(line(0) + "nonsense\n")
    with pytest.raises(DamagedTaskError, match=r"tasks.jsonl, line 2: cannot be read as JSON"):
        list(following(here / "tasks.jsonl"))


def test_a_name_that_comes_too_late_and_a_file_that_shrinks_are_named(here, monkeypatch):
    write(here / "tasks", 1)
    Writer(monkeypatch, lambda: write(here / "tasks", 0))
    with pytest.raises(DamagedTaskError, match=r"0000.npz must come before 0001.npz, which was played"):
        list(following(here / "tasks", timeout=None))
    lines = here / "tasks.jsonl"
    lines.write_text(line(0))
    Writer(monkeypatch, lambda: lines.write_text("{}\n"))
    with pytest.raises(DamagedTaskError, match="must only grow"):
        list(following(lines, timeout=None))


def test_a_run_that_is_stopped_and_killed_again_and_again_is_the_undisturbed_one(
    here, undisturbed, monkeypatch, capsys
):
    """Two signals while it waits, a crash in a round, a timeout, a folder that has moved."""
    write(here / "tasks", *range(2))
    flags = [*FLAGS, "--data.path", "tasks", "--rounds", "10"]
    Writer(monkeypatch, lambda: None, lambda: signal.raise_signal(signal.SIGTERM))
    assert cli.main(flags) == 143
    assert "stopped by SIGTERM after round 2; go on with" in capsys.readouterr().err
    run = only_run("runs")
    write(here / "tasks", 2, 3)
    Writer(monkeypatch, lambda: signal.raise_signal(signal.SIGINT))
    assert cli.main(["resume", str(run)]) == 130
    write(here / "tasks", 4, 5)

    def crash(*arguments):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(runs.RoundProgress, "on_train_batch_end", crash)
        with pytest.raises(Killed):
            cli.main(["resume", str(run)])
    assert cli.main(["resume", str(run), "--data.timeout", "0.01"]) == 0
    assert json.loads((run / "summary.json").read_text())["rounds"] == 6
    write(here / "tasks", 6, 7, 8)
    (here / "tasks").rename(here / "moved")
    assert cli.main(["resume", str(run), "--data.path", "moved", "--rounds", "9"]) == 0
    write(here / "moved", 9)
    assert cli.main(["resume", str(run), "--rounds", "10"]) == 0
    assert (run / "metrics.csv").read_bytes() == undisturbed


def test_another_past_is_refused(here, capsys):
    write(here / "tasks", *range(4))
    assert cli.main([*FLAGS, "--data.path", "tasks", "--rounds", "4"]) == 0
    run = only_run("runs")
    write(here / "other", 0, 1, 9, 3, 4)
    assert cli.main(["resume", str(run), "--data.path", "other", "--rounds", "5"]) == 2
    assert "but they differ from task 3, in round 3 on" in capsys.readouterr().err
    write(here / "short", 0, 1)
    assert cli.main(["resume", str(run), "--data.path", "short", "--rounds", "5"]) == 2
    assert "data must have the 4 rounds that" in capsys.readouterr().err


def test_a_damaged_task_stops_a_run_in_one_line_and_it_goes_on_when_it_is_mended(here, undisturbed, capsys):
    write(here / "tasks", *range(10))
    whole = (here / "tasks" / "0005.npz").read_bytes()
    np.savez(here / "tasks" / "0005.npz", **{**task(5), "query": np.full((4, 3), np.nan)})
    assert cli.main([*FLAGS, "--data.path", "tasks", "--rounds", "10"]) == 2
    error = capsys.readouterr().err
    assert "tasks/0005.npz: 'query' must be finite, and has NaN or infinity; when it is mended go on with" in error
    assert error.count("\n") == 1
    (here / "tasks" / "0005.npz").write_bytes(whole)
    assert cli.main(["resume", str(only_run("runs"))]) == 0
    assert only_run("runs").joinpath("metrics.csv").read_bytes() == undisturbed


@contextmanager
def piped(monkeypatch, text):
    out, into = os.pipe()
    os.write(into, text.encode())
    os.close(into)
    with os.fdopen(out) as file, monkeypatch.context() as patched:
        patched.setattr(sys, "stdin", file)
        yield


def test_standard_input_is_played_to_its_end_and_goes_on_with_what_comes_next(here, undisturbed, monkeypatch):
    with piped(monkeypatch, "".join(map(line, range(6))) + line(6)[:20]):  # the last line never ended
        assert cli.main([*FLAGS, "--data.path", "-", "--rounds", "10"]) == 0
    run = only_run("runs")
    assert json.loads((run / "summary.json").read_text())["rounds"] == 6
    with piped(monkeypatch, "".join(map(line, range(6, 12)))):
        assert cli.main(["resume", str(run)]) == 0
    assert (run / "metrics.csv").read_bytes() == undisturbed


def test_what_cannot_be_followed_is_one_line(here, capsys):
    (here / "empty").mkdir()
    np.savez("one.npz", x=np.zeros(3))
    plain = ["fit", "--data", "follow", "--rounds", "3"]
    for flags, said in {
        (
            "--data.path",
            "nowhere",
            "--problem",
            "few_shot",
        ): "data.path must be a folder, a file of JSON lines, or -, and",
        (
            "--data.path",
            "one.npz",
            "--problem",
            "few_shot",
        ): "data.path must be a folder, a file of JSON lines, or -, and",
        ("--data.path", "empty"): "problem must be given for data follow: few_shot, or file.py:Class, got none",
        (
            "--data.path",
            "empty",
            "--data.timeout",
            "0",
            "--problem",
            "few_shot",
        ): "data.timeout must be a positive finite",
        ("--data.path", "empty", "--data.timeout", "0.01", "--problem", "few_shot"): "empty has brought none",
    }.items():
        assert cli.main([*plain, *flags]) == 2
        assert said in capsys.readouterr().err
    assert not Path("runs").exists()


OWN = """
import torch
from obbo_lightning import Problem

class Ridge(Problem):
    def initial_outer(self, seed):
        return torch.full((1, 1), 0.1, dtype=torch.float64)

    def initial_inner(self, outer, task):
        return torch.zeros(1, task["x"].shape[1], dtype=outer.dtype)

    def inner_loss(self, outer, inner, task, sample=None):
        return (inner @ task["x"].T - task["y"]).square().mean(-1) + outer[:, 0] * inner.square().sum(-1)

    def outer_loss(self, outer, inner, task, sample=None):
        return (inner @ task["x"].T - task["y"]).square().mean(-1)
"""


def test_a_problem_of_ones_own_is_followed_in_its_precision(here, capsys):
    (here / "mine.py").write_text(OWN)
    rng = np.random.default_rng(0)
    tasks = [{"x": rng.normal(size=(5, 2)).tolist(), "y": rng.normal(size=5).tolist()} for _ in range(3)]
    (here / "tasks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in tasks))
    flags = ["--data.path", "tasks.jsonl", "--problem", "mine.py:Ridge", "--algorithm.inner.start", "previous"]
    assert cli.main(["fit", "--data", "follow", *flags, "--rounds", "3", "--trainer.accelerator", "cpu"]) == 0
    assert json.loads(only_run("runs").joinpath("summary.json").read_text())["metric"] == "loss"
    assert "lower is better" in capsys.readouterr().out


def test_an_iterator_goes_on_from_its_state(here):
    write(here / "tasks", *range(3))
    (here / "tasks.jsonl").write_text("".join(map(line, range(3))))
    for path in (here / "tasks", here / "tasks.jsonl"):
        whole = list(following(path))
        iterator = iter(following(path))
        next(iterator)
        state = iterator.state_dict()
        next(iterator)
        other = iter(following(path))
        other.load_state_dict(state)
        rest = list(other)
        assert len(rest) == 2
        assert all(torch.equal(a["query"], b["query"]) for a, b in zip(rest, whole[1:], strict=True))


def rows_of(folder):
    return sum(path.read_text().count("\n") - 1 for path in folder.glob("*/*/metrics.csv"))


@pytest.mark.slow
def test_stopped_five_times_while_tasks_arrive_it_is_the_undisturbed_run(here):
    """In real processes: three of them are killed without a word."""
    rng, tasks, followed = random.Random(0), here / "tasks", here / "followed"
    write(tasks, 0)
    command = [*FLAGS, "--data.path", str(tasks), "--rounds", "60", "--output", str(followed)]
    for i, signum in enumerate((signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGKILL)):
        process = Forked(here, *command)
        write(tasks, *range(10 * i + 1, 10 * i + 11))
        enough, patience = 10 * i + rng.randint(2, 9), 6000
        while rows_of(followed) < enough:
            patience -= 1
            assert process.poll() is None, process.said()
            assert patience, "no row has come for a minute"
            time.sleep(0.01)
        process.send_signal(signum)
        assert process.wait() == (-9 if signum == signal.SIGKILL else 128 + signum), process.said()
        command = ["resume", str(only_run(followed))]
    write(tasks, *range(51, 60))
    assert cli.main(command) == 0
    assert cli.main([*FLAGS, "--data.path", str(tasks), "--rounds", "60", "--output", str(here / "whole")]) == 0
    whole, stopped = (only_run(folder) for folder in (here / "whole", followed))
    for name in ("metrics.csv", "tasks.csv"):
        assert (stopped / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize(("path", "passed"), [("-", 0), ("other.jsonl", 3)])
def test_tasks_that_were_played_are_passed_over_in_another_file_and_not_in_a_pipe(path, passed):
    taken = []

    def take():
        taken.append(path)
        return "a task"

    tasks = SimpleNamespace(path=path, arrivals=lambda position=None: SimpleNamespace(take=take))
    Following(tasks, None).load_state_dict({"path": "tasks.jsonl", "position": None, "count": 3, "like": {}})
    assert len(taken) == passed
