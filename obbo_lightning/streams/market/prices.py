"""Prices and events from files, checked; events found in the prices; prices and events made up."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from obbo_lightning.core.randomness import derive_seed
from obbo_lightning.escaping import unescape_table
from obbo_lightning.streams.market.columns import Columns, find_columns, named_columns, require_columns
from obbo_lightning.streams.readers.parquet import read_parquet

PRICE_COLUMNS = ("ticker", "timestamp", "close")
EVENT_COLUMNS = ("ticker", "timestamp")
FILES = (".csv", ".txt", ".parquet")
FILE = "a parquet or CSV file"
PRICES = f"{FILE}, or a folder of them"


class BadEvent(NamedTuple):
    """An event that cannot be used, where it stands, and why."""

    source: str
    row: int
    ticker: str
    timestamp: str
    reason: str

    def __str__(self) -> str:
        return f"{self.source}, row {self.row}, event {self.ticker} {self.timestamp}: {self.reason}"


class Series(NamedTuple):
    """The prices of one ticker, or what is wrong with them."""

    timestamps: NDArray[np.datetime64]
    prices: NDArray[np.float64]
    fault: str | None


def read_prices(path: Path, columns: Columns = None) -> pl.DataFrame:
    """A long table of ticker, timestamp and close, with the number of each row in its file, and the file's name.

    Args:
        path: a parquet or CSV file, or a folder of them. The ticker is the file's name where no column has it.
        columns: what ticker, timestamp and close are called in the files, where they are not called so.
    """
    named = named_columns(columns)
    if not path.is_dir():
        return _prices_of(path, named)
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in FILES and not file.name.startswith("."))
    if not files:
        raise ValueError(f"data.prices must be {PRICES}, got {str(path)!r}, which has none ({', '.join(FILES)})")
    tables = [_prices_of(file, named) for file in files]
    for file, table in zip(files, tables, strict=True):
        if table.schema["timestamp"] != tables[0].schema["timestamp"]:
            raise ValueError(f"{file} must have timestamps with a time zone where {files[0].name} has them, or neither")
    kind = pl.Enum([file.name for file in files])
    return pl.concat(
        table.with_columns(file=pl.lit(file.name, dtype=kind)) for file, table in zip(files, tables, strict=True)
    )


def _prices_of(path: Path, named: Mapping[str, str]) -> pl.DataFrame:
    table = _read(path, "data.prices", PRICE_COLUMNS, named)
    if table.schema["close"] != pl.String and not table.schema["close"].is_numeric():
        raise ValueError(f"{path}: close must be numbers, got {table.schema['close']}")
    # What is no number becomes none, and is named with its row where an event needs it.
    close = pl.col("close").cast(pl.Float64, strict=False).fill_null(math.nan)
    return table.with_columns(close).with_row_index("row", offset=1)


def read_events(path: Path, columns: Columns = None) -> pl.DataFrame:
    """A table of ticker and timestamp, with the number of each row in its file.

    Args:
        path: a parquet or CSV file.
        columns: those of the prices; events may have them, or the usual ones.
    """
    return _read(path, "data.events", EVENT_COLUMNS, named_columns(columns)).with_row_index("row", offset=1)


def _read(path: Path, key: str, columns: tuple[str, ...], named: Mapping[str, str]) -> pl.DataFrame:
    of_prices = key == "data.prices"
    if not path.is_file():
        allowed, reason = PRICES if of_prices else FILE, "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"{key} must be {allowed}, got {str(path)!r}, which {reason}")
    table = _read_any(path)
    there = table.columns
    if not of_prices:
        named = {ours: theirs for ours, theirs in named.items() if theirs in there}
    found = find_columns(there, columns, named, path)
    require_columns(found, columns[1:] if of_prices else columns, there, path)
    if table.is_empty():
        raise ValueError(f"{path} must have rows, and is empty")
    ticker = pl.col(found["ticker"]).cast(pl.String) if "ticker" in found else pl.lit(path.stem)
    table = table.select(ticker.alias("ticker"), *(pl.col(found[name]).alias(name) for name in columns[1:]))
    read = table.with_columns(_timestamps(table["timestamp"], path))
    for name, example in (("ticker", "AMD"), ("timestamp", "2021-01-04 or 2021-01-04 09:30:00")):
        if read[name].null_count():
            row = int(read[name].is_null().arg_true()[0])
            column = "" if found[name] == name else f", column {found[name]}"
            rule = f"{name} must be there and readable, like {example}, got {table[name][row]!r}"
            raise ValueError(f"{path}{column}, row {row + 1}: {rule}")
    return read


def _read_any(path: Path) -> pl.DataFrame:
    kind = "CSV" if path.suffix.lower() in (".csv", ".txt") else "parquet"
    try:
        # Words first: a ticker 000660 is no number, and a price column may begin with whole numbers.
        return unescape_table(pl.read_csv(path, infer_schema=False)) if kind == "CSV" else read_parquet(path)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise ValueError(f"{path} cannot be read as {kind}: {str(error).splitlines()[0]}") from None


def _timestamps(found: pl.Series, path: Path) -> pl.Series:
    """Dates and times in microseconds; with a time zone they become those of UTC, and stay marked as such."""
    if found.dtype == pl.String:
        zone = "UTC" if found.str.contains(r"(Z|[+-]\d\d:?\d\d)$").fill_null(False).all() else None
        try:
            found = found.str.strip_chars().str.to_datetime(time_unit="us", time_zone=zone, strict=False)
        except pl.exceptions.ComputeError:  # polars gives up where it can read none of them
            found = pl.Series("timestamp", [None] * len(found), dtype=pl.Datetime("us"))
    if not (found.dtype == pl.Date or isinstance(found.dtype, pl.Datetime)):
        raise ValueError(f"{path}: timestamp must be dates and times, got {found.dtype}")
    if isinstance(found.dtype, pl.Datetime) and found.dtype.time_zone is not None:
        found = found.dt.convert_time_zone("UTC")
        return found.cast(pl.Datetime("us", "UTC"))
    return found.cast(pl.Datetime("us"))


def same_clock(prices: pl.DataFrame, events: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Both without a time zone; refuses where only one has one."""
    zones = [getattr(table.schema["timestamp"], "time_zone", None) for table in (prices, events)]
    if zones[0] != zones[1]:
        which = "data.prices" if zones[0] else "data.events"
        raise ValueError(f"data.prices and data.events must both have a time zone, or neither; only {which} has one")
    plain = pl.col("timestamp").dt.replace_time_zone(None)
    return prices.with_columns(plain), events.with_columns(plain)


def series_of(prices: pl.DataFrame, tickers: list[str], source: str) -> dict[str, Series]:
    """Each ticker's prices in time, with the first fault in them."""
    wanted = prices.filter(pl.col("ticker").is_in(tickers))
    return {
        str(key[0]): _series(part, source, f"ticker {key[0]}")
        for key, part in wanted.partition_by("ticker", as_dict=True, include_key=False).items()
    }


def _series(part: pl.DataFrame, source: str, ticker: str) -> Series:
    times, closes, rows = part["timestamp"].to_numpy(), part["close"].to_numpy(), part["row"].to_numpy()

    def where(place: int) -> str:
        file = f"{source.rstrip('/')}/{part['file'][place]}" if "file" in part.columns else source
        return f"{file}, {ticker}, row {rows[place]}"

    fault = None
    bad = ~(np.isfinite(closes) & (closes > 0))
    steps = np.diff(times)
    if bad.any():
        first = int(bad.argmax())
        fault = f"{where(first)}: a price must be a positive number, got {closes[first]}"
    elif (steps <= np.timedelta64(0)).any():
        first = int((steps <= np.timedelta64(0)).argmax()) + 1
        rule = "occur once" if steps[first - 1] == np.timedelta64(0) else "increase"
        fault = f"{where(first)}: timestamps must {rule}, got {name_moment(times[first])}"
    return Series(times, closes, fault)


def find_bar(series: Series | None, when: np.datetime64, before: int, after: int) -> int | str:
    """The place of the event's bar, with ``before`` prices up to it and ``after`` behind it, or what is wrong.

    The event's bar is the last one that is not later than the event.
    """
    if series is None:
        return "the ticker must be in the prices, and is not"
    if series.fault:
        return series.fault
    first, last = series.timestamps[0], series.timestamps[-1]
    if not first <= when <= last:
        return f"must lie in the prices, {name_moment(first)} to {name_moment(last)}, and does not"
    bar = int(np.searchsorted(series.timestamps, when, side="right")) - 1
    if bar + 1 < before:
        return f"must have {before} prices up to it, and has {bar + 1}"
    if len(series.prices) - bar - 1 < after:
        return f"must have {after} prices after it, and has {len(series.prices) - bar - 1}"
    return bar


def detect_events(
    prices: pl.DataFrame, threshold: float = 8.0, lookback: int = 500, gap: int = 130, before: int = 0, after: int = 0
) -> pl.DataFrame:
    """Jumps, from the prices alone and without look-ahead.

    A bar's return is its log price minus the one before, minus the median of all tickers' returns at that time (with
    fewer than three tickers there is no market, and nothing is taken off). It is a
    jump where its absolute value is at least ``threshold`` times 1.4826 times the median absolute return of the
    ``lookback`` bars before it, and an event where the last event of the ticker is at least ``gap`` bars away, with
    ``before`` bars up to it and ``after`` behind it.
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
    """Made-up prices, one ticker for each event: quiet and restless regimes, a jump at the event, noise on top."""
    rng = np.random.default_rng(derive_seed(seed, "market") % 2**63)
    count = before + after
    start = np.datetime64("2021-01-04T09:30:00", "us")
    times = start + np.arange(count) * np.timedelta64(1, "h")
    tables = []
    for number in range(events):
        restless = np.cumsum(rng.random(count) < 0.01) % 2 == 1
        steps = rng.normal(size=count) * np.where(restless, 0.010, 0.003)
        steps[before - 1] += rng.choice([-1, 1]) * rng.uniform(0.05, 0.15)
        steps[before:] += rng.normal() * 3e-4  # what follows a jump drifts
        close = 100 * np.exp(np.cumsum(steps) + 0.002 * rng.normal(size=count))
        tables.append(pl.DataFrame({"ticker": f"SIM{number:03d}", "timestamp": times, "close": close}))
    prices = pl.concat(tables).with_row_index("row", offset=1)
    at_event = prices.filter(pl.col("timestamp") == times[before - 1])
    return prices, at_event.select("row", "ticker", "timestamp")


def name_moment(moment: np.datetime64) -> str:
    """As people write it."""
    return str(moment.astype("datetime64[s]")).replace("T", " ")
