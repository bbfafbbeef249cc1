"""What a run on a table says of rows whose target is not known yet."""

import inspect
from pathlib import Path
from typing import NamedTuple

import polars as pl
import torch

from obbo_lightning.foreign_text import cells
from obbo_lightning.problems.forgetting import Forgetting
from obbo_lightning.runs.checkpoints import read_checkpoint
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.runs.earlier import read_settings
from obbo_lightning.runs.manifest import checkpoint_to_use
from obbo_lightning.settings.build import build_problem, build_stream
from obbo_lightning.settings.files import Settings
from obbo_lightning.settings.layers import part_class
from obbo_lightning.settings.schema import complete
from obbo_lightning.streams.forgetting import ForgettingStream
from obbo_lightning.streams.forgetting_data import read_queries


class RowForecast(NamedTuple):
    """Predictions of the rows that were asked for.

    Attributes:
        table: a row each: ``row``, ``predicted``, for classes the ``probability`` of that class, and ``actual``
            where the target of all rows is known already.
        target: the column that is predicted.
        learned_from: how many rows the model was fitted to, the last whole blocks of the file.
    """

    table: pl.DataFrame
    target: str
    learned_from: int

    @property
    def right(self) -> float | None:
        """Share of the classes, where there are classes and they are known."""
        if "actual" not in self.table.columns or "probability" not in self.table.columns:
            return None
        return float((self.table["predicted"] == self.table["actual"]).cast(pl.Float64).to_numpy().mean())

    @property
    def error(self) -> float | None:
        """Mean absolute error in the target's own units, where it is a number and known."""
        if "actual" not in self.table.columns or "probability" in self.table.columns:
            return None
        return float((self.table["predicted"] - self.table["actual"]).abs().to_numpy().mean())

    def write(self, path: str | Path) -> Path:
        """As a CSV file."""
        cells(self.table).write_csv(path)
        return Path(path)


def is_table(settings: Settings) -> bool:
    """Whether these are the settings of a run on a table."""
    cls = part_class(settings, "data")
    return inspect.isclass(cls) and issubclass(cls, ForgettingStream)


def predict_rows(
    run: str | Path, query: str | Path, csv: str | Path | None = None, checkpoint: str | Path | None = None
) -> RowForecast:
    """Rows of a file, by the model that the run's next round would fit: the last blocks, weighted as it has learned.

    Args:
        run: the directory of a run with ``data.csv``, or a folder above, for its newest run.
        query: a CSV file with the same features, and perhaps the target.
        csv: the run's table, where it has moved or grown; what it was played on is not played again.
        checkpoint: of the run, instead of the newest.
    """
    directory = RunDirectory.newest(run)
    chosen = checkpoint_to_use(directory, Path(checkpoint) if checkpoint else None)
    settings = complete(read_settings(directory))
    kind = part_class(settings, "problem")
    if not is_table(settings) or kind is None or not issubclass(kind, Forgetting):
        raise ValueError(f"predict_rows needs a run with --config forgetting, got {directory.path}")
    data = settings["data"] | ({} if csv is None else {"csv": str(csv)})
    if data["csv"] is None:
        raise ValueError(f"predict_rows needs a run with data.csv, and {directory.path} drew its rows")
    stream: ForgettingStream = build_stream({**settings, "data": data})  # type: ignore[assignment]
    features, actual = read_queries(Path(query).expanduser(), stream.columns, data["target"])
    # β̂(λ) on the blocks before the one that comes next
    past, tasks = read_checkpoint(chosen)["state_dict"]["outer"].double(), stream.train
    problem: Forgetting = build_problem(settings, stream)  # type: ignore[assignment]
    inner = problem.solution(past, tasks.known(len(tasks)))
    fitted = tasks.scaled(features, len(tasks)) @ inner[0]
    table = {"row": pl.Series(range(1, len(features) + 1)), **_predicted(stream, fitted, actual)}
    return RowForecast(pl.DataFrame(table), data["target"], tasks.past * tasks.target.shape[1])


def _predicted(stream: ForgettingStream, fitted: torch.Tensor, actual: pl.Series | None) -> dict[str, pl.Series]:
    if stream.train.kind == "regression":
        mean, deviation = stream.train.target_scale(len(stream.train))
        found = {"predicted": pl.Series((mean + deviation * fitted).tolist())}
        numbers = None if actual is None else actual.cast(pl.Float64, strict=False)
        return found if numbers is None or numbers.null_count() else {**found, "actual": numbers}
    chance = fitted.sigmoid()
    found = {
        "predicted": pl.Series([stream.classes[int(one)] for one in (chance > 0.5).tolist()]),
        "probability": pl.Series(torch.maximum(chance, 1 - chance).tolist()),
    }
    return found if actual is None else {**found, "actual": actual}
