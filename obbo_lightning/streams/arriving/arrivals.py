"""Places where tasks arrive: a folder of files, a file of lines, standard input. What is incomplete is not read."""

import os
import select
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, Protocol

from obbo_lightning.streams.arriving.task_files import READERS, Arrays, DamagedTaskError, UnreadableError, read_json

UNFINISHED = (".part", ".tmp")
CHUNK = 1 << 16
Found = tuple[str, Arrays]  # where a task stands, and what it holds


class Arrivals(Protocol):
    """Tasks in their order, each once."""

    position: Any  # behind the last one that was taken, in plain values
    over: bool  # whether no more can come

    def take(self) -> Found | None:
        """The next task; None where there is none yet that is complete."""
        ...

    def wait(self, seconds: float) -> None:
        """For a while."""
        ...

    def give_up(self) -> None:
        """Say what was waited for in vain, where that is wrong."""
        ...


class Folder:
    """A file a task (npz, parquet, json), in the order of their names.

    Names that begin with a dot or end in ``.part`` or ``.tmp`` are no tasks yet. A file that cannot be read to its end
    is waited for while it is the newest one or still grows.
    """

    over = False

    def __init__(self, path: Path, position: str = "") -> None:
        self.path, self.position = path, position
        self._listed: set[str] | None = None
        self._next: deque[str] = deque()
        self._unreadable: tuple[str, int, int] | None = None
        self._fault = ""

    def take(self) -> Found | None:
        if not self._next:
            self._look()
        if not self._next:
            return None
        file = self.path / self._next[0]
        try:
            size, changed = file.stat().st_size, file.stat().st_mtime_ns
            arrays = READERS[file.suffix.lower()](file.read_bytes())
        except FileNotFoundError:  # it was taken away before it was played
            self._next.clear()
            return None
        except UnreadableError as fault:
            now, known = (file.name, size, changed), self._unreadable
            self._unreadable, self._fault = now, f"{file} {fault}"
            if now == known and len(self._next) > 1:
                raise DamagedTaskError(self._fault) from None
            self._next.clear()  # look again who is the newest
            return None
        except DamagedTaskError as damage:
            raise DamagedTaskError(f"{file}: {damage}") from None
        self.position, self._unreadable = self._next.popleft(), None
        return str(file), arrays

    def _look(self) -> None:
        names = sorted(name for name in os.listdir(self.path) if is_task(name))
        for name in names if self._listed is not None else ():
            if name <= self.position and name not in (self._listed or ()):
                raise DamagedTaskError(
                    f"{self.path / name} must come before {self.position}, which was played, and came after it"
                )
        self._listed = set(names)
        self._next = deque(name for name in names if name > self.position)

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def give_up(self) -> None:
        if self._unreadable:
            raise DamagedTaskError(self._fault)


def is_task(name: str) -> bool:
    """Whether a file of this name is a task.

    >>> [is_task(name) for name in ("0001.npz", ".0002.npz", "0003.npz.part", "notes.txt")]
    [True, False, False, False]
    """
    return not name.startswith(".") and not name.endswith(UNFINISHED) and Path(name).suffix.lower() in READERS


class LinesOfAFile:
    """JSON lines, one task each; a line is complete with its newline."""

    over = False

    def __init__(self, path: Path, position: dict[str, int] | None = None) -> None:
        self.path = path
        self.position = position or {"bytes": 0, "line": 0}

    def take(self) -> Found | None:
        with self.path.open("rb") as file:
            start = self.position["bytes"]
            if file.seek(0, os.SEEK_END) < start:
                raise DamagedTaskError(
                    f"{self.path} must only grow, and is shorter than the {start} bytes that were played"
                )
            file.seek(start)
            line = file.readline()
        if not line.endswith(b"\n"):
            return None
        self.position = {"bytes": start + len(line), "line": self.position["line"] + 1}
        return read_line(f"{self.path}, line {self.position['line']}", line) if line.strip() else self.take()

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def give_up(self) -> None:
        """A line without an end is nothing yet."""


class StandardInput:
    """JSON lines that are piped in; what was read is gone, so a run goes on with what comes next."""

    def __init__(self) -> None:
        self.position: dict[str, int] = {"line": 0}
        self.over = False
        self._buffer = b""
        self._given_back: list[Found] = []

    def take(self) -> Found | None:
        if self._given_back:
            return self._given_back.pop()
        while b"\n" not in self._buffer:
            if not select.select([sys.stdin], [], [], 0)[0]:
                return None
            more = os.read(sys.stdin.fileno(), CHUNK)
            if not more:
                self.over = True
                return None
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        self.position = {"line": self.position["line"] + 1}
        return read_line(f"standard input, line {self.position['line']}", line) if line.strip() else self.take()

    def give_back(self, found: Found) -> None:
        """It is the next one again."""
        self._given_back.append(found)

    def wait(self, seconds: float) -> None:
        select.select([sys.stdin], [], [], seconds)

    def give_up(self) -> None:
        """A line without an end is nothing yet."""


def read_line(where: str, line: bytes) -> Found:
    """A task from a line that is complete."""
    try:
        return where, read_json(line)
    except (UnreadableError, DamagedTaskError) as damage:
        raise DamagedTaskError(f"{where}: {damage}") from None
