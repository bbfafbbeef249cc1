"""What each test task gave, before and after: without it nobody could say how much the choice of tasks matters."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

from obbo_lightning.runs.directory import write_atomically


def write_tested(path: Path, untrained: Mapping[str, Sequence[float]], trained: Mapping[str, Sequence[float]]) -> None:
    """``tests.csv``: a row a test task, numbered from 1; of each score a column with λ_1 and one with the last λ.

    Args:
        path: of the file.
        untrained: scores by their names.
        trained: the same; λ_1 may have been judged by a version that knew fewer.
    """
    tasks = len(next(iter(trained.values())))
    columns: dict[str, Sequence[float]] = {}
    for name, values in trained.items():
        columns |= {f"untrained_{name}": untrained[name]} if name in untrained else {}
        columns[name] = values
    write_atomically(path, pl.DataFrame({"task": range(1, tasks + 1), **columns}).write_csv())
