"""Flags of the commands that are not `fit`: argparse that refuses in one line, and help that needs nothing imported."""

import argparse
import os
from pathlib import Path
from typing import Any, NamedTuple, NoReturn


class Command(NamedTuple):
    """What a command takes.

    Attributes:
        about: what it does, in a sentence or two.
        flags: names and what `add_argument` is told of each.
        example: as it is typed.
        more: what else its help says.
    """

    about: str
    flags: dict[str, dict[str, Any]]
    example: str
    more: str = ""


def _flag(meaning: str, **options: Any) -> dict[str, Any]:
    return {"help": meaning, **options}


RUN = _flag("a run's directory, or a folder above: its newest run", metavar="RUN_DIR")
CHECKPOINT = _flag("another checkpoint than the newest", type=Path, metavar="FILE")
JUDGED = {
    "directory": RUN,
    "--tasks": _flag("how many tasks; those of the run otherwise", type=int, metavar="N"),
    "--checkpoint": CHECKPOINT,
}
COMPARED = {
    "--config": _flag("a comparison file, or a shipped one's name", required=True, metavar="FILE"),
    "--jobs": _flag("runs at a time", type=int, metavar="N"),
    "--slurm": _flag("run it as a Slurm array; FILE has the #SBATCH lines of a job", type=Path, metavar="FILE"),
    "--output": _flag("where the folder of the grid is made", type=Path, default=Path("runs/compare")),
    "--dry_run": _flag("the plan only", action="store_true"),
}
SETTING = "--KEY VALUE   a setting of all runs, as in `obbo fit`"
COMMANDS = {
    "resume": Command(
        "Go on with runs, exactly where they were stopped, or beyond their end.",
        {
            "directories": _flag("one or several", nargs="+", type=Path, metavar="RUN_DIR"),
            "--rounds": _flag("play up to this many rounds in all", type=int, metavar="N"),
            "--checkpoint": CHECKPOINT,
            "--devices": _flag("go on with this many processes", type=int, metavar="N"),
        },
        "obbo resume runs/default/obbo-20261116-120000 --rounds 400",
        "--data.KEY VALUE   go on with data that have grown; those whose past has changed are refused",
    ),
    "watch": Command(
        "What runs are doing now, a line each, from their files.",
        {
            "directories": _flag("runs, or folders with runs below", nargs="+", type=Path, metavar="RUN_DIR"),
            "--every": _flag("look again and again, until all are finished", type=float, metavar="SECONDS"),
        },
        "obbo watch runs/default --every 5",
    ),
    "validate": Command(
        "Judge what a run has learned on validation tasks; nothing is learned from them.",
        JUDGED,
        "obbo validate runs/default/obbo-20261116-120000 --tasks 40",
    ),
    "test": Command(
        "Judge what a run has learned on test tasks; nothing is learned from them.",
        JUDGED,
        "obbo test runs/default/obbo-20261116-120000",
    ),
    "export": Command(
        "What a run has learned, as a folder that other programs read.",
        {
            "run": {**RUN, "type": Path},
            "out": _flag("the folder to make", type=Path, metavar="OUT"),
            "--format": _flag("safetensors, onnx or torchscript", default="safetensors", dest="kind", metavar="KIND"),
            "--checkpoint": CHECKPOINT,
        },
        "obbo export runs/default/obbo-20261116-120000 export",
    ),
    "predict": Command(
        "Predict classes of new examples, adapted to a few examples of each; or rows of a table, with a run on it.",
        {
            "source": _flag("a run's directory, or an export", type=Path, metavar="RUN_OR_EXPORT"),
            "--support": _flag(
                "a folder of images for each new class, or a file with labels", type=Path, metavar="PATH"
            ),
            "--query": _flag(
                "a folder or file to predict; scored where classes are known", type=Path, required=True, metavar="PATH"
            ),
            "--output": _flag("the predictions", type=Path, default=Path("predictions.csv"), metavar="FILE.csv"),
            "--steps": _flag("of adaptation; the run's otherwise", type=int, metavar="N"),
            "--lr": _flag("of adaptation; the run's otherwise", type=float, metavar="X"),
            "--transductive": _flag("normalise all queries together, as papers evaluate", action="store_true"),
            "--data.csv": _flag("the run's table, where it has moved or grown", dest="csv", metavar="FILE.csv"),
            "--checkpoint": CHECKPOINT,
        },
        "obbo predict export --support support --query query",
        "A run on a table (--config forgetting) needs --query FILE.csv only: obbo predict RUN_DIR --query tomorrow.csv",
    ),
    "compare": Command(
        "Play a grid of runs. It can be stopped at any time; the same command goes on.",
        COMPARED,
        "obbo compare --config default --jobs 2",
        SETTING,
    ),
    "tune": Command(
        "Tune each method of a comparison with the same budget, on tasks that are not the test's, then play it.",
        COMPARED,
        "obbo tune --config default --jobs 2",
        SETTING,
    ),
    "report": Command(
        "One page, tables and figures of finished runs.",
        {
            "directories": _flag("runs, or folders with runs below", nargs="+", type=Path, metavar="DIR"),
            "--output": _flag("where to; DIR/report otherwise, ranks with --by_folder", metavar="DIR"),
            "--title": _flag("of the page", metavar="TEXT"),
            "--by_folder": _flag("one comparison per DIR: the rank of each method in each", action="store_true"),
            "--event": _flag("a market event to draw by itself: 'AMD 2021-11-08'", metavar="TEXT"),
            "--reference": _flag("which algorithm the others are compared with", metavar="LABEL"),
        },
        "obbo report runs/compare/default",
    ),
    "dashboard": Command(
        "The W&B workspace and report of a project.",
        {
            "--project": _flag("W&B project", default="obbo_lightning"),
            "--entity": _flag("W&B entity; your own otherwise"),
            "--group": _flag("a grid's name: the report is of its runs alone"),
            "--dry_run": _flag("write what would be sent", action="store_true"),
            "--output": _flag("of --dry_run", type=Path, default=Path("dashboard.json"), metavar="FILE"),
        },
        "obbo dashboard --project obbo_lightning --dry_run",
    ),
}


def require_csv(path: Path) -> Path:
    """A file that predictions can be written to."""
    if path.suffix != ".csv" or not os.access(path.absolute().parent, os.W_OK):
        raise ValueError(f"--output must be a csv file in a folder that can be written, got {str(path)!r}")
    return path


class Flags(argparse.ArgumentParser):
    """A command's own flags."""

    def __init__(self, command: str) -> None:
        known = COMMANDS[command]
        super().__init__(
            command, description=known.about, add_help=False, allow_abbrev=False, formatter_class=_Formatter
        )
        for name, options in known.flags.items():
            self.add_argument(name, **options)

    def error(self, message: str) -> NoReturn:
        """One line, like every refusal."""
        raise ValueError(f"{self.prog}: {message}")


class _Formatter(argparse.HelpFormatter):
    """Meanings in one column, on wide enough lines."""

    def __init__(self, prog: str, *_: Any, **options: Any) -> None:
        super().__init__(f"obbo {prog}", max_help_position=32, width=110, **options)


def help_of(command: str, trusting: bool) -> str:
    """What `obbo COMMAND --help` prints."""
    known = COMMANDS[command]
    parts = [Flags(command).format_help(), *([f"{known.more}\n"] if known.more else [])]
    trust = "  --trust   run code that the run's files name and no installed package has (file.py:Class)\n"
    parts.append((trust if trusting else "") + "  --debug   where an error came from\n")
    return "\n".join([*parts, f"example:\n  {known.example}\n"])
