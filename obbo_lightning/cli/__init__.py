"""The command line: fit, compare, report and the others. Every mistake is one line and exit code 2."""

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from obbo_lightning.flags import Flags

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

    parser = Flags("resume")
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
    except FloatingPointError as blow_up:  # of all ranks in the same round
        if is_first():
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

    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    words = ("gloo", "Connection closed", "Connection reset", "Broken pipe", "NCCL")
    return isinstance(error, distributed.DistError) or any(word in str(error) for word in words)


def _validate(arguments: list[str]) -> int:
    return _judge("validate", arguments)


def _test(arguments: list[str]) -> int:
    return _judge("test", arguments)


def _judge(command: str, arguments: list[str]) -> int:
    from rich.console import Console
    from rich.table import Table

    from obbo_lightning.training import run as runs
    from obbo_lightning.training.checkpoints import newest_checkpoint, verify_checkpoint

    parser = Flags(command)
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


def _compare(arguments: list[str]) -> int:
    from obbo_lightning.experiments.commands import run_compare

    return run_compare(arguments)


def _report(arguments: list[str]) -> int:
    from obbo_lightning.experiments.commands import run_report

    return run_report(arguments)


def _dashboard(arguments: list[str]) -> int:
    from obbo_lightning.experiments.commands import run_dashboard

    return run_dashboard(arguments)


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
