"""What λ must beat, beside the rounds that it was learned in."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from obbo_lightning.runs.directory import write_atomically


def write_baselines(path: Path, found: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Write the metric of each round, a column a baseline; the mean of each for the summary, where there is one."""
    if not found:
        return {}
    rounds = range(1, 1 + len(next(iter(found.values()))))
    write_atomically(path, pl.DataFrame({"round": rounds, **found}).write_csv())
    return {"baselines": {name: statistics.fmean(values) for name, values in found.items()}}
