"""Smoothing of prices before market events, online: every event is a lane; prices and events are read or simulated."""

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import derive_seed
from obbo_lightning.core.validation import at_least, one_of, positive, require_memory
from obbo_lightning.escaping import unescape_table
from obbo_lightning.problems.spline import SmoothingSpline, spline_task
from obbo_lightning.streams.fingerprints import digest_arrays
from obbo_lightning.streams.readers import read_table, require_file, require_rows
from obbo_lightning.streams.stream import Metric, Stream, TaskSequence

SIMULATED_EVENTS = 40


def read_prices(path: Path) -> pl.DataFrame:
    """Return ticker, timestamp and close of a parquet or CSV file, with the row number in the file."""
    table = _read_columns("data.prices", path, ("ticker", "timestamp", "close"))
    if table.schema["close"] != pl.String and not table.schema["close"].is_numeric():
        raise ValueError(f"{path}: close must be numbers, got {table.schema['close']}")
    # What is not a number becomes NaN, and is refused with its row if an event needs it.
    return table.with_columns(pl.col("close").cast(pl.Float64, strict=False).fill_null(math.nan))


def read_events(path: Path) -> pl.DataFrame:
    """Return ticker and timestamp of a parquet or CSV file, with the row number in the file."""
    return _read_columns("data.events", path, ("ticker", "timestamp"))


def _read_columns(key: str, path: Path, columns: tuple[str, ...]) -> pl.DataFrame:
    require_file(key, path, "a parquet or CSV file", (".parquet", ".csv"))
    is_csv = path.suffix.lower() == ".csv"
    # As text: a ticker 000660 is no number, and a column of prices may begin with integers.
    table = read_table(path, is_csv, infer_schema=False)
    table = unescape_table(table) if is_csv else table
    if table.is_empty() or not set(columns) <= set(table.columns):
        raise ValueError(
            f"{path} must have rows, and the columns {', '.join(columns)}, "
            f"got {len(table)} rows of {', '.join(table.columns)}"
        )
    parsed = table.select(pl.col("ticker").cast(pl.String), _parse_timestamps(table["timestamp"]), *columns[2:])
    for name, example in (("ticker", "AMD"), ("timestamp", "2021-01-04 or 2021-01-04 09:30:00")):
        require_rows(str(path), parsed[name].is_not_null(), table[name], f"have a value like {example}")
    return parsed.with_row_index("row", offset=1)


def _parse_timestamps(column: pl.Series) -> pl.Series:
    """Return dates and times in microseconds, null where there is none; those with a time zone are converted to UTC."""
    if column.dtype not in (pl.Date, pl.Datetime):
        column = column.cast(pl.String)
        zone = "UTC" if column.str.contains(r"(Z|[+-]\d\d:?\d\d)$").fill_null(False).all() else None
        try:
            column = column.str.strip_chars().str.to_datetime(time_unit="us", time_zone=zone, strict=False)
        except pl.exceptions.ComputeError:  # polars raises where it cannot read any of them
            column = pl.Series("timestamp", [None] * len(column), dtype=pl.Datetime("us"))
    if isinstance(column.dtype, pl.Datetime) and column.dtype.time_zone is not None:
        return column.dt.convert_time_zone("UTC").cast(pl.Datetime("us", "UTC"))
    return column.cast(pl.Datetime("us"))


def same_clock(prices: pl.DataFrame, events: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return both tables without time zones; refuse them if only one has a time zone."""
    zones = [getattr(table.schema["timestamp"], "time_zone", None) for table in (prices, events)]
    if zones[0] != zones[1]:
        which = "data.prices" if zones[0] else "data.events"
        raise ValueError(f"data.prices and data.events must both have a time zone, or neither; only {which} has one")
    plain = pl.col("timestamp").dt.replace_time_zone(None)
    return prices.with_columns(plain), events.with_columns(plain)


def prices_around(bars: pl.DataFrame | None, when: np.datetime64, before: int, after: int) -> NDArray[np.float64] | str:
    """Return ``before`` prices up to the event's bar and ``after`` ones after it, or the rule that is broken.

    The event's bar is the last one of its ticker that is not later than the event.
    """
    if bars is None:
        return "the ticker must be in the prices, and is not"
    times, prices = bars["timestamp"].to_numpy(), bars["close"].to_numpy()
    if (bad := ~(np.isfinite(prices) & (prices > 0))).any():
        first = int(bad.argmax())
        return f"row {bars['row'][first]} of the prices: a price must be a positive number, got {prices[first]}"
    if (bad := np.diff(times) <= np.timedelta64(0)).any():
        first = int(bad.argmax()) + 1
        return f"row {bars['row'][first]} of the prices: timestamps must increase, got {format_time(times[first])}"
    if not times[0] <= when <= times[-1]:
        return f"must lie in the prices, {format_time(times[0])} to {format_time(times[-1])}, and does not"
    end = int(np.searchsorted(times, when, side="right"))
    if end < before or len(prices) - end < after:
        return f"must have {before} prices up to it and {after} after it, and has {end} and {len(prices) - end}"
    return prices[end - before : end + after]


def detect_events(
    prices: pl.DataFrame, threshold: float = 8.0, lookback: int = 500, gap: int = 130, before: int = 0, after: int = 0
) -> pl.DataFrame:
    """Detect jumps from the prices alone, without look-ahead.

    A bar's return is its log price minus the one before, minus the median of all tickers' returns at that time (not
    with fewer than three tickers). It is a jump if its absolute value is at least ``threshold`` times 1.4826 times the
    median absolute return of the ``lookback`` bars before it. A jump is an event if the last event of the ticker is at
    least ``gap`` bars away, with ``before`` bars up to it and ``after`` bars after it.
    """
    market = pl.col("raw").median().over("timestamp") if prices["ticker"].n_unique() >= 3 else 0.0
    adjusted = pl.col("raw") - market
    earlier = pl.col("size").shift(1).rolling_median(lookback, min_samples=lookback).over("ticker")
    table = (
        prices.with_columns(raw=pl.col("close").log().diff().over("ticker"))
        .with_columns(size=adjusted.abs())
        .with_columns(score=pl.col("size") / (1.4826 * earlier))
        .with_columns(bar=pl.int_range(pl.len()).over("ticker"), bars=pl.len().over("ticker"))
    )
    jumps = table.filter(
        pl.col("score").is_finite()
        & (pl.col("score") >= threshold)
        & (pl.col("bar") + 1 >= before)
        & (pl.col("bars") - pl.col("bar") - 1 >= after)
    )
    kept: list[int] = []
    last: dict[str, int] = {}
    for i, (ticker, bar) in enumerate(jumps.select("ticker", "bar").iter_rows()):
        if bar - last.get(ticker, -math.inf) >= gap:
            kept.append(i)
            last[ticker] = bar
    return jumps[kept].select("row", "ticker", "timestamp", "score").sort("timestamp", "ticker")


def simulate_market(events: int, before: int, after: int, seed: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Simulate prices, one ticker per event: regimes of low and high volatility, a jump at the event, noise."""
    rng = np.random.default_rng(derive_seed(seed, "market") % 2**63)
    count = before + after
    start = np.datetime64("2021-01-04T09:30:00", "us")
    times = start + np.arange(count) * np.timedelta64(1, "h")
    tables = []
    for number in range(events):
        volatile = np.cumsum(rng.random(count) < 0.01) % 2 == 1
        steps = rng.normal(size=count) * np.where(volatile, 0.010, 0.003)
        steps[before - 1] += rng.choice([-1, 1]) * rng.uniform(0.05, 0.15)
        steps[before:] += rng.normal() * 3e-4  # a drift after the jump
        close = 100 * np.exp(np.cumsum(steps) + 0.002 * rng.normal(size=count))
        tables.append(pl.DataFrame({"ticker": f"SIM{number:03d}", "timestamp": times, "close": close}))
    prices = pl.concat(tables).with_row_index("row", offset=1)
    at_event = prices.filter(pl.col("timestamp") == times[before - 1])
    return prices, at_event.select("row", "ticker", "timestamp")


def format_time(moment: np.datetime64) -> str:
    """Return a moment as text, like 2021-01-04 09:30:00."""
    return str(moment.astype("datetime64[s]")).replace("T", " ")


class RollingSubsets(TaskSequence):
    """Task t: the observations [t, t + n) of every lane, a view, standardised by those that are for training."""

    def __init__(self, values: Tensor, training: Tensor, rounds: int) -> None:
        self.values, self.training, self.length = values, training, rounds

    def task(self, t: int) -> Task:
        return spline_task(self.values[t : t + len(self.training)].T, training=self.training, standardise=True)


class MarketStream(Stream):
    """Weight of a smoothing spline for each event, learned on the prices before it, evaluated on those after it.

    Round t uses the observations [t, t + subset) of the ``subset + subsets`` that end with the event's bar. After the
    last round the last ``subset`` of them are fitted and the next ``horizon`` ones forecast.

    Args:
        prices: parquet or CSV file with columns ticker, timestamp, close; None simulates prices.
        events: parquet or CSV file with columns ticker, timestamp; ``auto`` detects jumps in the prices.
        subset: observations per round.
        subsets: number of rounds up to the event.
        horizon: observations after the event, to evaluate the forecast on; 0 if there are none yet.
        validation: ``stride`` takes every fifth observation, ``random`` a fifth of the interior ones, by the seed.
        stride: one of so many observations is for validation.
        offset: index of the first of them, with ``stride``.
        transform: of prices: ``log`` or ``none``; subsets are standardised in any case.
        start: λ_1 of every event.
        on_bad_event: ``raise``, or ``skip`` with a warning.
        threshold: for ``auto``: smallest jump, in robust standard deviations.
        lookback: for ``auto``: bars that the deviation is estimated from.
        gap: for ``auto``: least number of bars between two events of a ticker.
        beyond: number of further rounds, on the bars after the event; the forecast is of the bars after those.
        seed: of the random validation and of simulated prices.
    """

    metric = Metric("mse", higher_is_better=False)
    problem_type = SmoothingSpline
    may_differ = ("start",)
    lanes: pl.DataFrame
    train: RollingSubsets

    def __init__(
        self,
        prices: str | None = None,
        events: str = "auto",
        subset: int = 700,
        subsets: int = 600,
        horizon: int = 120,
        validation: str = "stride",
        stride: int = 5,
        offset: int = 2,
        transform: str = "log",
        start: float = 0.1,
        on_bad_event: str = "raise",
        threshold: float = 8.0,
        lookback: int = 500,
        gap: int = 130,
        beyond: int = 0,
        seed: int = 0,
    ) -> None:
        counts = {"subset": (subset, 4), "subsets": (subsets, 1), "horizon": (horizon, 0), "beyond": (beyond, 0)}
        for name, (value, least) in {**counts, "lookback": (lookback, 2), "gap": (gap, 1)}.items():
            at_least(f"data.{name}", value, least)
        positive("data.threshold", threshold)
        one_of("data.transform", transform, ("log", "none"))
        one_of("data.on_bad_event", on_bad_event, ("raise", "skip"))
        self._start = positive("data.start", start)
        before, after = subset + subsets, beyond + horizon
        _require_capacity(1 if prices else SIMULATED_EVENTS, before + after)
        training = training_mask(subset, validation, stride, offset, seed)
        if prices is None:
            if events != "auto":
                raise ValueError(f"data.events needs data.prices, got {events!r} without any")
            table, found = simulate_market(SIMULATED_EVENTS, before, after, seed)
        else:
            table = read_prices(Path(prices).expanduser())
            if events == "auto":
                found = detect_events(table, threshold, lookback, gap, before, after)
            else:
                found = read_events(Path(events).expanduser())
            table, found = same_clock(table, found)
        source = (prices or "simulated prices") if events == "auto" else events
        if found.is_empty():
            raise ValueError(f"data.events 'auto' found no jump of {threshold} deviations in {source}")
        _require_capacity(len(found), before + after)
        raw, self.lanes, self.skipped = _cut_events(table, found, source, before, after, on_bad_event)
        values = torch.from_numpy(np.log(raw) if transform == "log" else raw)
        self._before = before
        self.train = RollingSubsets(values, training, subsets + beyond)
        # after the last round: validation within its subset, and the forecast if bars follow
        last = values[subsets + beyond :]
        self.validation = RollingSubsets(last, training, 1)
        if horizon:
            self.test = RollingSubsets(last, torch.arange(subset + horizon) < subset, 1)
            task = self.test[0]
            naive = (task["validation_values"] - task["values"][:, -1:]).square().mean(-1)  # forecasts the last value
            self.lanes = self.lanes.with_columns(naive_mse=pl.Series(naive.tolist()))

    def fingerprint(self, t: int, task: Task) -> str:
        """Return a digest of the observations that are new in round t; the others were in the rounds before."""
        values, seen = self.train.values.numpy(), len(self.train.training)
        return digest_arrays(values[t + seen - 1]) if t else digest_arrays(values[:seen], self.train.training.numpy())

    def describe(self, t: int) -> str:
        seen = len(self.train.training)
        return f"bar {t + seen} of every event" if t else f"one of the first {seen} bars of an event"

    def source_digests(self) -> dict[str, str]:
        """Return a digest of the prices up to each event's bar."""
        columns = self.train.values[: self._before].T.contiguous().numpy()
        names = zip(self.lanes["ticker"], self.lanes["timestamp"], strict=True)
        return {
            f"{ticker} {moment}": digest_arrays(column) for (ticker, moment), column in zip(names, columns, strict=True)
        }

    def start(self, problem: Problem, seed: int) -> Tensor:
        """Return λ_1, the same for every event."""
        return torch.full((len(self.lanes), 1), self._start, dtype=torch.float64)


def _require_capacity(lanes: int, sites: int) -> None:
    """Refuse more observations than fit into memory: they take about five numbers each, with logarithms and tables."""
    require_memory(
        "events × (data.subset + data.subsets + data.beyond + data.horizon)", lanes * sites, 40.0 * lanes * sites
    )


def training_mask(subset: int, validation: str, stride: int, offset: int, seed: int) -> Tensor:
    """Return which observations of a subset are for training, the same in every round."""
    one_of("data.validation", validation, ("stride", "random"))
    at_least("data.stride", stride, 2)
    if stride > subset // 2:
        raise ValueError(f"data.stride must be at most half of data.subset, {subset // 2}, got {stride}")
    place = torch.arange(subset)
    if validation == "stride":
        if not 0 <= offset < stride:
            raise ValueError(f"data.offset must lie in 0..{stride - 1}, below data.stride, got {offset}")
        return place % stride != offset
    generator = torch.Generator().manual_seed(derive_seed(seed, "validation"))
    held = 1 + torch.randperm(subset - 2, generator=generator)[: subset // stride]
    return ~torch.isin(place, held)


def _cut_events(
    prices: pl.DataFrame, events: pl.DataFrame, source: str, before: int, after: int, on_bad_event: str
) -> tuple[np.ndarray, pl.DataFrame, list[dict[str, Any]]]:
    """Return prices ``[before + after, events]``, the events, and the events that were skipped."""
    wanted = prices.filter(pl.col("ticker").is_in(events["ticker"].unique().to_list()))
    bars = wanted.partition_by("ticker", as_dict=True)
    columns, kept, bad, messages = [], [], [], []
    seen: dict[tuple[str, np.datetime64], int] = {}
    times = events["timestamp"].to_numpy()
    for i, (row, ticker) in enumerate(events.select("row", "ticker").iter_rows()):
        found = prices_around(bars.get((ticker,)), times[i], before, after)
        if seen.setdefault((ticker, times[i]), row) != row:
            found = f"must occur once, and is in row {seen[ticker, times[i]]} too"
        if isinstance(found, str):
            when = format_time(times[i])
            bad.append({"source": source, "row": row, "ticker": ticker, "timestamp": when, "reason": found})
            messages.append(f"{source}, row {row}, event {ticker} {when}: {found}")
            if on_bad_event == "raise":
                raise ValueError(f"{messages[0]} (--data.on_bad_event skip leaves it out)")
        else:
            columns.append(found)
            kept.append(i)
    if not kept:
        raise ValueError(f"data.events must leave at least one event that can be used; {messages[0]}")
    if bad:
        warnings.warn(f"{len(bad)} of {len(events)} events skipped: {'; '.join(messages)}", stacklevel=2)
    return np.ascontiguousarray(np.stack(columns, axis=1)), events[kept].select("ticker", "timestamp"), bad
