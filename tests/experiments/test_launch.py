"""Grids on this machine: warm processes, logs, signals, kills; most runs are a few lines of Python instead."""

import io
import os
import random
import signal
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path

import pytest
import yaml
from processes import Forked, wait_for
from rich.console import Console
from small_runs import SMALL_GRID, write_grid

from obbo_lightning import cli
from obbo_lightning.experiments import launch
from obbo_lightning.experiments.grid import PlannedRun, read_grid
from obbo_lightning.experiments.launch import LocalLauncher, prepare, run_all
from obbo_lightning.runs.directory import RunDirectory, read_config

# Every Python process that is started imports this: instead of a run, lines in its directory are executed.
SITE = """
import sys, types

def resume(directory):
    names = {"directory": directory, "code": 0}
    exec(compile((directory / "run.py").read_text(), "run.py", "exec"), names)
    if names["code"] == 0:
        (directory / "summary.json").write_text("{}")
    return names["code"]

sys.modules["obbo_lightning.training.resume"] = types.ModuleType("resume")
sys.modules["obbo_lightning.training.resume"].resume = resume
"""
PID = "import os\n(directory / 'pid').write_text(str(os.getpid()))\n"
# What a run does: it remembers the signal, and stops after its round.
SAVED_BY_SIGNAL = (
    PID
    + """
import signal, threading
received = threading.Event()
before = signal.signal(signal.SIGTERM, lambda *_: received.set())
(directory / "started").touch()
received.wait()
signal.signal(signal.SIGTERM, before)
(directory / "saved").touch()
code = 128 + signal.SIGTERM
"""
)


@pytest.fixture
def fake_runs(tmp_path, monkeypatch):
    """Return a function that makes a run directory for each name, with its lines, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    monkeypatch.setattr(launch, "prepare", lambda planned, root: [RunDirectory(root / run.name) for run in planned])

    def make(**runs):
        made = []
        for name, lines in runs.items():
            made.append(RunDirectory(tmp_path / name))
            made[-1].path.mkdir()
            (made[-1].path / "run.py").write_text(lines)
        return made

    return make


def execute(runs, jobs=1, launcher=None):
    """Return the reasons of the runs that failed."""
    planned, own = [PlannedRun(run.path.name, {"rounds": 1}) for run in runs], launcher or LocalLauncher(jobs)
    failed = run_all(planned, runs[0].path.parent, own, Console(file=io.StringIO()))
    if launcher is None:
        own.stop()
    return failed


def pids(runs):
    return [int((run.path / "pid").read_text()) for run in runs]


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_processes_wait_for_further_runs_until_they_are_stopped(fake_runs):
    launcher = LocalLauncher(1)
    runs = fake_runs(a=PID, b=PID)
    for run in (runs[0], RunDirectory(Path("b"))):  # a relative directory is found as well
        assert execute([run], launcher=launcher) == {}
    first, second = pids(runs)
    assert first == second
    assert is_running(first)
    launcher.stop()
    assert not is_running(first)


def test_one_process_executes_all_runs_and_each_has_its_own_log(fake_runs):
    prints = (
        PID
        + """
import ctypes, sys, warnings
name = directory.name
print("printed by", name)
print("reported by", name, file=sys.stderr)
os.write(1, f"written by {name}\\n".encode())
ctypes.CDLL(None).puts(f"put by {name}".encode())
os.system(f"echo echoed by {name}")
warnings.warn("watch out")
"""
    )
    runs = fake_runs(a=prints, b=prints, c=prints)
    assert execute(runs) == {}
    assert len(set(pids(runs))) == 1
    assert not is_running(pids(runs)[0])
    for run in runs:
        log = (run.path / "log.txt").read_text()
        for word in ("printed", "reported", "written", "put", "echoed"):
            assert log.count(f"{word} by ") == log.count(f"{word} by {run.path.name}\n") == 1
        assert log.count("UserWarning: watch out") == 1  # also the second time that this line warns


def test_a_free_process_gets_the_next_run(fake_runs):
    waits = PID + "import time\nwhile not (directory.parent / 'e' / 'pid').exists(): time.sleep(0.01)\n"
    runs = fake_runs(a=waits, b=PID, c=PID, d=PID, e=PID)
    assert execute(runs, jobs=2) == {}
    first, *others = pids(runs)
    assert len(set(others)) == 1
    assert first not in others


@pytest.mark.parametrize(
    ("lines", "reason", "continues"),
    [
        ("raise ValueError('lr must be\\n positive, got -1')", "obbo: lr must be positive, got -1", True),
        ("raise RuntimeError('a defect')", "RuntimeError: a defect", True),
        ("import sys\nprint('not finite', file=sys.stderr)\ncode = 1", "not finite", True),
        ("raise SystemExit(3)", "it printed nothing", True),
        ("raise SystemExit('words')", "it printed nothing", True),
        ("code = 2", "it printed nothing", True),
        ("print('stopped after round 4')\ncode = 143", "stopped after round 4", False),  # by SIGTERM
        ("print('a', flush=True)\nos.kill(os.getpid(), 9)", "a; its process was killed by SIGKILL", False),
        ("print('a', flush=True)\nos.kill(os.getpid(), 11)", "a; its process was killed by SIGSEGV", False),
    ],
)
def test_a_run_that_fails_has_a_reason_and_its_process_continues_unless_a_signal_ended_it(
    lines, reason, continues, fake_runs
):
    runs = fake_runs(a=PID, b=PID + lines, c=PID, d=PID)
    assert execute(runs) == {"b": reason}
    first, second, third, fourth = pids(runs)
    assert first == second
    assert (second == third) == continues
    assert third == fourth


def test_a_process_that_cannot_start_has_its_reason_in_the_log(fake_runs, tmp_path):
    runs = fake_runs(a=PID, b=PID)
    (tmp_path / "site" / "sitecustomize.py").write_text("import sys\nsys.exit('no torch here')")
    assert execute(runs) == dict.fromkeys("ab", "SystemExit: no torch here")


@pytest.mark.parametrize(("jobs", "each"), [(1, "5"), (2, "2"), (9, "1")])
def test_processes_share_the_cores(jobs, each, fake_runs, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("obbo_lightning.threads._initial_torch_threads", lambda: 5)
    monkeypatch.setattr("obbo_lightning.threads.usable_cores", lambda: 6)
    threads = (
        "import os\n(directory / 'threads').write_text(os.environ['OMP_NUM_THREADS'] + os.environ['MKL_NUM_THREADS'])"
    )
    (run,) = fake_runs(a=threads)
    assert execute([run], jobs=jobs) == {}
    assert (run.path / "threads").read_text() == each + each


def test_a_process_whose_parent_is_gone_saves_its_run_and_ends(fake_runs):
    (run,) = fake_runs(a=SAVED_BY_SIGNAL)
    connection, other = Pipe()
    command = [sys.executable, "-m", "obbo_lightning.experiments.launch", str(other.fileno())]
    process = subprocess.Popen(command, pass_fds=[other.fileno()])
    other.close()
    connection.send(str(run.path))
    wait_for((run.path / "started").exists)
    connection.close()
    assert process.wait(60) == 143
    assert (run.path / "saved").exists()


def test_only_unfinished_runs_are_executed_and_those_that_stay_so_have_failed(fake_runs):
    runs = fake_runs(a=PID, b=PID, c=PID + "code = 1")
    runs[0].summary.write_text("{}")
    runs[2].timings.write_text("round\n1\n2\n3\n")
    assert launch._progress(runs, [10, 10, 10])["completed"] == 13
    assert execute(runs) == {"c": "it printed nothing"}
    assert [(run.path / "pid").exists() for run in runs] == [False, True, True]


@pytest.mark.parametrize("finish", [False, True])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_running_runs_starts_nothing_and_leaves_no_process_and_no_handler(
    signum, finish, fake_runs, tmp_path, monkeypatch, capsys
):
    lines = SAVED_BY_SIGNAL + ("code = 0" if finish else "")
    runs = fake_runs(**{"obbo-seed_0": lines, "obbo-seed_1": lines, "obbo-seed_2": PID})

    class SignalledLauncher(LocalLauncher):
        def execute(self, runs):
            for _ in super().execute(runs):
                if all((run.path / "started").exists() for run in runs[:2]):
                    signal.raise_signal(signum)
                yield

    monkeypatch.setattr("obbo_lightning.cli.compare.LocalLauncher", SignalledLauncher)
    monkeypatch.setattr(launch, "prepare", lambda planned, root: runs)
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    (tmp_path / "grid.yaml").write_text("compare: grid\nbase: quadratic\ngrid: {seed: [0, 1, 2]}\n")
    assert cli.main(["compare", "--config", "grid.yaml", "--output", ".", "--jobs", "2"]) == 128 + signum
    assert capsys.readouterr().err == f"obbo: stopped by {signum.name}; the same command continues\n"
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
    assert all((run.path / "saved").exists() for run in runs[:2])
    assert [run.finished for run in runs] == [finish, finish, False]
    assert not any(map(is_running, pids(runs[:2])))
    assert not (runs[2].path / "log.txt").exists()


def test_runs_that_fail_for_one_reason_are_one_line(monkeypatch, capsys, tmp_path):
    reasons = {"a": "no such file", "b": "killed", "c": "no such file"}
    monkeypatch.setattr("obbo_lightning.cli.compare.run_all", lambda *arguments: reasons)
    (tmp_path / "grid.yaml").write_text("compare: g\nbase: quadratic\ngrid: {seed: [0, 1, 2, 3]}\n")
    command = ["compare", "--config", str(tmp_path / "grid.yaml"), "--output", str(tmp_path)]
    assert cli.main(command) == 1
    printed = capsys.readouterr()
    error = "obbo: run a failed: no such file, and 1 more for the same reason\nobbo: run b failed: killed\n"
    assert printed.err == error
    assert printed.out == f"1 of 4 runs finished; next: python -m obbo_lightning report {tmp_path}/g\n"
    reasons["d"] = "killed"
    assert cli.main(command) == 1
    assert capsys.readouterr().out == "0 of 4 runs finished\n"


def write(folder, **changes):
    """Return the command of a comparison in a folder."""
    return ["compare", "--config", str(write_grid(folder, **changes)), "--output", str(folder / "runs")]


def test_a_plan_needs_no_data_and_makes_nothing(tmp_path, capsys):
    data = {"prices": str(tmp_path / "nowhere.csv"), "events": str(tmp_path / "nothing.csv")}
    settings = {**SMALL_GRID["settings"], "data": {**SMALL_GRID["settings"]["data"], **data}}
    assert cli.main([*write(tmp_path, settings=settings), "--dry_run"]) == 0
    output = capsys.readouterr().out
    assert "obbo-window_3-start_0.5: 20 rounds" in output
    assert "6 of 6 runs to execute, 120 rounds" in output
    assert not (tmp_path / "runs").exists()
    finished = tmp_path / "runs" / "small" / "adam-start_0.1"
    finished.mkdir(parents=True)
    (finished / "summary.json").write_text("{}")
    assert cli.main([*write(tmp_path, settings=settings), "--dry_run"]) == 0
    output = capsys.readouterr().out
    assert "adam-start_0.1: finished" in output
    assert "5 of 6 runs to execute, 100 rounds" in output


def test_a_run_that_was_started_keeps_its_threads(tmp_path):
    write(tmp_path, grid={"seed": [0]})
    planned = read_grid(tmp_path / "grid.yaml").runs
    (run,) = prepare(planned, tmp_path / "runs")
    run.config.write_text(yaml.safe_dump({**read_config(run), "threads": 7}))
    prepare(planned, tmp_path / "runs")
    assert read_config(run)["threads"] == 7
    with pytest.raises(ValueError, match="started with other settings"):
        prepare(read_grid(tmp_path / "grid.yaml", {"threads": 3}).runs, tmp_path / "runs")


def tables(root):
    return {p.relative_to(root): p.read_bytes() for p in sorted(root.rglob("*.csv")) if p.name != "timings.csv"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("compare")
    assert cli.main([*write(root), "--jobs", "2"]) == 0
    return root


def test_a_run_that_diverges_is_named_and_not_run_again(tmp_path, capsys):
    settings = {"rounds": 12, "on_nonfinite": "skip", "evaluation": {"tasks": 2}}
    grid = {"algorithm": ["obbo"], "algorithm.inner.lr": [0.1, 1e200]}
    command, written = write(tmp_path, base="quadratic", settings=settings, grid=grid), []
    for _ in range(2):
        assert cli.main(command) == 0
        printed = capsys.readouterr()
        (line,) = (line for line in printed.err.splitlines() if "diverged" in line)
        assert line == "obbo: run obbo-lr_1e_200 diverged: its last rounds were all skipped as not finite"
        assert "2 of 2 runs finished" in printed.out
        written.append({path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")})
    assert len(written[0]) == 2
    assert written[0] == written[1]
    assert cli.main(["report", str(tmp_path / "runs" / "small")]) == 0
    assert "not finite" in capsys.readouterr().out


def test_finished_runs_are_skipped_and_other_settings_are_refused(finished, capsys):
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("summary.json")}
    assert len(before) == 6
    command = ["compare", "--config", str(finished / "grid.yaml"), "--output", str(finished / "runs")]
    assert cli.main(command) == 0
    assert {p: p.stat().st_mtime_ns for p in finished.rglob("summary.json")} == before
    assert cli.main([*command, "--algorithm.lr", "0.3"]) == 2
    assert "was started with other settings" in capsys.readouterr().err


def rounds_done(root):
    return sum(max(0, path.read_text().count("\n") - 1) for path in root.rglob("metrics.csv"))


@pytest.mark.slow
def test_after_kills_and_a_signal_the_tables_are_those_of_an_undisturbed_comparison(finished, tmp_path):
    command, rng = [*write(tmp_path), "--jobs", "2"], random.Random(0)
    for signum in (signal.SIGKILL, signal.SIGINT, signal.SIGKILL):
        process = Forked(tmp_path, *command)
        enough = rounds_done(tmp_path) + rng.randint(12, 30)
        wait_for(lambda enough=enough: rounds_done(tmp_path) >= enough)
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in workers if signum == signal.SIGKILL else ():  # the command and its runs, all at once
            os.kill(int(pid), signal.SIGKILL)
        process.send_signal(signum)
        assert process.wait() == (130 if signum == signal.SIGINT else -9)
        if signum == signal.SIGINT:
            assert "the same command continues" in process.output()
            assert 0 < len(list((tmp_path / "runs").rglob("checkpoints/*.ckpt"))) < 6 * 4
    assert cli.main(command) == 0
    assert tables(tmp_path / "runs") == tables(finished / "runs")
    for root, output in ((tmp_path / "runs", "disturbed"), (finished / "runs", "undisturbed")):
        assert cli.main(["report", str(root / "small"), "--output", str(tmp_path / output)]) == 0
    disturbed, undisturbed = tables(tmp_path / "disturbed"), tables(tmp_path / "undisturbed")
    assert {Path("table.csv"), Path("paired.csv"), Path("events.csv")} <= set(disturbed)
    assert disturbed == undisturbed
    assert "obbo, window = 3, start = 0.5" in (tmp_path / "disturbed" / "table.md").read_text()
