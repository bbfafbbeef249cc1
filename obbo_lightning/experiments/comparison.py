"""Several algorithms on the same stream: tables of means and paired differences, made from their runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl
from scipy.stats import binomtest

from obbo_lightning.core.statistics import clustered_error, mean_and_error, two_way_error
from obbo_lightning.escaping import unescape_table
from obbo_lightning.experiments.comparison_figures import ComparisonFigures
from obbo_lightning.experiments.report_data import Score, Table, format_with_error, sorted_labels
from obbo_lightning.experiments.runs import DAMAGE, Run
from obbo_lightning.runs.table import read_rounds

MOMENTS = 250  # rounds of λ that are kept of each run: more than a figure has dots
# Columns of the tables, and those that are compared in pairs.
MEASURES = {
    "regret": "regret",
    "prequential_last_100": "prequential {}, last 100",
    "test": "test {}",
    "inductive": "test {}, inductive",
    "gain": "gain",
}
PAIRED_MEASURES = ("regret", "prequential_last_100", "test")
TEST_MEASURES = ("test", "inductive", "gain")  # their errors are over the choice of test tasks, too


class Paired(NamedTuple):
    """Differences of pairs, second minus first.

    Attributes:
        pairs: their number.
        difference: mean of the differences.
        error: its standard error; None for one pair.
        larger: number of pairs in which the second is larger; ties count in neither.
        smaller: number of pairs in which it is smaller.
        p: of the two-sided sign test; None where all are ties.
    """

    pairs: int
    difference: float
    error: float | None
    larger: int
    smaller: int
    p: float | None

    def cells(self, digits: int) -> tuple[str, str]:
        """Return two cells of a table: difference ± standard error; larger / smaller with the p-value.

        >>> Paired(4, 0.75, 0.25, 3, 0, 0.25).cells(2)
        ('+0.75 ± 0.25', '3 / 0, p = 0.25')
        """
        p = "" if self.p is None else ", p < 0.0001" if self.p < 1e-4 else f", p = {self.p:.2g}"
        difference = round(self.difference, digits) + 0.0  # no -0.0
        return format_with_error(difference, self.error, digits, "+"), f"{self.larger} / {self.smaller}{p}"


def compare_pairs(first: np.ndarray, second: np.ndarray) -> Paired:
    """Compare ``second`` with ``first``, pair by pair.

    >>> compare_pairs(np.array([1.0, 2.0, 3.0, 4.0]), np.array([2.0, 3.0, 4.0, 4.0]))
    Paired(pairs=4, difference=0.75, error=0.25, larger=3, smaller=0, p=0.25)
    """
    differences = second - first
    mean, error = mean_and_error(differences)
    larger, smaller = int((differences > 0).sum()), int((differences < 0).sum())
    p = float(binomtest(larger, larger + smaller).pvalue) if larger + smaller else None
    return Paired(len(differences), mean, error, larger, smaller, p)


def compare_clusters(first: np.ndarray, second: np.ndarray, clusters: np.ndarray) -> Paired:
    """Compare pairs of which those of one cluster (events of one day) are dependent; signs are those of clusters.

    >>> days = np.array(["mon", "mon", "tue"])
    >>> compare_clusters(np.array([1.0, 2.0, 3.0]), np.array([2.0, 2.0, 2.0]), days)
    Paired(pairs=2, difference=0.0, error=0.6666666666666666, larger=1, smaller=1, p=1.0)
    """
    differences = second - first
    names, index = np.unique(clusters, return_inverse=True)
    means = np.bincount(index, differences) / np.bincount(index)
    signs = compare_pairs(np.zeros(len(names)), means)
    return signs._replace(difference=float(differences.mean()), error=clustered_error(differences, clusters))


@dataclass(frozen=True)
class Comparison(ComparisonFigures):
    """Data, tables and figures of a comparison."""

    def tables(self) -> list[Table]:
        """Return the means, the differences to the first algorithm, and the baselines."""
        return [self._means_table(), *self._paired_table(), *self._baseline_table()]

    def scores(self) -> tuple[str, bool, dict[str, Score]]:
        """Return the scores of the test tasks where there are any, else the prequential ones."""
        if self.has_test_tasks:
            kind, scores = f"{self.metric} on test tasks", self.runs.select("label", pl.col("test").alias("score"))
        else:
            kind = f"prequential {self.metric}, all rounds"
            scores = self.rounds.group_by("label", "seed", maintain_order=True).agg(pl.col("score").mean())
        found = {}
        for label in self.labels:
            values = scores.filter(pl.col("label") == label)["score"].cast(pl.Float64).fill_null(np.nan)
            found[label] = Score(*mean_and_error(values.to_numpy()))
        return f"{kind}; {self.direction}", self.direction == "higher is better", found

    def _means_table(self) -> Table:
        """Return means over seeds, with standard errors where there is more than one seed."""
        metric, measures = self.metric, self._measures()
        rows = []
        for label in self.labels:
            runs = self.runs.filter(pl.col("label") == label)
            lr, evaluations = runs["lr"][0], float(runs["gradient_evaluations"].to_numpy().mean())
            settings = ["auto" if lr is None else f"{lr:g}", str(runs["rounds"].min()), str(len(runs))]
            rows.append([label, *settings, *(self._cell(label, name) for name in measures), f"{evaluations:.0f}"])
        sentences = [
            f"Means ± standard error over seeds{self._error_of_tasks() if self.has_test_tasks else ''}.",
            f"Regret (lower is better) is the Euclidean bilevel local regret after the last round{self._skipped(',')}.",
            f"The prequential {metric} ({self.direction}) is measured before a round is learned from.",
        ]
        if "inductive" in measures:
            sentences.append("Inductive: each query is predicted by itself, without the statistics of the others.")
        if self.has_test_tasks:
            better = f"how much better the test {metric} is than that of the initial λ_1 on the same tasks"
            sentences.append(f"Gain is {better}.")
        sentences.append("Gradient evaluations are gradients and second-derivative products per round.")
        names = [name.format(metric) for name in measures.values()]
        columns = ["algorithm", "α", "rounds", "seeds", *names, "gradient evaluations"]
        return Table("table", " ".join(sentences), columns, rows)

    def _measures(self) -> dict[str, str]:
        """Return the measures that the runs have, with their names."""
        absent = set() if self.has_test_tasks else set(TEST_MEASURES)
        if not self.test_scores["inductive"].is_finite().any():
            absent.add("inductive")
        return {name: title for name, title in MEASURES.items() if name not in absent}

    def _cell(self, label: str, name: str) -> str:
        """Return mean ± standard error of a measure; a regret of runs with skipped rounds is a lower bound."""
        runs, scores = self.runs.filter(pl.col("label") == label), self._by_task(label, name)
        if name in TEST_MEASURES and runs["test_tasks"].max() == 0:  # these runs were not evaluated
            return ""
        if name not in runs.columns and scores is None:
            return ""
        values = runs[name] if name in runs.columns else pl.Series(scores.mean(1))  # type: ignore[union-attr]
        if values.null_count() or not values.is_finite().all():
            return "not finite"
        mean, error = mean_and_error(values.to_numpy())
        bound = "≥ " if name == "regret" and runs["skipped"].sum() else ""
        return bound + format_with_error(mean, error if scores is None else two_way_error(scores), self._digits(name))

    def _by_task(self, label: str, name: str) -> np.ndarray | None:
        """Return ``[seeds, tasks]`` of a measure, seeds in order; None where not every run has scores of its tasks."""
        if name not in TEST_MEASURES:
            return None
        runs = self.runs.filter(pl.col("label") == label)
        tasks = self.test_scores.filter(pl.col("label") == label).sort("seed", "task")
        better = 1 if runs["higher_is_better"][0] else -1
        gain = better * (pl.col("test") - pl.col("initial"))
        values = tasks.select(gain if name == "gain" else pl.col(name)).to_series()
        if len(values) != runs["test_tasks"].sum() or values.null_count() or runs["test_tasks"].n_unique() != 1:
            return None
        return values.to_numpy().reshape(len(runs), -1)

    def _error_of_tasks(self) -> str:
        count = max(self.runs["test_tasks"].to_list())
        if all(self._by_task(label, "test") is not None for label in self.labels):
            return f"; of test {self.metric} and gain over seeds and the {count} test tasks that they share (two-way)"
        return (
            f", without that of the {count} test tasks that they share, because not all runs have scores of each task"
        )

    def _skipped(self, begin: str) -> str:
        if not self.runs["skipped"].sum():
            return ""
        return f"{begin} ≥ where rounds were skipped as not finite, each of which counts as much as the one before it"

    def _paired_table(self) -> list[Table]:
        """Return the differences to the first algorithm, seed by seed."""
        first, *others = self.labels
        if not others:
            return []
        measures = {name: title for name, title in self._measures().items() if name in PAIRED_MEASURES}
        rows = []
        for label in others:
            mine, theirs = (self.runs.filter(pl.col("label") == one) for one in (first, label))
            pairs = mine.join(theirs, on=["seed", "rounds"])
            cells = [label, str(len(pairs))]
            for name in measures:
                known = pairs.drop_nulls([name, f"{name}_right"])
                cells += self._paired_cells(first, label, name, known) if len(known) else ("", "")
            rows.append(cells)
        columns = [c for title in measures.values() for c in (title.format(self.metric), "larger / smaller")]
        shared = self._error_of_tasks() if self.has_test_tasks else ""
        caption = (
            f"Each algorithm minus {first} on the same seeds: mean difference ± its standard error over seeds{shared}; "
            "in how many seeds it is larger and smaller; p of the two-sided sign test, which needs 6 seeds to come "
            f"below 0.05. Runs of different lengths are not paired.{self._skipped(' Regrets are')}"
        )
        return [Table("paired", caption, ["algorithm", "pairs", *columns], rows)]

    def _paired_cells(self, first: str, second: str, name: str, pairs: pl.DataFrame) -> tuple[str, str]:
        """Return the cells of one measure; with the two-way error where both have scores of the same tasks."""
        paired = compare_pairs(pairs[name].to_numpy(), pairs[f"{name}_right"].to_numpy())
        mine, theirs = (self._by_task(label, name) for label in (first, second))
        if mine is not None and theirs is not None and mine.shape == theirs.shape and paired.pairs == len(mine):
            paired = paired._replace(error=two_way_error(theirs - mine))
        return paired.cells(self._digits(name))

    def _baseline_table(self) -> list[Table]:
        """Return the prequential scores of algorithms and baselines, over all rounds and over the last 100."""
        if self.baselines.is_empty():
            return []
        learned = self.rounds.select(pl.col("label").alias("name"), "seed", "round", "score")
        rows = []
        for frame in (learned, self.baselines):
            for (name,), part in frame.partition_by("name", as_dict=True, maintain_order=True).items():
                seeds = [one["score"].to_numpy() for one in part.sort("round").partition_by("seed")]
                means = [np.array([scores[-last:].mean() for scores in seeds]) for last in (len(part), 100)]
                rows.append([str(name), str(len(seeds)), *(format_with_error(*mean_and_error(m), 4) for m in means)])
        caption = (
            f"Prequential {self.metric} ({self.direction}), of each round before it is learned from: the algorithms, "
            "and baselines with the same inner solver and a λ that is not learned. Mean ± standard error over seeds."
        )
        return [Table("baselines_table", caption, ["algorithm or baseline", "seeds", "all rounds", "last 100"], rows)]

    def _digits(self, name: str) -> int:
        """Return decimals: three for scores; for regrets as many as the smallest one needs to show three digits."""
        if name != "regret":
            return 3
        known = self.runs[name].drop_nulls()
        smallest = float(known.filter(known > 0).to_numpy().min(initial=1.0))
        return 1 if smallest >= 1 else 2 - math.floor(math.log10(smallest))


def read_comparison(runs: Sequence[Run]) -> Comparison:
    """Return the data of labelled runs."""
    order = sorted_labels(sorted({run.label for run in runs}))
    runs = sorted(runs, key=lambda run: (order.index(run.label), run.summary["seed"]))
    first_seeds = [next(run for run in runs if run.label == label) for label in order]
    parts = {
        "runs": map(_run_row, runs),
        "rounds": map(_rounds, runs),
        "timings": map(_timings, runs),
        "test_scores": map(_test_scores, runs),
        "baselines": _baselines(runs),
        "weights": map(_weights, first_seeds),
    }
    frames = {}
    for name, columns in Comparison.columns.items():
        typed = [part.select(pl.col(column).cast(kind) for column, kind in columns.items()) for part in parts[name]]
        frames[name] = pl.concat([pl.DataFrame(schema=columns), *typed])
    return Comparison(**frames)


def _labelled(run: Run, frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(label=pl.lit(run.label), seed=pl.lit(run.summary["seed"], pl.Int64))


def _run_row(run: Run) -> pl.DataFrame:
    summary, metrics = run.summary, run.metrics
    metric, lr = summary["metric"], run.config["algorithm"].get("lr")
    names = ("algorithm", "rounds", "metric", "test_tasks", "skipped", "gain", "gain_se", "higher_is_better")
    row = {
        **{name: summary[name] for name in names},
        "lr": lr if isinstance(lr, (int, float)) else None,  # auto, or one for each parameter group
        "initial_test": summary[f"initial_test_{metric}"],
        "test": summary[f"test_{metric}"],
        "test_se": summary[f"test_{metric}_se"],
        "prequential_last_100": metrics[metric].tail(100).mean(),
        "regret": metrics["regret/euclidean"][-1],
        "gradient_evaluations": run.gradient_evaluations.mean(),
    }
    return _labelled(run, pl.DataFrame([row]))


def _rounds(run: Run) -> pl.DataFrame:
    metric = run.summary["metric"]
    names = {"score": metric, "test": f"test_{metric}", "test_se": f"test_{metric}_se", "regret": "regret/euclidean"}
    columns = [run.metrics[old].alias(new) for new, old in names.items()]
    return _labelled(run, run.metrics.with_columns(*columns, gradient_evaluations=run.gradient_evaluations))


def _timings(run: Run) -> pl.DataFrame:
    """Return seconds so far; no rows where timings.csv is damaged, because no result depends on it."""
    try:
        seconds = read_rounds(run.directory.timings).with_columns(pl.col("seconds").cum_sum())
        evaluated = run.metrics[f"test_{run.summary['metric']}"].is_not_null()
        return _labelled(run, seconds.filter(evaluated))
    except DAMAGE:
        return pl.DataFrame(schema=Comparison.columns["timings"])


def _test_scores(run: Run) -> pl.DataFrame:
    metric = run.summary["metric"]
    try:
        scores = pl.read_csv(run.directory.test_scores)
        inductive = scores["inductive_accuracy"] if "inductive_accuracy" in scores.columns else pl.lit(None)
        return _labelled(run, scores.with_columns(initial=f"initial_{metric}", test=metric, inductive=inductive))
    except DAMAGE:  # a run without test tasks has no such file
        return pl.DataFrame(schema=Comparison.columns["test_scores"])


def _baselines(runs: Sequence[Run]) -> list[pl.DataFrame]:
    """Return the baselines of each seed once, from the first algorithm: they do not depend on the outer rule."""
    found: dict[int, pl.DataFrame] = {}
    for run in runs:
        seed = run.summary["seed"]
        if seed not in found and run.directory.baselines.is_file():
            wide = unescape_table(pl.read_csv(run.directory.baselines))
            found[seed] = _labelled(run, wide.unpivot(index="round", variable_name="name", value_name="score"))
    return [found[seed] for seed in sorted(found)]


def _weights(run: Run) -> pl.DataFrame:
    try:
        outer = unescape_table(read_rounds(run.directory.outer))
        kept = outer.gather_every(-(-len(outer) // MOMENTS))
        return _labelled(run, kept.unpivot(index="round", variable_name="name", value_name="value"))
    except DAMAGE:  # there is no such file where the coordinates of λ have no names
        return pl.DataFrame(schema=Comparison.columns["weights"])
