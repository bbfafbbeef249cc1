"""One process plays a run."""

import os
import signal
import socket
import time
from types import SimpleNamespace

import pytest

from obbo_lightning import cli
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.runs.status import OwnedError, RunStatus, is_owned, read_state
from obbo_lightning.training.run import fit


@pytest.fixture
def run(tmp_path):
    tmp_path.joinpath("config.yaml").write_text("nothing: 1\n")
    return RunDirectory(tmp_path)


def test_a_second_owner_is_refused_with_the_process_and_host_of_the_first(run, capsys, monkeypatch):
    monkeypatch.setattr("obbo_lightning.runs.status.PATIENCE", 0.05)
    owner = RunStatus()
    owner.open(run.state)
    owner.say("playing")
    before = run.state.read_bytes()
    expected = f"{run.path} is being played by process {os.getpid()} on {socket.gethostname()}"
    assert cli.main(["resume", str(run.path)]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1
    assert run.state.read_bytes() == before
    assert cli.main(["watch", str(run.path)]) == 0
    assert "  playing  " in capsys.readouterr().out
    owner.close()
    assert cli.main(["resume", str(run.path)]) == 2  # nobody plays it; its settings are not those of a run
    assert "is being played" not in capsys.readouterr().err
    assert run.state.read_bytes() == before


def test_a_run_that_begins_where_another_is_played_is_refused(run, monkeypatch):
    monkeypatch.setattr("obbo_lightning.runs.status.PATIENCE", 0.05)
    owner = RunStatus()
    owner.open(run.state)
    with pytest.raises(OwnedError):
        fit({}, run, parts=SimpleNamespace())
    owner.close()


def test_those_who_look_do_not_keep_anybody_from_playing(run):
    owner = RunStatus()
    owner.open(run.state)
    owner.say("playing")
    owner.close()
    looking = os.open(run.state, os.O_RDONLY)
    child = os.fork()
    if child == 0:  # looks for a moment
        import fcntl

        fcntl.flock(looking, fcntl.LOCK_SH)
        time.sleep(0.2)
        os._exit(0)
    os.close(looking)
    time.sleep(0.1)
    owner.open(run.state)
    os.waitpid(child, 0)
    assert read_state(run.state) == ("playing", True)
    owner.close()


def test_those_who_look_do_not_see_each_other(run):
    run.state.write_text("{}")
    first, second = (os.open(run.state, os.O_RDONLY) for _ in range(2))
    assert [is_owned(first), is_owned(second)] == [False, False]
    os.close(first)
    os.close(second)


def test_the_lock_of_a_dead_process_is_taken_over(run):
    heard, says = os.pipe()
    child = os.fork()
    if child == 0:
        state = RunStatus()
        state.open(run.state)
        state.say("playing")
        os.write(says, b"x")
        signal.pause()
    os.read(heard, 1)
    with pytest.raises(OwnedError, match=f"process {child} on"):
        RunStatus().open(run.state)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert read_state(run.state) == ("playing", False)
    RunStatus().open(run.state)


def test_a_link_instead_of_the_state_is_not_followed(run, tmp_path):
    (tmp_path / "precious").write_text("mine")
    run.state.symlink_to(tmp_path / "precious")
    with pytest.raises(ValueError, match=r"state\.json must be a file that can be written, and cannot"):
        RunStatus().open(run.state)
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_refusal_leaves_no_state_where_there_was_none(run, capsys):
    assert cli.main(["resume", str(run.path)]) == 2
    assert not run.state.exists()


def test_a_state_that_is_no_file_is_refused(run):
    run.state.mkdir()
    with pytest.raises(ValueError, match=r"state\.json must be a file that can be written, and cannot: Is a directory"):
        RunStatus().open(run.state)
