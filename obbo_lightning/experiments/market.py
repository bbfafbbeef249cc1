"""Market runs, whose lanes are events: the paper's tables 1 to 3 and its figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import polars as pl
import torch

from obbo_lightning.config.parse import complete_config
from obbo_lightning.core.problem import Task
from obbo_lightning.core.statistics import clustered_error, clustered_interval
from obbo_lightning.escaping import escape_mathtext, unescape_table
from obbo_lightning.experiments.comparison import compare_clusters, compare_pairs
from obbo_lightning.experiments.report_data import (
    INK,
    ReportData,
    ReportFigure,
    Score,
    Table,
    finish_figure,
    line_style,
    new_figure,
    set_title,
    sorted_labels,
)
from obbo_lightning.experiments.runs import DAMAGE, LeftOut, Run, describe_damage
from obbo_lightning.training.run import build

NUMBERS = ("naive_mse", "weight", "regret", "gradient_norm", "test_mse")  # of each event


@dataclass(frozen=True)
class MarketComparison(ReportData):
    """Several runs on the same events.

    Attributes:
        events: one row per event of a label.
        regret: median and median absolute deviation over events, every 100 rounds of a label.
    """

    columns: ClassVar[dict[str, dict[str, Any]]] = {
        "events": {**dict.fromkeys(("label", "ticker", "timestamp"), pl.String), **dict.fromkeys(NUMBERS, pl.Float64)},
        "regret": {"label": pl.String, "round": pl.Int64, "median": pl.Float64, "mad": pl.Float64},
    }

    events: pl.DataFrame
    regret: pl.DataFrame

    def column(self, label: str, name: str) -> np.ndarray:
        """Return the numbers of a label, one per event."""
        return self.events.filter(pl.col("label") == label)[name].to_numpy()

    @property
    def days(self) -> np.ndarray:
        """Day of each event; events of one day share its news, and their errors are dependent."""
        return self.events.filter(pl.col("label") == self.labels[0])["timestamp"].str.slice(0, 10).to_numpy()

    def scores(self) -> tuple[str, bool, dict[str, Score]]:
        errors = {label: self.column(label, "test_mse") for label in self.labels}
        scores = {label: Score(float(e.mean()), clustered_error(e, self.days)) for label, e in errors.items()}
        return "forecast error (mse), by day; lower is better", False, scores

    def tables(self) -> list[Table]:
        """Return the columns of the paper's tables with regret and gradient norm, and paired differences."""
        first, *others = self.labels
        days, last_value = self.days, self.column(self.labels[0], "naive_mse")
        count = len(set(days))
        rows = []
        for label in self.labels:
            regret, norm = (np.median(self.column(label, name)) for name in ("regret", "gradient_norm"))
            rows.append([label, *_error_cells(self.column(label, "test_mse"), days), f"{regret:.3f}", f"{norm:.4f}"])
        rows.append(["last value", *_error_cells(last_value, days), "", ""])
        final = Table(
            "table",
            f"Forecast mean squared error over {len(days)} events on {count} days, in the units of each fit's "
            "standardised log price (the columns of the paper's tables 1 to 3), with the median cumulative regret and "
            "the median gradient norm after the last round; lower is better in all. The standard error is that of "
            "whole days, whose events are dependent. “Last value” forecasts the last price.",
            [
                *("algorithm", "mean", "standard error", "median", "median abs. deviation"),
                *("median regret", "median gradient norm at T"),
            ],
            rows,
        )
        reference = self.column(first, "test_mse")
        compared = {label: self.column(label, "test_mse") for label in others} | {"last value": last_value}
        paired = Table(
            "paired",
            f"Forecast error of each minus that of {first}, event by event: mean difference ± its standard error by "
            f"days, and its 95 % interval from a bootstrap of the {count} days; on how many events it is larger and "
            "smaller, ties in neither; on how many days the mean over the day's events is, with p of the two-sided "
            "sign test of the days.",
            [
                *("algorithm", "difference of the mean squared error", "95 % interval"),
                *("events larger / smaller", "days larger / smaller"),
            ],
            [[label, *_paired_cells(reference, errors, days)] for label, errors in compared.items()],
        )
        return [final, paired]

    def figures(self, title: str) -> list[ReportFigure]:
        """Return median regret, and gradient norms and forecast errors of the first against the others."""
        return [
            self._draw_regret(title),
            self._draw_scatter("gradient_norm", "gradient norm at t = T", "gradient_norms", title),
            self._draw_scatter("test_mse", "forecast mean squared error", "forecast_errors", title),
        ]

    def _draw_regret(self, title: str) -> ReportFigure:
        figure, (axes,) = new_figure(4.2)
        labels = self.labels
        for i, label in enumerate(labels):
            curve = self.regret.filter(pl.col("label") == label)
            rounds, median, mad = (np.concatenate([[0], curve[name]]) for name in ("round", "median", "mad"))
            shift = (i - (len(labels) - 1) / 2) * rounds[-1] / 150  # bars must not hide each other
            axes.errorbar(rounds + shift, median, yerr=mad, capsize=2, **line_style(labels, label))
        axes.set(xlabel="round t", ylabel="median cumulative local regret\n(lower is better)", ylim=(0, None))
        caption = (
            "Cumulative bilevel local regret, lower is better: median over events, bars: median absolute deviation "
            "over events (how they differ, not an error)."
        )
        return finish_figure(figure, axes, "regret", caption, title)

    def _draw_scatter(self, column: str, quantity: str, name: str, title: str) -> ReportFigure:
        first, *others = self.labels
        columns = min(3, max(1, len(others)))
        rows = -(-max(1, len(others)) // columns)
        figure, panels = new_figure(1.0 + 1.75 * rows, rows=rows, columns=columns)
        mine = self.column(first, column)
        smallest = max(1e-9, float(min(1.0, *(self.column(label, column).min() for label in self.labels))))
        for axes, other in zip(panels, others, strict=False):
            theirs = self.column(other, column)
            largest = float(max(mine.max(), theirs.max()))
            axes.plot([smallest, largest], [smallest, largest], color=INK, linewidth=1)
            colour = line_style(self.labels, other)["color"]
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
            f"{quantity[0].upper()}{quantity[1:]}: {first} (vertical) against each of the others (horizontal), one "
            f"point per event; how many are below / above the line. Below it {first} has the smaller one, which is "
            "better."
        )
        return ReportFigure(name, caption, figure)


def _error_cells(errors: np.ndarray, days: np.ndarray) -> list[str]:
    median, error = np.median(errors), clustered_error(errors, days)
    deviation = np.median(np.abs(errors - median))
    return [f"{errors.mean():.4f}", "" if error is None else f"{error:.4f}", f"{median:.4f}", f"{deviation:.4f}"]


def _paired_cells(first: np.ndarray, second: np.ndarray, days: np.ndarray) -> list[str]:
    by_event, interval = compare_pairs(first, second), clustered_interval(second - first, days)
    difference, by_day = compare_clusters(first, second, days).cells(4)
    limits = "" if interval is None else f"[{interval[0]:+.4f}, {interval[1]:+.4f}]"
    return [difference, limits, f"{by_event.larger} / {by_event.smaller}", by_day]


def has_events(run: Run) -> bool:
    """Return whether the lanes of a run are market events."""
    try:
        return {"ticker", *NUMBERS} <= set(pl.read_csv(run.directory.events, n_rows=0).columns)
    except DAMAGE:
        return False


def read_market(runs: Sequence[Run]) -> tuple[MarketComparison, list[LeftOut]]:
    """Return the data of labelled runs, and those left out; numbers are means over the seeds that all labels have."""
    lanes: dict[str, dict[int, tuple[pl.DataFrame, pl.DataFrame]]] = {}
    left_out = []
    for run in runs:
        try:
            events, regret = _read_lanes(run)
            first = next(iter(next(iter(lanes.values())).values()))[0] if lanes else events
            if not events.select("ticker", "timestamp").equals(first.select("ticker", "timestamp")):
                raise ValueError("it has other events than the first run")
            lanes.setdefault(run.label, {})[run.config["seed"]] = events, regret
        except ValueError as reason:
            left_out.append(LeftOut(run.directory.path, str(reason)))
    if not lanes:
        raise ValueError(f"report needs finished runs, and found none: {left_out[0].path} {left_out[0].reason}")
    common = sorted(set.intersection(*(set(seeds) for seeds in lanes.values())))
    if not common:
        found = "; ".join(f"{sorted(seeds)} for {label}" for label, seeds in lanes.items())
        raise ValueError(f"report needs a seed that all have, got {found}")
    # The error of the last value does not depend on algorithms: seeds that differ in it have different prices.
    prices = {tuple(seeds[seed][0]["naive_mse"]) for seeds in lanes.values() for seed in common}
    if len(common) > 1 and len(prices) > 1:
        raise ValueError(f"report needs one seed where each has its own simulated prices, got {common}")
    for run in runs:
        if run.config["seed"] in lanes.get(run.label, {}) and run.config["seed"] not in common:
            left_out.append(LeftOut(run.directory.path, f"not all algorithms have the seed {run.config['seed']}"))
    used = [lanes[label][seed] for label in sorted_labels(list(lanes)) for seed in common]
    events, regret = (pl.concat([frames[i] for frames in used]) for i in (0, 1))
    events = events.group_by("label", "ticker", "timestamp", maintain_order=True).mean()
    by_lane = regret.group_by("label", "round", "lane", maintain_order=True).mean()
    deviation = (pl.col("regret") - pl.col("regret").median()).abs().median()
    middle = {"median": pl.col("regret").median(), "mad": deviation}
    return MarketComparison(events, by_lane.group_by("label", "round", maintain_order=True).agg(**middle)), left_out


def _read_lanes(run: Run) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the events of a run, and the regret of each lane every 100 rounds."""
    columns = MarketComparison.columns["events"]
    try:
        events = unescape_table(pl.read_csv(run.directory.events, schema_overrides=columns))
        with np.load(run.directory.lanes, allow_pickle=False) as saved:
            rounds, regret = saved["rounds"], saved["regret"]
        lanes = {"round": np.repeat(rounds, regret.shape[1]), "lane": np.tile(np.arange(regret.shape[1]), len(rounds))}
        frames = (events, pl.DataFrame({**lanes, "regret": regret.ravel()}))
        events, curves = (frame.with_columns(label=pl.lit(run.label)) for frame in frames)
        return events.select(*columns), curves
    except DAMAGE as damage:
        raise ValueError(describe_damage(damage)) from None


def draw_event(runs: Sequence[Run], ticker: str, day: str) -> list[ReportFigure]:
    """Draw one event: three of its subsets, and the forecast of every run."""
    built = build(complete_config(runs[0].config))
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


def _draw_subsets(tasks: Sequence[Task], lane: int, ticker: str, title: str) -> ReportFigure:
    figure, panels = new_figure(5.4, rows=3, sharey=True)
    for axes, t in zip(panels, (0, len(tasks) // 2, len(tasks) - 1), strict=True):
        task = tasks[t]
        for prefix, label, colour in (("", "training", "#0072B2"), ("validation_", "validation", "#D55E00")):
            x, y = t + task[f"{prefix}sites"], task[f"{prefix}values"][lane]
            axes.plot(x, y, ".", color=colour, markersize=2.5, label=label)
        axes.set_title(f"round {t}", fontsize="small")
    panels[1].set_ylabel("standardised log price")
    panels[-1].set_xlabel("observation (bars)")
    caption = "Observations of this event in the first, a middle and the last round."
    return finish_figure(figure, panels[0], f"{ticker}_subsets", caption, title)


def _draw_forecasts(
    problem: Any, test: Task, lane: int, weights: dict[str, float], ticker: str, title: str
) -> ReportFigure:
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
        look = {**line_style(labels, label), "label": name, "linewidth": 1.2, "markevery": 0.2}
        axes.plot(sites, torch.cat([inner[0][seen], ahead[0]]), **look)
    axes.axvline(float(one["sites"][-1]), color=INK, linewidth=1, linestyle=":")
    axes.set(xlabel="observation of the last subset (bars)", ylabel="standardised log price")
    caption = "The spline fitted with each algorithm's last weight, and its forecast. Dotted: the event."
    return finish_figure(figure, axes, f"{ticker}_forecasts", caption, title)
