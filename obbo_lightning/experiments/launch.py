"""Run a grid: by a few warm processes of this machine (each is this module as a script), or as a Slurm array."""

import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from obbo_lightning.config.parse import complete_config
from obbo_lightning.experiments.grid import PlannedRun
from obbo_lightning.runs.directory import RunDirectory, read_config, write_atomically
from obbo_lightning.threads import share_of_cores
from obbo_lightning.training.signals import Stopped, StopSignals

LOG = "log.txt"  # in a run directory: what the run printed
SLURM_JOB = "slurm_job.txt"  # in a run directory: the id of its job
LOOK_EVERY = 0.5  # seconds between two updates of the progress bar
LOOK_AT_QUEUE = 10.0  # seconds between two calls of squeue, which serves all users


class GridError(Exception):
    """A signal or failed runs stopped a grid; the same command continues it."""

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


def run_all(planned: Sequence[PlannedRun], root: Path, launcher: "Launcher", console: Console) -> dict[str, str]:
    """Execute all runs that are not finished, in directories below ``root``; returns why some failed, by name."""
    runs = prepare(planned, root)
    rounds = [run.config["rounds"] for run in planned]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    signals = StopSignals()
    signals.listen()
    try:
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("rounds", total=sum(rounds))
            for _ in launcher.execute([run for run in runs if not run.finished]):
                if signals.received:
                    raise Stopped(signals.received, 0)
                progress.update(bar, **_progress(runs, rounds))
            progress.update(bar, **_progress(runs, rounds))
    except Stopped as stop:
        signals.restore()  # a second signal ends this process at once
        name = signal.Signals(stop.signum).name
        raise GridError(f"stopped by {name}; {launcher.stop()}", 128 + stop.signum) from None
    finally:
        signals.restore()
    return {run.path.name: launcher.reason(run) for run in runs if not run.finished}


def describe_plan(planned: Sequence[PlannedRun], root: Path) -> list[str]:
    """Return which runs would be executed, one line per run, and their rounds in all."""
    waiting = {name: config["rounds"] for name, config in planned if not RunDirectory(root / name).finished}
    lines = [f"{name}: {waiting[name]} rounds" if name in waiting else f"{name}: finished" for name, _ in planned]
    return [*lines, f"{len(waiting)} of {len(planned)} runs to execute, {sum(waiting.values()):,} rounds"]


def prepare(planned: Sequence[PlannedRun], root: Path) -> list[RunDirectory]:
    """Write the configuration of each run to its directory; refuse a run that was started with other settings."""
    runs = []
    for name, config in planned:
        run = RunDirectory(root / name)
        if not run.config.is_file():
            run.path.mkdir(parents=True, exist_ok=True)
            write_atomically(run.config, yaml.safe_dump(config, sort_keys=False))
        # Not compared: files of components, of whose changes the run itself warns, and a number of threads that was
        # determined when the run was started.
        other = {"component_files": None} | ({"threads": None} if config["threads"] == "auto" else {})
        started = complete_config({**read_config(run), "component_files": config.get("component_files")})
        if {**started, **other} != {**config, **other}:
            raise ValueError(f"{run.path} was started with other settings: give --output another folder, or delete it")
        runs.append(run)
    return runs


def _progress(runs: Sequence[RunDirectory], rounds: Sequence[int]) -> dict[str, Any]:
    lines = [len(_read(run.timings).splitlines()) - 1 for run in runs]  # the first is the header
    done = [n if run.finished else max(0, line) for run, n, line in zip(runs, rounds, lines, strict=True)]
    return {"completed": sum(done), "description": f"{sum(run.finished for run in runs)} of {len(runs)} runs, rounds"}


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")


def _read(file: Path) -> str:
    return file.read_text(errors="replace") if file.is_file() else ""


class LocalLauncher:
    """``jobs`` warm processes that share the cores of this machine until `stop`; one that dies fails its run only."""

    def __init__(self, jobs: int) -> None:
        self._jobs, self._threads = jobs, str(share_of_cores(jobs))
        self._processes: dict[Connection, subprocess.Popen[bytes]] = {}
        self._running: dict[Connection, RunDirectory] = {}
        self._idle: list[Connection] = []
        self._deaths: dict[RunDirectory, str] = {}

    def execute(self, runs: Sequence[RunDirectory]) -> Iterator[None]:
        """Execute runs, of which none is finished; yields about twice a second until all have ended."""
        waiting = deque(runs)
        while waiting or self._running:
            while waiting and len(self._running) < self._jobs:
                run = waiting.popleft()
                connection = self._idle.pop() if self._idle else self._start_process(run)
                self._running[connection] = run
                with contextlib.suppress(OSError):  # it has died, which is found out below
                    connection.send(str(run.path.absolute()))
            yield
            for connection in [one for one in wait(list(self._running), LOOK_EVERY) if isinstance(one, Connection)]:
                run = self._running.pop(connection)
                if _exit_code(connection) < 128:
                    self._idle.append(connection)
                else:  # a signal that ends a run ends its process, too
                    code = self._processes.pop(connection).wait()
                    connection.close()
                    self._deaths[run] = f"its process was killed by {signal.Signals(-code).name}" if code < 0 else ""

    def _start_process(self, run: RunDirectory) -> Connection:
        """Start a process, which prints into the log of its first run until it has started.

        Not a `multiprocessing.Process`: the number of threads, the log and the session must be set when it starts,
        before torch is imported and before a Ctrl-C can reach it.
        """
        connection, other = Pipe()
        with (run.path / LOG).open("ab") as log:
            self._processes[connection] = subprocess.Popen(  # noqa: S603 no word is a user's
                [sys.executable, "-u", "-m", "obbo_lightning.experiments.launch", str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[other.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": self._threads, "MKL_NUM_THREADS": self._threads},
                start_new_session=True,  # a Ctrl-C reaches it through its parent only
            )
        other.close()
        return connection

    def stop(self) -> str:
        """Stop all processes, runs after their round and a checkpoint; returns what becomes of the runs."""
        for connection in self._running:
            self._processes[connection].send_signal(signal.SIGTERM)
        for connection in self._running:
            _exit_code(connection)  # before it is closed, which is a second signal: stop at once
        for connection, process in self._processes.items():
            connection.close()
            process.wait()
        self._processes, self._running, self._idle = {}, {}, []
        return "the same command continues"

    def reason(self, run: RunDirectory) -> str:
        """Return why a run did not finish."""
        return "; ".join(filter(None, (_last_line(_read(run.path / LOG)), self._deaths.get(run))))


def _exit_code(connection: Connection) -> int:
    """Wait for the end of a run; returns its exit code, 255 where its process has died."""
    try:
        return int(connection.recv())
    except (EOFError, OSError):
        return 255


def serve(connection: Connection) -> int:
    """Execute the runs whose directories arrive, until the connection is closed or a signal has stopped a run."""
    directories: SimpleQueue[str] = SimpleQueue()

    def receive() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                directories.put(connection.recv())
        directories.put("")  # the parent is gone
        os.kill(os.getpid(), signal.SIGTERM)  # stops the present run, so that it is saved

    threading.Thread(target=receive, daemon=True).start()
    while directory := directories.get():
        code = execute_run(Path(directory))
        with contextlib.suppress(OSError):
            connection.send(code)
        if code >= 128:
            return code
    return 0


def execute_run(directory: Path) -> int:
    """Start or resume a run; returns its exit code. What this process prints from now on is appended to its log."""
    with (directory / LOG).open("ab") as log:
        os.dup2(log.fileno(), 1)  # file descriptors, because C code prints, too
        os.dup2(log.fileno(), 2)
    try:
        from obbo_lightning.training.resume import resume

        with warnings.catch_warnings():  # which also forgets those that were shown in another run
            return resume(directory)
    except ValueError as refusal:
        print(f"obbo: {' '.join(str(refusal).split())}", file=sys.stderr)
        return 2
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).fflush(None)  # buffers of C code


# After the user's own lines. A run whose time is up gets SIGUSR1, saves a checkpoint and ends with 128 + 10.
SLURM_SCRIPT = """
runs=({runs})
run=${{runs[$SLURM_ARRAY_TASK_ID]}}
echo "Slurm job ${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID" >> "$run/{log}"
export SRUN_CPUS_PER_TASK=${{SLURM_CPUS_PER_TASK:-1}}
export OMP_NUM_THREADS=$SRUN_CPUS_PER_TASK MKL_NUM_THREADS=$SRUN_CPUS_PER_TASK
# Without SLURM_NTASKS, because Lightning would take tasks of the job for ranks.
srun --ntasks=1 env -u SLURM_NTASKS {python} -m obbo_lightning resume "$run" --trust >> "$run/{log}" 2>&1
code=$?
if [ $code = 138 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt 20 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
"""


class SlurmLauncher:
    """Jobs of an array, one per run; a run whose job is still in the queue is waited for, not submitted again.

    ``header`` is a shell script with the ``#SBATCH`` lines of a job, and what must be executed before its run; the
    nodes must see ``folder``, which has the script and Slurm's logs; ``jobs`` limits the runs at a time.
    """

    def __init__(self, header: Path, folder: Path, jobs: int | None = None) -> None:
        self._header = _read(header)
        if not self._header.startswith("#!"):
            raise ValueError(f"--slurm must be a shell script that begins with #!, got {str(header)!r}")
        missing = [command for command in ("sbatch", "squeue") if shutil.which(command) is None]
        if missing:
            raise ValueError(f"--slurm needs a machine with Slurm, got one without {', '.join(missing)}")
        self._folder, self._limit = folder.absolute(), "" if jobs is None else f"%{jobs}"
        self._jobs: dict[RunDirectory, str] = {}

    def execute(self, runs: Sequence[RunDirectory]) -> Iterator[None]:
        """Submit runs, of which none is finished; yields about twice a second until all have ended."""
        queue = _queue() if runs else set()
        if queue is None:
            raise ValueError("--slurm needs an answer of squeue, got none: is Slurm's controller up?")
        known = {run: job for run in runs if (job := _read(run.path / SLURM_JOB).strip()) in queue}
        new = [run for run in runs if run not in known]
        self._jobs = known | (self._submit(new) if new else {})
        if runs:
            print(f"{len(new)} runs submitted, {len(known)} in the queue already: Slurm job {self._ids()}", flush=True)
        active, missing, looked = dict(self._jobs), set[str](), time.monotonic()
        while active:
            yield
            time.sleep(LOOK_EVERY)
            active = {run: job for run, job in active.items() if not run.finished}
            if time.monotonic() - looked < LOOK_AT_QUEUE:
                continue
            looked, queue = time.monotonic(), _queue()
            if queue is not None:  # a controller that does not answer tells nothing about jobs
                absent = {job for job in active.values() if job not in queue}
                # Absent twice, because a shared file system may show the last files of a job late.
                active = {run: job for run, job in active.items() if job not in absent & missing}
                missing = absent

    def stop(self) -> str:
        """Leave the jobs to Slurm; returns what becomes of the runs."""
        return f"the jobs continue: the same command waits for them, scancel {self._ids()} ends them"

    def reason(self, run: RunDirectory) -> str:
        """Return why a run did not finish."""
        job = self._jobs[run]
        log = self._folder / f"{job}.out"  # Slurm's: a run that is killed, for its memory, prints nothing itself
        _, begun, printed = _read(run.path / LOG).rpartition(f"Slurm job {job}\n")
        return f"{_last_line(printed if begun else '')}; Slurm job {job}: {_last_line(_read(log))}; all of it in {log}"

    def _submit(self, runs: Sequence[RunDirectory]) -> dict[RunDirectory, str]:
        self._folder.mkdir(parents=True, exist_ok=True)
        script, paths = self._folder / "array.sh", " ".join(shlex.quote(str(run.path.absolute())) for run in runs)
        body = SLURM_SCRIPT.format(runs=paths, log=LOG, python=shlex.quote(sys.executable))
        write_atomically(script, f"{self._header}\n{body}")
        options = [f"--array=0-{len(runs) - 1}{self._limit}", "--signal=USR1@150", "--requeue", "--open-mode=append"]
        options += [f"--job-name=obbo-{self._folder.parent.name}", f"--output={self._folder}/%A_%a.out"]
        answer = _ask("sbatch", "--parsable", *options, str(script))
        if answer.returncode:
            raise ValueError(f"Slurm refused: {' '.join(answer.stderr.split())}")
        jobs = {run: f"{answer.stdout.strip().partition(';')[0]}_{i}" for i, run in enumerate(runs)}
        for run, job in jobs.items():
            write_atomically(run.path / SLURM_JOB, f"{job}\n")
        return jobs

    def _ids(self) -> str:
        return " ".join(sorted({job.partition("_")[0] for job in self._jobs.values()}, key=int))


Launcher = LocalLauncher | SlurmLauncher


def _queue() -> set[str] | None:
    """Return the user's jobs that wait or run, elements of arrays one by one; None where Slurm does not answer."""
    answer = _ask("squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i")
    return set(answer.stdout.split()) if answer.returncode == 0 else None


def _ask(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)  # noqa: S603 not a shell


if __name__ == "__main__":
    sys.exit(serve(Connection(int(sys.argv[1]))))
