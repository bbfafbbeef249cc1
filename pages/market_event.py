"""Draw one market event: python -m pages.market_event RUNS TICKER DAY, such as runs/market AMD 2021-11-08.

Writes TICKER_subsets.png (three of its subsets) and TICKER_forecasts.png (the forecast of every run) to
docs/experiments/market. The price files that the runs name must exist.
"""

import sys
from pathlib import Path
from typing import Any

import polars as pl
import torch

from obbo_lightning.config.parse import complete_config
from obbo_lightning.experiments.report_data import (
    INK,
    ReportFigure,
    finish_figure,
    line_style,
    new_figure,
    report_style,
    sorted_labels,
)
from obbo_lightning.experiments.runs import find_finished_runs, label_runs
from obbo_lightning.training.run import build

FOLDER = Path(__file__).parents[1] / "docs" / "experiments" / "market"


def draw(runs: Path, ticker: str, day: str) -> list[ReportFigure]:
    """Return the two figures of an event."""
    labelled, _ = label_runs(find_finished_runs([runs])[0])
    found = {run.label: run for run in labelled}
    built = build(complete_config(labelled[0].config))
    problem: Any = built.module.problem
    stream: Any = built.stream
    dates = stream.lanes["timestamp"].dt.strftime("%Y-%m-%d")
    (lane,) = ((stream.lanes["ticker"] == ticker) & (dates == day)).arg_true().to_list()[:1]
    title = f"{ticker}, event on {day}"
    figure, panels = new_figure(5.4, rows=3, sharey=True)
    for axes, t in zip(panels, (0, len(stream.train) // 2, len(stream.train) - 1), strict=True):
        task = stream.train[t]
        for prefix, label, colour in (("", "training", "#0072B2"), ("validation_", "validation", "#D55E00")):
            x, y = t + task[f"{prefix}sites"], task[f"{prefix}values"][lane]
            axes.plot(x, y, ".", color=colour, markersize=2.5, label=label)
        axes.set_title(f"round {t}", fontsize="small")
    panels[1].set_ylabel("standardised log price")
    panels[-1].set_xlabel("observation (bars)")
    subsets = finish_figure(figure, f"{ticker}_subsets", "Observations of three rounds.", title)

    one = {name: values[lane : lane + 1] if values.ndim == 2 else values for name, values in stream.test[0].items()}
    figure, (axes,) = new_figure(4.6)
    seen = one["sites"] >= one["sites"][-1] - 150
    axes.plot(one["sites"][seen], one["values"][0][seen], ".", color="#999999", markersize=3, label="seen")
    axes.plot(one["validation_sites"], one["validation_values"][0], ".", color=INK, markersize=3, label="held out")
    sites = torch.cat([one["sites"][seen], one["validation_sites"]])
    labels = sorted_labels(list(found))
    for label in labels:
        weight = float(pl.read_csv(found[label].directory.events)["weight"][lane])
        inner = problem.solution(torch.full((1, 1), weight, dtype=one["values"].dtype), one)
        ahead = problem.predict(inner, one)
        error = float((ahead - one["validation_values"]).square().mean())
        look = {**line_style(labels, label), "label": f"{label}: λ = {weight:.3g}, MSE {error:.3f}"}
        axes.plot(sites, torch.cat([inner[0][seen], ahead[0]]), **look, linewidth=1.2, markevery=0.2)
    axes.axvline(float(one["sites"][-1]), color=INK, linewidth=1, linestyle=":")
    axes.set(xlabel="observation of the last subset (bars)", ylabel="standardised log price")
    return [subsets, finish_figure(figure, f"{ticker}_forecasts", "Splines and their forecasts.", title)]


if __name__ == "__main__":
    with report_style():
        for figure in draw(Path(sys.argv[1]), *sys.argv[2:]):
            figure.save(FOLDER)
