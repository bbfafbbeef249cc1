"""Predict rows of a table whose target is not known yet, with what a run on the table has learned."""

from pathlib import Path

import polars as pl
import torch
from torch import Tensor

from obbo_lightning.config.build import build_problem, build_stream
from obbo_lightning.config.parse import complete_config, component_class
from obbo_lightning.config.registry import untrusted_source
from obbo_lightning.inference.predictions import Predictions
from obbo_lightning.problems.forgetting import Forgetting
from obbo_lightning.runs.checkpoints import read_checkpoint
from obbo_lightning.runs.directory import RunDirectory, read_config
from obbo_lightning.runs.provenance import usable_checkpoint
from obbo_lightning.streams.tabular.forgetting import ForgettingStream
from obbo_lightning.streams.tabular.rows import read_queries


def predict_rows(
    run: str | Path,
    query: str | Path,
    csv: str | Path | None = None,
    checkpoint: str | Path | None = None,
    trust: bool = False,
) -> Predictions:
    """Predict rows of a file with the model that the run's next round would fit: the last blocks, weighted by λ.

    The table of the `Predictions` has ``row``, ``actual`` where the target of all rows is known, ``predicted``, and for
    classes the ``probability`` of the predicted one.

    Args:
        run: directory of a run with ``data.csv``, or a folder above it, for its newest run.
        query: a CSV file with the same features; the target may be missing.
        csv: the run's table, where it has moved or grown.
        checkpoint: of the run; None for its newest.
        trust: import classes that the run names (``file.py:Class``) although no installed package has them.
    """
    with untrusted_source(None if trust else f"predict_rows({str(run)!r}, …, trust=True)"):
        return predict_with_run(RunDirectory.newest(run), Path(query), csv, Path(checkpoint) if checkpoint else None)


def predict_with_run(
    run: RunDirectory, query: Path, csv: str | Path | None = None, checkpoint: Path | None = None
) -> Predictions:
    """Do what `predict_rows` does, where it has been decided already whether the run is trusted."""
    file = usable_checkpoint(run, checkpoint)
    config = complete_config(read_config(run))
    for key, needed in (("data", ForgettingStream), ("problem", Forgetting)):
        found = component_class(config, key)
        if found is None or not issubclass(found, needed):
            name = "none" if found is None else found.__name__
            raise ValueError(
                f"predict_rows needs a run on a table (--config forgetting), got {run.path} with the {key} {name}"
            )
    data = config["data"] | ({} if csv is None else {"csv": str(csv)})
    if data.get("csv") is None:
        raise ValueError(f"predict_rows needs a run with data.csv, got {run.path}, whose rows are synthetic")
    stream = build_stream({**config, "data": data})
    problem = build_problem(config, stream)
    assert isinstance(stream, ForgettingStream)
    assert isinstance(problem, Forgetting)
    features, actual = read_queries(query.expanduser(), stream.columns, data["target"])
    tasks, weights = stream.train, read_checkpoint(file)["state_dict"]["outer"].double()
    # β̂(λ) on the blocks before the one that comes next
    inner = problem.solution(weights, tasks.known(len(tasks)))
    fitted = tasks.scaled(features, len(tasks)) @ inner[0]
    columns = {"row": pl.Series(range(1, len(features) + 1)), **_predicted_columns(stream, fitted, actual)}
    fitted_rows = tasks.past * tasks.target.shape[1]
    return Predictions(
        pl.DataFrame(columns), f"{data['target']}, fitted to the last {fitted_rows} rows with learned weights"
    )


def _predicted_columns(stream: ForgettingStream, fitted: Tensor, actual: pl.Series | None) -> dict[str, pl.Series]:
    if stream.train.kind == "regression":
        mean, deviation = stream.train.target_scale(len(stream.train))
        predicted = {"predicted": pl.Series((mean + deviation * fitted).tolist())}
        actual = None if actual is None else actual.cast(pl.Float64, strict=False)
    else:
        probability = fitted.sigmoid()
        predicted = {
            "predicted": pl.Series([stream.classes[int(one)] for one in (probability > 0.5).tolist()]),
            "probability": pl.Series(torch.maximum(probability, 1 - probability).tolist()),
        }
    return predicted if actual is None or actual.null_count() else {"actual": actual, **predicted}
