"""A CSV file with a row a round, or every so many, that a resumed run continues exactly."""

import csv
import hashlib
import io
import os
from pathlib import Path
from typing import Any, TypedDict

import polars as pl

from obbo_lightning.runs.directory import write_atomically


class Mark(TypedDict):
    """What a table held at some time: how many rows, the hash of all lines but the last one, and that one."""

    rows: int
    sha256: str
    last: str


TIMINGS = ["round", "seconds", "evaluation_seconds"]  # of timings.csv


class RoundTable:
    """Appends rows; `cut` drops those after a round, so that a resumed run writes them again.

    Args:
        path: of the file.
        columns: its header; the first one is the round.
        every: which rounds have a row: those that this divides.
    """

    def __init__(self, path: Path, columns: list[str], every: int = 1) -> None:
        self.path = path
        self.columns = columns
        self.every = every
        self._file: Any = None
        self._last = 0
        self._hash = hashlib.sha256()  # of all lines but the last one, which may be written again
        self._line, self._rows = "", 0

    def cut(self, rounds: int) -> dict[str, Any]:
        """Open the file with its header and the rows of the first ``rounds`` rounds; returns the last one, as text."""
        kept = [",".join(self.columns)]
        if rounds:
            lines, rows = self.path.read_text().splitlines(), rounds // self.every
            if lines and lines[0] == ",".join(self.columns[:-1]):  # an older version has begun it, with one less
                self.columns, kept = self.columns[:-1], lines[:1]
            if len(lines) < rows + 1 or lines[0] != kept[0]:
                raise ValueError(f"{self.path} must hold {rows} rounds to continue from, got {max(len(lines) - 1, 0)}")
            kept = lines[: rows + 1]
        write_atomically(self.path, "\n".join(kept) + "\n")
        self._hash = hashlib.sha256("".join(f"{line}\n" for line in kept[:-1]).encode())
        self._line, self._rows = f"{kept[-1]}\n", len(kept) - 1
        self._file = self.path.open("a", newline="")
        if not rounds:
            return {}
        self._last = self._file.seek(0, os.SEEK_END) - len(self._line.encode())
        return dict(zip(self.columns, next(csv.reader(kept[-1:])), strict=True))

    def append(self, row: dict[str, Any]) -> None:
        """Write one row; what a row does not have stays empty."""
        self._hash.update(self._line.encode())
        self._last = self._file.tell()
        self._rows += 1
        self._write(row)

    def amend(self, row: dict[str, Any]) -> None:
        """Write the last row again."""
        self._file.truncate(self._last)
        self._file.seek(self._last)
        self._write(row)

    def _write(self, row: dict[str, Any]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(
            ["" if row.get(name) is None else row[name] for name in self.columns]
        )
        self._line = text.getvalue()
        self._file.write(self._line)
        self._file.flush()  # for those who watch

    def mark(self) -> Mark:
        """What it holds now."""
        return {"rows": self._rows, "sha256": self._hash.hexdigest(), "last": self._line}

    def sync(self) -> None:
        """Make sure that what was written survives anything."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_rounds(path: Path) -> pl.DataFrame:
    """The table of a run: every column is Float64, also the round; empty cells are null.

    Raises what polars raises of a damaged file (`polars.exceptions.PolarsError`), or OSError.
    """
    return pl.read_csv(path, infer_schema=False).cast(pl.Float64)


def require_rows(path: Path, mark: Mark, whole: bool = False) -> None:
    """Refuse a table whose rows are not those that were written.

    Args:
        path: of the file.
        mark: what it held.
        whole: it ends there, and its last row is as it was; in a run that goes on that one may have been written again.
    """
    lines = _lines(path)
    kept, last = lines[: mark["rows"]], mark["last"].encode()
    if len(kept) < mark["rows"] or hashlib.sha256(b"".join(kept)).hexdigest() != mark["sha256"]:
        raise ValueError(f"{path} is damaged: its first {mark['rows']} rounds are not those that were played")
    if whole and lines[mark["rows"] :] != [last]:
        raise ValueError(f"{path} is damaged: it does not end with the last round that was played")


def mend_rows(path: Path, mark: Mark, rows: int) -> None:
    """Of a table that `require_rows` let pass: the last row as it was, and nothing behind the first ``rows``."""
    lines, place = _lines(path), mark["rows"]
    kept = [*lines[:place], mark["last"].encode(), *lines[place + 1 : rows + 1]]
    if kept != lines:
        write_atomically(path, b"".join(kept).decode())


def mend_timings(path: Path, rounds: int) -> None:
    """Times decide nothing: where they are damaged, those of the first ``rounds`` rounds are not known any more."""
    try:
        header, *rows = csv.reader(path.read_text().splitlines())
        numbers = [[float(cell or "nan") for cell in row] for row in rows]
        whole = header == TIMINGS and {len(row) for row in numbers} <= {len(TIMINGS)}
        if whole and [row[0] for row in numbers[:rounds]] == list(range(1, rounds + 1)):
            return
    except (OSError, ValueError, csv.Error):
        pass
    write_atomically(path, "".join([",".join(TIMINGS), "\n", *(f"{t},nan,\n" for t in range(1, rounds + 1))]))


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise ValueError(f"{path} is damaged: it cannot be read: {error.strerror}") from None
