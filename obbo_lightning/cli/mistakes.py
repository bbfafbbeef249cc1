"""The one place where what went wrong becomes a line: no command shows a traceback unless `--debug` asks for it."""

import sys
import traceback

from obbo_lightning.escaping import escape_terminal

SHOWN = 2000  # letters; a message may quote a whole file


def refuse(message: str, code: int = 2) -> int:
    """One line on standard error, and the exit code of a refusal."""
    line = " ".join(message.split())
    print(escape_terminal(f"obbo: {line if len(line) <= SHOWN else line[:SHOWN] + '…'}"), file=sys.stderr)
    return code


def refuse_error(error: BaseException, debug: bool) -> int:
    """The line of an error, and its exit code: 2, or what a run that had begun says (``exit_code``)."""
    if debug:
        traceback.print_exception(error)
    return refuse(described(error), getattr(error, "exit_code", 2))


def described(error: BaseException) -> str:
    """What happened, in words; what is nobody's mistake but ours says how to see more.

    >>> described(PermissionError(13, "Permission denied", "/data/x.npz"))
    '/data/x.npz: Permission denied'
    """
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    if isinstance(error, MemoryError):
        return f"this machine has not enough memory for it: {error}".removesuffix(": ")
    if hasattr(error, "exit_code"):
        return str(error)
    return f"{type(error).__name__}: {error} (--debug shows where)"
