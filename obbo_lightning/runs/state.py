"""What a run is doing, in a small file that others read while it is played."""

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path
from typing import NamedTuple

SIZE = 512  # bytes, always: what is written over has no rest of what was there


class RunState:
    """``state.json``, written over in place by the process that plays the run, which holds a lock on it as it lives."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._said = ""

    def open(self, path: Path) -> None:
        """Begin to say."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        with contextlib.suppress(OSError):  # there are file systems without locks
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def say(self, doing: str) -> None:
        """What is done from now on."""
        if self._file is None or doing == self._said:
            return
        self._said = doing
        text = json.dumps({"doing": doing[: SIZE // 3], "since": round(time.time(), 1)})
        os.pwrite(self._file, text.encode().ljust(SIZE - 1) + b"\n", 0)

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
        doing = str(json.loads(os.read(file, SIZE))["doing"])
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Found(doing, True)
        except OSError:
            return Found(doing, None)
        return Found(doing, False)
    except (ValueError, KeyError):  # it is being written, or was never
        return None
    finally:
        os.close(file)
