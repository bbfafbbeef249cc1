"""Prices and events of a market: read from files, detected in prices, or simulated."""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from obbo_lightning.core.randomness import derive_seed
from obbo_lightning.escaping import unescape_table
from obbo_lightning.streams.readers import read_table, require_file, require_rows


class BadEvent(NamedTuple):
    """An event that cannot be used, its file and row, and the reason."""

    source: str
    row: int
    ticker: str
    timestamp: str
    reason: str

    def __str__(self) -> str:
        return f"{self.source}, row {self.row}, event {self.ticker} {self.timestamp}: {self.reason}"


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
