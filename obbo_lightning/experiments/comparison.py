"""Runs side by side: what several algorithms gave on the same tasks."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from obbo_lightning.escaping import unescape_table
from obbo_lightning.experiments.comparison_weights import read_weights
from obbo_lightning.experiments.runs import DAMAGE, Run, sorted_labels
from obbo_lightning.runs.table import read_rounds

RUN_COLUMNS = {
    "label": pl.String,
    "algorithm": pl.String,
    "seed": pl.Int64,
    "lr": pl.Float64,
    "rounds": pl.Int64,
    "metric": pl.String,
    "test_tasks": pl.Int64,
    "untrained_test": pl.Float64,
    "test": pl.Float64,
    "test_se": pl.Float64,
    "gain": pl.Float64,
    "gain_se": pl.Float64,
    "stream_last_100": pl.Float64,
    "regret": pl.Float64,
    "skipped": pl.Int64,
    "calls": pl.Float64,
    "higher_is_better": pl.Boolean,
}
ROUND_COLUMNS = {
    "label": pl.String,
    "seed": pl.Int64,
    "round": pl.Int64,
    "score": pl.Float64,
    "test": pl.Float64,
    "test_se": pl.Float64,
    "regret": pl.Float64,
    "hypergradient_norm": pl.Float64,
    "residual": pl.Float64,
    "calls": pl.Int64,
}
TIME_COLUMNS = {"label": pl.String, "seed": pl.Int64, "round": pl.Int64, "seconds": pl.Float64}
TASK_COLUMNS = {
    "label": pl.String,
    "seed": pl.Int64,
    "task": pl.Int64,
    "untrained": pl.Float64,
    "test": pl.Float64,
    "inductive": pl.Float64,
}
BASELINE_COLUMNS = {"name": pl.String, "seed": pl.Int64, "round": pl.Int64, "score": pl.Float64}


class Comparison(NamedTuple):
    """What several runs of one experiment gave.

    Attributes:
        runs: a row a run.
        rounds: a row a round of a run.
        timings: seconds of all rounds so far, at each round with an evaluation.
        tasks: a row a test task of a run; empty where runs of an older version did not keep them.
        baselines: a row a round of what λ must beat, where the stream plays that.
        weights: λ over the rounds, a row a coordinate with a name.
    """

    runs: pl.DataFrame
    rounds: pl.DataFrame
    timings: pl.DataFrame
    tasks: pl.DataFrame
    baselines: pl.DataFrame
    weights: pl.DataFrame

    @property
    def metric(self) -> str:
        """What the runs are judged by, such as accuracy or loss."""
        return str(self.runs["metric"][0])

    @property
    def better(self) -> str:
        """Whether more of the metric is better, in words; nothing where a report of an older version does not say."""
        higher = self.runs["higher_is_better"][0]
        return "" if higher is None else "higher is better" if higher else "lower is better"

    @property
    def labels(self) -> list[str]:
        """Algorithms (and what tells two of the same apart), the paper's first; the first is what others face."""
        return self.runs["label"].unique(maintain_order=True).to_list()

    def facing(self, reference: str | None) -> "Comparison":
        """In order, with ``reference`` first."""
        labels = put_first(reference, self.labels)
        place = pl.col("label").replace_strict({label: i for i, label in enumerate(labels)}, return_dtype=pl.Int64)
        return Comparison(
            self.runs.sort(place, "seed"),
            self.rounds.sort(place, "seed", "round"),
            self.timings.sort(place, "seed", "round"),
            self.tasks.sort(place, "seed", "task"),
            self.baselines,
            self.weights,
        )


def put_first(reference: str | None, labels: Sequence[str]) -> list[str]:
    """The paper's order, but for the reference."""
    ordered = sorted_labels(labels)
    if reference is None:
        return ordered
    if reference not in ordered:
        raise ValueError(f"--reference must be one of {'; '.join(ordered)}, got {reference!r}")
    return [reference, *(label for label in ordered if label != reference)]


def read_comparison(runs: Sequence[Run]) -> Comparison:
    """From labelled runs."""
    return Comparison(
        pl.DataFrame([_row(run) for run in runs], schema=RUN_COLUMNS),
        pl.concat([_rounds(run) for run in runs]),
        pl.concat([_timings(run) for run in runs]),
        pl.concat([_tasks(run) for run in runs]),
        _baselines(runs),
        read_weights(runs),
    ).facing(None)


def _row(run: Run) -> dict[str, Any]:
    summary, metrics = run.summary, run.metrics
    metric, lr = summary["metric"], run.settings["algorithm"].get("lr")
    return {
        **{name: summary[name] for name in ("algorithm", "seed", "rounds", "metric", "test_tasks", "skipped")},
        "label": run.label,
        "lr": lr if isinstance(lr, (int, float)) else None,  # auto, or each block's own
        "untrained_test": summary[f"untrained_test_{metric}"],
        "test": summary[f"test_{metric}"],
        "test_se": summary[f"test_{metric}_se"],
        "gain": summary["gain"],
        "gain_se": summary["gain_se"],
        "stream_last_100": metrics[metric].tail(100).mean(),
        "regret": metrics["regret/euclidean"][-1],
        "calls": (metrics["gradients"] + metrics["products"]).mean(),
        "higher_is_better": summary.get("higher_is_better"),
    }


def _rounds(run: Run) -> pl.DataFrame:
    metric = run.summary["metric"]
    return run.metrics.select(
        pl.lit(run.label).alias("label"),
        pl.lit(run.summary["seed"], pl.Int64).alias("seed"),
        pl.col("round").cast(pl.Int64),
        pl.col(metric).alias("score"),
        pl.col(f"test_{metric}").alias("test"),
        pl.col(f"test_{metric}_se").alias("test_se"),
        pl.col("regret/euclidean").alias("regret"),
        "hypergradient_norm",
        "residual",
        (pl.col("gradients") + pl.col("products")).cast(pl.Int64).alias("calls"),
    )


def _timings(run: Run) -> pl.DataFrame:
    """Nothing where the clock's file is damaged: a figure less, not a run."""
    try:
        seconds = np.cumsum(read_rounds(run.directory.timings)["seconds"].to_numpy())
        rounds = np.flatnonzero(run.metrics[f"test_{run.summary['metric']}"].is_not_null().to_numpy())
        rows = [(run.label, run.summary["seed"], t + 1, seconds[t]) for t in rounds.tolist()]
    except (*DAMAGE, IndexError):
        rows = []
    return pl.DataFrame(rows, schema=TIME_COLUMNS, orient="row")


def _tasks(run: Run) -> pl.DataFrame:
    metric = run.summary["metric"]
    try:
        found = pl.read_csv(run.directory.test_scores)
        inductive = "inductive_accuracy" if "inductive_accuracy" in found.columns else None
        return found.select(
            pl.lit(run.label).alias("label"),
            pl.lit(run.summary["seed"], pl.Int64).alias("seed"),
            pl.col("task").cast(pl.Int64),
            pl.col(f"untrained_{metric}").cast(pl.Float64).alias("untrained"),
            pl.col(metric).cast(pl.Float64).alias("test"),
            (pl.col(inductive) if inductive else pl.lit(None)).cast(pl.Float64).alias("inductive"),
        )
    except DAMAGE:  # there is none, in a run of an older version or without test tasks
        return pl.DataFrame(schema=TASK_COLUMNS)


def _baselines(runs: Sequence[Run]) -> pl.DataFrame:
    """Of each seed once: they know nothing of outer rules. The first algorithm's, since they share its inner solver."""
    found: dict[int, pl.DataFrame] = {}
    ordered = {label: i for i, label in enumerate(sorted_labels([run.label for run in runs]))}
    for run in sorted(runs, key=lambda run: ordered[run.label]):
        seed = run.summary["seed"]
        if seed not in found and run.directory.baselines.is_file():
            wide = unescape_table(pl.read_csv(run.directory.baselines))
            long = wide.unpivot(index="round", variable_name="name", value_name="score")
            found[seed] = long.with_columns(seed=pl.lit(seed, pl.Int64)).select(
                pl.col(name).cast(kind) for name, kind in BASELINE_COLUMNS.items()
            )
    return pl.concat([pl.DataFrame(schema=BASELINE_COLUMNS), *(found[seed] for seed in sorted(found))])
