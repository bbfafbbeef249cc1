"""Figures of several algorithms: regret, gradient norms, stream score, test score, and what each costs."""

from typing import Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes

from obbo_lightning.core.statistics import mean_and_error, standard_error
from obbo_lightning.escaping import escape_mathtext
from obbo_lightning.experiments.comparison import Comparison
from obbo_lightning.experiments.comparison_weights import draw_all_weights
from obbo_lightning.experiments.drawing import STYLES, Drawing, finish, look_of, new_figure, set_title


def draw_comparison(comparison: Comparison, title: str) -> list[Drawing]:
    """The paper's figures, and two on compute."""
    metric = comparison.metric
    of_rounds = [
        _draw_regret(comparison, title),
        _draw_norms(comparison, title),
        _draw_stream(comparison, f"stream_{metric}", title),
        *draw_all_weights(comparison.weights, comparison.labels, title),
    ]
    if comparison.runs["test_tasks"].max() == 0:  # a stream without test tasks
        return of_rounds
    return [
        *of_rounds,
        _draw_tests(comparison, f"test_{metric}", title),
        _draw_compute(comparison, f"{metric}_against_compute", title),
    ]


def _draw_regret(comparison: Comparison, title: str) -> Drawing:
    figure, axes = new_figure(3.7)
    curves = {label: _seeds(comparison, label, "regret") for label in comparison.labels}
    _draw_curves(axes[0], comparison, curves)
    ends = [float(values.mean(axis=0)[-1]) for _, values in curves.values()]
    if min(ends) > 0 and max(ends) > 20 * min(ends):
        axes[0].set_yscale("log")
    axes[0].set(xlabel="round t", ylabel="cumulative bilevel local regret\n(lower is better)")
    caption = (
        "Euclidean bilevel local regret so far, the same yardstick for all; lower is better. Mean over seeds, band: ± "
        "standard error over seeds."
    )
    return finish(figure, axes[0], "regret", caption, title)


def _draw_stream(comparison: Comparison, name: str, title: str) -> Drawing:
    curves = {label: _seeds(comparison, label, "score") for label in comparison.labels}
    lengths = [len(rounds) for rounds, _ in curves.values()]
    width = max(1, min(50, max(lengths) // 4, min(lengths) // 2))
    smooth = {
        label: (rounds[width - 1 :], np.stack([np.convolve(v, np.ones(width) / width, mode="valid") for v in values]))
        for label, (rounds, values) in curves.items()
    }
    figure, axes = new_figure(3.7)
    _draw_curves(axes[0], comparison, smooth)
    ending = _draw_baselines(axes[0], comparison, width)
    ends = [float(np.nanmean(line.get_ydata())) for line in axes[0].get_lines()]  # type: ignore[arg-type]
    if ending and comparison.better == "lower is better" and min(ends) > 0 and max(ends) > 4 * min(ends):
        axes[0].set_yscale("log")  # what needs no model is far away
    quantity = f"stream {escape_mathtext(comparison.metric)}, mean of {width} rounds"
    axes[0].set(xlabel="round t", ylabel=f"{quantity}\n({comparison.better})" if comparison.better else quantity)
    caption = (
        f"The stream's {comparison.metric}{_direction(comparison)}: each round is judged before it is learned from. "
        f"Mean over the last {width} rounds and over seeds, band: ± standard error over seeds.{ending}"
    )
    return finish(figure, axes[0], name, caption, title)


def _direction(comparison: Comparison) -> str:
    return f" ({comparison.better})" if comparison.better else ""


def _draw_baselines(axes: Axes, comparison: Comparison, width: int) -> str:
    """The best few of what λ must beat, in grey, mean over seeds; says so."""
    sign = -1 if comparison.better == "higher is better" else 1
    found = {
        name: part.group_by("round").agg(pl.col("score").mean()).sort("round")["score"].to_numpy()
        for (name,), part in comparison.baselines.partition_by("name", as_dict=True, maintain_order=True).items()
    }
    best = sorted(found, key=lambda name: sign * float(found[name].mean()))[: len(STYLES)]
    for name, style in zip(best, STYLES, strict=False):
        smooth = np.convolve(found[name], np.ones(width) / width, mode="valid")
        rounds = np.arange(width, len(found[name]) + 1)
        axes.plot(rounds, smooth, linestyle=style, color="#888888", linewidth=1, label=escape_mathtext(str(name)))
    return " Grey: the best of what a learned λ must beat." if best else ""


def _draw_untrained(axes: Axes, comparison: Comparison) -> None:
    untrained = comparison.runs["untrained_test"].drop_nulls().to_numpy()
    if len(untrained):
        axes.axhline(float(untrained.mean()), color="#888888", linestyle=":", linewidth=1.2, label="untrained λ_1")


def _draw_curves(axes: Axes, comparison: Comparison, curves: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    for label, (rounds, values) in curves.items():
        look = look_of(comparison.labels, label)
        mean = values.mean(axis=0)
        axes.plot(rounds, mean, **look, markevery=0.12)
        if len(values) > 1:
            error = standard_error(values).numpy()
            axes.fill_between(rounds, mean - error, mean + error, color=look["color"], alpha=0.2, linewidth=0)


def _draw_norms(comparison: Comparison, title: str) -> Drawing:
    """How large hypergradients are, one row an algorithm."""
    labels = comparison.labels
    figure, rows = new_figure(0.9 + 0.62 * len(labels), rows=len(labels), sharex=True)
    norms = {
        label: comparison.rounds.filter(pl.col("label") == label)["hypergradient_norm"].to_numpy() for label in labels
    }
    positive = np.concatenate([n[(n > 0) & np.isfinite(n)] for n in norms.values()])
    if len(positive):
        bins = np.geomspace(positive.min() / 1.001, positive.max() * 1.001, 50)
        rows[0].set_xscale("log")
    else:
        bins = np.linspace(0, 1, 50)
    for label, axes in zip(labels, rows, strict=True):
        axes.hist(norms[label], bins=bins.tolist(), color=look_of(labels, label)["color"])
        axes.axvline(float(np.median(norms[label])), color=axes.spines["bottom"].get_edgecolor(), ls=":", lw=1)
        axes.set_yticks([])
        axes.set_ylabel(escape_mathtext(label).replace(", ", "\n"), rotation=0, ha="right", va="center")
        axes.spines["left"].set_visible(False)
    rows[-1].set_xlabel("norm of the hypergradient ‖d_t‖")
    set_title(figure, title)
    caption = "How many rounds have a hypergradient of which norm; all rounds and seeds. Dotted: the median."
    return Drawing("gradient_norms", caption, figure)


def _draw_tests(comparison: Comparison, name: str, title: str) -> Drawing:
    figure, axes = new_figure(3.7)
    last = int(comparison.rounds["round"].max())  # type: ignore[arg-type]
    for i, label in enumerate(comparison.labels):
        table = _with_untrained(comparison, label)
        apart = (i - (len(comparison.labels) - 1) / 2) * last / 200  # error bars must not hide each other
        axes[0].errorbar(
            table["round"] + apart,
            table["test"],
            yerr=table["error"].fill_null(np.nan),
            capsize=2,
            **look_of(comparison.labels, label),
        )
    _draw_untrained(axes[0], comparison)
    axes[0].set(xlabel="round t", ylabel=f"test {escape_mathtext(comparison.metric)}{_direction(comparison)}")
    caption = (
        f"{comparison.metric.capitalize()}{_direction(comparison)} on the same fixed test tasks for all, adapted to "
        "from λ_t. Mean over seeds and tasks, bars: ± standard error over seeds alone, without that of the shared "
        "tasks. Dotted: the untrained λ_1, mean over all runs."
    )
    return finish(figure, axes[0], name, caption, title)


def _draw_compute(comparison: Comparison, name: str, title: str) -> Drawing:
    """The test score against what was spent on rounds: oracle calls, and seconds."""
    clocked = len(comparison.timings) > 0
    figure, axes = new_figure(6.2 if clocked else 3.7, rows=2 if clocked else 1)
    calls = comparison.rounds.with_columns(pl.col("calls").cum_sum().over("label", "seed").alias("spent"))
    for label in comparison.labels:
        look = look_of(comparison.labels, label)
        table = _with_untrained(comparison, label).join(_mean_of(calls, label, "spent"), on="round", how="left")
        axes[0].plot(table["spent"], table["test"], **look)
        if clocked:
            table = table.join(_mean_of(comparison.timings, label, "seconds"), on="round", how="left")
            axes[1].plot(table["seconds"], table["test"], **look)
    for one in axes:
        _draw_untrained(one, comparison)
    xlabels = ("gradients and second-derivative products so far", "seconds of rounds so far, evaluations not counted")
    for one, xlabel in zip(axes, xlabels, strict=False):
        one.set(
            xlabel=xlabel, ylabel=f"test {escape_mathtext(comparison.metric)}{_direction(comparison)}", xscale="log"
        )
    caption = (
        f"Test {comparison.metric} against compute, means over seeds; a line begins with its first evaluation. "
        "Seconds are those of this machine"
        + (", with as many runs side by side as there were." if clocked else " and were not kept.")
    )
    return finish(figure, axes[0], name, caption, title)


def _seeds(comparison: Comparison, label: str, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Rounds ``[T]`` and values ``[seeds, T]``."""
    chosen = comparison.rounds.filter(pl.col("label") == label)
    tables = chosen.partition_by("seed", maintain_order=True)
    return tables[0]["round"].to_numpy(), np.stack([part[column].to_numpy() for part in tables])


def _with_untrained(comparison: Comparison, label: str) -> pl.DataFrame:
    """Round, test (mean over seeds) and its standard error; round 0 is the untrained λ_1."""
    runs = comparison.runs.filter(pl.col("label") == label)
    tested = comparison.rounds.filter((pl.col("label") == label) & pl.col("test").is_not_null())
    rows: list[tuple[Any, ...]] = [(0, runs["untrained_test"].mean(), None)]
    for (played,), seeds in sorted(tested.partition_by("round", as_dict=True).items()):
        rows.append((played, *mean_and_error(seeds["test"].to_numpy())))
    return pl.DataFrame(rows, schema={"round": pl.Int64, "test": pl.Float64, "error": pl.Float64}, orient="row")


def _mean_of(table: pl.DataFrame, label: str, column: str) -> pl.DataFrame:
    return table.filter(pl.col("label") == label).group_by("round").agg(pl.col(column).mean())
