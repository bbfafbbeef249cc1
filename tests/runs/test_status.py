"""One process owns a run, and `watch` shows what it is doing."""

import contextlib
import fcntl
import json
import os
import signal
import socket
import threading
import time

import pytest

from obbo_lightning import cli
from obbo_lightning.runs import status as status_module
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.runs.status import RunStatus, describe_run, find_run_directories
from obbo_lightning.training.run import Components, fit

NUMBERS = {"round": 300, "rounds": 400, "loss": 37.5, "regret": 600.0, "rounds_per_second": 4.0, "seconds_left": 25}


@pytest.fixture
def run(tmp_path):
    tmp_path.joinpath("config.yaml").write_text("nothing: 1\n")
    return RunDirectory(tmp_path)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(status_module, "PATIENCE", 0.05)


@pytest.fixture
def in_child():
    """Start processes that enter a context and stay in it until they are killed; each returns its number."""
    children = []

    def start(context):
        reads, writes = os.pipe()
        children.append(os.fork())
        if children[-1] == 0:
            try:
                with context():
                    os.write(writes, b"x")
                    time.sleep(60)
            finally:
                os._exit(1)
        assert os.read(reads, 1) == b"x"
        return children[-1]

    yield start
    for child in children:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            kill(child)


def kill(child):
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_second_owner_is_refused_with_the_process_and_host_of_the_first(run, capsys, impatient):
    owner = RunStatus()
    with owner.own(run):
        owner.set("running")
        before = run.status.read_bytes()
        assert cli.main(["resume", str(run.path)]) == 2
        error = capsys.readouterr().err
        assert f"{run.path} is in use by process {os.getpid()} on {socket.gethostname()}" in error
        assert error.count("\n") == 1
        with pytest.raises(ValueError, match="is in use by"):
            fit({}, run, components=Components(None, None, None, None))
        assert run.status.read_bytes() == before
        assert cli.main(["watch", str(run.path)]) == 0
        assert capsys.readouterr().out == f"{run.path}  running\n"
        with owner.own(run):  # its own
            pass
        assert cli.main(["resume", str(run.path)]) == 2
        assert "is in use by" in capsys.readouterr().err
    assert cli.main(["resume", str(run.path)]) == 2  # nobody owns it; its configuration is not that of a run
    assert "is in use by" not in capsys.readouterr().err


def test_a_refused_command_writes_no_status(run, capsys):
    assert cli.main(["resume", str(run.path)]) == 2
    assert not run.status.exists()


def test_the_lock_of_a_dead_process_is_taken_over(run, impatient, in_child):
    @contextlib.contextmanager
    def running():
        status = RunStatus()
        with status.own(run):
            status.set("running")
            yield

    child = in_child(running)
    with pytest.raises(ValueError, match=f"process {child} on"), RunStatus().own(run):
        pass
    assert describe_run(run) == f"{run.path}  running"
    kill(child)
    assert describe_run(run) == f"{run.path}  dead (was running)"
    with RunStatus().own(run):
        pass


def test_processes_that_look_do_not_keep_another_from_owning_a_run(run, in_child):
    @contextlib.contextmanager
    def looking():
        with run.lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            yield

    run.lock.touch()
    run.status.write_text('{"doing": "running"}')
    child = in_child(looking)
    assert describe_run(run) == f"{run.path}  dead (was running)"  # a process that looks is not the owner
    threading.Timer(0.1, kill, [child]).start()  # it has looked
    with RunStatus().own(run):
        pass


@pytest.mark.parametrize("what", ["link", "folder"])
def test_a_lock_that_is_no_file_is_refused(run, what, tmp_path):
    (tmp_path / "precious").write_text("mine")
    if what == "link":
        run.lock.symlink_to(tmp_path / "precious")
    else:
        run.lock.mkdir()
    with pytest.raises(ValueError, match=r"\.lock must be a file that can be written, got"), RunStatus().own(run):
        pass
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_file_system_without_locks_runs_all_the_same(run, monkeypatch):
    def no_locks(*arguments):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    status = RunStatus()
    with status.own(run):
        status.set("running")
    assert describe_run(run) == f"{run.path}  running"  # nobody can know whether it is dead


def test_a_line_has_the_numbers_of_a_run_and_the_time_left(run):
    status = RunStatus()
    status.set("running")  # nobody owns the run: nothing is written
    assert not run.status.exists()
    with status.own(run):
        assert describe_run(run) == f"{run.path}  not started"
        status.set("running", **NUMBERS)
        line = f"{run.path}  running  round 300 of 400  loss 37.5  regret 600  4 rounds/s"
        assert describe_run(run) == f"{line}  0:00:25 left"
        status.set("waiting for the next task")
        assert describe_run(run) == line.replace("running", "waiting for the next task")
        status.set("running", rounds=None, seconds_left=None)
        assert describe_run(run) == line.replace(" of 400", "")
        status.set("stopped by SIGTERM after round 300", rounds=400)
    assert describe_run(run) == line.replace("running", "stopped by SIGTERM after round 300")
    run.summary.write_text("{}")
    assert describe_run(run) == line.replace("running", "finished")


def test_numbers_alone_are_written_once_in_a_second(run, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    status = RunStatus()
    with status.own(run):
        for t in range(1, 31):
            now[0] += 0.125
            status.set("running", round=t)
            shown = json.loads(run.status.read_text())["round"]
            assert t - 8 < shown <= t
        assert shown == 25
        status.set("evaluating")
        assert json.loads(run.status.read_text())["round"] == 30


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000])
def test_a_damaged_status_is_no_status(text, run):
    run.status.write_text(text)
    assert describe_run(run) == f"{run.path}  not started"


def test_runs_below_a_folder_are_found_in_order_and_each_path_must_have_one(tmp_path):
    for name in ("b/two", "a/one"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    found = find_run_directories([tmp_path / "runs", tmp_path / "runs" / "b" / "two"])
    assert [run.path.name for run in found] == ["one", "two", "two"]
    with pytest.raises(ValueError, match="x must be a run directory, or have one below it, got none"):
        find_run_directories([tmp_path / "runs", tmp_path / "runs" / "a" / "one" / "x"])
