"""Market runs, whose lanes are events: the paper's tables 1 to 3 and its figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import polars as pl

from obbo_lightning.core.statistics import clustered_error, clustered_interval
from obbo_lightning.escaping import escape_mathtext, unescape_table
from obbo_lightning.experiments.comparison import compare_pairs
from obbo_lightning.experiments.report_data import (
    INK,
    ReportData,
    ReportFigure,
    Score,
    Table,
    finish_figure,
    line_style,
    new_figure,
    sorted_labels,
)
from obbo_lightning.experiments.runs import DAMAGE, Run, describe_damage

NUMBERS = ("naive_mse", "weight", "regret", "gradient_norm", "test_mse")  # of each event


@dataclass(frozen=True)
class MarketComparison(ReportData):
    """Several runs on the same events."""

    columns: ClassVar[dict[str, dict[str, Any]]] = {
        "events": {**dict.fromkeys(("label", "ticker", "timestamp"), pl.String), **dict.fromkeys(NUMBERS, pl.Float64)},
        "regret": {"label": pl.String, "round": pl.Int64, "median": pl.Float64, "mad": pl.Float64},
    }

    events: pl.DataFrame  # one row per event of a label
    regret: pl.DataFrame  # median and median absolute deviation over events, every 100 rounds of a label

    def column(self, label: str, name: str) -> np.ndarray:
        """Return the numbers of a label, one per event."""
        return self.events.filter(label=label)[name].to_numpy()

    @property
    def days(self) -> np.ndarray:
        """Day of each event; events of one day share its news, and their errors are dependent."""
        return self.events.filter(label=self.labels[0])["timestamp"].str.slice(0, 10).to_numpy()

    def scores(self) -> tuple[str, bool, dict[str, Score]]:
        errors = {label: self.column(label, "test_mse") for label in self.labels}
        scores = {label: (float(e.mean()), clustered_error(e, self.days)) for label, e in errors.items()}
        return "forecast error (mse), by day; lower is better", False, scores

    def tables(self) -> list[Table]:
        """Return the columns of the paper's tables with regret and gradient norm, and paired differences."""
        first, days = self.labels[0], self.days
        errors = {label: self.column(label, "test_mse") for label in self.labels}
        errors["last value"] = self.column(first, "naive_mse")
        rows, paired = [], []
        for label, values in errors.items():
            median, error = np.median(values), clustered_error(values, days)
            row = [label, f"{values.mean():.4f}", "" if error is None else f"{error:.4f}"]
            row += [f"{median:.4f}", f"{np.median(np.abs(values - median)):.4f}"]
            ends = [self.column(label, name) for name in ("regret", "gradient_norm")]  # no events of the last value
            row += [f"{np.median(ends[0]):.3f}", f"{np.median(ends[1]):.4f}"] if len(ends[0]) else ["", ""]
            rows.append(row)
            if label != first:
                difference, by_day = compare_pairs(errors[first], values, 4, days)
                _, by_event = compare_pairs(errors[first], values, 4)
                interval = clustered_interval(values - errors[first], days)
                limits = "" if interval is None else f"[{interval[0]:+.4f}, {interval[1]:+.4f}]"
                paired.append([label, difference, limits, by_event.partition(",")[0], by_day])
        caption = (
            f"Forecast mean squared error over {len(days)} events on {len(set(days))} days, in the units of each fit's "
            "standardised log price (the columns of the paper's tables 1 to 3), with the median cumulative regret and "
            "the median gradient norm after the last round; lower is better in all. The standard error is that of "
            "whole days, whose events are dependent. “Last value” forecasts the last price."
        )
        columns = ["mean", "standard error", "median", "median abs. deviation", "median regret"]
        means = Table("table", caption, ["algorithm", *columns, "median gradient norm at T"], rows)
        caption = (
            f"Forecast error of each minus that of {first}, event by event: mean difference ± its standard error by "
            "days, and its 95 % interval from a bootstrap of the days; on how many events it is larger and smaller, "
            "ties in neither; on how many days the mean over the day's events is, with p of the two-sided sign test."
        )
        columns = ["difference of the mean squared error", "95 % interval", "events larger / smaller"]
        return [means, Table("paired", caption, ["algorithm", *columns, "days larger / smaller"], paired)]

    def figures(self, title: str) -> list[ReportFigure]:
        """Return median regret, and gradient norms and forecast errors of the first against the others."""
        figure, (axes,) = new_figure(4.2)
        for label in self.labels:
            curve = self.regret.filter(label=label)
            axes.errorbar(
                curve["round"], curve["median"], yerr=curve["mad"], capsize=2, **line_style(self.labels, label)
            )
        axes.set(xlabel="round t", ylabel="median cumulative local regret\n(lower is better)", ylim=(0, None))
        caption = "Cumulative bilevel local regret: median over events, bars: median absolute deviation over events."
        return [
            finish_figure(figure, "regret", caption, title),
            self._draw_scatter("gradient_norm", "gradient norm at t = T", "gradient_norms", title),
            self._draw_scatter("test_mse", "forecast mean squared error", "forecast_errors", title),
        ]

    def _draw_scatter(self, column: str, quantity: str, name: str, title: str) -> ReportFigure:
        first, *others = self.labels
        rows = max(1, -(-len(others) // 3))
        figure, panels = new_figure(1.0 + 1.75 * rows, rows=rows, columns=3)
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
        for axes in panels[len(others) :]:
            axes.set_visible(False)
        figure.supylabel(f"{quantity}, {escape_mathtext(first)}", fontsize="small")
        caption = (
            f"{quantity.capitalize()}: {first} (vertical) against each of the others (horizontal), one point per "
            f"event; how many are below / above the line. Below it {first} has the smaller one, which is better."
        )
        return finish_figure(figure, name, caption, title)


def has_events(run: Run) -> bool:
    """Return whether the lanes of a run are market events."""
    try:
        return {"ticker", *NUMBERS} <= set(pl.read_csv(run.directory.events, n_rows=0).columns)
    except DAMAGE:
        return False


def read_market(runs: Sequence[Run]) -> tuple[MarketComparison, list[str]]:
    """Return the data of labelled runs, and those left out; all must have the seed and the events of the first."""
    found: dict[str, tuple[pl.DataFrame, pl.DataFrame]] = {}
    left_out, first = [], None
    for run in runs:
        try:
            events, regret = _read_lanes(run)
            which = run.config["seed"], events.select("ticker", "timestamp").rows()
            first = first or which
            if which != first:
                raise ValueError("it has other events, or another seed, than the first run")
            found[run.label] = events, regret
        except ValueError as reason:
            left_out.append(f"{run.directory.path} is left out: {reason}")
    if not found:
        raise ValueError(f"report needs finished runs, and found none: {left_out[0]}")
    events, regret = (pl.concat([found[label][i] for label in sorted_labels(list(found))]) for i in (0, 1))
    return MarketComparison(events, regret), left_out


def _read_lanes(run: Run) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the frames of one run."""
    columns = MarketComparison.columns["events"]
    try:
        events = unescape_table(pl.read_csv(run.directory.events, schema_overrides=columns))
        with np.load(run.directory.lanes, allow_pickle=False) as saved:
            rounds, regret = saved["rounds"], saved["regret"]
        median = np.median(regret, axis=1)
        middle = {"round": rounds, "median": median, "mad": np.median(np.abs(regret - median[:, None]), axis=1)}
        label = pl.lit(run.label).alias("label")
        return events.select(label, *list(columns)[1:]), pl.DataFrame(middle).select(label, *middle)
    except DAMAGE as damage:
        raise ValueError(describe_damage(damage)) from None
