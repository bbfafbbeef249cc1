"""What several algorithms gave on the same tasks, in tables."""

import math

import numpy as np
import polars as pl

from obbo_lightning.core.statistics import mean_and_error, two_way_error
from obbo_lightning.experiments.comparison import Comparison
from obbo_lightning.experiments.paired import Paired, as_cells, compare_pairs
from obbo_lightning.experiments.tables import Table, plain

MEASURES = {
    "regret": "regret",
    "stream_last_100": "stream {}, last 100",
    "test": "test {}",
    "inductive": "test {}, inductive",
    "gain": "gain",
}
PAIRED = ("regret", "stream_last_100", "test")
OF_TASKS = ("test", "inductive", "gain")  # with an error of the choice of tasks, too


def comparison_tables(comparison: Comparison) -> list[Table]:
    """The final table, who differs from the first algorithm, and what λ must beat."""
    return [_final_table(comparison), *_paired_table(comparison), *_baseline_table(comparison)]


def _final_table(comparison: Comparison) -> Table:
    """Means over seeds, each with its standard error where there is more than one seed."""
    metric, measures = comparison.metric, _measures(comparison)
    rows = []
    for label in comparison.labels:
        runs = comparison.runs.filter(pl.col("label") == label)
        lr, calls = runs["lr"][0], float(runs["calls"].to_numpy().mean())
        facts = ["auto" if lr is None else f"{lr:g}", str(runs["rounds"].min()), str(len(runs))]
        rows.append([label, *facts, *(_cell(comparison, label, name) for name in measures), f"{calls:.0f}"])
    tested = "test" in measures
    better = f" ({comparison.better})" if comparison.better else ""
    gained = f"gain is how much better the test {metric} is than that of the untrained λ_1 on the same tasks; "
    inductive = (
        "inductive is where each query is predicted by itself, without the statistics of the others; "
        if "inductive" in measures
        else ""
    )
    return Table(
        "table",
        f"Means ± standard error over seeds{_error_of_tasks(comparison) if tested else ''}. Regret (lower is better) "
        f"is the Euclidean bilevel local regret after the last round{_skipped(comparison)}; the stream's "
        f"{metric}{better} is measured before a round is learned from; {inductive}{gained if tested else ''}"
        "calls are gradients and second-derivative products a round.",
        ["algorithm", "α", "rounds", "seeds", *(measures[name].format(metric) for name in measures), "calls"],
        rows,
    )


def _measures(comparison: Comparison) -> dict[str, str]:
    """What is in the table: nothing of test tasks where the stream has none."""
    absent = set(OF_TASKS) if comparison.runs["test_tasks"].max() == 0 else set()
    if not comparison.tasks["inductive"].is_finite().any():
        absent.add("inductive")
    return {name: called for name, called in MEASURES.items() if name not in absent}


def _cell(comparison: Comparison, label: str, name: str) -> str:
    """Mean ± standard error; nothing is hidden where one is not finite, nor where a regret is a lower bound."""
    runs, digits = comparison.runs.filter(pl.col("label") == label), _digits(comparison, name)
    if name in OF_TASKS and runs["test_tasks"].max() == 0:  # of this run nothing was measured
        return ""
    scores = _by_task(comparison, label, name)
    if name not in runs.columns and scores is None:
        return ""
    values = runs[name] if name in runs.columns else pl.Series(scores.mean(1))  # type: ignore[union-attr]
    if values.null_count() or not values.is_finite().all():
        return "not finite"
    mean, error = mean_and_error(values.to_numpy())
    if scores is not None:
        error = two_way_error(scores)
    bound = "≥ " if name == "regret" and runs["skipped"].sum() else ""
    return bound + plain(mean, digits) + ("" if error is None else f" ± {plain(error, digits)}")


def _by_task(comparison: Comparison, label: str, name: str) -> np.ndarray | None:
    """``[seeds, tasks]``, seeds in their order; None where not every run of this algorithm has kept them."""
    if name not in OF_TASKS:
        return None
    runs = comparison.runs.filter(pl.col("label") == label)
    tasks = comparison.tasks.filter(pl.col("label") == label).sort("seed", "task")
    better = 1 if runs["higher_is_better"][0] else -1
    gain = better * (pl.col("test") - pl.col("untrained"))
    values = tasks.select(gain if name == "gain" else pl.col(name)).to_series()
    if len(values) != runs["test_tasks"].sum() or values.null_count() or runs["test_tasks"].n_unique() != 1:
        return None
    return values.to_numpy().reshape(len(runs), -1)


def _error_of_tasks(comparison: Comparison) -> str:
    count = int(comparison.runs["test_tasks"].max())  # type: ignore[arg-type]
    if all(_by_task(comparison, label, "test") is not None for label in comparison.labels):
        return f"; of test {comparison.metric} and gain over seeds and the {count} test tasks that they share (two-way)"
    return f", which leaves out the error of the {count} test tasks that they share: not all of these runs kept them"


def _skipped(comparison: Comparison, begin: str = ",") -> str:
    if not comparison.runs["skipped"].sum():
        return ""
    return f"{begin} ≥ where rounds were skipped as not finite, each of which counts as much as the one before it"


def _paired_table(comparison: Comparison) -> list[Table]:
    """The others minus the first, seed by seed; not made for runs of different lengths."""
    first, *others = comparison.labels
    if not others:
        return []
    measures = {name: called for name, called in _measures(comparison).items() if name in PAIRED}
    rows = []
    for label in others:
        pairs = _pairs(comparison, first, label)
        cells = [label, str(len(pairs))]
        for name in measures:
            known = pairs.drop_nulls([name, f"{name}_right"])
            paired = compare_pairs(known[name].to_numpy(), known[f"{name}_right"].to_numpy()) if len(known) else None
            cells += as_cells(_with_tasks(comparison, first, label, name, paired), _digits(comparison, name))
        rows.append(cells)
    names = [name.format(comparison.metric) for name in measures.values()]
    columns = [column for name in names for column in (name, "larger / smaller")]
    shared = _error_of_tasks(comparison) if "test" in measures else ""
    return [
        Table(
            "paired",
            f"Each algorithm minus {first} on the same seeds: mean difference ± its standard error over seeds{shared}; "
            "in how many seeds it is larger and smaller; p of the two-sided sign test, which needs 6 seeds to come "
            f"below 0.05. Runs of different lengths are not paired.{_skipped(comparison, ' Regrets are')}",
            ["algorithm", "pairs", *columns],
            rows,
        )
    ]


def _with_tasks(comparison: Comparison, first: str, second: str, name: str, paired: Paired | None) -> Paired | None:
    """The same with the two-way error of the differences, where both have the scores of the same tasks and seeds."""
    mine, theirs = (_by_task(comparison, label, name) for label in (first, second))
    if paired is None or mine is None or theirs is None or mine.shape != theirs.shape or paired.pairs != len(mine):
        return paired
    return paired._replace(error=two_way_error(theirs - mine))


def _pairs(comparison: Comparison, first: str, second: str) -> pl.DataFrame:
    mine, theirs = (comparison.runs.filter(pl.col("label") == label) for label in (first, second))
    return mine.join(theirs, on=["seed", "rounds"])


def _baseline_table(comparison: Comparison) -> list[Table]:
    """The stream's metric of algorithms and of what they must beat, over all rounds and over the last 100."""
    if comparison.baselines.is_empty():
        return []
    played = comparison.rounds.select(pl.col("label").alias("name"), "seed", "round", "score")
    rows = []
    for table in (played, comparison.baselines):
        for (name,), part in table.partition_by("name", as_dict=True, maintain_order=True).items():
            seeds = [one["score"].to_numpy() for one in part.sort("round").partition_by("seed")]
            means = [np.array([scores[-last:].mean() for scores in seeds]) for last in (len(part), 100)]
            errors = [mean_and_error(values) for values in means]
            cells = [plain(m, 4) + ("" if e is None else f" ± {plain(e, 4)}") for m, e in errors]
            rows.append([str(name), str(len(seeds)), *cells])
    caption = (
        f"{comparison.metric.capitalize()} on the stream ({comparison.better}), each round judged before it is learned "
        "from: the algorithms, and what a learned λ must beat, played with the same inner solver. Mean ± standard "
        "error over seeds."
    )
    return [Table("baselines_table", caption, ["algorithm or baseline", "seeds", "all rounds", "last 100"], rows)]


def _digits(comparison: Comparison, name: str) -> int:
    """Scores have three; a regret as many as its smallest one needs to show three."""
    if name != "regret":
        return 3
    known = comparison.runs[name].drop_nulls()
    smallest = float(known.filter(known > 0).to_numpy().min(initial=1.0))
    return 1 if smallest >= 1 else 2 - math.floor(math.log10(smallest))
