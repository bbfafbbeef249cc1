"""`compare`: run a grid, or print its plan."""

import sys

from obbo_lightning.cli.flags import Flags
from obbo_lightning.config.files import find_config
from obbo_lightning.config.flags import read_flags
from obbo_lightning.experiments.grid import read_grid, read_section
from obbo_lightning.experiments.launch import Launcher, LocalLauncher, SlurmLauncher, describe_plan, run_all
from obbo_lightning.experiments.tune import TuneConfig, describe_search, run_tuned
from obbo_lightning.runs.console import PlainConsole
from obbo_lightning.training.run import format_warnings


def run(arguments: list[str]) -> int:
    """Run the grid of a comparison file, or print its plan."""
    return run_comparison("compare", arguments)


def run_comparison(command: str, arguments: list[str]) -> int:
    """Execute `compare`, or `tune`, which is the same for a file with a section ``tune``; returns the exit code."""
    asked, rest = Flags(command).parse_known_args(arguments)
    flags = read_flags(rest)
    if flags.switches:
        raise ValueError(f"{command} takes settings and its own flags, got --{min(flags.switches)}")
    if asked.jobs is not None and asked.jobs < 1:
        raise ValueError(f"--jobs must be an integer of at least 1, got {asked.jobs}")
    path, console = find_config(asked.config, command), PlainConsole()
    grid = read_grid(path, flags.settings)
    if command == "tune" and grid.tune is None:
        raise ValueError(f"{path} must have a section tune for the command of that name, got none; compare runs it")
    tune = None if grid.tune is None else read_section(TuneConfig, grid.tune, "tune")
    root = asked.output / grid.name
    if asked.dry_run:
        for line in [*(describe_search(grid, tune) if tune else []), *describe_plan(grid.runs, root)]:
            console.print(line, soft_wrap=True, highlight=False)
        return 0
    launcher: Launcher = LocalLauncher(asked.jobs or 1)
    if asked.slurm:
        launcher = SlurmLauncher(asked.slurm, root / "slurm", asked.jobs)
    format_warnings()
    try:
        if tune:
            grid = run_tuned(grid, tune, root, launcher, console)
        failed = run_all(grid.runs, root, launcher, console)
    finally:
        launcher.stop()
    by_reason: dict[str, list[str]] = {}
    for failure in failed:
        by_reason.setdefault(failure.reason, []).append(failure.run)
    for reason, (first, *others) in by_reason.items():
        more = f", and {len(others)} more for the same reason" if others else ""
        print(f"obbo: run {first} failed: {reason}{more}", file=sys.stderr)
    finished = len(grid.runs) - len(failed)
    report = f"; next: python -m obbo_lightning report {root}" if finished else ""
    console.print(f"{finished} of {len(grid.runs)} runs finished{report}", soft_wrap=True)
    return 1 if failed else 0
