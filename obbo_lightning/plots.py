"""Figures of runs and reports for notebooks and papers.

Each function returns matplotlib's ``Figure``, which a notebook shows and ``savefig`` writes.
"""

import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from obbo_lightning.escaping import escape_mathtext
from obbo_lightning.runs.directory import RunDirectory, read_config
from obbo_lightning.runs.figures import draw_scores, draw_weights, tidy
from obbo_lightning.runs.summary import run_title
from obbo_lightning.runs.table import read_rounds


def plot_run(run: str | Path) -> Figure:
    """Draw the prequential score of each round, the scores of test tasks, and the baselines.

    Args:
        run: a finished run's directory; or a folder above, for its newest run.
    """
    directory = RunDirectory.newest(run)
    table = {column.name: column.to_numpy() for column in read_rounds(directory.metrics).fill_null(np.nan)}
    if not directory.finished:
        raise ValueError(f"plot_run needs a finished run, and {directory.path} is not: resume it first")
    summary = json.loads(directory.summary.read_text())
    metric, baselines = summary["metric"], {}
    if directory.baselines.exists():
        baselines = {column.name: column.to_numpy() for column in read_rounds(directory.baselines).drop("round")}
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    draw_scores(axes, table, metric, summary[f"initial_test_{metric}"], baselines)
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


def plot_comparison(*runs: str | Path) -> dict[str, Figure]:
    """Draw the figures of `report`, of several algorithms on the same stream; returns them by name.

    Args:
        runs: folders with finished runs somewhere below, such as ``runs/compare/default``.
    """
    from obbo_lightning.experiments.report import draw_runs

    figures = draw_runs([Path(run) for run in runs], ", ".join(Path(run).resolve().name for run in runs))
    return {figure.name: figure.figure for figure in figures}
