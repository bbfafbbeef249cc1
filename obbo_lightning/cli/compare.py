"""`compare`: a grid of runs, or its plan."""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from obbo_lightning.cli.flags import Flags
from obbo_lightning.config.parse import Config, find_config, read_flags
from obbo_lightning.escaping import PlainConsole
from obbo_lightning.experiments import compare
from obbo_lightning.experiments.grid import Grid, read_grid
from obbo_lightning.experiments.local import LocalLauncher
from obbo_lightning.experiments.slurm import SlurmLauncher
from obbo_lightning.experiments.slurm_request import read_request
from obbo_lightning.experiments.tune_request import read_tune
from obbo_lightning.training.run import format_warnings


def run(arguments: list[str]) -> int:
    """A grid of runs, or its plan."""
    return play_comparison("compare", arguments)


def play_comparison(command: str, arguments: list[str]) -> int:
    """`compare`, and `tune`, which is the same of a file with a ``tune`` section."""
    asked, rest = Flags(command).parse_known_args(arguments)
    _require_launcher(asked)
    console, jobs = PlainConsole(), asked.jobs or 1
    request = read_request(asked.slurm) if asked.slurm else {}
    path = find_config(asked.config, command)
    grid = read_grid(path, _settings(rest))
    if command == "tune" and grid.tune is None:
        raise ValueError(f"{path} must have a section tune for the command of that name, got none; compare plays it")
    root = asked.output / grid.name
    if asked.dry_run:
        if grid.tune is not None:
            print_search(grid, console)
        _print_plan(grid, root, request, jobs if asked.measure else None, console)
        return 0

    launcher: compare.Launcher = LocalLauncher(jobs, warm=grid.tune is not None)
    if asked.slurm:
        launcher = SlurmLauncher(request, root / "slurm", grid.name)
    format_warnings()
    try:
        return (play_cells if grid.tune is None else play_tuned)(grid, root, launcher, console)
    except compare.Interrupted as stop:
        print(f"obbo: {stop}", file=sys.stderr)
        return 128 + stop.signum


def play_cells(grid: Grid, root: Path, launcher: compare.Launcher, console: Console) -> int:
    """All cells that are not finished; returns the exit code."""
    runs = compare.prepare(grid, root)
    failed = compare.run_cells(grid.cells, runs, launcher, console)
    by_reason: dict[str, list[str]] = {}
    for failure in failed:
        by_reason.setdefault(failure.reason, []).append(failure.cell)
    for reason, (first, *others) in by_reason.items():
        more = f", and {len(others)} more as it did" if others else ""
        print(f"obbo: cell {first} failed: {reason}{more}", file=sys.stderr)
    finished = len(runs) - len(failed)
    report = f"; next: python -m obbo_lightning report {root}" if finished else ""
    console.print(f"{finished} of {len(runs)} cells finished{report}", soft_wrap=True)
    return 1 if failed else 0


def play_tuned(grid: Grid, root: Path, launcher: compare.Launcher, console: Console) -> int:
    """Tune, then play the comparison untuned and tuned; returns the exit code."""
    from obbo_lightning.experiments import tuning
    from obbo_lightning.experiments.tune import tune, tuned_grid

    request, folder = read_tune(grid.tune), root / tuning.FOLDER
    try:
        over = tune(grid, request, folder, lambda cells, runs: compare.run_cells(cells, runs, launcher, console))
        tuning.write_search(over, request, folder, grid.name)
        for method in over.methods:
            found = over.found(method)
            said = ", ".join(f"{key} {tuning.shown(value)}" for key, value in found.items())
            ends = [key for key, given in method.ranges.items() if given.ends_at(found[key])]
            hint = f"; {', '.join(ends)} at an end of its range: beyond it may be better ones" if ends else ""
            console.print(f"{method.label}: {said}{hint}", soft_wrap=True, highlight=False)
        both, pairs = tuned_grid(grid, over)
        code = play_cells(both, root, launcher, console)
    finally:
        launcher.stop()
    if code == 0:
        tuning.write_tuned(over, pairs, root)
    return code


def print_search(grid: Grid, console: Console) -> None:
    """What would be searched."""
    from obbo_lightning.experiments.tune import methods_of

    request = read_tune(grid.tune)
    for method in methods_of(grid, request):
        ranges = "; ".join(f"{key} in {given}" for key, given in method.ranges.items())
        spent = f"{request.budget:,} {request.unit} on {request.judge}"
        console.print(f"{method.label}: {spent}; {ranges}", soft_wrap=True, highlight=False)


def _settings(arguments: list[str]) -> Config:
    """The flags that are settings of all cells."""
    found = read_flags(arguments)
    if found.switches:
        raise ValueError(f"compare takes settings and its own flags, got --{min(found.switches)}")
    return found.settings


def _print_plan(grid: Grid, root: Path, request: dict[str, object], jobs: int | None, console: Console) -> None:
    """What would be played; and with ``jobs`` for how long, which needs the data and is measured."""
    waiting = [cell for cell in grid.cells if not (root / cell.name / "summary.json").is_file()]
    for cell in grid.cells:
        state = f"{cell.settings['rounds']} rounds" if cell in waiting else "finished"
        console.print(f"{cell.name}: {state}", soft_wrap=True, highlight=False)
    how = "; --measure plays a round of each kind, and says how long that is"
    if request:
        how = f" as Slurm jobs with {', '.join(f'{k}: {v}' for k, v in request.items())}"
    elif jobs:
        from obbo_lightning.experiments.estimate import estimate_seconds

        how = f", about {estimate_seconds(waiting, jobs) / 60:.1f} minutes with --jobs {jobs}"
    rounds = sum(cell.settings["rounds"] for cell in waiting)
    console.print(f"{len(waiting)} of {len(grid.cells)} cells to play, {rounds:,} rounds{how}", soft_wrap=True)


def _require_launcher(asked: argparse.Namespace) -> None:
    """Each launcher has its own flag, and none of the other's."""
    if asked.launcher not in ("local", "slurm"):
        raise ValueError(f"--launcher must be one of local, slurm, got {asked.launcher!r}")
    if asked.measure and not (asked.dry_run and asked.launcher == "local"):
        raise ValueError("--measure needs --dry_run, and measures this machine: --launcher local")
    if asked.jobs is not None and asked.jobs < 1:
        raise ValueError(f"--jobs must be an integer of at least 1, got {asked.jobs}")
    if asked.launcher == "slurm" and not asked.slurm:
        raise ValueError("--launcher slurm needs --slurm FILE, what to ask of Slurm: see configs/slurm/default.yaml")
    if asked.launcher == "slurm" and asked.jobs:
        raise ValueError(
            f"--jobs is for --launcher local, got {asked.jobs}: array_parallelism in {asked.slurm} is its like"
        )
    if asked.launcher == "local" and asked.slurm:
        raise ValueError(f"--slurm needs --launcher slurm, got --slurm {asked.slurm}")
