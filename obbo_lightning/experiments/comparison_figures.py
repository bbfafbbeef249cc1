"""Figures of several algorithms: regret, gradient norms, stream score, test score."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import polars as pl
from matplotlib.axes import Axes

from obbo_lightning.experiments.comparison import ORDER, Comparison
from obbo_lightning.experiments.figures import save_figure

# Okabe and Ito's colours, distinguishable for colour-blind readers; an algorithm has the same one everywhere.
COLOURS = dict(
    zip(ORDER, ("#0072B2", "#56B4E9", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#000000", "#888888"), strict=True)
)
STYLES = ("-", "--", ":", "-.")


def draw_comparison(comparison: Comparison, directory: Path, title: str) -> list[Path]:
    """Write the four figures and return their paths."""
    metric = comparison.metric
    return [
        _lines(comparison, "regret", directory / "regret.png", title, "cumulative bilevel local regret"),
        _norms(comparison, directory / "gradient_norms.png", title),
        _lines(comparison, "score", directory / f"stream_{metric}.png", title, f"stream {metric}", smooth=True),
        _tests(comparison, directory / f"test_{metric}.png", title),
    ]


def look_of(labels: Sequence[str], label: str) -> tuple[str, str]:
    """Colour and line style: the algorithm's colour, and a style for each of its variants among ``labels``."""
    algorithm = label.partition(",")[0]
    variants = [other for other in labels if other.partition(",")[0] == algorithm]
    return COLOURS.get(algorithm, "#444444"), STYLES[variants.index(label) % len(STYLES)]


def _seeds(comparison: Comparison, label: str, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Rounds ``[T]`` and values ``[seeds, T]`` of the rounds that all seeds have."""
    chosen = comparison.rounds.filter(pl.col("label") == label)
    tables = [part.sort("round") for part in chosen.partition_by("seed", maintain_order=True)]
    length = min(len(part) for part in tables)
    return tables[0]["round"][:length].to_numpy(), np.stack([part[column][:length].to_numpy() for part in tables])


def _lines(
    comparison: Comparison,
    column: str,
    path: Path,
    title: str,
    name: str,
    smooth: bool = False,
) -> Path:
    figure, axes = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    curves = {label: _seeds(comparison, label, column) for label in comparison.labels}
    width = max(1, min(50, min(len(rounds) for rounds, _ in curves.values()) // 4)) if smooth else 1
    for label, (rounds, values) in curves.items():
        if smooth:
            values = np.stack([np.convolve(v, np.ones(width) / width, mode="valid") for v in values])
            rounds = rounds[width - 1 :]
        colour, style = look_of(comparison.labels, label)
        mean = values.mean(axis=0)
        axes.plot(rounds, mean, style, color=colour, label=label)
        if len(values) > 1:
            error = values.std(axis=0, ddof=1) / len(values) ** 0.5
            axes.fill_between(rounds, mean - error, mean + error, color=colour, alpha=0.15, linewidth=0)
    ends = [float(np.asarray(line.get_ydata())[-1]) for line in axes.get_lines()]
    if min(ends) > 0 and max(ends) > 20 * min(ends):
        axes.set_yscale("log")
    axes.set(xlabel="round t", ylabel=name + (f", mean of {width} rounds" if smooth else ""))
    _title(axes, title, "bands: ± standard error over seeds")
    axes.legend(frameon=False, ncols=2)
    return save_figure(figure, axes, path)


def _norms(comparison: Comparison, path: Path, title: str) -> Path:
    """How large hypergradients are, one row an algorithm."""
    labels = comparison.labels
    figure, rows = plt.subplots(
        len(labels), 1, figsize=(6.5, 1 + 0.8 * len(labels)), layout="constrained", sharex=True, squeeze=False
    )
    norms = {
        label: comparison.rounds.filter(pl.col("label") == label)["hypergradient_norm"].to_numpy() for label in labels
    }
    positive = np.concatenate([n[n > 0] for n in norms.values()])
    bins = np.geomspace(positive.min(), positive.max() * 1.001, 50)
    for label, axes in zip(labels, rows[:, 0], strict=True):
        axes.hist(norms[label], bins=bins, color=look_of(comparison.labels, label)[0], density=False)
        axes.axvline(float(np.median(norms[label])), color="#444444", linewidth=1, linestyle=":")
        axes.set_xscale("log")
        axes.set_yticks([])
        axes.set_ylabel(label, rotation=0, ha="right", va="center")
        axes.spines[["top", "right", "left"]].set_visible(False)
    rows[-1, 0].set_xlabel("norm of the hypergradient ‖d_t‖ (dotted: median), all rounds and seeds")
    _title(rows[0, 0], title, "number of rounds")
    return save_figure(figure, rows[-1, 0], path)


def _tests(comparison: Comparison, path: Path, title: str) -> Path:
    figure, axes = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    last = int(comparison.rounds["round"].max())  # type: ignore[arg-type]
    for i, label in enumerate(comparison.labels):
        runs = comparison.runs.filter(pl.col("label") == label)
        tested = comparison.rounds.filter((pl.col("label") == label) & pl.col("test").is_not_null())
        means = tested.group_by("round").agg(pl.col("test").mean(), error=pl.col("test").std() / pl.len().sqrt())
        means = means.sort("round")
        rounds = np.concatenate([[0], means["round"].to_numpy()])
        values = np.concatenate([[runs["untrained_test"].mean()], means["test"].to_numpy()])
        errors = np.concatenate([[np.nan], means["error"].fill_null(np.nan).to_numpy()])
        colour, style = look_of(comparison.labels, label)
        apart = (i - (len(comparison.labels) - 1) / 2) * last / 200  # error bars must not hide each other
        axes.errorbar(
            rounds + apart,
            values,
            yerr=errors,
            fmt=style,
            color=colour,
            marker="o",
            markersize=4,
            capsize=2,
            label=label,
        )
    axes.set(xlabel="round t", ylabel=f"test {comparison.metric}, mean over tasks")
    _title(axes, title, "bars: ± standard error over seeds, same test tasks for all")
    axes.legend(frameon=False, ncols=2)
    return save_figure(figure, axes, path)


def _title(axes: Axes, title: str, note: str) -> None:
    axes.set_title(f"{title}\n{note}", fontsize="medium", loc="left")
