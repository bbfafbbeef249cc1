"""Prices and events of a market: read from files with any column names, detected in prices, or simulated."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from obbo_lightning.core.randomness import derive_seed
from obbo_lightning.escaping import unescape_table
from obbo_lightning.streams.readers import read_table, require_file

PRICE_COLUMNS = ("ticker", "timestamp", "close")
EVENT_COLUMNS = ("ticker", "timestamp")
# Names of finance sites and libraries, in any case; the first one that a file has is taken.
USUAL_NAMES = {
    "ticker": ("ticker", "symbol"),
    "timestamp": ("timestamp", "datetime", "date", "time"),
    "close": ("close",),
}
CSV_SUFFIXES = (".csv", ".txt")
SUFFIXES = (*CSV_SUFFIXES, ".parquet")
FILE = "a parquet or CSV file"
FILE_OR_FOLDER = f"{FILE}, or a folder of them,"
Columns = str | Mapping[str, str] | None


class BadEvent(NamedTuple):
    """An event that cannot be used, its file and row, and the reason."""

    source: str
    row: int
    ticker: str
    timestamp: str
    reason: str

    def __str__(self) -> str:
        return f"{self.source}, row {self.row}, event {self.ticker} {self.timestamp}: {self.reason}"


class Series(NamedTuple):
    """The prices of one ticker; ``fault`` says what is wrong with them, if anything is."""

    timestamps: NDArray[np.datetime64]
    prices: NDArray[np.float64]
    fault: str | None


def read_prices(path: Path, columns: Columns = None) -> pl.DataFrame:
    """Return a long table of ticker, timestamp and close, with the row number in the file, and the file's name.

    Args:
        path: a parquet or CSV file, or a folder of them. Without a column for it, the ticker is the file's name.
        columns: names of ticker, timestamp and close in the files, where they are other names.
    """
    names = parse_columns(columns)
    if not path.is_dir():
        return _read_price_file(path, names)
    files = [f for f in sorted(path.iterdir()) if f.suffix.lower() in SUFFIXES and not f.name.startswith(".")]
    if not files:
        raise ValueError(f"data.prices must be {FILE} or a folder with some, got {str(path)!r}, which has none")
    tables = [_read_price_file(file, names) for file in files]
    first = tables[0].schema["timestamp"]
    for file, found in zip(files, (table.schema["timestamp"] for table in tables), strict=True):
        if found != first:
            raise ValueError(f"{file} must have a time zone if {files[0].name} has one, {first}, got {found}")
    kind = pl.Enum([file.name for file in files])
    return pl.concat(
        table.with_columns(file=pl.lit(file.name, dtype=kind)) for file, table in zip(files, tables, strict=True)
    )


def _read_price_file(path: Path, names: Mapping[str, str]) -> pl.DataFrame:
    require_file("data.prices", path, FILE_OR_FOLDER)
    table = _read_columns(path, PRICE_COLUMNS, names)
    if table.schema["close"] != pl.String and not table.schema["close"].is_numeric():
        raise ValueError(f"{path}: close must be numbers, got {table.schema['close']}")
    # What is not a number becomes NaN, and is refused with its row if an event needs it.
    close = pl.col("close").cast(pl.Float64, strict=False).fill_null(math.nan)
    return table.with_columns(close).with_row_index("row", offset=1)


def read_events(path: Path, columns: Columns = None) -> pl.DataFrame:
    """Return a table of ticker and timestamp, with the row number in the file.

    Args:
        path: a parquet or CSV file.
        columns: names in the price files; a file of events has these names or the usual ones.
    """
    require_file("data.events", path, FILE)
    return _read_columns(path, EVENT_COLUMNS, parse_columns(columns)).with_row_index("row", offset=1)


def _read_columns(path: Path, columns: tuple[str, ...], names: Mapping[str, str]) -> pl.DataFrame:
    """Return these columns of a file under our names; events may lack a column that ``names`` has."""
    is_csv = path.suffix.lower() in CSV_SUFFIXES
    # As text: a ticker 000660 is no number, and a column of prices may begin with integers.
    table = read_table(path, is_csv, infer_schema=False)
    table = unescape_table(table) if is_csv else table
    if columns == EVENT_COLUMNS:
        names = {ours: theirs for ours, theirs in names.items() if theirs in table.columns}
    found = find_columns(table.columns, columns, names, path)
    required = columns if columns == EVENT_COLUMNS else columns[1:]  # the file's name may be the ticker
    missing = [ours for ours in required if ours not in found]
    if missing:
        raise ValueError(
            f"{path} must have the columns {', '.join(required)}, got {', '.join(table.columns)}, without "
            f"{', '.join(missing)} (data.columns maps names: {missing[0]}=…)"
        )
    if table.is_empty():
        raise ValueError(f"{path} must have rows, and is empty")
    ticker = pl.col(found["ticker"]).cast(pl.String) if "ticker" in found else pl.lit(path.stem)
    table = table.select(ticker.alias("ticker"), *(pl.col(found[name]).alias(name) for name in columns[1:]))
    read = table.with_columns(_parse_timestamps(table["timestamp"], path))
    for name, example in (("ticker", "AMD"), ("timestamp", "2021-01-04 or 2021-01-04 09:30:00")):
        if read[name].null_count():
            row = int(read[name].is_null().arg_true()[0])
            column = "" if found[name] == name else f", column {found[name]}"
            rule = f"{name} must have a value like {example}, got {table[name][row]!r}"
            raise ValueError(f"{path}{column}, row {row + 1}: {rule}")
    return read


def parse_columns(columns: Columns) -> dict[str, str]:
    """Return names in files by our names, from a mapping or from text.

    >>> parse_columns("timestamp=Date, close=Adj Close")
    {'timestamp': 'Date', 'close': 'Adj Close'}
    """
    if columns is None:
        return {}
    if isinstance(columns, str):
        sides = [pair.partition("=") for pair in columns.split(",")]
        pairs = [(ours.strip(), theirs.strip()) for ours, _, theirs in sides]
    else:
        pairs = list(columns.items())
    for ours, theirs in pairs:
        if not (ours and theirs):
            raise ValueError(f"data.columns must be like timestamp=Date,close=Close, got {columns!r}")
        if ours not in PRICE_COLUMNS:
            raise ValueError(f"data.columns must name {', '.join(PRICE_COLUMNS)}, as in close=Close, got {ours!r}")
    for side in zip(*pairs, strict=True):
        if len(set(side)) < len(side):
            raise ValueError(f"data.columns must name each column once, got {columns!r}")
    return dict(pairs)


def find_columns(there: Sequence[str], wanted: Sequence[str], names: Mapping[str, str], path: Path) -> dict[str, str]:
    """Return names in a table by our names: the given names, else ours, else the usual ones; missing ones are left out.

    Args:
        there: columns of the table.
        wanted: our names.
        names: given names, by ours; a given name must exist.
        path: of the table.
    """
    found = {}
    for ours in wanted:
        if ours in names and names[ours] not in there:
            raise ValueError(
                f"{path} must have the column {names[ours]!r} that data.columns names, got {', '.join(there)}"
            )
        theirs = names.get(ours, ours if ours in there else _usual_name(there, ours, path))
        if theirs is not None:
            found[ours] = theirs
    return found


def _usual_name(there: Sequence[str], ours: str, path: Path) -> str | None:
    for usual in USUAL_NAMES[ours]:
        same = [theirs for theirs in there if theirs.strip().lower() == usual]
        if len(same) > 1:
            raise ValueError(f"{path} must have one column for {ours}, got {', '.join(same)} (data.columns chooses)")
        if same:
            return same[0]
    return None


def _parse_timestamps(column: pl.Series, path: Path) -> pl.Series:
    """Return dates and times in microseconds; those with a time zone are converted to UTC, and keep it."""
    if column.dtype == pl.String:
        zone = "UTC" if column.str.contains(r"(Z|[+-]\d\d:?\d\d)$").fill_null(False).all() else None
        try:
            column = column.str.strip_chars().str.to_datetime(time_unit="us", time_zone=zone, strict=False)
        except pl.exceptions.ComputeError:  # polars raises where it cannot read any of them
            column = pl.Series("timestamp", [None] * len(column), dtype=pl.Datetime("us"))
    if not (column.dtype == pl.Date or isinstance(column.dtype, pl.Datetime)):
        raise ValueError(f"{path}: timestamp must be dates and times, got {column.dtype}")
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


def series_of(prices: pl.DataFrame, tickers: list[str], source: str) -> dict[str, Series]:
    """Return the prices of each ticker, with the first fault in them."""
    wanted = prices.filter(pl.col("ticker").is_in(tickers))
    return {
        str(key[0]): _one_series(table, source, f"ticker {key[0]}")
        for key, table in wanted.partition_by("ticker", as_dict=True, include_key=False).items()
    }


def _one_series(table: pl.DataFrame, source: str, ticker: str) -> Series:
    times, closes, rows = table["timestamp"].to_numpy(), table["close"].to_numpy(), table["row"].to_numpy()

    def where(place: int) -> str:
        file = f"{source.rstrip('/')}/{table['file'][place]}" if "file" in table.columns else source
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
        fault = f"{where(first)}: timestamps must {rule}, got {format_time(times[first])}"
    return Series(times, closes, fault)


def find_bar(series: Series | None, when: np.datetime64, before: int, after: int) -> int | str:
    """Return the index of the event's bar, with ``before`` prices up to it and ``after`` after it, or what is wrong.

    The event's bar is the last one that is not later than the event.
    """
    if series is None:
        return "the ticker must be in the prices, and is not"
    if series.fault:
        return series.fault
    first, last = series.timestamps[0], series.timestamps[-1]
    if not first <= when <= last:
        return f"must lie in the prices, {format_time(first)} to {format_time(last)}, and does not"
    bar = int(np.searchsorted(series.timestamps, when, side="right")) - 1
    if bar + 1 < before:
        return f"must have {before} prices up to it, and has {bar + 1}"
    if len(series.prices) - bar - 1 < after:
        return f"must have {after} prices after it, and has {len(series.prices) - bar - 1}"
    return bar


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
