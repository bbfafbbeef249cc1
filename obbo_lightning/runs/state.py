"""What a run is doing, in a small file that others read while it is played."""

import json
import os
import socket
import time
from pathlib import Path
from typing import NamedTuple

from obbo_lightning.runs.lock import SIZE, is_owned, own, read_owned


class RunState:
    """``state.json``, written over in place by the process that plays the run, which holds a lock on it as it lives."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._said = ""
        self._before: bytes | None = b""  # None: there was no file
        self._path = Path()

    def open(self, path: Path) -> None:
        """Begin to say; refuses a run that another process plays."""
        if self._file is None:
            there, self._path = path.exists(), path
            self._file = own(path)
            self._before = os.pread(self._file, SIZE, 0) if there else None

    def say(self, doing: str) -> None:
        """What is done from now on."""
        if self._file is None or doing == self._said:
            return
        self._said = doing
        who = {"pid": os.getpid(), "host": socket.gethostname()[:64]}
        text = json.dumps({"doing": doing[: SIZE // 3], "since": round(time.time(), 1), **who})
        os.pwrite(self._file, text.encode().ljust(SIZE - 1) + b"\n", 0)

    def unsay(self) -> None:
        """Nothing was done: the file is as it was found."""
        if self._file is not None and self._before is None:
            self._path.unlink(missing_ok=True)
        elif self._file is not None and self._before is not None:
            os.pwrite(self._file, self._before, 0)
            os.ftruncate(self._file, len(self._before))

    def close(self) -> None:
        """Nobody plays any more."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Found(NamedTuple):
    """What a state file says.

    Attributes:
        doing: in words.
        alive: whether the process that said so is still there; None where that cannot be known.
    """

    doing: str
    alive: bool | None


def read_state(path: Path) -> Found | None:
    """None where there is nothing to read."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        found = read_owned(file)
        return Found(str(found["doing"]), is_owned(file)) if "doing" in found else None
    finally:
        os.close(file)
