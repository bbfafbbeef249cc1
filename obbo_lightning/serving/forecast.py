"""What a market run's λ says of the next bars: the fitted curve and its forecast, in prices."""

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch
from torch import Tensor

from obbo_lightning.core.validation import at_least
from obbo_lightning.problems.spline import SmoothingSpline, spline_task
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.runs.earlier import read_settings
from obbo_lightning.runs.manifest import checkpoint_to_use
from obbo_lightning.serving.events import choose_events, events_of, require_market
from obbo_lightning.settings.files import Settings
from obbo_lightning.settings.schema import complete
from obbo_lightning.streams.columns import Columns
from obbo_lightning.streams.market import SIMULATED
from obbo_lightning.streams.market_data import (
    BadEvent,
    find_bar,
    name_moment,
    read_events,
    read_prices,
    same_clock,
    series_of,
    simulate_market,
)

BARS = 20  # where the run itself looked no bar ahead


class Forecast(NamedTuple):
    """The curves of some events.

    Attributes:
        curves: a row a bar: ticker, event, step (0 is the last bar that was played: the event's, or ``data.beyond``
            bars after it), timestamp and actual price where they are known, the fitted curve up to there, and behind
            it the spline's forecast and the last value's.
        events: a row an event: λ (``weight``), the last price, the forecast, how many of the bars are known, and on
            these the root mean squared error of both forecasts in prices, and their mean squared error in the units of
            the fit, as in a run's events.csv.
    """

    curves: pl.DataFrame
    events: pl.DataFrame

    def write(self, path: str | Path) -> list[Path]:
        """The curves as ``path``, a CSV file; beside it the events, ``_events.csv``, and a figure as PNG and SVG."""
        from obbo_lightning.serving.forecast_files import write_forecast  # matplotlib only for those who draw

        return write_forecast(self, Path(path))


class _Windows(NamedTuple):
    """Prices around events ``[events, subset + ahead]``, NaN where there are none, and their times."""

    prices: np.ndarray
    times: np.ndarray
    kept: list[int]


def forecast(
    run: str | Path,
    prices: str | Path | None = None,
    events: str | Path | None = None,
    columns: Columns = None,
    bars: int | None = None,
    checkpoint: str | Path | None = None,
) -> Forecast:
    """The last observations that were played of each event, fitted with the run's λ for it, and the next ones forecast.

    The spline is constant beyond the last observation, and so is its forecast.

    Args:
        run: the directory of a finished market run.
        prices: a file or folder as in ``data.prices``, where it is not the run's: one that has grown, or has moved.
        events: a file as in ``data.events`` with some of the run's events; all where not given.
        columns: as ``data.columns``; the run's where not given.
        bars: how many to forecast; the run's ``data.horizon`` where not given.
        checkpoint: of the run, instead of the newest.
    """
    directory = RunDirectory.newest(run)
    chosen = checkpoint_to_use(directory, Path(checkpoint) if checkpoint else None)
    settings = complete(read_settings(directory))
    data = require_market(settings, directory.path)
    bars = at_least("bars", (data["horizon"] or BARS) if bars is None else bars, 1)
    columns = data["columns"] if columns is None else columns
    known = events_of(directory, chosen)
    table, source = _prices(settings, prices, columns)
    if events is not None:
        asked = read_events(Path(events).expanduser(), columns)
        table, asked = same_clock(table, asked)
        known = choose_events(known, asked, str(events), directory.path)
    windows = _cut(table, known, source, data, max(bars, data["horizon"]))
    return _solve(windows, known[windows.kept], data, bars)


def _prices(settings: Settings, given: str | Path | None, columns: Columns) -> tuple[pl.DataFrame, str]:
    """The table, with times as a run's events.csv has them, and what it is called."""
    data = settings["data"]
    source = data["prices"] if given is None else str(given)
    if source is not None:
        return read_prices(Path(source).expanduser(), columns), source
    before, after = data["subset"] + data["subsets"], data["beyond"] + data["horizon"]  # as in the run's stream
    made_up, _ = simulate_market(SIMULATED, before, after, settings["seed"])
    return made_up, "simulated prices"


def _cut(table: pl.DataFrame, events: pl.DataFrame, source: str, data: dict[str, Any], ahead: int) -> _Windows:
    subset, beyond = data["subset"], data["beyond"]
    plain = table.with_columns(pl.col("timestamp").dt.replace_time_zone(None))
    series = series_of(plain, events["ticker"].unique().to_list(), source)
    prices = np.full((len(events), subset + ahead), np.nan)
    times = np.full(prices.shape, np.datetime64("NaT"), dtype="datetime64[us]")
    kept, bad = [], []
    moments = events["timestamp"].to_numpy()
    for i, ticker in enumerate(events["ticker"]):
        bar = find_bar(series.get(ticker), moments[i], max(1, subset - beyond), beyond)
        if isinstance(bar, str):
            bad.append(BadEvent("events.csv", i + 1, ticker, name_moment(moments[i]), bar))
            if data["on_bad_event"] == "raise":
                raise ValueError(f"{bad[-1]}")
            continue
        last = bar + beyond
        there = slice(last + 1 - subset, last + 1 + ahead)
        found = series[ticker].prices[there]
        prices[i, : len(found)], times[i, : len(found)] = found, series[ticker].timestamps[there]
        kept.append(i)
    if not kept:
        raise ValueError(f"data.prices must leave at least one event that can be used; {bad[0]}")
    if bad:
        warnings.warn(f"{len(bad)} of {len(events)} events skipped: {'; '.join(map(str, bad))}", stacklevel=3)
    return _Windows(prices[kept], times[kept], kept)


def _solve(windows: _Windows, events: pl.DataFrame, data: dict[str, Any], bars: int) -> Forecast:
    """Fit as the run's last judgement does, and give the curves back in prices."""
    subset, logs = data["subset"], data["transform"] == "log"
    observed = torch.from_numpy(np.log(windows.prices) if logs else windows.prices)
    task = spline_task(observed, training=torch.arange(observed.shape[1]) < subset, standardise=True)
    weight = torch.from_numpy(events["weight"].to_numpy().copy()).unsqueeze(-1)
    spline = SmoothingSpline()
    solution = spline.solution(weight, task)
    ahead, last = spline.predict(solution, task), task["values"][:, -1:]
    # price = exp(mean + deviation · β): the standardisation of log prices, taken back
    seen = observed[:, :subset]
    mean, deviation = seen.mean(1, keepdim=True), seen.std(1, correction=0, keepdim=True)
    curve = mean + deviation * torch.cat([solution, ahead], dim=1)
    in_prices = (curve.exp() if logs else curve).numpy()[:, : subset + bars]
    actual = task["validation_values"]
    _compare_past(events, (actual - last).square()[:, : data["horizon"]], data["horizon"])
    errors = {
        "mse": _mean_of_known((ahead - actual).square()[:, :bars]),
        "last_value_mse": _mean_of_known((last - actual).square()[:, :bars]),
    }
    cut = _Windows(windows.prices[:, : subset + bars], windows.times[:, : subset + bars], windows.kept)
    return Forecast(_curves(cut, events, in_prices, subset), _events(cut, events, in_prices, subset, errors))


def _curves(windows: _Windows, events: pl.DataFrame, curve: np.ndarray, subset: int) -> pl.DataFrame:
    count, width = curve.shape
    rows = np.repeat(np.arange(count), width)
    step = np.tile(np.arange(width) - subset + 1, count)
    last = np.repeat(windows.prices[:, subset - 1], width)
    flat = {"timestamp": windows.times.ravel(), "actual": windows.prices.ravel()}
    table = events.select("ticker", event="timestamp")[rows].with_columns(
        step=pl.Series(step), **{name: pl.Series(values) for name, values in flat.items()}
    )
    ahead, found = pl.col("step") > 0, pl.Series(curve.ravel())
    return table.with_columns(
        actual=pl.col("actual").fill_nan(None),
        fitted=pl.when(~ahead).then(found),
        forecast=pl.when(ahead).then(found),
        last_value=pl.when(ahead).then(pl.Series(last)),
    )


def _events(
    windows: _Windows, events: pl.DataFrame, curve: np.ndarray, subset: int, errors: dict[str, pl.Series]
) -> pl.DataFrame:
    last, actual = windows.prices[:, subset - 1 : subset], torch.from_numpy(windows.prices[:, subset:])
    ahead = torch.from_numpy(curve[:, subset:])
    return (
        events.select("ticker", "weight", event="timestamp")
        .select("ticker", "event", "weight")
        .with_columns(
            last_price=pl.Series(last[:, 0]),
            forecast=pl.Series(curve[:, subset]),
            bars_known=pl.Series(torch.isfinite(actual).sum(1).tolist()),
            rmse=_mean_of_known((ahead - actual).square()).sqrt(),
            last_value_rmse=_mean_of_known((torch.from_numpy(last) - actual).square()).sqrt(),
            **errors,
        )
    )


def _mean_of_known(squares: Tensor) -> pl.Series:
    """Over the bars that there are; none where there is none."""
    return pl.Series(squares.nanmean(1).tolist(), dtype=pl.Float64).fill_nan(None)


def _compare_past(events: pl.DataFrame, naive: Tensor, horizon: int) -> None:
    """Say so where the prices are not those of the run: its events.csv has the last value's error on them."""
    if "naive_mse" not in events.columns or not horizon:
        return
    now, then = naive.mean(1).numpy(), events["naive_mse"].to_numpy()
    other = np.isfinite(now) & ~np.isclose(now, then, rtol=1e-6, atol=1e-12)
    if other.any():
        ticker, when = events.select("ticker", "timestamp").row(int(other.argmax()))
        warnings.warn(
            f"the prices around {other.sum()} of {len(events)} events are not those of the run; first {ticker} {when}",
            stacklevel=4,
        )
