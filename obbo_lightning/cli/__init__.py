"""The command line: commands are imported when they are used; every error is one line."""

import argparse
import pkgutil
import shlex
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from obbo_lightning import __version__
from obbo_lightning.escaping import escape_terminal
from obbo_lightning.threads import bound_spinning

NEWEST_RUN = "a run directory, or a folder above: its newest run"
MAX_MESSAGE = 2000  # characters; a message may quote a whole file
# Commands, and the functions of this package that run them.
COMMANDS = {
    "fit": "fit:fit",
    "resume": "fit:resume",
    "watch": "watch:run",
    "validate": "evaluate:run",
    "test": "evaluate:run",
    "export": "predict:export",
    "predict": "predict:predict",
    "compare": "compare:run",
    "tune": "compare:run",
    "report": "report:run",
    "dashboard": "dashboard:run",
}
OVERRIDES = ("fit", "resume", "compare", "tune")  # commands that take configuration keys: --KEY VALUE
# Commands that read what others may have written.
READERS = ("resume", "validate", "test", "export", "predict", "report")


class _Parser(argparse.ArgumentParser):
    """Parser that raises its errors."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.prog.rpartition(' ')[2]}: {message}")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = _Parser(prog="obbo", description="Online bilevel optimization with Bregman geometry.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=__version__, help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", required=True)

    def command(name: str, about: str, example: str, more: str = "") -> Any:
        added = commands.add_parser(
            name,
            help=about,
            description=f"{about[0].upper()}{about[1:]}.",
            epilog=f"{more}\n\nexample: obbo {name} {example}".lstrip(),
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.add_argument("--debug", action="store_true", help="show where an error came from")
        if name in READERS:
            trust = "import code that the run's files name and that is neither ours nor an installed entry point"
            added.add_argument("--trust", action="store_true", help=trust)
        return added.add_argument

    commands.add_parser("fit", help="run an online stream; without flags, the embedded default", add_help=False)

    add = command(
        "resume",
        "continue a run exactly where it was stopped, or beyond its end",
        "runs/default/obbo-20261116-120000 --rounds 400",
        "--data.KEY VALUE continues with data that have grown; data whose past has changed are refused",
    )
    add("directory", type=Path, metavar="RUN_DIR", help="a run directory")
    add("--rounds", type=int, metavar="N", help="run up to this many rounds in all")
    add("--devices", type=int, metavar="N", help="continue with this many processes")
    _add_checkpoint(add)

    add = command("watch", "print what runs are doing, one line per run", "runs/default --every 5")
    add("directories", nargs="+", type=Path, metavar="RUN_DIR", help="run directories, or folders above them")
    add("--every", type=float, metavar="SECONDS", help="repeat until all runs are finished")

    for name in ("validate", "test"):
        what = "validation" if name == "validate" else "test"
        add = command(name, f"evaluate a run on {what} tasks", "runs/default/obbo-20261116-120000 --tasks 40")
        add("directory", type=Path, metavar="RUN_DIR", help=NEWEST_RUN)
        add("--tasks", type=int, metavar="N", help="number of tasks (default: the run's)")
        _add_checkpoint(add)

    add = command("export", "export what a run has learned", "runs/default/obbo-20261116-120000 export")
    add("run", type=Path, metavar="RUN_DIR", help=NEWEST_RUN)
    add("out", type=Path, metavar="OUT", help="folder to make")
    add("--format", default="safetensors", dest="kind", metavar="FORMAT", help="safetensors, or onnx in addition")
    _add_checkpoint(add)

    add = command(
        "predict",
        "predict the classes of new examples after adapting to a few, or rows of a table",
        "export --support support --query query",
        "A run on a table (--config forgetting) needs --query only: obbo predict RUN_DIR --query tomorrow.csv",
    )
    add("source", type=Path, metavar="RUN_OR_EXPORT", help="a run directory, or an export")
    add("--support", type=Path, metavar="PATH", help="a folder of images for each class, or a file with labels")
    add("--query", type=Path, required=True, metavar="PATH", help="what to predict; scored where classes are known")
    add("--output", type=Path, default=Path("predictions.csv"), metavar="FILE.csv", help="file of the predictions")
    add("--steps", type=int, metavar="N", help="steps of adaptation (default: the run's)")
    add("--lr", type=float, metavar="X", help="step size of adaptation (default: the run's)")
    add("--transductive", action="store_true", help="normalise all queries together, as papers evaluate")
    add("--data.csv", dest="csv", metavar="FILE.csv", help="the run's table, where it has moved or grown")
    _add_checkpoint(add)

    comparisons = {
        "compare": "run a grid of runs; the same command continues after a stop",
        "tune": "tune each method with the same budget on tasks that are not test tasks, then compare",
    }
    for name, about in comparisons.items():
        add = command(name, about, "--config default --jobs 2", "--KEY VALUE sets a configuration key of all runs")
        add("--config", required=True, metavar="FILE", help="a comparison file, or the name of a shipped one")
        add("--jobs", type=int, metavar="N", help="runs at a time")
        add("--slurm", type=Path, metavar="FILE", help="run a Slurm array; the script has the #SBATCH lines of a job")
        add("--output", type=Path, default=Path("runs/compare"), metavar="DIR", help="folder of comparisons")
        add("--dry_run", action="store_true", help="print the plan only")

    add = command("report", "write tables, figures and a page of finished runs", "runs/compare/default")
    add("directories", nargs="+", type=Path, metavar="DIR", help="runs, or folders with runs below")
    add("--by_folder", action="store_true", help="the rank of each method in several comparisons, one per folder")
    add("--output", type=Path, metavar="DIR", help="folder to write to (default: DIR/report; with --by_folder: ranks)")
    add("--title", metavar="TEXT", help="title of the page")
    add("--reference", metavar="LABEL", help="algorithm that the others are compared with")

    add = command("dashboard", "make the W&B workspace and report of a project", "--project obbo_lightning --dry_run")
    add("--project", default="obbo_lightning", help="W&B project")
    add("--entity", help="W&B entity (default: your own)")
    add("--group", help="name of a comparison: the report shows its runs only")
    add("--dry_run", action="store_true", help="write what would be sent to a file")
    add("--output", type=Path, default=Path("dashboard.json"), metavar="FILE", help="file of --dry_run")
    return parser


def _add_checkpoint(add: Any) -> None:
    add("--checkpoint", type=Path, metavar="FILE", help="another checkpoint than the newest")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 1 after a failure, 2 for a refusal, 128 + n after signal n."""
    bound_spinning()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words or ["--help"])
    except KeyboardInterrupt:  # while no run is in progress: a run handles signals itself
        return refuse("stopped by SIGINT", 130)
    except SystemExit as end:
        if isinstance(end.code, int) or end.code is None:
            return end.code or 0
        raise
    except Exception as error:
        if "--debug" in words:
            traceback.print_exception(error)
        return refuse(describe_error(error), getattr(error, "exit_code", 2))  # that of a run that had started


def _run(words: list[str]) -> int:
    command, *rest = words
    if command not in (*COMMANDS, "-h", "--help", "--version"):
        near = get_close_matches(command, COMMANDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"command must be one of {', '.join(COMMANDS)}, got {command!r}{hint}")
    arguments, overrides = argparse.Namespace(), [word for word in rest if word != "--debug"]
    if command != "fit":
        arguments, overrides = make_parser().parse_known_args(words)
    if overrides and command not in OVERRIDES:
        raise ValueError(f"{command}: unrecognized arguments: {' '.join(overrides)}")
    arguments.overrides = overrides
    from obbo_lightning.config.registry import untrusted_source

    hint = f"python -m obbo_lightning {shlex.join([*words, '--trust'])}"
    with untrusted_source(hint if command in READERS and not arguments.trust else None):
        code: int = pkgutil.resolve_name(f"{__name__}.{COMMANDS[command]}")(arguments)
    return code


def refuse(message: str, code: int = 2) -> int:
    """Print one line on standard error, and return the exit code."""
    line = " ".join(message.split())
    line = line if len(line) <= MAX_MESSAGE else f"{line[:MAX_MESSAGE]}…"
    print(escape_terminal(f"obbo: {line}"), file=sys.stderr)
    return code


def describe_error(error: BaseException) -> str:
    """Return what happened in words; an unexpected error tells how to see more.

    >>> describe_error(PermissionError(13, "Permission denied", "/data/x.npz"))
    '/data/x.npz: Permission denied'
    """
    if hasattr(error, "exit_code") or (isinstance(error, ValueError) and not isinstance(error, UnicodeError)):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    if isinstance(error, MemoryError):
        return f"this machine has not enough memory for it: {error}".removesuffix(": ")
    return f"{type(error).__name__}: {error} (--debug shows where)"
