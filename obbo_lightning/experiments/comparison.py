"""Runs side by side: what several algorithms gave on the same tasks."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from obbo_lightning.core.statistics import mean_and_error
from obbo_lightning.experiments.paired import as_cells, compare_pairs
from obbo_lightning.experiments.runs import DAMAGE, Run, sorted_labels
from obbo_lightning.experiments.tables import Table, plain
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
MEASURES = {"regret": "regret", "stream_last_100": "stream {}, last 100", "test": "test {}"}  # of the tables


class Comparison(NamedTuple):
    """What several runs of one experiment gave.

    Attributes:
        runs: a row a run.
        rounds: a row a round of a run.
        timings: seconds of all rounds so far, at each round with an evaluation.
    """

    runs: pl.DataFrame
    rounds: pl.DataFrame
    timings: pl.DataFrame

    @property
    def metric(self) -> str:
        """What the runs are judged by, such as accuracy or loss."""
        return str(self.runs["metric"][0])

    @property
    def labels(self) -> list[str]:
        """Algorithms (and what tells two of the same apart), the paper's first; the first is what others face."""
        return self.runs["label"].unique(maintain_order=True).to_list()

    def facing(self, reference: str | None) -> "Comparison":
        """In order, with ``reference`` first."""
        labels = put_first(reference, self.labels)
        place = pl.col("label").replace_strict({label: i for i, label in enumerate(labels)}, return_dtype=pl.Int64)
        return Comparison(
            self.runs.sort(place, "seed"), self.rounds.sort(place, "seed", "round"), self.timings.sort(place, "seed")
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


def comparison_tables(comparison: Comparison) -> list[Table]:
    """The final table, and who differs from the first algorithm."""
    return [_final_table(comparison), *_paired_table(comparison)]


def _final_table(comparison: Comparison) -> Table:
    """Means over seeds, each with its standard error where there is more than one seed."""
    metric, measures = comparison.metric, _measures(comparison)
    gain = ["gain"] if "test" in measures else []
    rows = []
    for label in comparison.labels:
        runs = comparison.runs.filter(pl.col("label") == label)
        means = [_mean(runs[name], _digits(comparison, name)) for name in (*measures, *gain)]
        if gain and runs["test_tasks"].max() == 0:  # of this run nothing was measured
            means[-2:] = ["", ""]
        lr, calls = runs["lr"][0], float(runs["calls"].to_numpy().mean())
        facts = ["auto" if lr is None else f"{lr:g}", str(runs["rounds"].min()), str(len(runs))]
        rows.append([label, *facts, *means, f"{calls:.0f}"])
    gained = f"gain is how much better the test {metric} is than that of the untrained λ_1 on the same tasks; "
    return Table(
        "table",
        f"Means ± standard error over seeds. Regret is the Euclidean bilevel local regret after the last round; the "
        f"stream's {metric} is measured before a round is learned from; {gained if gain else ''}"
        "calls are gradients and second-derivative products a round.",
        ["algorithm", "α", "rounds", "seeds", *(measures[name].format(metric) for name in measures), *gain, "calls"],
        rows,
    )


def _measures(comparison: Comparison) -> dict[str, str]:
    """What is in the tables: nothing of test tasks where the stream has none."""
    tested = comparison.runs["test_tasks"].max() != 0
    return {name: called for name, called in MEASURES.items() if tested or name != "test"}


def _paired_table(comparison: Comparison) -> list[Table]:
    """The others minus the first, seed by seed; not made for runs of different lengths."""
    first, *others = comparison.labels
    if not others:
        return []
    rows, measures = [], _measures(comparison)
    for label in others:
        pairs = _pairs(comparison, first, label)
        cells = [label, str(len(pairs))]
        for name in measures:
            known = pairs.drop_nulls([name, f"{name}_right"])
            paired = compare_pairs(known[name].to_numpy(), known[f"{name}_right"].to_numpy()) if len(known) else None
            cells += as_cells(paired, _digits(comparison, name))
        rows.append(cells)
    names = [name.format(comparison.metric) for name in measures.values()]
    columns = [column for name in names for column in (name, "larger / smaller")]
    return [
        Table(
            "paired",
            f"Each algorithm minus {first} on the same seeds: mean difference ± its standard error; in how many seeds "
            "it is larger and smaller; p of the two-sided sign test, which needs 6 seeds to come below 0.05. Runs of "
            "different lengths are not paired.",
            ["algorithm", "pairs", *columns],
            rows,
        )
    ]


def _pairs(comparison: Comparison, first: str, second: str) -> pl.DataFrame:
    mine, theirs = (comparison.runs.filter(pl.col("label") == label) for label in (first, second))
    return mine.join(theirs, on=["seed", "rounds"])


def _digits(comparison: Comparison, name: str) -> int:
    """Scores have three; a regret as many as its smallest one needs to show three."""
    if name != "regret":
        return 3
    known = comparison.runs[name].drop_nulls()
    smallest = float(known.filter(known > 0).to_numpy().min(initial=1.0))
    return 1 if smallest >= 1 else 2 - math.floor(math.log10(smallest))


def _mean(values: pl.Series, digits: int) -> str:
    """Mean ± standard error; nothing is hidden where one is not finite."""
    if values.null_count() or not values.is_finite().all():
        return "not finite"
    mean, error = mean_and_error(values.to_numpy())
    return plain(mean, digits) + ("" if error is None else f" ± {plain(error, digits)}")
