"""`compare --launcher local`: the cells of a grid in a few warm processes of this machine."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from typing import IO, cast

from obbo_lightning.experiments.grid import Cell
from obbo_lightning.experiments.logs import LOG, last_line, read_log
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.threads import share_of_cores


class LocalLauncher:
    """Workers of this machine, ``jobs`` at a time, which share its cores; a free one gets the next cell.

    A worker that dies fails its cell and no other: the next cell gets a new worker.

    Args:
        jobs: how many.
        warm: whether those that have nothing to do wait for another `start`, until `stop`.
    """

    def __init__(self, jobs: int, warm: bool = False) -> None:
        self._jobs, self._warm = jobs, warm
        self._threads = share_of_cores(jobs)
        self._waiting: deque[RunDirectory] = deque()
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._deaths: dict[RunDirectory, str] = {}

    def start(self, cells: Sequence[Cell], runs: Sequence[RunDirectory]) -> None:
        self._waiting = deque(runs)

    def busy(self) -> bool:
        for worker in [worker for worker in self._workers if worker.has_answered()]:
            if worker.serves and self._waiting:
                worker.play(self._waiting.popleft())
                continue
            self._workers.remove(worker)
            if worker.serves and self._warm:
                self._idle.append(worker)
            else:
                self._deaths[worker.run] = worker.end()
        while self._waiting and len(self._workers) < self._jobs:
            self._workers.append(self._give(self._waiting.popleft()))
        return bool(self._workers)

    def _give(self, run: RunDirectory) -> "_Worker":
        if not self._idle:
            return _Worker(run, self._threads)
        worker = self._idle.pop()
        worker.play(run)
        return worker

    def wait(self, seconds: float) -> None:
        select.select(self._workers, [], [], seconds)

    def stop(self) -> str:
        self._waiting.clear()
        for worker in self._workers:
            worker.process.send_signal(signal.SIGTERM)
        for worker in self._workers:
            # First its answer: to a run the end of its input would be a second signal, which means at once. A cell
            # whose last round was played when the signal came has finished, and its worker waits for the next one.
            worker.take_answer()
        for worker in (*self._workers, *self._idle):
            worker.end()
        self._workers, self._idle = [], []
        return "the same command goes on"

    def last_words(self, run: RunDirectory) -> str:
        return "; ".join(filter(None, (last_line(read_log(run.path / LOG)), self._deaths.get(run))))


class _Worker:
    """A process that plays one cell at a time.

    Attributes:
        process: it.
        run: the cell that it was given last.
        serves: whether it can take another one.
    """

    def __init__(self, run: RunDirectory, threads: int) -> None:
        with (run.path / LOG).open("a") as log:  # of what it says before it is in a cell
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", "obbo_lightning.experiments.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
                start_new_session=True,  # a Ctrl-C reaches it through us
            )
        self._requests, self._answers = cast(IO[str], self.process.stdin), cast(IO[str], self.process.stdout)
        self.run, self.serves = run, True
        self.play(run)

    def fileno(self) -> int:
        """Of its answers, for `select`."""
        return self._answers.fileno()

    def play(self, run: RunDirectory) -> None:
        self.run = run
        with contextlib.suppress(BrokenPipeError):  # it has died, and its answers have ended
            print(run.path.absolute(), file=self._requests, flush=True)

    def has_answered(self) -> bool:
        """Whether its cell is over, well or not."""
        over = bool(select.select([self], [], [], 0)[0])
        if over:
            self.take_answer()
        return over

    def take_answer(self) -> None:
        """Wait for the end of its cell, or its own."""
        answer = self._answers.readline()
        self.serves = answer != "" and int(answer) < 128  # a signal that ended a cell ends its worker, too

    def end(self) -> str:
        """Let it go; returns what killed it, if something did."""
        if self.serves:  # it waits for a cell, and ends when none can come
            self._requests.close()
        code = self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        self._answers.close()
        return f"its process was killed by {signal.Signals(-code).name}" if code < 0 and not self.serves else ""
