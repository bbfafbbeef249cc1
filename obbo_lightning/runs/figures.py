"""Figures of one run, as files and for notebooks; without pyplot, whose state belongs to the user.

``plot_`` functions return matplotlib's ``Figure``, which a notebook shows and ``savefig`` writes.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import polars as pl
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from obbo_lightning.escaping import escape_mathtext
from obbo_lightning.runs.directory import RunDirectory, read_config
from obbo_lightning.runs.summary import run_title
from obbo_lightning.runs.table import read_columns, read_rounds

# Okabe and Ito's colours, distinguishable for colour-blind readers.
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"
BASELINE_STYLES = ("--", ":", "-.", (0, (1, 4)), "-")  # lines of baselines
SHADES = ("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#D55E00", "#CC79A7", "#999999", "#44546A", "#7A5195")
NAMED = 12  # most coordinates in a legend
# Fixed margins: a computed layout would draw every figure twice.
MARGINS = {"left": 0.15, "right": 0.97, "bottom": 0.13, "top": 0.91}


def plot_run(run: str | Path) -> Figure:
    """Draw the prequential score of each round, the scores of test tasks, and the baselines.

    Args:
        run: a finished run's directory; or a folder above, for its newest run.
    """
    directory = RunDirectory.newest(run)
    if not directory.finished:
        raise ValueError(f"plot_run needs a finished run, and {directory.path} is not: resume it first")
    summary, baselines = json.loads(directory.summary.read_text()), dict[str, np.ndarray]()
    if directory.baselines.exists():
        baselines = read_columns(directory.baselines)
        del baselines["round"]
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes, metric = figure.subplots(), summary["metric"]
    draw_scores(axes, read_columns(directory.metrics), metric, summary[f"initial_test_{metric}"], baselines)
    axes.set_title(escape_mathtext(run_title(read_config(directory))))
    tidy(axes)
    return figure


def plot_weights(run: str | Path) -> Figure:
    """Draw the learned values over the rounds, by name: shares as a stack, other numbers as lines.

    Args:
        run: a run directory whose values have names (it has an outer.csv); or a folder above, for its newest run.
    """
    directory = RunDirectory.newest(run)
    if not directory.outer.is_file():
        raise ValueError(f"plot_weights needs values with names, and {directory.path} has no outer.csv")
    figure = Figure(figsize=(6, 4), layout="constrained")
    draw_weights(figure, read_rounds(directory.outer))
    figure.suptitle(escape_mathtext(run_title(read_config(directory))), fontsize="medium")
    return figure


def draw_figures(
    directory: Path,
    rounds: Mapping[str, Sequence[float]],
    metric: str,
    initial: float | None,
    title: str,
    baselines: Mapping[str, Sequence[float]],
) -> list[Path]:
    """Draw scores and cumulative regret from the columns of metrics.csv; returns the paths of the two PNG files."""
    table = {name: np.array(values, dtype=float) for name, values in rounds.items()}
    others = {name: np.array(values, dtype=float) for name, values in baselines.items()}
    directory.mkdir(exist_ok=True)
    paths = []
    for name in (metric, "regret"):
        figure = Figure(figsize=(6, 4))
        axes = figure.subplots(gridspec_kw=MARGINS)
        if name == metric:
            draw_scores(axes, table, metric, initial, others)
        else:
            for regret, colour, style in (("euclidean", BLUE, "-"), ("exact", ORANGE, "--")):
                if np.isfinite(table[f"regret/{regret}"]).any():
                    axes.plot(table["round"], table[f"regret/{regret}"], style, color=colour, label=regret)
            axes.set(xlabel="round t", ylabel="cumulative bilevel local regret", ylim=(0, None))
            axes.legend(frameon=False)
        axes.set_title(escape_mathtext(title))
        tidy(axes)
        paths.append(directory / f"{name}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths


def draw_scores(
    axes: Axes, table: dict[str, np.ndarray], metric: str, initial: float | None, others: dict[str, np.ndarray]
) -> None:
    """Draw the metric of every round with a running mean, of the test tasks, and of the baselines."""
    rounds, values = table["round"], table[metric]
    width = max(1, min(10 if others else 50, len(values) // 5))  # with baselines phases must be visible
    means = np.ones(width) / width
    smooth = {name: np.convolve(scores, means, mode="valid") for name, scores in {"": values, **others}.items()}
    axes.plot(rounds, values, ".", color=BLUE, alpha=0.2, markersize=4)
    label = f"prequential, mean of {width} rounds" if width > 1 else "prequential"
    axes.plot(rounds[width - 1 :], smooth[""], color=BLUE, label=label)
    for name, style in zip(others, BASELINE_STYLES, strict=False):
        label = escape_mathtext(name)
        axes.plot(rounds[width - 1 :], smooth[name], linestyle=style, color=GREY, linewidth=1, label=label)
    centers = [float(np.nanmean(one)) for one in (smooth[""], *others.values())]
    if others and min(centers) > 0 and max(centers) > 4 * min(centers) and metric != "accuracy":
        axes.set_yscale("log")  # a baseline without a model is far away
    if initial is not None and np.isfinite(initial):
        tested = np.isfinite(table[f"test_{metric}"])
        test = [initial, *table[f"test_{metric}"][tested]]
        errors = [np.nan, *table[f"test_{metric}_se"][tested]]
        label = "test tasks, ± standard error" if np.isfinite(errors).any() else "test, median over lanes"
        axes.errorbar([0, *rounds[tested]], test, yerr=errors, color=ORANGE, marker="o", capsize=3, label=label)
        axes.axhline(initial, color=GREY, linestyle=":", linewidth=1, label="before learning")
    axes.set(xlabel="round t", ylabel=escape_mathtext(metric))
    axes.legend(frameon=bool(others), framealpha=0.7, fontsize="small" if others else None)


def draw_weights(figure: Figure, outer: pl.DataFrame) -> None:
    """Draw λ over the rounds, the rows of outer.csv, in an empty figure: one panel per parameter group."""
    groups: dict[str, list[str]] = {}
    for name in outer.columns[1:]:
        groups.setdefault(re.sub(r"\[\d+\]$", "", name), []).append(name)
    panels = figure.subplots(len(groups), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (group, names) in zip(panels, groups.items(), strict=True):
        draw_group(axes, outer.select("round", *names))
        axes.set_ylabel(escape_mathtext(group))
        if len(names) > 1:
            axes.legend(reverse=True, frameon=False, fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))
        tidy(axes)
    panels[-1].set_xlabel("round t")


def draw_group(axes: Axes, outer: pl.DataFrame) -> None:
    """Draw one parameter group over the rounds: weights on a simplex as a stack, other numbers as lines."""
    rounds, names = outer["round"].to_numpy(), outer.columns[1:]
    values = outer.select(names).to_numpy().T
    many = len(names) > NAMED  # from dark to light, with labels for the first and the last only
    dark = colormaps["viridis"](np.linspace(0, 1, len(names)))
    colours = [*dark] if many else [SHADES[i % len(SHADES)] for i in range(len(names))]
    labels = [escape_mathtext(name) if not many or i in (0, len(names) - 1) else "_" for i, name in enumerate(names)]
    if len(names) > 1 and np.allclose(values.sum(0), 1, atol=1e-3) and values.min() >= 0:
        axes.stackplot(rounds, values, labels=labels, colors=colours, edgecolor="white", linewidth=0.3)
        axes.set_ylim(0, 1)
        return
    for one, label, colour in zip(values, labels, colours, strict=True):
        axes.plot(rounds, one, color=colour, label=label)
    if values.min() > 0 and values.max() > 30 * values.min():
        axes.set_yscale("log")


def tidy(axes: Axes) -> None:
    """Set the style of all figures of runs."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # rounds are whole
    axes.grid(alpha=0.25)
