"""Tables and figures that compare finished runs of several algorithms on one stream: means, paired differences."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from scipy.stats import binomtest

from obbo_lightning.core.statistics import clustered_error, mean_and_error, standard_error, two_way_error
from obbo_lightning.escaping import escape_mathtext, unescape_table
from obbo_lightning.experiments.report_data import (
    LINE_STYLES,
    ReportData,
    ReportFigure,
    Score,
    Table,
    finish_figure,
    format_with_error,
    line_style,
    new_figure,
    sorted_labels,
)
from obbo_lightning.experiments.runs import DAMAGE, Run
from obbo_lightning.runs.table import read_rounds

MEASURES = {  # titles of their columns
    "regret": "regret",
    "prequential_last_100": "prequential {}, last 100",
    "test": "test {}",
    "inductive": "test {}, inductive",
    "gain": "gain",
}
PAIRED_MEASURES = ("regret", "prequential_last_100", "test")
TEST_MEASURES = ("test", "inductive", "gain")
# Columns of the data frames, which have a CSV file each, and their types; the others are Float64.
COLUMNS = {
    "runs": "label algorithm seed lr rounds metric test_tasks initial_test test test_se gain gain_se "
    "prequential_last_100 regret skipped gradient_evaluations higher_is_better",
    "rounds": "label seed round score test test_se regret hypergradient_norm residual gradient_evaluations",
    "timings": "label seed round seconds",
    "test_scores": "label seed task initial test inductive",
    "baselines": "name seed round score",
}
TYPES = {
    **dict.fromkeys(("label", "algorithm", "metric", "name"), pl.String),
    **dict.fromkeys(("seed", "rounds", "round", "task", "test_tasks", "skipped"), pl.Int64),
    "higher_is_better": pl.Boolean,
}
COMPUTE = {
    "gradient_evaluations": "gradients and second-derivative products so far",
    "seconds": "seconds of rounds so far, without evaluations",
}


def compare_pairs(
    first: np.ndarray,
    second: np.ndarray,
    digits: int,
    days: np.ndarray | None = None,
    by_task: np.ndarray | None = None,
) -> tuple[str, str]:
    """Return two cells: mean of second − first ± its standard error; how many are larger / smaller, and the p-value.

    p is that of the two-sided sign test. Pairs of one day are dependent: the error is clustered, signs are those of the
    means of ``days``. The error of differences ``by_task [seeds, tasks]`` is two-way.

    >>> compare_pairs(np.array([1.0, 2.0, 3.0, 4.0]), np.array([2.0, 3.0, 4.0, 4.0]), 2)
    ('+0.75 ± 0.25', '3 / 0, p = 0.25')
    >>> compare_pairs(np.array([1.0, 2.0, 3.0]), np.array([2.0, 2.0, 2.0]), 2, np.array(["mon", "mon", "tue"]))
    ('+0.00 ± 0.67', '1 / 1, p = 1')
    """
    signs = differences = second - first
    mean, error = mean_and_error(differences)
    if days is not None:
        index = np.unique(days, return_inverse=True)[1]
        signs, error = np.bincount(index, differences) / np.bincount(index), clustered_error(differences, days)
    if by_task is not None:
        error = two_way_error(by_task)
    larger, smaller = int((signs > 0).sum()), int((signs < 0).sum())
    p = float(binomtest(larger, larger + smaller).pvalue) if larger + smaller else math.nan
    shown = "" if math.isnan(p) else ", p < 0.0001" if p < 1e-4 else f", p = {p:.2g}"
    return format_with_error(round(mean, digits) + 0.0, error, digits, "+"), f"{larger} / {smaller}{shown}"  # no -0.0


@dataclass(frozen=True)
class Comparison(ReportData):
    """Several runs of one experiment."""

    columns: ClassVar[dict[str, dict[str, Any]]] = {
        name: {column: TYPES.get(column, pl.Float64) for column in columns.split()} for name, columns in COLUMNS.items()
    }
    columns["rounds"]["gradient_evaluations"] = pl.Int64  # elsewhere means

    runs: pl.DataFrame  # one row per run
    rounds: pl.DataFrame  # one row per round of a run
    timings: pl.DataFrame  # seconds of all rounds so far, at each round with an evaluation
    test_scores: pl.DataFrame  # one row per test task of a run, after the last round
    baselines: pl.DataFrame  # one row per round of a baseline

    @property
    def metric(self) -> str:
        """Score of the runs, such as accuracy or loss."""
        return str(self.runs["metric"][0])

    @property
    def direction(self) -> str:
        """Direction of the metric in words."""
        return "higher is better" if self.runs["higher_is_better"][0] else "lower is better"

    @property
    def has_test_tasks(self) -> bool:
        """Whether any of the runs was evaluated on test tasks."""
        return bool(self.runs["test_tasks"].max())

    def scores(self) -> tuple[str, bool, dict[str, Score]]:
        """Return the scores of the test tasks where there are any, else the prequential ones."""
        if self.has_test_tasks:
            kind, scores = f"{self.metric} on test tasks", self.runs.select("label", score="test")
        else:
            kind = f"prequential {self.metric}, all rounds"
            scores = self.rounds.group_by("label", "seed", maintain_order=True).agg(pl.col("score").mean())
        by_label = {label: scores.filter(label=label)["score"].cast(pl.Float64) for label in self.labels}
        found = {label: mean_and_error(one.fill_null(np.nan).to_numpy()) for label, one in by_label.items()}
        return f"{kind}; {self.direction}", self.direction == "higher is better", found

    def tables(self) -> list[Table]:
        """Return the means, with baselines, and the differences to the first algorithm."""
        absent = set() if self.has_test_tasks else set(TEST_MEASURES)
        if not self.test_scores["inductive"].is_finite().any():
            absent.add("inductive")
        titles = {name: title.format(self.metric) for name, title in MEASURES.items() if name not in absent}
        paired = {name: title for name, title in titles.items() if name in PAIRED_MEASURES}
        return [self._means_table(titles), *([self._paired_table(paired)] if len(self.labels) > 1 else [])]

    def _means_table(self, titles: dict[str, str]) -> Table:
        """Return means over seeds, with standard errors where there is more than one seed."""
        rows = []
        for label in self.labels:
            runs = self.runs.filter(label=label)
            lr, evaluations = runs["lr"][0], float(runs["gradient_evaluations"].to_numpy().mean())
            settings = ["auto" if lr is None else f"{lr:g}", str(runs["rounds"].min()), str(len(runs))]
            rows.append([label, *settings, *(self._cell(label, name) for name in titles), f"{evaluations:.0f}"])
        for baseline in self.baselines.partition_by("name", maintain_order=True):
            seeds = baseline.sort("round").group_by("seed").agg(pl.col("score").tail(100).mean())["score"].to_numpy()
            cells = {"prequential_last_100": format_with_error(*mean_and_error(seeds), 3)}
            settings = ["", str(baseline["round"].max()), str(len(seeds))]
            rows.append([baseline["name"][0], *settings, *(cells.get(name, "") for name in titles), ""])
        caption = (
            f"Means ± standard error over seeds; {self.metric}: {self.direction}. Regret (lower is better): Euclidean "
            "bilevel local regret after the last round; ≥ where rounds were skipped as not finite, each of which "
            "counts as much as the one before it. Not finite: a score is, or a run whose last rounds were all skipped "
            "has no score. Prequential: measured before a round is learned from. Errors on test "
            "tasks are over seeds and the tasks that they share (two-way); over seeds alone where not all runs have "
            "scores of each task. Inductive: each query is predicted without the statistics of the others. Gain: how "
            "much better the test score is than that of the initial λ_1 on the same tasks. Gradient evaluations: "
            "gradients and second-derivative products per round. Below the algorithms: baselines with the same inner "
            "solver and a λ that is not learned."
        )
        columns = ["algorithm", "α", "rounds", "seeds", *titles.values(), "gradient evaluations"]
        return Table("table", caption, columns, rows)

    def _cell(self, label: str, name: str) -> str:
        """Return mean ± standard error of a measure; a regret of runs with skipped rounds is a lower bound."""
        runs, scores = self.runs.filter(label=label), self._by_task(label, name)
        values = runs[name] if name in runs.columns else pl.Series(scores.mean(1), dtype=pl.Float64)
        if values.is_empty() or (name in TEST_MEASURES and runs["test_tasks"].max() == 0):
            return ""
        if values.null_count() or not values.is_finite().all():
            return "not finite"
        mean, error = mean_and_error(values.to_numpy())
        bound = "≥ " if name == "regret" and runs["skipped"].sum() else ""
        return bound + format_with_error(mean, two_way_error(scores) if scores.size else error, self._digits(name))

    def _by_task(self, label: str, name: str) -> np.ndarray:
        """Return ``[seeds, tasks]`` of a measure, seeds in order; empty where not every run has scores of its tasks."""
        runs = self.runs.filter(label=label)
        tasks = self.test_scores.filter(label=label).sort("seed", "task")
        if name not in TEST_MEASURES or len(tasks) != runs["test_tasks"].sum() or runs["test_tasks"].n_unique() != 1:
            return np.empty((0, 0))
        better = 1 if runs["higher_is_better"][0] else -1
        gain = better * (pl.col("test") - pl.col("initial"))
        values = tasks.select(gain if name == "gain" else pl.col(name)).to_series()
        return np.empty((0, 0)) if values.null_count() else values.to_numpy().reshape(len(runs), -1)

    def _digits(self, name: str) -> int:
        """Return decimals: three for scores; for regrets as many as the smallest one needs to show three digits."""
        if name != "regret":
            return 3
        known = self.runs[name].drop_nulls()
        smallest = float(known.filter(known > 0).to_numpy().min(initial=1.0))
        return 1 if smallest >= 1 else 2 - math.floor(math.log10(smallest))

    def _paired_table(self, titles: dict[str, str]) -> Table:
        """Return the differences to the first algorithm, seed by seed."""
        first, *others = self.labels
        rows = []
        for label in others:
            mine, theirs = (self.runs.filter(label=one) for one in (first, label))
            pairs = mine.join(theirs, on=["seed", "rounds"])
            row = [label, str(len(pairs))]
            for name in titles:
                known = pairs.drop_nulls([name, f"{name}_right"])
                before, after = self._by_task(first, name), self._by_task(label, name)
                same = before.size and before.shape == after.shape and len(known) == len(after)
                values = known[name].to_numpy(), known[f"{name}_right"].to_numpy()
                cells = compare_pairs(*values, self._digits(name), by_task=after - before if same else None)
                row += cells if len(known) else ("", "")
            rows.append(row)
        caption = (
            f"Each algorithm minus {first} on the same seeds: mean difference ± its standard error (as in the table of "
            "means); in how many seeds it is larger and smaller; p of the two-sided sign test, which needs 6 seeds to "
            "come below 0.05. Runs of different lengths are not paired."
        )
        columns = [column for title in titles.values() for column in (title, "larger / smaller")]
        return Table("paired", caption, ["algorithm", "pairs", *columns], rows)

    def figures(self, title: str) -> list[ReportFigure]:
        """Return the figures; that of test tasks where there are any."""
        tests = [self._draw_tests(title)] if self.has_test_tasks else []
        return [self._draw_regret(title), self._draw_prequential(title), *tests]

    def _draw_regret(self, title: str) -> ReportFigure:
        figure, (axes,) = new_figure(3.7)
        curves = {label: self._by_seed(label, "regret") for label in self.labels}
        _draw_curves(axes, curves)
        ends = [float(values.mean(axis=0)[-1]) for values in curves.values()]
        if min(ends) > 0 and max(ends) > 20 * min(ends):
            axes.set_yscale("log")
        axes.set(xlabel="round t", ylabel="cumulative bilevel local regret\n(lower is better)")
        caption = "Euclidean bilevel local regret so far: mean over seeds, band: ± standard error over seeds."
        return finish_figure(figure, "regret", caption, title)

    def _draw_prequential(self, title: str) -> ReportFigure:
        """Draw running means of the prequential score, and in grey those of the best baselines."""
        scores = {label: self._by_seed(label, "score") for label in self.labels}
        lengths = [values.shape[1] for values in scores.values()]
        width = max(1, min(50, max(lengths) // 4, min(lengths) // 2))
        figure, (axes,) = new_figure(3.7)
        _draw_curves(axes, {label: _smooth(values, width) for label, values in scores.items()}, first_round=width)
        sign = -1 if self.direction == "higher is better" else 1
        means = self.baselines.group_by("name", "round", maintain_order=True).agg(pl.col("score").mean())
        baselines = means.sort("round").partition_by("name", maintain_order=True)
        best = sorted(baselines, key=lambda one: sign * one["score"].mean())  # type: ignore[operator]
        for one, style in zip(best, LINE_STYLES, strict=False):
            x, y, label = np.arange(width, len(one) + 1), _smooth(one["score"].to_numpy(), width), one["name"][0]
            axes.plot(x, y, linestyle=style, color="#888888", linewidth=1, label=escape_mathtext(label))
        drawn = [np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()]
        levels = [float(np.nanmean(y)) for y in drawn if not np.isnan(y).all()]
        if best and sign > 0 and min(levels) > 0 and max(levels) > 4 * min(levels):
            axes.set_yscale("log")  # a baseline without a model is far away
        quantity = f"prequential {escape_mathtext(self.metric)}\nmean of {width} rounds ({self.direction})"
        axes.set(xlabel="round t", ylabel=quantity)
        caption = (
            f"Prequential {self.metric} ({self.direction}): each round is evaluated before it is learned from. Mean "
            f"over the last {width} rounds and over seeds, band: ± standard error over seeds. Grey: the best baselines."
        )
        return finish_figure(figure, f"prequential_{self.metric}", caption, title)

    def _draw_tests(self, title: str) -> ReportFigure:
        """Draw the test score against rounds, gradient evaluations, and seconds where they are known."""
        spent = self.rounds.with_columns(pl.col("gradient_evaluations").cum_sum().over("label", "seed"))
        spent = spent.join(self.timings, on=["label", "seed", "round"], how="left").drop_nulls("test")
        error = pl.col("test").std() / pl.len().sqrt()
        means = spent.group_by("label", "round").agg(pl.col("test", *COMPUTE).mean(), error=error).sort("round")
        known = {name: quantity for name, quantity in COMPUTE.items() if means[name].is_not_null().any()}
        figure, panels = new_figure(1.2 + 2.5 * (1 + len(known)), rows=1 + len(known))
        initial = self.runs["initial_test"].mean()
        for axes, (name, quantity) in zip(panels, {"round": "round t", **known}.items(), strict=True):
            for label in self.labels:
                one, look = means.filter(label=label), line_style(self.labels, label)
                axes.errorbar(one[name], one["test"], yerr=one["error"].fill_null(np.nan), capsize=2, **look)
            if initial is not None:
                axes.axhline(float(initial), color="#888888", linestyle=":", label="initial λ_1")  # type: ignore[arg-type]
            axes.set(
                xlabel=quantity,
                ylabel=f"test {escape_mathtext(self.metric)}",
                xscale="log" if name in known else "linear",
            )
        caption = (
            f"Test {self.metric} ({self.direction}) on the same tasks for all, adapted to from λ_t, against rounds and "
            "compute (seconds on this machine). Mean over seeds and tasks, bars: ± standard error over seeds alone, "
            "without that of the shared tasks. Dotted: the initial λ_1, mean over all runs."
        )
        return finish_figure(figure, f"test_{self.metric}", caption, title)

    def _by_seed(self, label: str, column: str) -> np.ndarray:
        """Return a column of rounds as ``[seeds, rounds]``."""
        seeds = self.rounds.filter(label=label).partition_by("seed", maintain_order=True)
        return np.stack([seed[column].to_numpy() for seed in seeds])


def _smooth(values: np.ndarray, width: int) -> np.ndarray:
    return np.apply_along_axis(np.convolve, -1, values, np.ones(width) / width, "valid")


def _draw_curves(axes: Axes, curves: dict[str, np.ndarray], first_round: int = 1) -> None:
    """Draw the mean of ``[seeds, rounds]`` of each label, and its standard error as a band."""
    for label, values in curves.items():
        look = line_style(list(curves), label)
        mean, rounds = values.mean(axis=0), np.arange(first_round, first_round + values.shape[1])
        # matplotlib cannot place marks at fractions of a curve that has no point
        axes.plot(rounds, mean, **look, markevery=0.12 if np.isfinite(mean).any() else None)
        if len(values) > 1:
            error = standard_error(values).numpy()
            axes.fill_between(rounds, mean - error, mean + error, color=look["color"], alpha=0.2, linewidth=0)


def read_comparison(runs: Sequence[Run]) -> Comparison:
    """Return the data of labelled runs."""
    order = sorted_labels(sorted({run.label for run in runs}))
    runs = sorted(runs, key=lambda run: (order.index(run.label), run.summary["seed"]))
    frames = {name: [pl.DataFrame(schema=columns)] for name, columns in Comparison.columns.items()}
    seeds = set()
    for run in runs:
        found = _read_frames(run)
        if run.summary["seed"] in seeds:
            found.pop("baselines", None)  # they do not depend on the algorithm
        seeds.add(run.summary["seed"])
        for name, frame in found.items():
            labelled = frame.with_columns(label=pl.lit(run.label), seed=pl.lit(run.summary["seed"], pl.Int64))
            columns = Comparison.columns[name].items()
            frames[name].append(labelled.select(pl.col(column).cast(kind) for column, kind in columns))
    return Comparison(**{name: pl.concat(parts) for name, parts in frames.items()})


def _read_frames(run: Run) -> dict[str, pl.DataFrame]:
    """Return the frames of one run, without labels; some files are there only where runs have what they hold."""
    summary, directory, lr = run.summary, run.directory, run.config["algorithm"].get("lr")
    metric = summary["metric"]
    names = {"score": metric, "test": f"test_{metric}", "test_se": f"test_{metric}_se", "regret": "regret/euclidean"}
    evaluations = pl.col("gradients") + pl.col("products")
    rounds = run.metrics.with_columns(**names, gradient_evaluations=evaluations)
    row = {
        **summary,
        "lr": lr if isinstance(lr, (int, float)) else None,  # auto, or one for each parameter group
        "initial_test": summary[f"initial_test_{metric}"],
        "test": summary[f"test_{metric}"],
        "test_se": summary[f"test_{metric}_se"],
        "prequential_last_100": rounds["score"].tail(100).mean(),
        "regret": rounds["regret"][-1],
        "gradient_evaluations": rounds["gradient_evaluations"].mean(),
    }
    if summary.get("diverged"):  # the scores are those of a λ that has stopped, and no result
        row |= dict.fromkeys(("test", "test_se", "gain", "gain_se", "prequential_last_100"))
    one_run = pl.DataFrame({name: [row[name]] for name in Comparison.columns["runs"] if name in row})
    frames = {"runs": one_run, "rounds": rounds}
    with contextlib.suppress(*DAMAGE):  # no result depends on timings.csv
        seconds = read_rounds(directory.timings).with_columns(pl.col("seconds").cum_sum())
        frames["timings"] = seconds.filter(rounds["test"].is_not_null())
    if directory.test_scores.is_file():
        scores = pl.read_csv(directory.test_scores)
        inductive = scores["inductive_accuracy"] if "inductive_accuracy" in scores.columns else pl.lit(None)
        frames["test_scores"] = scores.with_columns(initial=f"initial_{metric}", test=metric, inductive=inductive)
    if directory.baselines.is_file():
        wide = unescape_table(pl.read_csv(directory.baselines))
        frames["baselines"] = wide.unpivot(index="round", variable_name="name", value_name="score")
    return frames
