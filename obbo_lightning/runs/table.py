"""A CSV file with a row a round, or every so many, that a resumed run continues exactly."""

import csv
import os
from pathlib import Path
from typing import Any

import polars as pl


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

    def cut(self, rounds: int) -> dict[str, Any]:
        """Open the file with its header and the rows of the first ``rounds`` rounds; returns the last one, as text."""
        kept = [",".join(self.columns)]
        if rounds:
            lines, rows = self.path.read_text().splitlines(), rounds // self.every
            if len(lines) < rows + 1 or lines[0] != kept[0]:
                raise ValueError(f"{self.path} must hold {rows} rounds to continue from, got {max(len(lines) - 1, 0)}")
            kept = lines[: rows + 1]
        aside = self.path.with_suffix(".part")
        aside.write_text("\n".join(kept) + "\n")
        os.replace(aside, self.path)
        self._file = self.path.open("a", newline="")
        if not rounds:
            return {}
        self._last = self._file.seek(0, os.SEEK_END) - len(kept[-1].encode()) - 1
        return dict(zip(self.columns, next(csv.reader(kept[-1:])), strict=True))

    def append(self, row: dict[str, Any]) -> None:
        """Write one row; what a row does not have stays empty."""
        self._last = self._file.tell()
        csv.writer(self._file, lineterminator="\n").writerow(
            ["" if row.get(name) is None else row[name] for name in self.columns]
        )
        self._file.flush()  # for those who watch

    def amend(self, row: dict[str, Any]) -> None:
        """Write the last row again."""
        self._file.truncate(self._last)
        self._file.seek(self._last)
        self.append(row)

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
