"""What runs are doing, from their files alone."""

import subprocess
import sys

import pytest

from obbo_lightning import cli
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.runs.status import RunStatus, describe

METRICS = "round,loss,inner_loss,accuracy,test_accuracy,test_accuracy_se,regret/euclidean\n"


@pytest.fixture
def run(tmp_path):
    """A run of 200 rounds that has played 40, a round in half a second."""
    run = RunDirectory(tmp_path / "runs" / "default" / "one")
    run.path.mkdir(parents=True)
    run.config.write_text("rounds: 200\n")
    rows = [f"{t},0.5,0.1,0.75,{'0.7,0.01' if t == 40 else ','},{t / 10}\n" for t in range(1, 41)]
    run.metrics.write_text(METRICS + "".join(rows) + "41,0.4")  # the last one is being written
    run.timings.write_text("round,seconds,evaluation_seconds\n" + "".join(f"{t},0.5,\n" for t in range(1, 41)))
    return run


def test_a_line_says_what_a_run_does_its_last_row_its_rate_and_the_time_left(run):
    state = RunStatus()
    state.open(run.state)
    state.say("evaluating")
    state.say("playing")
    assert describe(run) == (
        f"{run.path}  playing  round 40 of 200  accuracy 0.75  test 0.7  regret 4  2 rounds/s  80 s left"
    )
    state.say("waiting for tasks in folder")
    assert describe(run) == (
        f"{run.path}  waiting for tasks in folder  round 40 of 200  accuracy 0.75  test 0.7  regret 4  2 rounds/s"
    )
    state.say("stopped by SIGTERM after round 40")
    state.close()
    assert "  stopped by SIGTERM after round 40  " in describe(run)
    run.summary.write_text('{"rounds": 40}')
    assert "  finished  round 40 of 40  " in describe(run)


def test_a_process_that_was_killed_leaves_a_dead_run(run):
    script = "import sys, os, signal, pathlib\nfrom obbo_lightning.runs.status import RunStatus\nstate = RunStatus()\n"
    script += "state.open(pathlib.Path(sys.argv[1]))\nstate.say('playing')\nprint('said', flush=True)\ninput()\n"
    player = subprocess.Popen([sys.executable, "-c", script, run.state], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with player:
        player.stdout.readline()
        assert "  playing  " in describe(run)
        player.kill()
    assert "  dead (was playing)  " in describe(run)


def test_runs_without_a_state_and_without_a_round_have_a_line_too(run, tmp_path, capsys):
    other = RunDirectory(tmp_path / "runs" / "default" / "two")
    other.path.mkdir()
    other.config.write_text("rounds: 10\n")
    assert cli.main(["watch", str(tmp_path / "runs")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{run.path}  not finished  round 40 of 200")
    assert lines[1:] == [f"{other.path}  not begun  round 0 of 10"]


def test_it_looks_again_until_all_are_finished(run, monkeypatch, capsys):
    monkeypatch.setattr("time.sleep", lambda seconds: run.summary.write_text('{"rounds": 40}'))
    assert cli.main(["watch", str(run.path), "--every", "5"]) == 0
    assert [line.split("  ")[1] for line in capsys.readouterr().out.splitlines()] == ["not finished", "finished"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "watch: the following arguments are required: RUN_DIR"),
        (["nowhere"], "nowhere is no run directory, and has none below it"),
        (["nowhere", "--every", "0"], "--every must be a positive number of seconds, got 0"),
    ],
)
def test_mistakes_are_one_line(flags, said, capsys):
    assert cli.main(["watch", *flags]) == 2
    assert said in capsys.readouterr().err


def test_watching_does_not_import_torch(run):
    script = (
        "import sys; from obbo_lightning import cli; cli.main(['watch', sys.argv[1]]); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, run.path], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
