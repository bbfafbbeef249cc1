"""`watch`: what runs are doing, from their files alone."""

import subprocess
import sys

import pytest

from obbo_lightning import cli
from obbo_lightning.runs.directory import RunDirectory


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "runs" / "default" / "one")
    run.path.mkdir(parents=True)
    run.config.write_text("rounds: 200\n")
    return run


def test_there_is_one_line_per_run_until_all_are_finished(run, tmp_path, monkeypatch, capsys):
    other = RunDirectory(tmp_path / "runs" / "default" / "two")
    other.path.mkdir()
    other.config.write_text("rounds: 10\n")
    other.summary.write_text("{}")
    monkeypatch.setattr("time.sleep", lambda seconds: run.summary.write_text("{}"))
    assert cli.main(["watch", str(tmp_path / "runs"), "--every", "5"]) == 0
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    one, two = str(run.path), str(other.path)
    assert lines == [[one, "not started"], [two, "finished"], [one, "finished"], [two, "finished"]]
    run.summary.unlink()
    assert cli.main(["watch", str(run.path)]) == 0  # once


def test_interrupt_ends_it(run, monkeypatch):
    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupt)
    assert cli.main(["watch", str(run.path), "--every", "1"]) == 130


def test_watching_does_not_import_torch(run):
    script = (
        "import sys; from obbo_lightning import cli; cli.main(['watch', sys.argv[1]]); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, run.path], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
