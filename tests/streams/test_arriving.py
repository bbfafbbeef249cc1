"""Tasks that arrive in a folder, in a file of lines, or from standard input, and runs that wait for them."""

import json
import os
import random
import signal
import sys
import time
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import Forked

from obbo_lightning import Problem, cli
from obbo_lightning.streams import arriving
from obbo_lightning.streams.arriving import (
    DamagedTaskError,
    FollowStream,
    follow_folder,
    follow_lines,
    follow_standard_input,
)
from obbo_lightning.training import run as runs

FLAGS = ["fit", "--data", "follow", "--problem", "few_shot", "--problem.network", "mlp", "--evaluation.every", "4"]
FLAGS += ["--problem.network.widths", "[4]", "--checkpoint.every", "3", "--trainer.accelerator", "cpu"]
FLAGS += ["--algorithm.inner.steps", "1"]


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def task(t):
    rng = np.random.default_rng(t)
    labels = np.repeat([0, 1], 2)
    support, query = rng.normal(size=(2, 4, 3)) + labels[:, None]
    return {"support": support, "support_labels": labels, "query": query, "query_labels": labels}


def line(t, **changes):
    return json.dumps({name: np.asarray(values).tolist() for name, values in (task(t) | changes).items()}) + "\n"


def write(folder, *numbers):
    folder.mkdir(exist_ok=True)
    for t in numbers:
        np.savez(folder / f".{t:04d}.npz", **task(t))
        (folder / f".{t:04d}.npz").rename(folder / f"{t:04d}.npz")


def npz(path, value):
    np.savez(path, x=np.full(3, float(value)))
    return path.read_bytes()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "draw_figures", lambda *arguments: [])
    monkeypatch.setattr(arriving, "POLL", 0.001)
    return tmp_path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """metrics.csv of a run on ten tasks that were all there."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write(folder / "tasks", *range(10))
    assert cli.main([*FLAGS, "--data.path", str(folder / "tasks"), "--rounds", "10", "--output", str(folder)]) == 0
    return only_run(folder).joinpath("metrics.csv").read_bytes()


def only_run(folder):
    (run,) = (path.parent for path in Path(folder).glob("*/*/config.yaml"))
    return run


def tasks_in(path, few_shot=True, timeout=0.01):
    tasks = FollowStream(str(path), timeout).train
    tasks.few_shot = few_shot
    return tasks


def act_while_waiting(monkeypatch, *actions):
    """Replace waiting by the next action of a producer."""
    left = iter(actions)
    monkeypatch.setattr(arriving, "sleep", lambda seconds: next(left, lambda: None)())


@contextmanager
def piped(monkeypatch):
    """Replace standard input by a pipe and yield a file that is written to it."""
    out, into = os.pipe()
    with os.fdopen(out) as read, os.fdopen(into, "wb", buffering=0) as written, monkeypatch.context() as patched:
        patched.setattr(sys, "stdin", read)
        yield written


def test_tasks_are_the_same_in_files_of_any_kind_and_in_lines(here):
    folder = here / "tasks"
    write(folder, 2, 3)
    (folder / "0001.json").write_text(line(1))
    (folder / ".0000.npz").write_bytes(b"not yet")
    (folder / "0000.npz.part").write_bytes(b"not yet")
    (folder / "notes.txt").write_text("no task")
    (here / "tasks.jsonl").write_text("".join(map(line, (1, 2, 3))))
    for path in (folder, here / "tasks.jsonl"):
        found = list(tasks_in(path))
        assert len(found) == 3
        for t, one in enumerate(found, 1):
            assert one["support_labels"].tolist() == [0, 0, 1, 1]
            assert torch.equal(one["query"], torch.tensor(task(t)["query"]).float())


def test_dtypes_are_those_of_the_outer_variable_and_int64(here):
    (here / "tasks.jsonl").write_text(line(0, support=np.ones((4, 3), int), query=np.ones((4, 3), int)))
    (found,) = tasks_in(here / "tasks.jsonl")
    kinds = {name: values.dtype for name, values in found.items()}
    assert kinds["support"] == kinds["query"] == torch.float32
    assert kinds["support_labels"] == kinds["query_labels"] == torch.int64
    (here / "plain.jsonl").write_text('{"x": [1, 2], "y": [0.5], "z": [true]}\n')
    tasks = tasks_in(here / "plain.jsonl", few_shot=False)
    tasks.dtype = torch.float64
    (found,) = tasks
    assert [found[name].dtype for name in "xyz"] == [torch.int64, torch.float64, torch.bool]


@pytest.mark.parametrize("name", ["tasks/0001.npz", "tasks/0001.json", "tasks.jsonl"])
def test_half_written_tasks_are_waited_for(here, monkeypatch, name):
    newest = here / name
    write(here / "tasks", 0, 1)
    (here / "tasks" / "0001.json").write_text(line(1))
    (here / "tasks.jsonl").write_text(line(0) + line(1))
    content = newest.read_bytes()
    for other in (here / "tasks").glob("0001.*"):
        other.unlink()
    halves = [content[: -len(content) // 3], content[: -len(content) // 3], content]
    act_while_waiting(monkeypatch, *(lambda half=half: newest.write_bytes(half) for half in halves))
    newest.write_bytes(line(0).encode() if name == "tasks.jsonl" else b"")
    _, second = islice(tasks_in(here / name.split("/")[0], timeout=None), 2)
    assert torch.equal(second["query"], torch.tensor(task(1)["query"]).float())


def test_file_that_grows_is_waited_for_even_if_later_ones_are_there(here):
    whole = npz(here / "1.npz", 1)
    npz(here / "2.npz", 2)
    folder = follow_folder(here)
    for size in (100, 150, 200):
        (here / "1.npz").write_bytes(whole[:size])
        assert next(folder).startswith(f"{here / '1.npz'} cannot be read as an npz file")
    (here / "1.npz").write_bytes(whole)
    found = [next(folder) for _ in range(2)]
    assert [(one.arrays["x"][0], one.position) for one in found] == [(1.0, "1.npz"), (2.0, "2.npz")]
    assert next(folder) is None
    (here / "3.npz").write_bytes(whole[:100])
    assert "3.npz cannot be read" in next(folder)
    assert "3.npz cannot be read" in next(folder)  # the newest file may still grow
    npz(here / "4.npz", 4)
    with pytest.raises(DamagedTaskError, match=r"3\.npz cannot be read"):
        next(folder)
    folder = follow_folder(here, "2.npz")
    assert "3.npz cannot be read" in next(folder)
    (here / "3.npz").unlink()
    assert next(folder).where == str(here / "4.npz")
    assert next(follow_folder(here)).where == str(here / "1.npz")


def test_only_a_new_file_with_an_earlier_name_is_refused(here):
    for n in (1, 3):
        npz(here / f"{n}.npz", n)
    folder = follow_folder(here, "1.npz")
    assert next(folder).arrays["x"][0] == 3.0
    assert next(folder) is None
    npz(here / "1.npz", 7)  # written again after it was read
    assert next(folder) is None
    npz(here / "2.npz", 2)
    with pytest.raises(DamagedTaskError, match=r"2\.npz must arrive before 3\.npz, which was read, and arrived later"):
        next(folder)


def test_lines_are_read_once_they_end_and_counted_with_empty_ones(here):
    file = here / "tasks.jsonl"
    file.write_bytes(b'{"x": [1]}\n\n  \n{"x": [2]}\n{"x": [3]')
    lines = follow_lines(file)
    assert next(lines).where == f"{file}, line 1"
    second = next(lines)
    assert (second.where, second.arrays["x"].tolist(), second.position) == (f"{file}, line 4", [2], [26, 4])
    assert next(lines) is None
    again = follow_lines(file, second.position)
    file.write_bytes(file.read_bytes() + b"}\n")
    for one in (lines, again):
        assert next(one).arrays["x"].tolist() == [3]
    file.write_bytes(b'{"x": [1]}\n')
    with pytest.raises(DamagedTaskError, match=r"must only grow, got fewer than the 37 bytes already read"):
        next(lines)


def test_standard_input_is_read_line_by_line_in_any_chunks(monkeypatch):
    lines, found = follow_standard_input(), []
    with piped(monkeypatch) as pipe:
        for chunk in (b'{"x": [1]}\n{"x"', b": [2]}", b'\n\n{"x": [3]}\n'):
            pipe.write(chunk)
            found += iter(lines.__next__, None)
        pipe.close()
        assert list(lines) == []
    assert [one.where for one in found] == [f"standard input, line {number}" for number in (1, 2, 4)]
    assert [one.arrays["x"].tolist() for one in found] == [[1], [2], [3]]
    with piped(monkeypatch) as pipe:
        pipe.write(line(0).encode())
        pipe.close()
        tasks = tasks_in("-", timeout=None)
        assert tasks.so_far() is None
        first = tasks.first()
        assert [torch.equal(one["query"], first["query"]) for one in tasks] == [True]  # it stays the first one


DAMAGED = {
    "names": ({"query": None}, "must have support, support_labels, query and query_labels, got support, "),
    "more names": ({"x": [1]}, "'x' must be missing as in the first task, got int64 [1]"),
    "shape": ({"query": [[1.0, 2.0]] * 4}, "'query' must be float32 [4, 3] as in the first task"),
    "number of labels": ({"query_labels": [0]}, "for each of the query examples [4, 3], got int64"),
    "missing class": ({"support_labels": [0, 0, 2, 2]}, "labels must be the classes 0, 1, …"),
    "classes from 1": ({"support_labels": [1, 1, 2, 2], "query_labels": [1, 1, 2, 2]}, "labels must be the classes"),
    "unknown class": ({"query_labels": [0, 0, 1, 2]}, "labels must be the classes 0, 1, …"),
    "one class": ({"support_labels": [0, 0, 0, 0]}, "labels must be the classes 0, 1, …"),
    "fractions": ({"support_labels": [0.0, 0.0, 1.0, 1.0]}, "'support_labels' must be one integer for each of the"),
    "not finite": ({"query": [[float("nan")] * 3] * 4}, "'query' must be finite numbers, got float64 values that are"),
    "text": ({"query": "five"}, "'query' must be finite numbers, got <U4 values that are not"),
    "ragged": ({"query": [[1.0], [1.0, 2.0]]}, "must be an object of arrays by name"),
    "nothing": (dict.fromkeys(task(0)), "must hold arrays, and has none"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_task_is_named_with_its_rule(here, kind):
    changes, rule = DAMAGED[kind]
    one = {name: value for name, value in (json.loads(line(1)) | changes).items() if value is not None}
    (here / "tasks.jsonl").write_text(line(0) + json.dumps(one) + "\n")
    (here / "tasks").mkdir()
    (here / "tasks" / "0.json").write_text(line(0))
    (here / "tasks" / "1.json").write_text(json.dumps(one))
    for path, where in ((here / "tasks.jsonl", "tasks.jsonl, line 2"), (here / "tasks", "tasks/1.json")):
        with pytest.raises(DamagedTaskError) as damage:
            list(tasks_in(path))
        assert str(damage.value).startswith(f"{here / where}: ")
        assert rule in str(damage.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tasks/1.npz", "nonsense", r"1\.npz cannot be read as an npz file"),  # after the timeout
        ("tasks/1.json", "[1, 2]", r"1\.json: must be an object of arrays by name"),
        ("tasks.jsonl", line(0) + "nonsense\n", r"tasks.jsonl, line 2: cannot be read as JSON"),
    ],
)
def test_task_that_cannot_become_complete_is_damaged(here, name, content, message):
    write(here / "tasks", 0)
    (here / name).write_text(content)
    with pytest.raises(DamagedTaskError, match=message):
        list(tasks_in(here / name.split("/")[0]))


def test_wait_ends_after_the_timeout(here, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(arriving, "monotonic", lambda: clock[0])
    monkeypatch.setattr(arriving, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + 1.0))
    (here / "tasks.jsonl").write_text(line(0))
    tasks = tasks_in(here / "tasks.jsonl", timeout=5.0)
    assert len(list(tasks)) == 1
    assert clock == [5.0]
    with (here / "tasks.jsonl").open("a") as file:
        file.write(line(1)[:20])  # not complete yet
    assert [one["query"].shape for one in tasks.so_far()] == [(4, 3)]  # without waiting
    write(here / "tasks", 0)
    (here / "tasks" / "0001.npz").write_bytes(b"PK")  # not complete yet
    assert len(list(tasks_in(here / "tasks", timeout=5.0).so_far())) == 1
    assert clock == [5.0]


@pytest.mark.parametrize("moved", [False, True])
def test_form_of_the_first_task_is_known_after_a_resume(moved, here):
    wide = {name: np.ones((4, 5)) for name in ("support", "query")}
    (here / "one.jsonl").write_text(line(0) * 2)
    first = iter(tasks_in(here / "one.jsonl"))
    list(islice(first, 2))
    again = here / ("two.jsonl" if moved else "one.jsonl")
    again.write_text(line(0) * 2 + line(0, **wide))
    resumed = iter(tasks_in(again))
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    with pytest.raises(DamagedTaskError, match=r"line 3: 'support' must be float32 \[4, 3\] as in the first task, got"):
        next(resumed)
    (here / "three.jsonl").write_text(line(0))
    with pytest.raises(ValueError, match=r"must have the 2 tasks of the finished rounds, and .*three.jsonl has not"):
        iter(tasks_in(here / "three.jsonl")).load_state_dict(first.state_dict())


def test_run_that_is_stopped_and_killed_repeatedly_equals_the_undisturbed_one(here, undisturbed, monkeypatch, capsys):
    """Two signals while it waits, a crash in a round, a timeout, a folder that has moved."""
    write(here / "tasks", *range(2))
    act_while_waiting(monkeypatch, lambda: None, lambda: signal.raise_signal(signal.SIGTERM))
    assert cli.main([*FLAGS, "--data.path", "tasks", "--rounds", "10"]) == 143
    assert "stopped by SIGTERM after round 2; continue with" in capsys.readouterr().err
    run = only_run("runs")
    write(here / "tasks", 2, 3)
    act_while_waiting(monkeypatch, lambda: signal.raise_signal(signal.SIGINT))
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


def test_other_finished_tasks_are_refused(here, capsys):
    write(here / "tasks", *range(4))
    assert cli.main([*FLAGS, "--data.path", "tasks", "--rounds", "4"]) == 0
    run = only_run("runs")
    write(here / "other", 0, 1, 9, 3, 4)
    assert cli.main(["resume", str(run), "--data.path", "other", "--rounds", "5"]) == 2
    assert "task 3, in round 3" in capsys.readouterr().err
    write(here / "short", 0, 1)
    assert cli.main(["resume", str(run), "--data.path", "short", "--rounds", "5"]) == 2
    assert "data must have the 4 rounds of" in capsys.readouterr().err


def test_run_that_a_damaged_task_stopped_continues_when_it_is_fixed(here, undisturbed, capsys):
    write(here / "tasks", *range(10))
    whole = (here / "tasks" / "0005.npz").read_bytes()
    np.savez(here / "tasks" / "0005.npz", **{**task(5), "query": np.full((4, 3), np.nan)})
    assert cli.main([*FLAGS, "--data.path", "tasks", "--rounds", "10"]) == 2
    error = capsys.readouterr().err
    assert "tasks/0005.npz: 'query' must be finite numbers, got " in error
    assert "; when it is fixed, continue with" in error
    assert error.count("\n") == 1
    (here / "tasks" / "0005.npz").write_bytes(whole)
    assert cli.main(["resume", str(only_run("runs"))]) == 0
    assert only_run("runs").joinpath("metrics.csv").read_bytes() == undisturbed


def test_run_on_standard_input_ends_with_it_and_continues_with_what_comes_next(here, undisturbed, monkeypatch):
    first, rest = "".join(map(line, range(6))) + line(6)[:20], "".join(map(line, range(6, 12)))  # a line is incomplete
    for text, rounds in ((first, 6), (rest, 10)):
        with piped(monkeypatch) as pipe:
            pipe.write(text.encode())
            pipe.close()
            words = [*FLAGS, "--data.path", "-", "--rounds", "10"] if rounds == 6 else ["resume", str(only_run("runs"))]
            assert cli.main(words) == 0
        assert json.loads((only_run("runs") / "summary.json").read_text())["rounds"] == rounds
    assert (only_run("runs") / "metrics.csv").read_bytes() == undisturbed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nowhere", "--problem", "few_shot"], "a folder, a file of JSON lines, or -, and exist, got 'nowhere'"),
        (["one.npz", "--problem", "few_shot"], "a folder, a file of JSON lines, or -, and exist, got 'one.npz'"),
        (["empty"], "problem must be given for data follow: few_shot, or file.py:Class, got none"),
        (["empty", "--problem", "few_shot", "--data.timeout", "0"], "data.timeout must be a positive finite"),
        (["empty", "--problem", "few_shot", "--data.timeout", "0.01"], "and none has arrived in empty"),
    ],
)
def test_places_that_cannot_be_followed_are_refused(here, flags, message, capsys):
    (here / "empty").mkdir()
    np.savez("one.npz", x=np.zeros(3))
    assert cli.main(["fit", "--data", "follow", "--rounds", "3", "--data.path", *flags]) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()


class Ridge(Problem):
    """Ridge regression in double precision."""

    def initial_outer(self, seed):
        return torch.full((1, 1), 0.1, dtype=torch.float64)

    def initial_inner(self, outer, task):
        return torch.zeros(1, task["x"].shape[1], dtype=outer.dtype)

    def inner_loss(self, outer, inner, task, sample=None):
        return (inner @ task["x"].T - task["y"]).square().mean(-1) + outer[:, 0] * inner.square().sum(-1)

    def outer_loss(self, outer, inner, task, sample=None):
        return (inner @ task["x"].T - task["y"]).square().mean(-1)


def test_own_problem_is_run_in_its_precision(here, capsys):
    rng = np.random.default_rng(0)
    tasks = [{"x": rng.normal(size=(5, 2)).tolist(), "y": rng.normal(size=5).tolist()} for _ in range(3)]
    (here / "tasks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in tasks))
    flags = ["--data.path", "tasks.jsonl", "--problem", f"{__file__}:Ridge", "--algorithm.inner.start", "previous"]
    assert cli.main(["fit", "--data", "follow", *flags, "--rounds", "3", "--trainer.accelerator", "cpu"]) == 0
    assert json.loads(only_run("runs").joinpath("summary.json").read_text())["metric"] == "loss"
    assert "lower is better" in capsys.readouterr().out


@pytest.mark.slow
def test_processes_that_are_stopped_while_tasks_arrive_equal_the_undisturbed_run(here):
    """Five real processes, three of them killed."""
    rng, tasks, followed = random.Random(0), here / "tasks", here / "followed"
    write(tasks, 0)
    command = [*FLAGS, "--data.path", str(tasks), "--rounds", "60", "--output", str(followed)]
    for i, signum in enumerate((signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGKILL)):
        process = Forked(here, *command)
        write(tasks, *range(10 * i + 1, 10 * i + 11))
        enough, patience = 10 * i + rng.randint(2, 9), 6000
        while sum(path.read_text().count("\n") - 1 for path in followed.glob("*/*/metrics.csv")) < enough:
            patience -= 1
            assert process.poll() is None, process.output()
            assert patience, "no row was written for a minute"
            time.sleep(0.01)
        process.send_signal(signum)
        assert process.wait() == (-9 if signum == signal.SIGKILL else 128 + signum), process.output()
        command = ["resume", str(only_run(followed))]
    write(tasks, *range(51, 60))
    assert cli.main(command) == 0
    assert cli.main([*FLAGS, "--data.path", str(tasks), "--rounds", "60", "--output", str(here / "whole")]) == 0
    whole, stopped = (only_run(folder) for folder in (here / "whole", followed))
    for name in ("metrics.csv", "fingerprints.csv"):
        assert (stopped / name).read_bytes() == (whole / name).read_bytes()
