"""The command line: a file a command, none imported before it is asked for. Every mistake is one line, exit code 2."""

import importlib
import shlex
import sys
from collections.abc import Sequence

from obbo_lightning.cli.mistakes import refuse, refuse_error
from obbo_lightning.threads import bound_spinning

USAGE = """usage: obbo COMMAND [flags]

  fit                 play an online stream; with no flags, the embedded default
  resume RUN_DIR...   go on with runs, exactly where they were; --rounds N: further
  watch RUN_DIR...    what runs are doing now, a line each
  validate RUN_DIR    judge what was learned on validation tasks
  test RUN_DIR        judge what was learned on test tasks
  export RUN_DIR OUT  what was learned, as files that other programs read
  predict RUN_OR_EXPORT --support DIR --query DIR   new classes, or rows of a table
  compare --config FILE   a grid of runs, resumable
  tune --config FILE  the same with each method tuned before, on tasks that are not the test's
  report DIR...       one page, tables and figures of finished runs
  dashboard           the W&B workspace and report of a project

  obbo COMMAND --help   its flags, with an example
  obbo fit --help       every flag of the chosen algorithm, data and trainer
  --trust               of what reads a run: run code that its files name and no installed package has (file.py:Class)
  --debug               of any command: where an error came from

  obbo fit --config quadratic --algorithm sobow --algorithm.window 25 --seed 3
"""
# Each is a module of this package with a function `run`, which takes the arguments and returns the exit code.
# What is read by these names classes by itself; the other commands are told.
READING = ("resume", "validate", "test", "export", "predict", "report")
COMMANDS = (
    *("fit", "resume", "watch", "validate", "test", "export", "predict"),
    *("compare", "tune", "report", "dashboard"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 2 for a refusal, 128 + n after signal n."""
    bound_spinning()
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments else "--help"
    if command in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if command in COMMANDS and command != "fit" and {"-h", "--help"} & set(arguments):
        from obbo_lightning.cli.flags import help_of

        print(help_of(command, command in READING), end="")
        return 0
    if command == "--version":
        from obbo_lightning import __version__

        print(__version__)
        return 0
    if command not in COMMANDS:
        from difflib import get_close_matches

        near = get_close_matches(command, COMMANDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return refuse(f"command must be one of {', '.join(COMMANDS)}, got {command!r}{hint}")
    debug, trust = (_taken(flag, arguments, command) for flag in ("--debug", "--trust"))
    try:
        from obbo_lightning.config.trust import untrusted_source

        with untrusted_source(None if trust or command not in READING else _trusting(command, arguments)):
            code: int = importlib.import_module(f"{__name__}.{command}").run(arguments)
    except KeyboardInterrupt:  # while nothing is played: a run answers signals itself
        return refuse("stopped by SIGINT", 130)
    except Exception as error:
        return refuse_error(error, debug)
    return code


def _taken(flag: str, arguments: list[str], command: str) -> bool:
    """Whether a flag that is not the command's own was given; it is taken away."""
    if flag not in arguments or (flag == "--trust" and command not in READING):
        return False
    arguments.remove(flag)
    return True


def _trusting(command: str, arguments: list[str]) -> str:
    return f"python -m obbo_lightning {shlex.join([command, *arguments, '--trust'])}"
