"""`compare` and `tune`: run a grid, or print its plan."""

import argparse
import sys

from obbo_lightning.config.parse import find_config, read_dataclass, read_flags
from obbo_lightning.experiments.grid import read_grid
from obbo_lightning.experiments.launch import Launcher, LocalLauncher, SlurmLauncher, describe_plan, run_all
from obbo_lightning.experiments.runs import has_diverged
from obbo_lightning.experiments.tune import TuneConfig, describe_search, tune
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.runs.summary import PlainConsole
from obbo_lightning.training.run import format_warnings


def run(arguments: argparse.Namespace) -> int:
    """Run the grid of a comparison file; tune its methods first, where the file has a section ``tune``."""
    command, (flags, _, switches) = arguments.command, read_flags(arguments.overrides)
    if switches:
        raise ValueError(f"{command} takes configuration keys and its own flags, got --{min(switches)}")
    if arguments.jobs is not None and arguments.jobs < 1:
        raise ValueError(f"--jobs must be an integer of at least 1, got {arguments.jobs}")
    path, console = find_config(arguments.config, command), PlainConsole()
    grid = read_grid(path, flags)
    if command == "tune" and grid.tune is None:
        raise ValueError(f"{path} must have a section tune for the command of that name, got none; compare runs it")
    search = None if grid.tune is None else read_dataclass(TuneConfig, grid.tune, "tune")
    root = arguments.output / grid.name
    if arguments.dry_run:
        for line in [*(describe_search(grid, search) if search else []), *describe_plan(grid.runs, root)]:
            console.print(line, soft_wrap=True, highlight=False)
        return 0
    launcher: Launcher = LocalLauncher(arguments.jobs or 1)
    if arguments.slurm:
        launcher = SlurmLauncher(arguments.slurm, root / "slurm", arguments.jobs)
    format_warnings()
    try:
        if search:
            grid = tune(grid, search, root, launcher, console)
        failed = run_all(grid.runs, root, launcher, console)
    finally:
        launcher.stop()
    by_reason: dict[str, list[str]] = {}
    for name, reason in failed.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, (first, *others) in by_reason.items():
        more = f", and {len(others)} more for the same reason" if others else ""
        print(f"obbo: run {first} failed: {reason}{more}", file=sys.stderr)
    for name in (run.name for run in grid.runs if has_diverged(RunDirectory(root / run.name))):
        print(f"obbo: run {name} diverged: its last rounds were all skipped as not finite", file=sys.stderr)
    finished = len(grid.runs) - len(failed)
    report = f"; next: python -m obbo_lightning report {root}" if finished else ""
    console.print(f"{finished} of {len(grid.runs)} runs finished{report}", soft_wrap=True)
    return 1 if failed else 0
