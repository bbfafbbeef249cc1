"""The market experiment's figures: the paper's three, and one event by itself."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import torch

from obbo_lightning.core.problem import Task
from obbo_lightning.escaping import escape_mathtext
from obbo_lightning.experiments.drawing import INK, Drawing, finish, look_of, new_figure, set_title
from obbo_lightning.experiments.market_comparison import MarketComparison
from obbo_lightning.experiments.runs import Run, sorted_labels


def draw_market(comparison: MarketComparison, title: str) -> list[Drawing]:
    """Median regret with deviation bars; gradient norms and forecast errors of the first against the others."""
    return [
        _draw_regret(comparison, title),
        _draw_scatter(comparison, "gradient_norm", "gradient norm at t = T", "gradient_norms", title),
        _draw_scatter(comparison, "test_mse", "forecast mean squared error", "forecast_errors", title),
    ]


def _draw_regret(comparison: MarketComparison, title: str) -> Drawing:
    figure, axes = new_figure(4.2)
    labels = comparison.labels
    for i, label in enumerate(labels):
        curve = comparison.regret.filter(pl.col("label") == label)
        rounds = np.concatenate([[0], curve["round"].to_numpy()])
        median, deviation = (np.concatenate([[0], curve[name].to_numpy()]) for name in ("median", "mad"))
        apart = (i - (len(labels) - 1) / 2) * rounds[-1] / 150  # bars must not hide each other
        axes[0].errorbar(rounds + apart, median, yerr=deviation, capsize=2, **look_of(labels, label))
    axes[0].set(xlabel="round t", ylabel="median cumulative local regret\n(lower is better)", ylim=(0, None))
    caption = (
        "Cumulative bilevel local regret, lower is better: median over events, bars: median absolute deviation over "
        "events (how they differ, not an error)."
    )
    return finish(figure, axes[0], "regret", caption, title)


def _draw_scatter(comparison: MarketComparison, column: str, quantity: str, name: str, title: str) -> Drawing:
    first, *others = comparison.labels
    columns = min(3, max(1, len(others)))
    rows = -(-max(1, len(others)) // columns)
    figure, panels = new_figure(1.0 + 1.75 * rows, rows=rows, columns=columns)
    mine = comparison.column(first, column)
    smallest = max(1e-9, float(min(mine.min(), *(comparison.column(o, column).min() for o in others), 1.0)))
    for axes, other in zip(panels, others, strict=False):
        theirs = comparison.column(other, column)
        largest = float(max(mine.max(), theirs.max()))
        axes.plot([smallest, largest], [smallest, largest], color=INK, linewidth=1)
        colour = look_of(comparison.labels, other)["color"]
        axes.loglog(theirs.clip(smallest), mine.clip(smallest), ".", color=colour, ms=3, alpha=0.5, rasterized=True)
        axes.set_xlabel(escape_mathtext(other).replace(", ", "\n"), fontsize="small")
        axes.set_title(f"{np.sum(mine < theirs)} / {np.sum(mine > theirs)}", fontsize="small")
        axes.tick_params(labelsize="x-small")
        axes.minorticks_off()
    for axes in panels[len(others) :]:
        axes.set_visible(False)
    figure.supylabel(f"{quantity}, {escape_mathtext(first)}", fontsize="small")
    set_title(figure, title)
    caption = (
        f"{quantity[0].upper()}{quantity[1:]}: {first} (vertical) against each of the others (horizontal), one point "
        f"an event; how many are below / above the line. Below it {first} has the smaller one, which is better."
    )
    return Drawing(name, caption, figure)


def draw_event(runs: Sequence[Run], ticker: str, day: str) -> list[Drawing]:
    """One event: three of its subsets, and every run's forecast."""
    from obbo_lightning.config.parse import complete_config
    from obbo_lightning.training.run import build

    built = build(complete_config(runs[0].settings))
    problem: Any = built.module.problem
    stream: Any = built.stream
    chosen = stream.lanes.with_row_index("lane").filter(
        (pl.col("ticker") == ticker) & (pl.col("timestamp").dt.strftime("%Y-%m-%d") == day)
    )
    if chosen.is_empty():
        raise ValueError(f"--event must be one of the {len(stream.lanes)} events, got {ticker} {day}")
    lane = int(chosen["lane"][0])
    weights = {run.label: float(pl.read_csv(run.directory.events)["weight"][lane]) for run in runs}
    title = f"{ticker}, event on {day}"
    forecasts = _draw_forecasts(problem, stream.test[0], lane, weights, ticker, title)
    return [_draw_subsets(stream.train, lane, ticker, title), forecasts]


def _draw_subsets(tasks: Sequence[Task], lane: int, ticker: str, title: str) -> Drawing:
    figure, panels = new_figure(5.4, rows=3, sharey=True)
    for axes, t in zip(panels, (0, len(tasks) // 2, len(tasks) - 1), strict=True):
        task = tasks[t]
        for kind, sites, colour in (("", "sites", "#0072B2"), ("validation_", "validation_sites", "#D55E00")):
            label = "validation" if kind else "training"
            axes.plot(t + task[sites], task[f"{kind}values"][lane], ".", color=colour, markersize=2.5, label=label)
        axes.set_title(f"round {t}", fontsize="small")
    panels[1].set_ylabel("standardised log price")
    panels[-1].set_xlabel("observation (bars)")
    caption = "What the first, a middle and the last round see of this event."
    return finish(figure, panels[0], f"{ticker}_subsets", caption, title)


def _draw_forecasts(problem: Any, test: Task, lane: int, weights: dict[str, float], ticker: str, title: str) -> Drawing:
    one = {name: values[lane : lane + 1] if values.ndim == 2 else values for name, values in test.items()}
    figure, (axes,) = new_figure(4.6)
    seen = one["sites"] >= one["sites"][-1] - 150
    axes.plot(one["sites"][seen], one["values"][0][seen], ".", color="#999999", markersize=3, label="seen")
    axes.plot(one["validation_sites"], one["validation_values"][0], ".", color=INK, markersize=3, label="held out")
    labels = sorted_labels(list(weights))
    sites = torch.cat([one["sites"][seen], one["validation_sites"]])
    for label in labels:
        weight = torch.full((1, 1), weights[label], dtype=one["values"].dtype)
        inner = problem.solution(weight, one)
        ahead = problem.predict(inner, one)
        error = float((ahead - one["validation_values"]).square().mean())
        name = f"{label}: λ = {weights[label]:.3g}, MSE {error:.3f}"
        look = {**look_of(labels, label), "label": name, "linewidth": 1.2, "markevery": 0.2}
        axes.plot(sites, torch.cat([inner[0][seen], ahead[0]]), **look)
    axes.axvline(float(one["sites"][-1]), color=INK, linewidth=1, linestyle=":")
    axes.set(xlabel="observation of the last subset (bars)", ylabel="standardised log price")
    caption = "The spline fitted with each algorithm's last weight, and its forecast. Dotted: the event."
    return finish(figure, axes, f"{ticker}_forecasts", caption, title)
