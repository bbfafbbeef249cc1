"""The command line: fit, resume, validate, test, compare, report. Every mistake is one line and exit code 2."""

import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

USAGE = """usage: obbo COMMAND [flags]

  fit                 play an online stream; with no flags, the embedded default
  resume RUN_DIR...   go on with runs that were stopped, exactly where they were [--checkpoint FILE]
  validate RUN_DIR    adapt a run's outer variable to validation tasks and report [--tasks N] [--checkpoint FILE]
  test RUN_DIR        adapt a run's outer variable to test tasks and report [--tasks N] [--checkpoint FILE]
  compare             a grid of runs, resumable: --config configs/compare/default.yaml [--jobs N] [--dry_run]
  report DIR [DIR...] tables and figures of all finished runs [--output DIR] [--title TEXT] [--event 'AMD DAY']

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
    from obbo_lightning.training.run_directory import RunDirectory

    settings = runs.complete(settings)
    if "print_config" in switches:
        import yaml

        print(yaml.safe_dump(settings, sort_keys=False), end="")
        return 0
    parts = runs.build(settings)  # refuses what is impossible before anything is written
    run = RunDirectory.create(settings["output"], settings["experiment"], settings["algorithm"]["name"])
    return _play(settings, run, None, parts)


def _resume(arguments: list[str]) -> int:
    from obbo_lightning.training.checkpoints import list_checkpoints, newest_checkpoint, verify_checkpoint

    several = [word for word in arguments if not word.startswith("-")]
    if len(several) > 1 and len(several) == len(arguments):
        return max(_resume_caught([directory]) for directory in several)
    settings, run, checkpoint = _earlier_run("resume", arguments)
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


def _compare(arguments: list[str]) -> int:
    rest, jobs, dry_run, files, output = list(arguments), "1", False, [], "runs/compare"
    flags: list[str] = []
    while rest:
        word = rest.pop(0)
        key, equals, value = word.partition("=")
        if key == "--dry_run" and not equals:
            dry_run = True
        elif key in ("--config", "--jobs", "--output"):
            if not equals and not rest:
                raise ValueError(f"{key} needs a value, got none")
            value = value if equals else rest.pop(0)
            if key == "--config":
                files.append(value)
            elif key == "--jobs":
                jobs = value
            else:
                output = value
        else:
            flags.append(word)
    if len(files) != 1:
        raise ValueError(f"compare needs one --config FILE, got {' '.join(files) or 'none'}")
    if not jobs.isdigit() or int(jobs) < 1:
        raise ValueError(f"--jobs must be an integer of at least 1, got {jobs!r}")
    from rich.console import Console

    from obbo_lightning.experiments import compare
    from obbo_lightning.experiments.grid import read_grid

    console = Console()
    grid = read_grid(Path(files[0]), flags)
    root = Path(output) / grid.name
    if dry_run:
        for cell in grid.cells:
            state = "finished" if (root / cell.name / "summary.json").is_file() else f"{cell.settings['rounds']} rounds"
            console.print(f"{cell.name}: {state}", soft_wrap=True, highlight=False)
        waiting = [cell for cell in grid.cells if not (root / cell.name / "summary.json").is_file()]
        minutes = compare.estimate_seconds(waiting, int(jobs)) / 60
        console.print(
            f"{len(waiting)} of {len(grid.cells)} cells to play, about {minutes:.1f} minutes with --jobs {jobs}"
        )
        return 0
    runs = compare.prepare(grid, root)
    try:
        failed = compare.run_cells(grid.cells, runs, int(jobs), console)
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


def _play(settings: dict[str, Any], run: Any, checkpoint: Path | None, parts: Any) -> int:
    from obbo_lightning.training import run as runs
    from obbo_lightning.training.recorder import Stopped

    # Lightning has its own format, with paths; ours must come after it.
    warnings.formatwarning = lambda message, *_, **__: f"obbo: warning: {message}\n"
    try:
        runs.fit(settings, run, checkpoint, parts=parts)
    except Stopped as stop:
        print(f"obbo: {stop}; go on with: python -m obbo_lightning resume {run.path}", file=sys.stderr)
        return 128 + stop.signum
    except FloatingPointError as blow_up:
        print(f"obbo: {blow_up}", file=sys.stderr)
        return 1
    except ValueError:  # refusals came before: this one is a defect, and its place matters
        traceback.print_exc()
        return 1
    return 0


def _validate(arguments: list[str]) -> int:
    return _judge("validate", arguments)


def _test(arguments: list[str]) -> int:
    return _judge("test", arguments)


def _judge(command: str, arguments: list[str]) -> int:
    from rich.console import Console
    from rich.table import Table

    from obbo_lightning.training import run as runs
    from obbo_lightning.training.checkpoints import newest_checkpoint, verify_checkpoint

    tasks = None
    if "--tasks" in arguments[1:]:
        at = arguments.index("--tasks")
        tasks = "".join(arguments[at + 1 : at + 2])
        if not tasks.isdigit():
            raise ValueError(f"--tasks must be a number of tasks, got {tasks or 'none'!r}")
        arguments = arguments[:at] + arguments[at + 2 :]
    settings, run, checkpoint = _earlier_run(command, arguments)
    if tasks:
        settings["evaluation"]["tasks"] = int(tasks)
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
    options: dict[str, str | None] = {"--output": None, "--title": None, "--event": None, "--reference": None}
    paths: list[Path] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word in options:
            options[word] = rest.pop(0) if rest else None
            if options[word] is None:
                raise ValueError(f"{word} needs a value, got none")
        elif word.startswith("-"):
            raise ValueError(
                f"report takes DIR [DIR...], --output DIR, --title TEXT, --event 'TICKER DAY' and --reference LABEL, "
                f"got {word!r}"
            )
        else:
            paths.append(Path(word))
    if not paths:
        raise ValueError("report needs a directory with runs, got nothing")
    from rich.console import Console
    from rich.markdown import Markdown

    from obbo_lightning.experiments.report import write_report

    output = Path(options["--output"] or paths[0] / "report")
    ticker, _, day = (options["--event"] or "").partition(" ")
    event = (ticker, day) if options["--event"] else None
    written = write_report(paths, output, options["--title"] or paths[0].resolve().name, event, options["--reference"])
    console = Console()
    console.print(Markdown((output / "table.md").read_text()))
    for path in written:
        console.print(str(path), soft_wrap=True)
    return 0


def _earlier_run(command: str, arguments: list[str]) -> tuple[dict[str, Any], Any, Path | None]:
    import yaml

    from obbo_lightning.training.run_directory import RunDirectory

    if not arguments or arguments[0].startswith("-"):
        raise ValueError(f"{command} needs the run directory, got {' '.join(arguments) or 'nothing'}")
    run = RunDirectory.existing(arguments[0])
    rest = arguments[1:]
    if rest and not (len(rest) == 2 and rest[0] == "--checkpoint"):
        raise ValueError(f"{command} takes RUN_DIR and --checkpoint FILE, got {' '.join(rest)}")
    from obbo_lightning.configuration import ConfigError
    from obbo_lightning.training.run import complete

    try:
        settings = yaml.safe_load(run.config.read_text())
    except yaml.YAMLError:
        settings = None
    if not isinstance(settings, dict):
        raise ConfigError(f"{run.config} must hold the settings of a run, got something else")
    return complete(settings), run, Path(rest[1]) if rest else None
