"""Figures of several algorithms: regret, gradient norms, prequential and test scores, learned values, compute."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import polars as pl
from matplotlib.axes import Axes

from obbo_lightning.core.statistics import mean_and_error, standard_error
from obbo_lightning.escaping import escape_mathtext
from obbo_lightning.experiments.report_data import (
    LINE_STYLES,
    ReportData,
    ReportFigure,
    finish_figure,
    line_style,
    new_figure,
    set_title,
)
from obbo_lightning.runs.figures import NAMED, draw_group, group_coordinates

RUN = {"label": pl.String, "seed": pl.Int64}


@dataclass(frozen=True)
class ComparisonFigures(ReportData):
    """Data of several runs of one experiment, and its figures.

    Attributes:
        runs: one row per run.
        rounds: one row per round of a run.
        timings: seconds of all rounds so far, at each round with an evaluation.
        test_scores: one row per test task of a run, after the last round.
        baselines: one row per round of a baseline.
        weights: λ over the rounds, one row per coordinate that has a name; of the first seed of each label.
    """

    columns: ClassVar[dict[str, dict[str, Any]]] = {
        "runs": {
            "label": pl.String,
            "algorithm": pl.String,
            "seed": pl.Int64,
            "lr": pl.Float64,
            "rounds": pl.Int64,
            "metric": pl.String,
            "test_tasks": pl.Int64,
            **dict.fromkeys(("initial_test", "test", "test_se", "gain", "gain_se"), pl.Float64),
            "prequential_last_100": pl.Float64,
            "regret": pl.Float64,
            "skipped": pl.Int64,
            "gradient_evaluations": pl.Float64,
            "higher_is_better": pl.Boolean,
        },
        "rounds": {
            **RUN,
            "round": pl.Int64,
            **dict.fromkeys(("score", "test", "test_se", "regret", "hypergradient_norm", "residual"), pl.Float64),
            "gradient_evaluations": pl.Int64,
        },
        "timings": {**RUN, "round": pl.Int64, "seconds": pl.Float64},
        "test_scores": {**RUN, "task": pl.Int64, **dict.fromkeys(("initial", "test", "inductive"), pl.Float64)},
        "baselines": {"name": pl.String, "seed": pl.Int64, "round": pl.Int64, "score": pl.Float64},
        "weights": {**RUN, "round": pl.Int64, "name": pl.String, "value": pl.Float64},
    }
    optional: ClassVar[tuple[str, ...]] = ("test_scores", "baselines", "weights")

    runs: pl.DataFrame
    rounds: pl.DataFrame
    timings: pl.DataFrame
    test_scores: pl.DataFrame
    baselines: pl.DataFrame
    weights: pl.DataFrame

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

    def figures(self, title: str) -> list[ReportFigure]:
        """Return the figures; those of test tasks where there are any."""
        figures = [
            _draw_regret(self, title),
            _draw_norms(self, title),
            _draw_prequential(self, title),
            *_draw_weights(self, title),
        ]
        if self.has_test_tasks:
            figures += [_draw_tests(self, title), _draw_compute(self, title)]
        return figures


def _draw_regret(comparison: ComparisonFigures, title: str) -> ReportFigure:
    figure, (axes,) = new_figure(3.7)
    curves = {label: _values(comparison, label, "regret") for label in comparison.labels}
    _draw_curves(axes, curves)
    ends = [float(values.mean(axis=0)[-1]) for values in curves.values()]
    if min(ends) > 0 and max(ends) > 20 * min(ends):
        axes.set_yscale("log")
    axes.set(xlabel="round t", ylabel="cumulative bilevel local regret\n(lower is better)")
    caption = (
        "Euclidean bilevel local regret so far, measured alike for all; lower is better. Mean over seeds, band: ± "
        "standard error over seeds."
    )
    return finish_figure(figure, axes, "regret", caption, title)


def _draw_prequential(comparison: ComparisonFigures, title: str) -> ReportFigure:
    metric, direction = comparison.metric, comparison.direction
    scores = {label: _values(comparison, label, "score") for label in comparison.labels}
    lengths = [values.shape[1] for values in scores.values()]
    width = max(1, min(50, max(lengths) // 4, min(lengths) // 2))
    curves = {label: np.stack([_smooth(seed, width) for seed in values]) for label, values in scores.items()}
    figure, (axes,) = new_figure(3.7)
    _draw_curves(axes, curves, first_round=width)
    has_baselines = _draw_baselines(axes, comparison, width)
    means = [float(np.nanmean(line.get_ydata())) for line in axes.get_lines()]  # type: ignore[arg-type]
    if has_baselines and direction == "lower is better" and min(means) > 0 and max(means) > 4 * min(means):
        axes.set_yscale("log")  # a baseline without a model is far away
    quantity = f"prequential {escape_mathtext(metric)}\nmean of {width} rounds ({direction})"
    axes.set(xlabel="round t", ylabel=quantity)
    caption = (
        f"Prequential {metric} ({direction}): each round is evaluated before it is learned from. Mean over the last "
        f"{width} rounds and over seeds, band: ± standard error over seeds."
    ) + (" Grey: the best baselines." if has_baselines else "")
    return finish_figure(figure, axes, f"prequential_{metric}", caption, title)


def _draw_baselines(axes: Axes, comparison: ComparisonFigures, width: int) -> bool:
    """Draw the best baselines in grey, means over seeds; returns whether there are any."""
    sign = -1 if comparison.direction == "higher is better" else 1
    found = {
        str(name): part.group_by("round").agg(pl.col("score").mean()).sort("round")["score"].to_numpy()
        for (name,), part in comparison.baselines.partition_by("name", as_dict=True, maintain_order=True).items()
    }
    best = sorted(found, key=lambda name: sign * float(found[name].mean()))
    for name, style in zip(best, LINE_STYLES, strict=False):
        rounds = np.arange(width, len(found[name]) + 1)
        label = escape_mathtext(name)
        axes.plot(rounds, _smooth(found[name], width), linestyle=style, color="#888888", linewidth=1, label=label)
    return bool(best)


def _smooth(values: np.ndarray, width: int) -> np.ndarray:
    return np.convolve(values, np.ones(width) / width, mode="valid")


def _draw_curves(axes: Axes, curves: dict[str, np.ndarray], first_round: int = 1) -> None:
    """Draw the mean of ``[seeds, rounds]`` of each label, and its standard error as a band."""
    for label, values in curves.items():
        look = line_style(list(curves), label)
        mean, rounds = values.mean(axis=0), np.arange(first_round, first_round + values.shape[1])
        axes.plot(rounds, mean, **look, markevery=0.12)
        if len(values) > 1:
            error = standard_error(values).numpy()
            axes.fill_between(rounds, mean - error, mean + error, color=look["color"], alpha=0.2, linewidth=0)


def _draw_norms(comparison: ComparisonFigures, title: str) -> ReportFigure:
    """Draw histograms of the hypergradients' norms, one row per algorithm."""
    labels = comparison.labels
    figure, rows = new_figure(0.9 + 0.62 * len(labels), rows=len(labels), sharex=True)
    norms = {label: _values(comparison, label, "hypergradient_norm").ravel() for label in labels}
    positive = np.concatenate([n[(n > 0) & np.isfinite(n)] for n in norms.values()])
    bins = np.linspace(0, 1, 50)
    if len(positive):
        bins = np.geomspace(positive.min() / 1.001, positive.max() * 1.001, 50)
        rows[0].set_xscale("log")
    for label, axes in zip(labels, rows, strict=True):
        axes.hist(norms[label], bins=bins.tolist(), color=line_style(labels, label)["color"])
        axes.axvline(float(np.median(norms[label])), color=axes.spines["bottom"].get_edgecolor(), ls=":", lw=1)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        _label_row(axes, label)
    rows[-1].set_xlabel("norm of the hypergradient ‖d_t‖")
    set_title(figure, title)
    caption = "Number of rounds by the norm of their hypergradient; all rounds and seeds. Dotted: the median."
    return ReportFigure("gradient_norms", caption, figure)


def _label_row(axes: Axes, label: str) -> None:
    axes.set_ylabel(escape_mathtext(label).replace(", ", "\n"), rotation=0, ha="right", va="center")


def _draw_weights(comparison: ComparisonFigures, title: str) -> list[ReportFigure]:
    """Draw λ over the rounds: one figure per parameter group whose coordinates have names, one row per algorithm."""
    figures = []
    for group, names in group_coordinates(comparison.weights["name"].unique(maintain_order=True).to_list()).items():
        weights = comparison.weights.filter(pl.col("name").is_in(names))
        labels = [label for label in comparison.labels if label in set(weights["label"])]
        entries = 0 if len(names) == 1 else len(names) if len(names) <= NAMED else 2  # of the legend
        figure, rows = new_figure(1.0 + 0.95 * len(labels) + 0.17 * -(-entries // 4), rows=len(labels), sharex=True)
        for label, axes in zip(labels, rows, strict=True):
            wide = weights.filter(pl.col("label") == label).pivot(on="name", index="round", values="value")
            draw_group(axes, wide.sort("round").select("round", *names))
            _label_row(axes, label)
        rows[-1].set_xlabel("round t")
        if entries:
            figure.legend(*rows[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        set_title(figure, title)
        caption = (
            f"Learned {group} over the rounds, one row per algorithm, of its first seed ({weights['seed'][0]}). "
            "Numbers that sum to one are stacked, the first one at the bottom."
        )
        figures.append(ReportFigure(f"learned_{group}", caption, figure))
    return figures


def _draw_tests(comparison: ComparisonFigures, title: str) -> ReportFigure:
    metric, direction, labels = comparison.metric, comparison.direction, comparison.labels
    figure, (axes,) = new_figure(3.7)
    last = int(comparison.rounds["round"].max())  # type: ignore[arg-type]
    for i, label in enumerate(labels):
        table = _test_curve(comparison, label)
        shift = (i - (len(labels) - 1) / 2) * last / 200  # error bars must not hide each other
        errors = table["error"].fill_null(np.nan)
        axes.errorbar(table["round"] + shift, table["test"], yerr=errors, capsize=2, **line_style(labels, label))
    _draw_initial(axes, comparison)
    axes.set(xlabel="round t", ylabel=f"test {escape_mathtext(metric)} ({direction})")
    caption = (
        f"{metric.capitalize()} ({direction}) on the same test tasks for all, adapted to from λ_t. Mean over seeds and "
        "tasks, bars: ± standard error over seeds alone, without that of the shared tasks. Dotted: the initial λ_1, "
        "mean over all runs."
    )
    return finish_figure(figure, axes, f"test_{metric}", caption, title)


def _draw_compute(comparison: ComparisonFigures, title: str) -> ReportFigure:
    """Draw the test score against gradient evaluations, and against seconds where they are known."""
    metric = comparison.metric
    evaluations = pl.col("gradient_evaluations").cum_sum().over("label", "seed")
    spent = {"gradients and second-derivative products so far": (comparison.rounds, evaluations)}
    if len(comparison.timings):
        spent["seconds of rounds so far, without evaluations"] = (comparison.timings, pl.col("seconds"))
    figure, panels = new_figure(1.2 + 2.5 * len(spent), rows=len(spent))
    for axes, (quantity, (frame, column)) in zip(panels, spent.items(), strict=True):
        means = frame.with_columns(column.alias("x")).group_by("label", "round").agg(pl.col("x").mean())
        for label in comparison.labels:
            x = means.filter(pl.col("label") == label)
            table = _test_curve(comparison, label).join(x, on="round", how="left")
            axes.plot(table["x"], table["test"], **line_style(comparison.labels, label))
        _draw_initial(axes, comparison)
        axes.set(xlabel=quantity, ylabel=f"test {escape_mathtext(metric)} ({comparison.direction})", xscale="log")
    caption = (
        f"Test {metric} against compute, means over seeds; a line begins with its first evaluation. Seconds are those "
        "of this machine, with as many runs side by side as there were."
    )
    return finish_figure(figure, panels[0], f"{metric}_against_compute", caption, title)


def _draw_initial(axes: Axes, comparison: ComparisonFigures) -> None:
    initial = comparison.runs["initial_test"].drop_nulls().to_numpy()
    if len(initial):
        axes.axhline(float(initial.mean()), color="#888888", linestyle=":", linewidth=1.2, label="initial λ_1")


def _values(comparison: ComparisonFigures, label: str, column: str) -> np.ndarray:
    """Return a column of rounds as ``[seeds, rounds]``."""
    seeds = comparison.rounds.filter(pl.col("label") == label).partition_by("seed", maintain_order=True)
    return np.stack([seed[column].to_numpy() for seed in seeds])


def _test_curve(comparison: ComparisonFigures, label: str) -> pl.DataFrame:
    """Return round, test score (mean over seeds) and its standard error; round 0 is the initial λ_1."""
    runs = comparison.runs.filter(pl.col("label") == label)
    tested = comparison.rounds.filter((pl.col("label") == label) & pl.col("test").is_not_null())
    rows: list[tuple[Any, ...]] = [(0, runs["initial_test"].mean(), None)]
    for (number,), seeds in sorted(tested.partition_by("round", as_dict=True).items()):
        rows.append((number, *mean_and_error(seeds["test"].to_numpy())))
    return pl.DataFrame(rows, schema={"round": pl.Int64, "test": pl.Float64, "error": pl.Float64}, orient="row")
