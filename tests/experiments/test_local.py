"""`LocalLauncher` and its workers, with cells that are a few lines of Python instead of runs."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from obbo_lightning.experiments.compare import run_cells
from obbo_lightning.experiments.grid import Cell
from obbo_lightning.experiments.local import LocalLauncher
from obbo_lightning.runs.directory import RunDirectory

# Every Python process that is started imports this: instead of a run the cell's own lines are executed.
SITE = """
import sys, types

def resume(directory):
    found = {"directory": directory, "code": 0}
    exec(compile((directory / "cell.py").read_text(), "cell.py", "exec"), found)
    if found["code"] == 0:
        (directory / "summary.json").write_text("{}")
    return found["code"]

sys.modules["obbo_lightning.training.resume"] = types.ModuleType("resume")
sys.modules["obbo_lightning.training.resume"].resume = resume
"""
PID = "import os\n(directory / 'pid').write_text(str(os.getpid()))\n"
# What a run does: it remembers the signal, and stops when it is safe to.
SAVED_BY_SIGNAL = (
    PID
    + """
import signal, threading
came = threading.Event()
before = signal.signal(signal.SIGTERM, lambda *_: came.set())
(directory / "begun").touch()
came.wait()
signal.signal(signal.SIGTERM, before)
(directory / "saved").touch()
code = 128 + signal.SIGTERM
"""
)


@pytest.fixture(autouse=True)
def no_real_runs(tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)


def made(folder, **cells):
    """A run directory for each cell, with its lines."""
    runs = []
    for name, lines in cells.items():
        run = RunDirectory(folder / name)
        run.path.mkdir()
        (run.path / "cell.py").write_text(lines)
        runs.append(run)
    return runs


def played(runs, jobs):
    cells = [Cell(run.path.name, {"rounds": 1}) for run in runs]
    failed = run_cells(cells, runs, LocalLauncher(jobs), Console(file=io.StringIO()))
    return {failure.cell: failure.reason for failure in failed}


def pids(runs):
    return [int((run.path / "pid").read_text()) for run in runs]


def wait_for(path, seconds=60):
    for _ in range(seconds * 50):
        if path.exists():
            return
        time.sleep(0.02)
    pytest.fail(f"{path} is not there after {seconds} seconds")


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_warm_workers_wait_for_more_cells_until_they_are_stopped(tmp_path):
    launcher, console = LocalLauncher(1, warm=True), Console(file=io.StringIO())
    for name in ("a", "b"):
        runs = made(tmp_path, **{name: PID})
        assert run_cells([Cell(name, {"rounds": 1})], runs, launcher, console) == []
    first, second = ((int((tmp_path / name / "pid").read_text())) for name in ("a", "b"))
    assert first == second
    assert is_running(first)
    launcher.stop()
    assert not is_running(first)


def test_one_worker_plays_all_cells_and_each_has_its_own_log(tmp_path):
    speaks = (
        PID
        + """
import ctypes, sys, warnings
name = directory.name
print("printed by", name)
print("said by", name, file=sys.stderr)
os.write(1, f"written by {name}\\n".encode())
ctypes.CDLL(None).puts(f"put by {name}".encode())
os.system(f"echo echoed by {name}")
warnings.warn("watch out")
"""
    )
    runs = made(tmp_path, a=speaks, b=speaks, c=speaks)
    assert played(runs, jobs=1) == {}
    assert len(set(pids(runs))) == 1
    assert not is_running(pids(runs)[0])
    for run in runs:
        said = (run.path / "log.txt").read_text()
        for word in ("printed", "said", "written", "put", "echoed"):
            assert said.count(f"{word} by ") == said.count(f"{word} by {run.path.name}\n") == 1
        assert said.count("UserWarning: watch out") == 1  # also the second time that this line warns


def test_a_free_worker_gets_the_next_cell(tmp_path):
    waits = PID + "import time\nwhile not (directory.parent / 'e' / 'pid').exists(): time.sleep(0.01)\n"
    runs = made(tmp_path, a=waits, b=PID, c=PID, d=PID, e=PID)
    assert played(runs, jobs=2) == {}
    first, *others = pids(runs)
    assert len(set(others)) == 1
    assert first not in others


def test_a_worker_that_is_killed_fails_its_cell_only(tmp_path):
    dies = PID + "print('in round 3', flush=True)\nos.kill(os.getpid(), 9)\n"
    runs = made(tmp_path, a=PID, b=dies, c=PID, d=PID)
    assert played(runs, jobs=1) == {"b": "in round 3; its process was killed by SIGKILL"}
    first, second, third, fourth = pids(runs)
    assert first == second != third == fourth


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("raise ValueError('lr must be\\n positive, got -1')", "obbo: lr must be positive, got -1"),
        ("raise RuntimeError('a defect')", "RuntimeError: a defect"),
        ("import sys\nprint('blown up', file=sys.stderr)\ncode = 1", "blown up"),
        ("raise SystemExit(3)", "it said nothing"),
        ("code = 2", "it said nothing"),
    ],
)
def test_a_cell_that_fails_is_named_with_its_last_words_and_the_worker_goes_on(lines, reason, tmp_path):
    runs = made(tmp_path, a=PID + lines, b=PID)
    assert played(runs, jobs=1) == {"a": reason}
    assert len(set(pids(runs))) == 1


def test_a_worker_that_cannot_start_says_why_in_the_log(tmp_path):
    (tmp_path / "site" / "sitecustomize.py").write_text("import sys\nsys.exit('no torch here')")
    runs = made(tmp_path, a=PID, b=PID)
    assert played(runs, jobs=1) == dict.fromkeys("ab", "SystemExit: no torch here")


@pytest.mark.parametrize(("jobs", "each"), [(1, "5"), (2, "2"), (9, "1")])
def test_workers_share_the_cores(jobs, each, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("obbo_lightning.threads._torch_began_with", lambda: 5)
    monkeypatch.setattr("obbo_lightning.threads.usable_cores", lambda: 6)
    threads = (
        "import os\n(directory / 'threads').write_text(os.environ['OMP_NUM_THREADS'] + os.environ['MKL_NUM_THREADS'])"
    )
    (run,) = made(tmp_path, a=threads)
    assert played([run], jobs=jobs) == {}
    assert (run.path / "threads").read_text() == each + each


def test_stopping_saves_what_is_played_starts_nothing_and_leaves_nothing_running(tmp_path):
    runs = made(tmp_path, a=SAVED_BY_SIGNAL, b=SAVED_BY_SIGNAL, c=PID)
    launcher = LocalLauncher(2)
    launcher.start([], runs)
    assert launcher.busy()
    for run in runs[:2]:
        wait_for(run.path / "begun")
    assert launcher.stop() == "the same command goes on"
    assert all((run.path / "saved").exists() for run in runs[:2])
    assert not any(map(is_running, pids(runs[:2])))
    assert not launcher.busy()
    assert not (runs[2].path / "log.txt").exists()


def test_stopping_waits_for_a_cell_that_finishes_in_spite_of_the_signal(tmp_path):
    finishes = SAVED_BY_SIGNAL.replace("code = 128 + signal.SIGTERM", "")
    runs = made(tmp_path, a=finishes, b=PID)
    launcher = LocalLauncher(1)
    launcher.start([], runs)
    assert launcher.busy()
    wait_for(runs[0].path / "begun")
    launcher.stop()
    assert [run.finished for run in runs] == [True, False]
    assert not is_running(pids(runs[:1])[0])


def test_a_worker_whose_comparison_is_gone_saves_its_cell_and_ends(tmp_path):
    (run,) = made(tmp_path, a=SAVED_BY_SIGNAL)
    command = [sys.executable, "-m", "obbo_lightning.experiments.worker"]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    print(run.path, file=worker.stdin, flush=True)
    wait_for(run.path / "begun")
    assert worker.communicate(timeout=60)[0] == "143\n"  # closes its input first
    assert worker.returncode == 143
    assert (run.path / "saved").exists()


def test_a_signal_that_ends_a_cell_ends_its_worker_and_the_next_cell_has_another(tmp_path):
    stopped = PID + "import signal\ncode = 128 + signal.SIGTERM\nprint('stopped by SIGTERM after round 4')"
    runs = made(tmp_path, a=stopped, b=PID)
    assert played(runs, jobs=1) == {"a": "stopped by SIGTERM after round 4"}
    assert len(set(pids(runs))) == 2


def test_a_relative_directory_is_found_by_the_worker(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (run,) = made(Path(), a=PID)
    assert played([run], jobs=1) == {}


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_comparison_is_told_to_its_cells(signum, tmp_path):
    (run,) = made(tmp_path, a=SAVED_BY_SIGNAL)
    script = f"""
from pathlib import Path
from rich.console import Console
from obbo_lightning.experiments.compare import Interrupted, run_cells
from obbo_lightning.experiments.grid import Cell
from obbo_lightning.experiments.local import LocalLauncher
from obbo_lightning.runs.directory import RunDirectory
try:
    run_cells([Cell("a", {{"rounds": 1}})], [RunDirectory(Path({str(run.path)!r}))], LocalLauncher(1), Console())
except Interrupted as stop:
    print(stop)
    raise SystemExit(128 + stop.signum)
"""
    comparison = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    wait_for(run.path / "begun")
    comparison.send_signal(signum)
    said, _ = comparison.communicate(timeout=60)
    assert comparison.returncode == 128 + signum
    assert said.endswith(f"stopped by {signum.name}; the same command goes on\n")
    assert (run.path / "saved").exists()
    assert not is_running(pids([run])[0])
