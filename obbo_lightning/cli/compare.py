"""The commands that are about several runs: compare, report, dashboard."""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from obbo_lightning.experiments import compare, dashboard, slurm
from obbo_lightning.experiments.grid import Grid, read_grid
from obbo_lightning.experiments.report import write_report
from obbo_lightning.flags import Flags
from obbo_lightning.training.dashboards import has_login


def run_compare(arguments: list[str]) -> int:
    """A grid of runs, or its plan."""
    flags = Flags("compare")
    flags.add_argument("--config", required=True, type=Path)
    flags.add_argument("--launcher", default="local")
    flags.add_argument("--jobs", type=int)
    flags.add_argument("--slurm", type=Path)
    flags.add_argument("--output", type=Path, default=Path("runs/compare"))
    flags.add_argument("--dry_run", action="store_true")
    asked, settings = flags.parse_known_args(arguments)
    _require_launcher(asked)
    console, jobs = Console(), asked.jobs or 1
    request = slurm.read_request(asked.slurm) if asked.slurm else {}
    grid = read_grid(asked.config, settings)
    root = asked.output / grid.name
    if asked.dry_run:
        _print_plan(grid, root, request, jobs, console)
        return 0
    launcher: compare.Launcher = compare.LocalLauncher(jobs)
    if asked.slurm:
        launcher = slurm.SlurmLauncher(request, root / "slurm", grid.name)
    runs = compare.prepare(grid, root)
    try:
        failed = compare.run_cells(grid.cells, runs, launcher, console)
    except compare.Interrupted as stop:
        print(f"obbo: {stop}", file=sys.stderr)
        return 128 + stop.signum
    for failure in failed:
        print(f"obbo: cell {failure.cell} failed: {failure.reason}", file=sys.stderr)
    console.print(
        f"{len(runs) - len(failed)} of {len(runs)} cells finished; next: python -m obbo_lightning report {root}",
        soft_wrap=True,
    )
    return 1 if failed else 0


def _print_plan(grid: Grid, root: Path, request: dict[str, object], jobs: int, console: Console) -> None:
    """What would be played, and for how long."""
    waiting = [cell for cell in grid.cells if not (root / cell.name / "summary.json").is_file()]
    for cell in grid.cells:
        state = f"{cell.settings['rounds']} rounds" if cell in waiting else "finished"
        console.print(f"{cell.name}: {state}", soft_wrap=True, highlight=False)
    how = f"as Slurm jobs with {', '.join(f'{k}: {v}' for k, v in request.items())}"
    if not request:
        how = f"about {compare.estimate_seconds(waiting, jobs) / 60:.1f} minutes with --jobs {jobs}"
    console.print(f"{len(waiting)} of {len(grid.cells)} cells to play, {how}", soft_wrap=True)


def _require_launcher(asked: argparse.Namespace) -> None:
    """Each launcher has its own flag, and none of the other's."""
    if asked.launcher not in ("local", "slurm"):
        raise ValueError(f"--launcher must be one of local, slurm, got {asked.launcher!r}")
    if asked.jobs is not None and asked.jobs < 1:
        raise ValueError(f"--jobs must be an integer of at least 1, got {asked.jobs}")
    if asked.launcher == "slurm" and not asked.slurm:
        raise ValueError("--launcher slurm needs --slurm FILE, with what to ask of Slurm: see configs/slurm.yaml")
    if asked.launcher == "slurm" and asked.jobs:
        raise ValueError(
            f"--jobs is for --launcher local, got {asked.jobs}: array_parallelism in {asked.slurm} is its like"
        )
    if asked.launcher == "local" and asked.slurm:
        raise ValueError(f"--slurm needs --launcher slurm, got --slurm {asked.slurm}")


def run_report(arguments: list[str]) -> int:
    """Tables, figures and a page of finished runs."""
    flags = Flags("report")
    flags.add_argument("directories", nargs="+", type=Path)
    for option in ("--output", "--title", "--event", "--reference"):
        flags.add_argument(option)
    asked = flags.parse_args(arguments)
    output = Path(asked.output or asked.directories[0] / "report")
    ticker, _, day = (asked.event or "").partition(" ")
    title = asked.title or asked.directories[0].resolve().name
    report = write_report(asked.directories, output, title, (ticker, day) if asked.event else None, asked.reference)
    console = Console()
    for table in report.tables:
        shown = Table(title=table.name)
        for i, name in enumerate(table.columns):
            shown.add_column(name, overflow="fold", justify="right" if i else "left")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)
    files = ", ".join(sorted(path.name for path in report.written if path != report.page))
    console.print(f"\n{report.page}\nbeside it: {files}", soft_wrap=True, highlight=False)
    for one in report.left_out:
        print(f"obbo: {one}", file=sys.stderr)
    return 1 if report.left_out else 0


def run_dashboard(arguments: list[str]) -> int:
    """The W&B workspace and report of a project, or what would be sent."""
    flags = Flags("dashboard")
    flags.add_argument("--project", default="obbo_lightning")
    flags.add_argument("--entity")
    flags.add_argument("--group", help="a grid's name: the report is of its runs alone")
    flags.add_argument("--dry_run", action="store_true")
    flags.add_argument("--output", type=Path, default=Path("dashboard.json"))
    asked = flags.parse_args(arguments)
    if asked.dry_run:
        found = dashboard.specification(asked.entity or "ENTITY", asked.project, asked.group)
        try:
            asked.output.write_text(json.dumps(found, indent=2) + "\n")
        except OSError as error:
            raise ValueError(
                f"--output must be a file that can be written, got {asked.output}: {error.strerror}"
            ) from None
        print(f"{asked.output}: what would be sent to W&B for project {asked.project}")
        return 0
    if not has_login():
        raise ValueError("dashboard needs a W&B login, got none: wandb login, or --dry_run to see what would be sent")
    import wandb

    try:
        entity = str(asked.entity or wandb.Api().default_entity)
        addresses = dashboard.save(entity, asked.project, asked.group)
    except (wandb.errors.Error, OSError) as error:
        print(f"obbo: W&B refused: {type(error).__name__} {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print("\n".join(addresses))
    return 0
