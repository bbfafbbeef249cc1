"""A CSV file with one row per round, or every so many rounds, that a resumed run continues exactly."""

import contextlib
import csv
import hashlib
import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from obbo_lightning.runs.directory import write_atomically
from obbo_lightning.streams.fingerprints import sha256_of

TIMING_COLUMNS = ["round", "seconds", "evaluation_seconds"]  # of timings.csv


# Content of a table at some time: number of ``rows``, ``sha256`` of all lines but the last, and the ``last`` line.
TableMark = dict[str, Any]


class RoundTable:
    """Table that rows are appended to; `open` drops the rows after a round, so that a resumed run writes them again.

    Its header are ``columns``, or the names of the first row. A row is written in rounds that ``every`` divides. The
    columns of ``history`` are kept in memory as well, for the summary and the figures of the run.
    """

    def __init__(
        self, path: Path, columns: list[str] | None = None, every: int = 1, history: Sequence[str] = ()
    ) -> None:
        self.path, self.columns, self.every = path, columns, every
        self.history: dict[str, list[float]] = {name: [] for name in history}
        self._file: Any = None
        self._hash = hashlib.sha256()  # of all lines but the last, which may be written again
        self._line, self._rows, self._last_offset = "", 0, 0

    def open(self, rounds: int) -> dict[str, Any]:
        """Open the file with the rows of the first ``rounds`` rounds; returns the last row, as text."""
        kept = [] if self.columns is None else [",".join(self.columns)]
        if rounds:
            lines, rows = self.path.read_text(errors="replace").splitlines(), rounds // self.every
            if len(lines) < rows + 1 or lines[:1] != (kept or lines[:1]):
                raise ValueError(f"{self.path} must hold {rows} rounds to continue, got {max(len(lines) - 1, 0)}")
            kept = lines[: rows + 1]
            self.columns = next(csv.reader(kept))
        write_atomically(self.path, "".join(f"{line}\n" for line in kept))
        self._hash = hashlib.sha256("".join(f"{line}\n" for line in kept[:-1]).encode())
        self._line, self._rows = f"{kept[-1]}\n" if kept else "", max(len(kept) - 1, 0)
        self._file = self.path.open("a", newline="")
        self._last_offset = self._file.seek(0, os.SEEK_END) - len(self._line.encode())
        if self.history:
            for row in csv.DictReader(kept):
                self._remember(row)
        return dict(zip(self.columns or (), next(csv.reader(kept[-1:])), strict=True)) if rounds else {}

    def append(self, row: dict[str, Any]) -> None:
        """Write one row; values that a row does not have stay empty."""
        if self.columns is None:
            self.columns = list(row)
            self._line = _csv_line(self.columns)
            self._file.write(self._line)
        self._hash.update(self._line.encode())
        self._last_offset = self._file.tell()
        self._rows += 1
        self._write(row)

    def replace_last(self, row: dict[str, Any]) -> None:
        """Write the last row again."""
        self._file.truncate(self._last_offset)
        self._file.seek(self._last_offset)
        for values in self.history.values():
            values.pop()
        self._write(row)

    def _write(self, row: dict[str, Any]) -> None:
        self._line = _csv_line(["" if row.get(name) is None else row[name] for name in self.columns or ()])
        self._file.write(self._line)
        self._file.flush()  # for `watch`
        self._remember(row)

    def _remember(self, row: dict[str, Any]) -> None:
        for name, values in self.history.items():
            value = row.get(name)
            values.append(math.nan if value is None or value == "" else float(value))

    def mark(self) -> TableMark:
        """Return the mark of the present content."""
        return {"rows": self._rows, "sha256": self._hash.hexdigest(), "last": self._line}

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _csv_line(cells: Sequence[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def read_rounds(path: Path) -> pl.DataFrame:
    """Return the table of a run: every column is Float64, also the round; empty cells are null."""
    return pl.read_csv(path, infer_schema=False).cast(pl.Float64)


def read_columns(path: Path) -> dict[str, np.ndarray]:
    """Return the columns of the table of a run; empty cells are NaN."""
    return {column.name: column.to_numpy() for column in read_rounds(path).fill_null(np.nan)}


def require_rows(path: Path, mark: TableMark, complete: bool = False) -> None:
    """Refuse a table whose rows are not those of the mark; a ``complete`` one ends with the mark's last row."""
    try:
        lines, rows = path.read_bytes().splitlines(keepends=True), mark["rows"]
    except OSError as error:
        raise ValueError(f"{path} is damaged: it cannot be read: {error.strerror}") from None
    if len(lines) < rows or sha256_of(*lines[:rows]) != mark["sha256"]:
        raise ValueError(f"{path} is damaged: its first {rows} rounds are not those that the run wrote")
    if complete and lines[rows:] != [mark["last"].encode()]:
        raise ValueError(f"{path} is damaged: it does not end with the last round that the run wrote")


def restore_last_row(path: Path, mark: TableMark) -> None:
    """Restore the last row of a mark in a table that passed `require_rows`."""
    lines, rows = path.read_bytes().splitlines(keepends=True), mark["rows"]
    restored = [*lines[:rows], mark["last"].encode(), *lines[rows + 1 :]]
    if restored != lines:
        write_atomically(path, b"".join(restored).decode(errors="replace"))  # `open` drops damaged rows after it


def restore_timings(path: Path, rounds: int) -> None:
    """Replace damaged timings, which no result depends on, by unknown ones for the first ``rounds`` rounds."""
    header, numbers = ",".join(TIMING_COLUMNS), range(1, rounds + 1)
    with contextlib.suppress(OSError, ValueError):
        first, *rows = path.read_text().splitlines()
        known = [(row.split(",")[0], row.count(",")) for row in rows[:rounds]]
        if first == header and known == [(str(t), 2) for t in numbers]:
            return
    write_atomically(path, "".join([f"{header}\n", *(f"{t},nan,\n" for t in numbers)]))
