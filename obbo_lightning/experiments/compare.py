"""`compare`: a grid of runs, finished ones skipped, interrupted ones resumed; here as subprocesses, or on a cluster."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, NamedTuple, Protocol

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from obbo_lightning.experiments.grid import Cell, Grid
from obbo_lightning.training.run_directory import RunDirectory, write_atomically

LOOK_EVERY = 0.5  # seconds
LOG = "log.txt"
SMALL = ("market", "quadratic")  # data whose runs take seconds
TOGETHER = 8  # of them in one subprocess


class Failure(NamedTuple):
    """A cell that did not end well."""

    cell: str
    reason: str


class Interrupted(Exception):
    """A signal came, and the launcher was told."""

    def __init__(self, signum: int, becomes: str) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}; {becomes}")
        self.signum = signum


class Launcher(Protocol):
    """Where cells are played: in subprocesses of this machine (`LocalLauncher`) or as jobs of a cluster."""

    def start(self, cells: Sequence[Cell], runs: Sequence[RunDirectory]) -> None:
        """Take these cells on, none of them finished."""

    def busy(self) -> bool:
        """Whether a cell may still be played; asked every `LOOK_EVERY` seconds."""

    def stop(self) -> str:
        """Let go; returns what becomes of the cells, for the one who pressed Ctrl-C."""

    def last_words(self, run: RunDirectory) -> str:
        """Why a cell did not finish, as far as it said."""


def prepare(grid: Grid, root: Path) -> list[RunDirectory]:
    """A run directory with its configuration for every cell; refuses cells that were begun with other settings."""
    runs = []
    for cell in grid.cells:
        run = RunDirectory(root / cell.name)
        if run.config.is_file():
            if yaml.safe_load(run.config.read_text()) != yaml.safe_load(yaml.safe_dump(cell.settings)):
                raise ValueError(
                    f"{run.path} was begun with other settings: give --output another folder, or delete it"
                )
        else:
            run.path.mkdir(parents=True, exist_ok=True)
            write_atomically(run.config, yaml.safe_dump(cell.settings, sort_keys=False))
        runs.append(run)
    return runs


def run_cells(
    cells: Sequence[Cell], runs: Sequence[RunDirectory], launcher: Launcher, console: Console
) -> list[Failure]:
    """Play all that is not finished; returns what failed."""
    waiting = [(cell, run) for cell, run in zip(cells, runs, strict=True) if not run.finished]
    rounds = {run.path: cell.settings["rounds"] for cell, run in zip(cells, runs, strict=True)}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with _Signals() as signals:
        launcher.start([cell for cell, _ in waiting], [run for _, run in waiting])
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("rounds", total=sum(rounds.values()), completed=_played(runs, rounds))
            try:
                busy = True
                while busy:
                    busy = launcher.busy()
                    said = f"{sum(run.finished for run in runs)} of {len(runs)} cells, rounds"
                    progress.update(bar, completed=_played(runs, rounds), description=said)
                    time.sleep(LOOK_EVERY if busy else 0)
                    if signals.came:
                        raise Interrupted(signals.came, launcher.stop())
            except BaseException:
                launcher.stop()
                raise
    return [Failure(run.path.name, launcher.last_words(run)) for run in runs if not run.finished]


class LocalLauncher:
    """Subprocesses of this machine, ``jobs`` at a time, one thread each."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._together: list[list[RunDirectory]] = []
        self._workers: list[_Worker] = []
        self._runs: list[RunDirectory] = []

    def start(self, cells: Sequence[Cell], runs: Sequence[RunDirectory]) -> None:
        # One subprocess a cell; but where a run takes no longer than a start of Python, some share one.
        small = all(cell.settings["data"]["name"] in SMALL for cell in cells)
        size = max(1, min(TOGETHER, -(-len(runs) // self._jobs))) if small else 1
        self._runs = list(runs)
        self._together = [self._runs[i : i + size] for i in range(0, len(runs), size)]

    def busy(self) -> bool:
        self._workers = [worker for worker in self._workers if not worker.ended()]
        while self._together and len(self._workers) < self._jobs:
            self._workers.append(_Worker(self._together.pop(0)))
        return bool(self._workers)

    def stop(self) -> str:
        for worker in self._workers:
            worker.stop()
        return "the same command goes on"

    def last_words(self, run: RunDirectory) -> str:
        return _last_words(run, self._runs)


class _Worker:
    """A subprocess that plays some cells one after the other."""

    def __init__(self, runs: Sequence[RunDirectory]) -> None:
        self._log: IO[str] = (runs[0].path / LOG).open("a")
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "obbo_lightning", "resume", *(str(run.path) for run in runs)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            start_new_session=True,  # a Ctrl-C reaches it through us
        )

    def ended(self) -> bool:
        if self._process.poll() is None:
            return False
        self._log.close()
        return True

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait()
        self._log.close()


class _Signals:
    """Remembers SIGINT and SIGTERM instead of dying of them."""

    def __enter__(self) -> "_Signals":
        self.came = 0
        self._before = {n: signal.signal(n, self._remember) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _remember(self, signum: int, frame: object) -> None:
        self.came = signum


def _played(runs: Sequence[RunDirectory], rounds: dict[Path, int]) -> int:
    return sum(rounds[run.path] if run.finished else _rows(run.timings) for run in runs)


def _rows(table: Path) -> int:
    try:
        with table.open("rb") as file:
            return max(0, sum(1 for _ in file) - 1)
    except OSError:
        return 0


def _last_words(run: RunDirectory, runs: Sequence[RunDirectory]) -> str:
    """The last line of what a cell said, in its own log or in that of the worker it shared."""
    for log in (run.path / LOG, *(other.path / LOG for other in runs)):
        said = log.read_text() if log.is_file() else ""
        if log.parent != run.path or f"cell {run.path}\n" in said:
            said = (
                said.rpartition(f"cell {run.path}\n")[2].partition("\ncell ")[0] if f"cell {run.path}\n" in said else ""
            )
        lines = [line for line in said.splitlines() if line.strip()]
        if lines:
            return lines[-1]
    return "it said nothing"


def estimate_seconds(cells: Sequence[Cell], jobs: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """How long the cells will take: two rounds and one evaluation of each kind are played now and counted up."""
    import torch

    from obbo_lightning.core.memory import TaskWindow, Warm
    from obbo_lightning.core.outer_step import OuterStep
    from obbo_lightning.core.randomness import Key
    from obbo_lightning.core.rounds import play
    from obbo_lightning.training.run import build

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    known: dict[str, float] = {}
    total = 0.0
    for cell in cells:
        kind = yaml.safe_dump({k: v for k, v in cell.settings.items() if k != "seed"})
        if kind not in known:
            module, data, *_ = build(cell.settings)
            step = OuterStep(module.outer, module.algorithm, on_nonfinite="skip")
            tasks = [data.train[t] for t in range(2)]
            play(module.problem, module.algorithm, step, tasks[0], Warm(), Key())
            began = clock()
            play(
                module.problem,
                module.algorithm,
                OuterStep(module.outer, module.algorithm, on_nonfinite="skip"),
                tasks[1],
                Warm(),
                Key(),
            )
            each = clock() - began
            if isinstance(step.memory, TaskWindow):
                each *= cell.settings["algorithm"]["window"]
            began = clock()
            module.evaluate(data.test[0])
            judged = (1 + cell.settings["rounds"] // cell.settings["evaluation"]["every"]) * len(data.test)
            known[kind] = cell.settings["rounds"] * each + judged * (clock() - began)
        total += known[kind]
    torch.set_num_threads(threads)
    return total / jobs
