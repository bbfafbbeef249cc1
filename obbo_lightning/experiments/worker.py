"""A warm process that plays one cell after the other: ``python -m obbo_lightning.experiments.worker``.

A line with a cell's directory comes in, a line with its exit code goes out. What a cell says goes to its own log.
"""

import ctypes
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import IO

from obbo_lightning.experiments.logs import LOG


def play(directory: Path) -> int:
    """Play a cell to its end, or until a signal; returns the exit code, and what is said goes to the cell's log."""
    # catch_warnings also forgets which warnings were shown: each cell has its own
    with _said_to(directory / LOG), warnings.catch_warnings():
        try:
            from obbo_lightning.training.resume import resume

            return resume(directory)
        except ValueError as refusal:
            print(f"obbo: {' '.join(str(refusal).split())}", file=sys.stderr)
            return 2
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except Exception:
            traceback.print_exc()
            return 1


@contextmanager
def _said_to(log: Path) -> Iterator[None]:
    """Append all that this process writes to ``log``, also what C code writes: the file descriptors are led there."""
    _flush()
    before = [os.dup(descriptor) for descriptor in (1, 2)]
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        _flush()
        for descriptor, kept in zip((1, 2), before, strict=True):
            os.dup2(kept, descriptor)
            os.close(kept)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)  # what C code has printed and its library still holds


def _read_requests(requests: IO[str], cells: "SimpleQueue[str]") -> None:
    """Hand lines on; when no more can come, because `compare` is gone, a cell that is being played is to be saved."""
    for line in requests:
        cells.put(line.rstrip("\n"))
    cells.put("")
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    """Serve until the input ends, or a signal has stopped a cell."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # from here on only answers go out
    cells: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests, cells), daemon=True).start()
    while cell := cells.get():
        code = play(Path(cell))
        print(code, file=answers, flush=True)
        if code >= 128:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
