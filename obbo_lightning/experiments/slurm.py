"""`compare --launcher slurm`: the cells of a grid as one Slurm array, through submitit."""

import contextlib
import io
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from obbo_lightning.experiments.grid import Cell
from obbo_lightning.experiments.logs import LOG, last_line, read_log
from obbo_lightning.experiments.worker import play
from obbo_lightning.runs.directory import RunDirectory, write_atomically
from obbo_lightning.threads import BOUNDS

JOB = "slurm_job.txt"  # in a cell: the job that plays it
LOOK_AT_QUEUE = 10.0  # seconds; Slurm serves everybody
TIMEOUTS = 20  # times that a cell whose time is up is queued again
COMMANDS = ("sbatch", "srun", "squeue", "scontrol")


class PlayCell:
    """What a job does: it plays its cell in its own process, so that Slurm's signals come to the run itself.

    SIGTERM (scancel, preemption, the end of the time) makes a run save and stop, as anywhere. 90 to 150 seconds before
    the end of its time a job gets SIGUSR2: the run is saved in the same way, and then submitit queues the job again.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def checkpoint(self) -> Any:
        """What is queued again: the same, since all state is in the run directory."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def __call__(self) -> None:
        """Go on with the cell; what it says goes to its log."""
        from submitit import JobEnvironment

        time_is_up = False

        def save(signum: int, frame: FrameType | None) -> None:
            nonlocal time_is_up
            time_is_up = True
            signal.raise_signal(signal.SIGTERM)

        queue_again: Any = signal.signal(signal.SIGUSR2, save)
        signal.signal(signal.SIGTERM, _stop)
        # Lightning would take the tasks of the job for ranks, and requeue by itself.
        os.environ.pop("SLURM_NTASKS", None)
        with (self.directory / LOG).open("a") as log:
            log.write(_header(JobEnvironment().job_id))
        code = play(self.directory)
        if code == 128 + signal.SIGTERM and time_is_up:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the queue sends one more
            queue_again(signal.SIGUSR2, None)
        if code:
            raise SystemExit(code)  # so that Slurm, too, calls it failed


def _header(job: str) -> str:
    return f"Slurm job {job}\n"


def _stop(signum: int, frame: FrameType | None) -> None:
    """Between rounds the recorder has the signal; before the first and after the last nothing can be lost."""
    raise SystemExit(128 + signum)


class SlurmLauncher:
    """Jobs of an array, one for each cell; a cell whose job is still in the queue is waited for, not submitted again.

    Args:
        request: what the jobs ask for, see `slurm_request.read_request`.
        folder: where submitit keeps its files; the nodes must see it.
        name: of the grid.
    """

    def __init__(self, request: dict[str, Any], folder: Path, name: str) -> None:
        try:
            import submitit  # noqa: F401
        except ImportError:
            raise ValueError(
                "--launcher slurm needs submitit, which is not installed: pip install 'obbo_lightning[slurm]'"
            ) from None
        missing = [command for command in COMMANDS if shutil.which(command) is None]
        if missing:
            raise ValueError(
                f"--launcher slurm needs a machine with Slurm's {', '.join(COMMANDS)}, got none of {', '.join(missing)}"
            )
        threads = request["cpus_per_task"]
        bounds = " ".join(f"{name}=${{{name}:-{bound}}}" for name, bound in BOUNDS.items())
        exports = [f"export OMP_NUM_THREADS={threads} MKL_NUM_THREADS={threads} {bounds}"]
        self._folder = folder.absolute()
        self._parameters = {
            **request,
            "job_name": f"obbo-{name}",
            "setup": [*exports, *request.get("setup", [])],
            "srun_args": [f"--cpus-per-task={threads}"],  # since Slurm 22.05 srun does not inherit it
            "stderr_to_stdout": True,
        }
        self._jobs: dict[RunDirectory, str] = {}
        self._ended: dict[RunDirectory, str] = {}
        self._missing: set[str] = set()
        self._looked = 0.0

    def start(self, cells: Sequence[Cell], runs: Sequence[RunDirectory]) -> None:
        queue = _queue()
        if queue is None:
            raise ValueError("--launcher slurm needs an answer of squeue, got none: is Slurm's controller up?")
        self._jobs = {run: job for run in runs if (job := read_log(run.path / JOB).strip()) in queue}
        new = [run for run in runs if run not in self._jobs]
        waited = len(self._jobs)
        if new:
            for run, job in zip(new, self._submit(new), strict=True):
                write_atomically(run.path / JOB, job + "\n")
                self._jobs[run] = job
        self._looked = time.monotonic()
        if runs:
            print(f"{len(new)} cells submitted, {waited} in the queue already: Slurm job {self._ids()}", flush=True)

    def busy(self) -> bool:
        over = {run for run in self._jobs if run.finished}
        if time.monotonic() - self._looked >= LOOK_AT_QUEUE:
            self._looked = time.monotonic()
            queue = _queue()
            if queue is not None:  # a controller that is down says nothing about jobs
                missing = {job for job in self._jobs.values() if job not in queue}
                # Twice, because a shared file system may show the last files of a job late.
                over |= {run for run, job in self._jobs.items() if job in missing & self._missing}
                self._missing = missing
        for run in over:
            self._ended[run] = self._jobs.pop(run)
        return bool(self._jobs)

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def stop(self) -> str:
        return f"the jobs go on: the same command waits for them, scancel {self._ids()} ends them"

    def last_words(self, run: RunDirectory) -> str:
        # A cell that is killed, for its memory say, cannot say so: Slurm's log does.
        job = self._ended[run]
        log = self._folder / f"{job}_0_log.out"
        _, header, said = read_log(run.path / LOG).rpartition(_header(job))
        cell = last_line(said if header else "")
        return f"{cell}; Slurm job {job}: {last_line(read_log(log))}; all of it in {log}"

    def _submit(self, runs: Sequence[RunDirectory]) -> list[str]:
        from submitit import SlurmExecutor
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        executor = SlurmExecutor(self._folder, max_num_timeout=TIMEOUTS)
        executor.update_parameters(**self._parameters)
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # it prints what it raises, too
                jobs = executor.submit_array([PlayCell(run.path.absolute()) for run in runs])
        except (FailedJobError, FailedSubmissionError) as refusal:
            raise ValueError(f"Slurm refused: {refusal}") from None
        return [job.job_id for job in jobs]

    def _ids(self) -> str:
        return " ".join(sorted({job.partition("_")[0] for job in self._jobs.values()}, key=int))


def _queue() -> set[str] | None:
    """The user's jobs that wait or run, elements of arrays one by one; None where Slurm does not answer.

    sacct, which submitit would ask, needs an accounting database; squeue is there wherever Slurm is.
    """
    command = ["squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i"]
    asked = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)  # noqa: S603 no word is a user's
    return set(asked.stdout.split()) if asked.returncode == 0 else None
