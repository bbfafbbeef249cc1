"""The command line: fit, compare, report and the others. Every mistake is one line and exit code 2."""

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

USAGE = """usage: obbo COMMAND [flags]

  fit                 play an online stream; with no flags, the embedded default
  resume RUN_DIR...   go on with runs that were stopped, exactly where they were [--checkpoint FILE] [--devices N]
  validate RUN_DIR    adapt a run's outer variable to validation tasks and report [--tasks N] [--checkpoint FILE]
  test RUN_DIR        adapt a run's outer variable to test tasks and report [--tasks N] [--checkpoint FILE]
  compare             a grid of runs, resumable: --config configs/compare/default.yaml [--jobs N] [--dry_run]
                      [--launcher local|slurm] [--slurm configs/slurm.yaml]
  dashboard           the W&B workspace and report of a project [--project P] [--entity E] [--group G] [--dry_run]
  report DIR [DIR...] one page, tables and figures of finished runs [--output DIR] [--title TEXT] [--reference LABEL]

  obbo fit --help     every flag of the chosen algorithm, data and trainer
  obbo fit --config configs/default.yaml --algorithm sobow --algorithm.window 25 --seed 3
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 2 for a refusal, 128 + n after signal n."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments else "--help"
    if command in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if command == "--version":
        from obbo_lightning import __version__

        print(__version__)
        return 0
    if command != "fit" and {"-h", "--help"} & set(arguments):
        print(USAGE, end="")
        return 0
    commands = {
        "fit": _fit,
        "resume": _resume,
        "validate": _validate,
        "test": _test,
        "report": _report,
        "compare": _compare,
        "dashboard": _dashboard,
    }
    if command not in commands:
        from difflib import get_close_matches

        near = get_close_matches(command, commands, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return _refuse(f"command must be one of {', '.join(commands)}, got {command!r}{hint}")
    try:
        return commands[command](arguments)
    except ValueError as refusal:
        return _refuse(str(refusal))


def _refuse(message: str) -> int:
    print(f"obbo: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _fit(arguments: list[str]) -> int:
    from obbo_lightning.configuration import check, make_parser, read_layers

    settings, switches = read_layers(arguments)
    if switches & {"help", "h"}:
        parser = make_parser(settings)
        parser.set_defaults(check(settings).as_flat().__dict__)  # what this very command would use
        parser.print_help()
        return 0
    from obbo_lightning.training import run as runs
    from obbo_lightning.training.ranks import is_first
    from obbo_lightning.training.run_directory import RunDirectory

    settings = runs.complete(settings)
    if "print_config" in switches:
        import yaml

        print(yaml.safe_dump(settings, sort_keys=False), end="")
        return 0
    parts = runs.build(settings)  # refuses what is impossible before anything is written
    run = RunDirectory(Path(settings["output"]))  # rank 0 names it for all
    if is_first():
        run = RunDirectory.create(settings["output"], settings["experiment"], settings["algorithm"]["name"])
    return _play(settings, run, None, parts)


def _resume(arguments: list[str]) -> int:
    from obbo_lightning.training.checkpoints import list_checkpoints, newest_checkpoint, verify_checkpoint

    parser = _Parser("resume")
    parser.add_argument("directories", nargs="+", metavar="RUN_DIR")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--devices", type=int)
    asked = parser.parse_args(arguments)
    if len(asked.directories) > 1:
        if asked.checkpoint or asked.devices:
            raise ValueError("--checkpoint and --devices are for one RUN_DIR, got several")
        return max(_resume_caught([directory]) for directory in asked.directories)
    settings, run = _earlier_run(asked.directories[0])
    checkpoint = asked.checkpoint
    if asked.devices is not None:  # any number of processes goes on with a run
        settings["trainer"]["devices"] = asked.devices
    if run.finished:
        return _refuse(f"{run.path} is finished: it has a {run.summary.name}")
    if checkpoint:
        chosen: Path | None = verify_checkpoint(checkpoint)
    else:
        # A run that was stopped before its first checkpoint begins again.
        chosen = newest_checkpoint(run.checkpoints) if list_checkpoints(run.checkpoints) else None
    from obbo_lightning.training.run import build

    return _play(settings, run, chosen, build(settings))


def _resume_caught(arguments: list[str]) -> int:
    """One of several: its failure is not the others'; a signal ends all of them."""
    print(f"cell {arguments[0]}", flush=True)  # whose words follow
    try:
        code = _resume(arguments)
    except ValueError as refusal:
        return _refuse(str(refusal))
    if code >= 128:
        raise SystemExit(code)
    return code


class _Parser(argparse.ArgumentParser):
    """Refuses in one line like everything here."""

    def __init__(self, command: str) -> None:
        super().__init__(command, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.prog}: {message}")


def _compare(arguments: list[str]) -> int:
    parser = _Parser("compare")
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--launcher", default="local")
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--slurm", type=Path)
    parser.add_argument("--output", type=Path, default=Path("runs/compare"))
    parser.add_argument("--dry_run", action="store_true")
    asked, flags = parser.parse_known_args(arguments)
    _require_launcher(asked)
    from rich.console import Console

    from obbo_lightning.experiments import compare, slurm
    from obbo_lightning.experiments.grid import read_grid

    console = Console()
    request = slurm.read_request(asked.slurm) if asked.slurm else {}
    grid = read_grid(asked.config, flags)
    root = asked.output / grid.name
    jobs = asked.jobs or 1
    if asked.dry_run:
        for cell in grid.cells:
            state = "finished" if (root / cell.name / "summary.json").is_file() else f"{cell.settings['rounds']} rounds"
            console.print(f"{cell.name}: {state}", soft_wrap=True, highlight=False)
        waiting = [cell for cell in grid.cells if not (root / cell.name / "summary.json").is_file()]
        how = f"as Slurm jobs with {', '.join(f'{k}: {v}' for k, v in request.items())}"
        if not request:
            how = f"about {compare.estimate_seconds(waiting, jobs) / 60:.1f} minutes with --jobs {jobs}"
        console.print(f"{len(waiting)} of {len(grid.cells)} cells to play, {how}", soft_wrap=True)
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


def _play(settings: dict[str, Any], run: Any, checkpoint: Path | None, parts: Any) -> int:
    from obbo_lightning.training import run as runs
    from obbo_lightning.training.ranks import is_first
    from obbo_lightning.training.recorder import Stopped

    # Lightning has its own format, with paths; ours must come after it.
    warnings.formatwarning = lambda message, *_, **__: f"obbo: warning: {message}\n"
    try:
        runs.fit(settings, run, checkpoint, parts=parts)
    except Stopped as stop:
        if not is_first():  # rank 0 speaks for all; a code of ours would make Lightning kill it
            return 0
        print(f"obbo: {stop}; go on with: python -m obbo_lightning resume {run.path}", file=sys.stderr)
        return 128 + stop.signum
    except FloatingPointError as blow_up:
        print(f"obbo: {blow_up}", file=sys.stderr)
        return 1
    except (ValueError, RuntimeError) as error:  # refusals came before: this one is a defect, and its place matters
        if not _lost_a_rank(error):
            traceback.print_exc()
        elif is_first():
            print(
                f"obbo: another process of this run is gone; go on with: python -m obbo_lightning resume {run.path}",
                file=sys.stderr,
            )
        if not is_first() or _lost_a_rank(error):
            sys.stderr.flush()
            os._exit(1)  # torch would wait for the others
        return 1
    return 0


def _lost_a_rank(error: BaseException) -> bool:
    """Whether a collective failed because another process has died."""
    from torch import distributed

    words = ("gloo", "Connection closed", "Connection reset", "Broken pipe", "NCCL")
    broken = isinstance(error, distributed.DistError) or any(word in str(error) for word in words)
    return distributed.is_available() and distributed.is_initialized() and broken


def _validate(arguments: list[str]) -> int:
    return _judge("validate", arguments)


def _test(arguments: list[str]) -> int:
    return _judge("test", arguments)


def _judge(command: str, arguments: list[str]) -> int:
    from rich.console import Console
    from rich.table import Table

    from obbo_lightning.training import run as runs
    from obbo_lightning.training.checkpoints import newest_checkpoint, verify_checkpoint

    parser = _Parser(command)
    parser.add_argument("directory", metavar="RUN_DIR")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--tasks", type=int)
    asked = parser.parse_args(arguments)
    settings, run = _earlier_run(asked.directory)
    if asked.tasks is not None:
        settings["evaluation"]["tasks"] = asked.tasks
    checkpoint = asked.checkpoint
    settings["trainer"]["devices"] = 1  # one process judges as well as several
    chosen = verify_checkpoint(checkpoint) if checkpoint else newest_checkpoint(run.checkpoints)
    module, data, *_ = runs.build(settings)
    trainer = runs.make_trainer(settings, [], logger=False, limit_val_batches=1.0)
    (found,) = getattr(trainer, command)(module, data, ckpt_path=chosen, verbose=False)
    table = Table(title=f"{command} on {settings['evaluation']['tasks']} tasks, {chosen.stem}", show_header=False)
    for name in (n for n in found if not n.endswith("_se")):
        error = found.get(f"{name}_se")
        table.add_row(name, f"{found[name]:.4f}" + ("" if error is None else f" ± {error:.4f}"))
    Console().print(table)
    return 0


def _report(arguments: list[str]) -> int:
    parser = _Parser("report")
    parser.add_argument("directories", nargs="+", type=Path)
    for option in ("--output", "--title", "--event", "--reference"):
        parser.add_argument(option)
    asked = parser.parse_args(arguments)
    from rich.console import Console
    from rich.table import Table

    from obbo_lightning.experiments.report import write_report

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


def _dashboard(arguments: list[str]) -> int:
    parser = _Parser("dashboard")
    parser.add_argument("--project", default="obbo_lightning")
    parser.add_argument("--entity")
    parser.add_argument("--group", help="a grid's name: the report is of its runs alone")
    parser.add_argument("--dry_run", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("dashboard.json"))
    asked = parser.parse_args(arguments)
    import json

    from obbo_lightning.experiments import dashboard
    from obbo_lightning.training.dashboards import has_login

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


def _earlier_run(directory: str) -> tuple[dict[str, Any], Any]:
    """Its settings, and where it is."""
    import yaml

    from obbo_lightning.configuration import ConfigError
    from obbo_lightning.training.run import complete
    from obbo_lightning.training.run_directory import RunDirectory

    run = RunDirectory.existing(directory)
    try:
        settings = yaml.safe_load(run.config.read_text())
    except yaml.YAMLError:
        settings = None
    if not isinstance(settings, dict):
        raise ConfigError(f"{run.config} must hold the settings of a run, got something else")
    return complete(settings), run
