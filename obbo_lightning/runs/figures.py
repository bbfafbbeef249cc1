"""Figures of one run."""

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from obbo_lightning.foreign_text import drawn
from obbo_lightning.runs.table import read_rounds

# Okabe and Ito's colours, distinguishable for colour-blind readers.
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"
BESIDE = ("--", ":", "-.", (0, (1, 4)), "-")  # lines of baselines
# Wide enough for any number; a layout that is computed would draw every figure twice.
MARGINS = {"left": 0.15, "right": 0.97, "bottom": 0.13, "top": 0.91}


def draw_figures(
    metrics: Path, directory: Path, metric: str, untrained: float, title: str, baselines: Path | None = None
) -> list[Path]:
    """Cumulative regret, and stream and test scores; returns the paths of the two PNG files."""
    table = {column.name: column.to_numpy() for column in read_rounds(metrics).fill_null(np.nan)}
    beside = pl.read_csv(baselines) if baselines is not None and baselines.exists() else pl.DataFrame()
    others = {drawn(column.name): column.to_numpy() for column in beside if column.name != "round"}
    directory.mkdir(exist_ok=True)
    title = drawn(title)
    return [
        _draw_regret(table, directory / "regret.png", title),
        _draw_scores(table, directory / f"{metric}.png", metric, untrained, title, others),
    ]


def _draw_regret(table: dict[str, np.ndarray], path: Path, title: str) -> Path:
    figure, axes = plt.subplots(figsize=(6, 4), gridspec_kw=MARGINS)
    for name, colour, style in (("regret/euclidean", BLUE, "-"), ("regret/exact", ORANGE, "--")):
        if np.isfinite(table[name]).any():
            axes.plot(table["round"], table[name], style, color=colour, label=name.removeprefix("regret/"))
    axes.set(xlabel="round t", ylabel="cumulative bilevel local regret", title=title, ylim=(0, None))
    axes.legend(frameon=False)
    return save_figure(figure, axes, path)


def _draw_scores(
    table: dict[str, np.ndarray], path: Path, metric: str, untrained: float, title: str, others: dict[str, np.ndarray]
) -> Path:
    figure, axes = plt.subplots(figsize=(6, 4), gridspec_kw=MARGINS)
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
    if np.isfinite(untrained):  # a stream need not have test tasks
        _add_tests(axes, table, metric, untrained)
    axes.set(xlabel="round t", ylabel=drawn(metric), title=title)
    axes.legend(frameon=False)
    return save_figure(figure, axes, path)


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


def save_figure(figure: Figure, axes: Axes, path: Path) -> Path:
    """Write and close a figure; ``axes`` get the look of all of them."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # rounds are whole
    axes.grid(alpha=0.25)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
