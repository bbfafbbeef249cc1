"""Figures of one run, as files and for notebooks; without pyplot, whose state is the user's."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from obbo_lightning.foreign_text import drawn
from obbo_lightning.runs.table import read_rounds

# Okabe and Ito's colours, distinguishable for colour-blind readers.
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"
BESIDE = ("--", ":", "-.", (0, (1, 4)), "-")  # lines of baselines
SHADES = ("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#D55E00", "#CC79A7", "#999999", "#44546A", "#7A5195")
NAMED = 12  # coordinates that a legend has room for
# Wide enough for any number; a layout that is computed would draw every figure twice.
MARGINS = {"left": 0.15, "right": 0.97, "bottom": 0.13, "top": 0.91}


def draw_figures(
    metrics: Path, directory: Path, metric: str, untrained: float, title: str, baselines: Path | None = None
) -> list[Path]:
    """Stream and test scores, and cumulative regret; returns the paths of the two PNG files."""
    table = {column.name: column.to_numpy() for column in read_rounds(metrics).fill_null(np.nan)}
    directory.mkdir(exist_ok=True)
    regret, scores = _new_figure(), _new_figure()
    _draw_regret(regret.axes[0], table, drawn(title))
    draw_scores(scores.axes[0], table, metric, untrained, drawn(title), read_baselines(baselines))
    return [
        save_figure(scores, scores.axes[0], directory / f"{metric}.png"),
        save_figure(regret, regret.axes[0], directory / "regret.png"),
    ]


def _new_figure() -> Figure:
    figure = Figure(figsize=(6, 4))
    figure.subplots(gridspec_kw=MARGINS)
    return figure


def read_baselines(path: Path | None) -> dict[str, np.ndarray]:
    """What λ must beat, by name, a number a round; nothing where the stream knows of none."""
    beside = pl.read_csv(path) if path is not None and path.exists() else pl.DataFrame()
    return {drawn(column.name): column.to_numpy() for column in beside if column.name != "round"}


def _draw_regret(axes: Axes, table: dict[str, np.ndarray], title: str) -> None:
    for name, colour, style in (("regret/euclidean", BLUE, "-"), ("regret/exact", ORANGE, "--")):
        if np.isfinite(table[name]).any():
            axes.plot(table["round"], table[name], style, color=colour, label=name.removeprefix("regret/"))
    axes.set(xlabel="round t", ylabel="cumulative bilevel local regret", title=title, ylim=(0, None))
    axes.legend(frameon=False)


def draw_scores(
    axes: Axes, table: dict[str, np.ndarray], metric: str, untrained: float, title: str, others: dict[str, np.ndarray]
) -> None:
    """The metric of every round, with its mean over some; of the test tasks; and of what λ must beat."""
    rounds, values = table["round"], table[metric]
    width = max(1, min(50, len(values) // 5))
    if others:  # phases are to be seen
        width = min(width, 10)
    smooth = _smooth(values, width)
    axes.plot(rounds, values, ".", color=BLUE, alpha=0.2, markersize=4)
    axes.plot(
        rounds[width - 1 :], smooth, color=BLUE, label=f"stream, mean of {width} rounds" if width > 1 else "stream"
    )
    for (name, scores), style in zip(others.items(), BESIDE, strict=False):
        axes.plot(rounds[width - 1 :], _smooth(scores, width), linestyle=style, color=GREY, linewidth=1, label=name)
    means = [float(np.nanmean(one)) for one in (smooth, *others.values())]
    if others and min(means) > 0 and max(means) > 4 * min(means) and metric != "accuracy":
        axes.set_yscale("log")  # what needs no model is far away
    if np.isfinite(untrained):  # a stream need not have test tasks
        _add_tests(axes, table, metric, untrained)
    axes.set(xlabel="round t", ylabel=drawn(metric), title=title)
    axes.legend(frameon=bool(others), framealpha=0.7, fontsize="small" if others else None)


def _smooth(values: np.ndarray, width: int) -> np.ndarray:
    return np.convolve(values, np.ones(width) / width, mode="valid")


def _add_tests(axes: Axes, table: dict[str, np.ndarray], metric: str, untrained: float) -> None:
    rounds, tested = table["round"], np.isfinite(table[f"test_{metric}"])
    at = np.concatenate([[0], rounds[tested]])
    test = np.concatenate([[untrained], table[f"test_{metric}"][tested]])
    errors = np.concatenate([[np.nan], table[f"test_{metric}_se"][tested]])
    label = "test tasks, ± standard error" if np.isfinite(errors).any() else "test, median over lanes"
    axes.errorbar(at, test, yerr=errors, color=ORANGE, marker="o", capsize=3, label=label)
    axes.axhline(untrained, color=GREY, linestyle=":", linewidth=1, label="untrained")


def draw_weights(figure: Figure, outer: pl.DataFrame) -> None:
    """λ over the rounds, a panel a block.

    Args:
        figure: an empty one.
        outer: a column ``round`` and one a coordinate, ``trust[2]`` or ``decay``; the rows of outer.csv.
    """
    blocks = blocks_of(outer.columns[1:])
    panels = figure.subplots(len(blocks), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (block, names) in zip(panels, blocks.items(), strict=True):
        draw_block(axes, outer.select("round", *names))
        axes.set_ylabel(drawn(block))
        if len(names) > 1:
            axes.legend(reverse=True, frameon=False, fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))
        tidy(axes)
    panels[-1].set_xlabel("round t")


def blocks_of(names: Sequence[str]) -> dict[str, list[str]]:
    """The coordinates of each block.

    >>> blocks_of(["trust[0]", "trust[1]", "decay"])
    {'trust': ['trust[0]', 'trust[1]'], 'decay': ['decay']}
    """
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(re.sub(r"\[\d+\]$", "", name), []).append(name)
    return found


def draw_block(axes: Axes, outer: pl.DataFrame) -> None:
    """One block over the rounds: shares of one as a stack, other numbers as lines."""
    rounds, names = outer["round"].to_numpy(), outer.columns[1:]
    values = outer.select(names).to_numpy().T
    many = len(names) > NAMED  # then the first is dark, the last one light, and only these are named
    dark = colormaps["viridis"](np.linspace(0, 1, len(names)))
    colours = [*dark] if many else [SHADES[i % len(SHADES)] for i in range(len(names))]
    labels = [drawn(name) if not many or i in (0, len(names) - 1) else "_" for i, name in enumerate(names)]
    if len(names) > 1 and np.allclose(values.sum(0), 1, atol=1e-3) and values.min() >= 0:
        axes.stackplot(rounds, values, labels=labels, colors=colours, edgecolor="white", linewidth=0.3)
        axes.set_ylim(0, 1)
        return
    for one, label, colour in zip(values, labels, colours, strict=True):
        axes.plot(rounds, one, color=colour, label=label)
    if values.min() > 0 and values.max() > 30 * values.min():
        axes.set_yscale("log")


def tidy(axes: Axes) -> None:
    """The look of all figures of runs."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # rounds are whole
    axes.grid(alpha=0.25)


def save_figure(figure: Figure, axes: Axes, path: Path) -> Path:
    """Write a figure; ``axes`` get the look of all of them."""
    tidy(axes)
    figure.savefig(path, dpi=120)
    return path
