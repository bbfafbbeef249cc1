"""`compare`: a grid of runs, finished ones skipped, interrupted ones resumed; on this machine, or on a cluster."""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from obbo_lightning.config.parse import Config, complete_config
from obbo_lightning.experiments.grid import Cell, Grid
from obbo_lightning.runs.directory import RunDirectory, read_config, write_atomically

LOOK_EVERY = 0.5  # seconds


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
    """Where cells are played: by workers on this machine (`LocalLauncher`) or as jobs of a cluster."""

    def start(self, cells: Sequence[Cell], runs: Sequence[RunDirectory]) -> None:
        """Take these cells on, none of them finished."""

    def busy(self) -> bool:
        """Whether a cell may still be played."""

    def wait(self, seconds: float) -> None:
        """Until it is worth asking again, at most so long."""

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
            if not _has_settings(run, cell.settings):
                raise ValueError(
                    f"{run.path} was begun with other settings: give --output another folder, or delete it"
                )
        else:
            run.path.mkdir(parents=True, exist_ok=True)
            write_atomically(run.config, yaml.safe_dump(cell.settings, sort_keys=False))
        runs.append(run)
    return runs


def _has_settings(run: RunDirectory, settings: Config) -> bool:
    """Whether a cell was begun with these; those of an earlier version are completed first.

    A file of a part that has changed since is another matter: whoever plays the cell says so. A cell that was begun has
    the threads that it was begun with.
    """
    begun, wanted = read_config(run), yaml.safe_load(yaml.safe_dump(settings))
    left_out: Config = {"sources": None, **({"threads": None} if wanted["threads"] == "auto" else {})}
    if {**begun, **left_out} == {**wanted, **left_out}:
        return True
    return {**complete_config({**begun, "sources": settings.get("sources")}), **left_out} == {**wanted, **left_out}


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
                    if signals.came:
                        raise Interrupted(signals.came, launcher.stop())
                    launcher.wait(LOOK_EVERY if busy else 0)
            except BaseException:
                launcher.stop()
                raise
    return [Failure(run.path.name, launcher.last_words(run)) for run in runs if not run.finished]


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
