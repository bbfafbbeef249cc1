"""Prices and events: column names, time zones, faults, and the detection of jumps."""

import numpy as np
import polars as pl
import pytest
import torch
import yaml

from obbo_lightning import cli
from obbo_lightning.streams import MarketStream
from obbo_lightning.streams.market.prices import (
    Series,
    detect_events,
    find_bar,
    find_columns,
    read_events,
    read_prices,
    same_clock,
    series_of,
    simulate_market,
)

SMALL = {"subset": 30, "subsets": 20, "horizon": 10}
HOUR = np.timedelta64(1, "h")
START = np.datetime64("2021-01-04T00:00:00", "us")


@pytest.fixture(scope="module")
def tables():
    """Three tickers of 80 days, an event on the 60th of each."""
    prices, _ = simulate_market(3, 60, 20, seed=1)
    day = pl.date_range(pl.date(2021, 1, 4), pl.date(2021, 3, 24), eager=True)
    prices = prices.drop("row").with_columns(timestamp=pl.concat([day] * 3))
    return prices, prices.filter(pl.col("timestamp") == day[59]).drop("close")


@pytest.fixture
def folder(tables, tmp_path):
    """Folder with one file per ticker, with three spellings of their columns, and events.csv beside it."""
    (tmp_path / "prices").mkdir()
    for (ticker,), table in tables[0].partition_by("ticker", as_dict=True).items():
        date = pl.col("timestamp").alias({"SIM000": "Date", "SIM001": "DATE", "SIM002": "datetime"}[ticker])
        adjusted = {"Adj Close": pl.col("close") / 2}
        table.select(date, Open="close", Close="close", **adjusted).write_csv(tmp_path / "prices" / f"{ticker}.csv")
    (tmp_path / "prices" / "README.md").write_text("no prices")
    tables[1].write_csv(tmp_path / "events.csv")
    return tmp_path


def stream(prices, events, **settings):
    return MarketStream(str(prices), str(events), **{**SMALL, **settings})


def test_one_file_per_ticker_equals_one_file_of_all(tables, folder):
    tables[0].write_csv(folder / "all.csv")
    whole, several = (stream(folder / name, folder / "events.csv") for name in ("all.csv", "prices"))
    assert torch.equal(whole.train.values, several.train.values)
    assert whole.lanes.equals(several.lanes)


def test_folder_may_hold_csv_and_parquet_files_with_several_tickers(tables, folder):
    expected = stream(folder / "prices", folder / "events.csv").train.values
    for ticker in ("SIM000", "SIM001"):
        (folder / "prices" / f"{ticker}.csv").unlink()
    tables[0].filter(pl.col("ticker") != "SIM002").rename({"ticker": "Symbol"}).write_parquet(
        folder / "prices" / "two.parquet"
    )
    assert torch.allclose(stream(folder / "prices", folder / "events.csv").train.values, expected, rtol=1e-15)


def test_hidden_files_and_files_of_other_kinds_are_ignored(tmp_path):
    for name in ("B.csv", "A.TXT", ".hidden.csv", "notes.md"):
        (tmp_path / name).write_text("Date,Close\n2021-01-04,1\n")
    found = read_prices(tmp_path)
    assert found["ticker"].to_list() == ["A", "B"]
    assert found["file"].to_list() == ["A.TXT", "B.csv"]
    assert found["row"].to_list() == [1, 1]


def test_our_column_names_are_preferred_to_the_usual_ones(tables, tmp_path):
    decoys = tables[0].with_columns(Date=pl.lit("soon"), Close=pl.lit("dear"), symbol=pl.lit("X"))
    decoys.select("symbol", "Close", "Date", "ticker", "timestamp", "close").write_csv(tmp_path / "prices.csv")
    assert read_prices(tmp_path / "prices.csv").select("ticker", "close").equals(tables[0].select("ticker", "close"))


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        (["Date", "Datetime", "Close"], {"timestamp": "Datetime", "close": "Close"}),
        (["Time", "DATE", "close"], {"timestamp": "DATE", "close": "close"}),
        (["time", "CLOSE", "Symbol"], {"ticker": "Symbol", "timestamp": "time", "close": "CLOSE"}),
        (["Timestamp", "Datetime", "date", "ticker", "symbol"], {"ticker": "ticker", "timestamp": "Timestamp"}),
        ([" Date ", " Close"], {"timestamp": " Date ", "close": " Close"}),
        (["Adj Close", "day"], {}),
    ],
)
def test_first_of_the_usual_names_is_taken(there, expected, tmp_path):
    assert find_columns(there, ("ticker", "timestamp", "close"), {}, tmp_path) == expected


@pytest.mark.parametrize("columns", ["timestamp=Date, close=Adj Close", {"timestamp": "Date", "close": "Adj Close"}])
def test_columns_are_given_as_text_or_as_a_mapping(folder, columns):
    found = read_prices(folder / "prices" / "SIM000.csv", columns)
    usual = read_prices(folder / "prices" / "SIM000.csv")
    assert found["ticker"].unique().to_list() == ["SIM000"]
    assert (found["close"] == usual["close"] / 2).all()


def test_columns_of_flags_and_files_are_in_the_configuration(folder, capsys):
    (folder / "mine.yaml").write_text("data: {name: market, columns: {timestamp: Date, close: Adj Close}}\n")
    text = "timestamp=Date,close=Close"
    for flags, expected in (
        (["--config", str(folder / "mine.yaml")], {"timestamp": "Date", "close": "Adj Close"}),
        (["--data.columns.close", "Adj Close"], {"close": "Adj Close"}),
        (["--data.columns", text], text),
    ):
        assert cli.main(["fit", "--config", "market", *flags, "--print_config"]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["data"]["columns"] == expected


def test_events_have_the_column_names_of_the_prices_or_the_usual_ones(tables, tmp_path):
    named = "ticker=Stock,timestamp=Day,close=Last"
    tables[1].rename({"ticker": "Stock", "timestamp": "Day"}).write_csv(tmp_path / "one.csv")
    tables[1].rename({"ticker": "SYMBOL", "timestamp": "Date"}).write_csv(tmp_path / "two.csv")
    assert read_events(tmp_path / "one.csv", named).equals(read_events(tmp_path / "two.csv", named))


def text_in(name, text):
    return lambda folder: (folder / "prices" / name).write_text(text)


@pytest.mark.parametrize(
    ("spoil", "columns", "message"),
    [
        (
            text_in("A.csv", "Day,Close\n"),
            None,
            "must have the columns timestamp, close, got Day, Close, without",
        ),
        (text_in("A.csv", "Day,Close\n"), None, "without timestamp (data.columns maps names: timestamp=…)"),
        (text_in("A.csv", "Date,DATE,Close\n"), None, "A.csv must have one column for timestamp, got Date, DATE"),
        (
            text_in("A.csv", "Date,Close\n2021-01-04,1\nsoon,1\n"),
            None,
            "A.csv, column Date, row 2: timestamp must",
        ),
        (text_in("A.csv", "Date,Close\n13/01/21,1\n"), None, "like 2021-01-04 or 2021-01-04 09:30:00, got '13/01/21'"),
        (text_in("A.csv", "Symbol,Date,Close\n,2021-01-04,1\n"), None, "A.csv, column Symbol, row 1: ticker must have"),
        (text_in("A.csv", "Date,Close\n2021-01-04T00:00:00Z,1\n"), None, "must have a time zone if A.csv has one"),
        (text_in("SIM000.txt", "Date,Close\n2021-01-04,1\n"), None, "prices/SIM000.txt, ticker SIM000, row 1: time"),
        (text_in("SIM001.csv", "Date,Close\n2021-01-04,null\n"), None, "prices/SIM001.csv, ticker SIM001, row 1: a p"),
        (text_in("A.csv", "Date,Close\n2021-01-04,1\n"), "close=Last", "must have the column 'Last' that data.columns"),
        (lambda folder: None, "Close", "data.columns must be like timestamp=Date,close=Close, got 'Close'"),
        (lambda folder: None, "Close=close", "data.columns must name ticker, timestamp, close, as in close=Close, got"),
        (lambda folder: None, "close=A,close=B", "data.columns must name each column once, got 'close=A,close=B'"),
        (lambda folder: [p.unlink() for p in (folder / "prices").glob("*.csv")], None, "got 'prices', which has none"),
    ],
)
def test_unusable_files_and_columns_are_refused(folder, refusal, spoil, columns, message):
    spoil(folder)
    flags = [word for key, value in SMALL.items() for word in (f"--data.{key}", value)]
    flags += ["--data.columns", columns] if columns else []
    flags += ["--data.prices", "prices", "--data.events", "events.csv"]
    assert message in refusal("--config", "market", "--rounds", "20", *flags)


def test_folder_of_events_is_refused(folder):
    with pytest.raises(ValueError, match=r"data.events must be a parquet or CSV file that exists, got .*prices"):
        stream(folder / "prices", folder / "prices")


ZONES = {
    "2021-01-04T09:30:00Z": "2021-01-04T09:30:00",
    "2021-01-04T09:30:00-05:00": "2021-01-04T14:30:00",
    "2021-01-04 09:30:00+0530": "2021-01-04T04:00:00",
    "2021-01-04 09:30:00": "2021-01-04T09:30:00",
    "2021-01-04": "2021-01-04T00:00:00",
    " 2021-01-04T09:30:00.250000 ": "2021-01-04T09:30:00.250000",
}


@pytest.mark.parametrize("text", ZONES)
def test_timestamps_with_a_time_zone_become_utc(text, tmp_path):
    (tmp_path / "events.csv").write_text(f"ticker,timestamp\nA,{text}\n")
    events = read_events(tmp_path / "events.csv")
    zoned = text[10:].endswith("Z") or "+" in text or "-" in text[10:]
    assert events.schema["timestamp"] == pl.Datetime("us", "UTC" if zoned else None)
    plain, _ = same_clock(events, events)
    assert plain["timestamp"].to_numpy()[0] == np.datetime64(ZONES[text], "us")


def test_units_become_microseconds_and_a_mixture_of_zones_is_refused(tmp_path):
    (tmp_path / "events.csv").write_text("ticker,timestamp\nA,2021-01-04T09:30:00Z\nA,2021-01-05T09:30:00\n")
    with pytest.raises(ValueError, match=r"row \d: timestamp must have a value like"):
        read_events(tmp_path / "events.csv")
    for unit in ("ns", "ms"):
        for zone, hour in ((None, 9), ("America/New_York", 14)):
            moment = pl.Series(["2021-01-04 09:30:00"]).str.to_datetime(time_unit=unit)
            table = pl.DataFrame({"timestamp": moment.dt.replace_time_zone(zone), "close": [1.5]})
            table.write_parquet(tmp_path / "A.parquet")
            found = read_prices(tmp_path / "A.parquet")
            assert found.schema["timestamp"] == pl.Datetime("us", "UTC" if zone else None)
            assert found["timestamp"].dt.hour().to_list() == [hour]


@pytest.mark.parametrize(
    ("closes", "times", "fault"),
    [
        ([1, 0, 2, -1, 3], range(5), "p.csv, ticker A, row 12: a price must be a positive number, got 0.0"),
        ([1, 2, np.inf, np.nan, 3], range(5), "p.csv, ticker A, row 13: a price must be a positive number, got inf"),
        ([1, 2, 3, 4, 5], [0, 1, 1, 1, 2], "p.csv, ticker A, row 13: timestamps must occur once, got 2021-01-04 01:00"),
        ([1, 2, 3, 4, 5], [0, 3, 2, 1, 4], "p.csv, ticker A, row 13: timestamps must increase, got 2021-01-04 02:00"),
        ([1, 2, 3, 4, 0], [0, 3, 2, 1, 4], "p.csv, ticker A, row 15: a price must be a positive number, got 0.0"),
        ([1e-9, 2, 3, 4, 5], range(5), None),
    ],
)
def test_first_fault_of_a_ticker_is_named(closes, times, fault):
    moments = START + np.array(times) * HOUR
    table = pl.DataFrame({"row": range(11, 16), "ticker": "A", "timestamp": moments, "close": np.array(closes, float)})
    other = table.with_columns(ticker=pl.lit("B"), close=1.0)
    found = series_of(pl.concat([table, other]), ["A"], "p.csv")
    assert list(found) == ["A"]
    assert (found["A"].fault or "").startswith(fault or "")
    assert (found["A"].fault is None) == (fault is None)
    in_folder = series_of(table.with_columns(file=pl.lit("a.csv")), ["A"], "folder/")["A"].fault
    assert in_folder is None if fault is None else in_folder.startswith("folder/a.csv, ticker A, row 1")
    assert find_bar(found["A"], START, 1, 0) == (found["A"].fault or 0)
    assert find_bar(None, START, 1, 0) == "the ticker must be in the prices, and is not"


@pytest.mark.parametrize(
    ("minutes", "before", "after", "expected"),
    [
        (240, 5, 5, 4),  # the time of a bar
        (299, 5, 5, 4),  # until the next one
        (300, 6, 4, 5),
        (0, 1, 9, 0),
        (540, 10, 0, 9),
        (240, 6, 5, "must have 6 prices up to it, and has 5"),
        (240, 5, 6, "must have 6 prices after it, and has 5"),
        (541, 1, 0, "must lie in the prices, 2021-01-04 00:00:00 to 2021-01-04 09:00:00, and does not"),
        (-1, 1, 0, "must lie in the prices, 2021-01-04 00:00:00 to 2021-01-04 09:00:00, and does not"),
    ],
)
def test_bar_of_an_event_is_the_last_that_is_not_later(minutes, before, after, expected):
    series = Series(START + np.arange(10) * HOUR, np.arange(1.0, 11), None)
    assert find_bar(series, START + np.timedelta64(minutes, "m"), before, after) == expected


def jumping(tickers, bars, jumps, market=0.0):
    """Return prices with jumps ``{(ticker, bar): size}`` and a return that all tickers share."""
    rng = np.random.default_rng(0)
    steps = 0.001 * rng.normal(size=(tickers, bars)) + market * rng.normal(size=bars)
    for place, size in jumps.items():
        steps[place] += size
    times = START + np.arange(bars) * HOUR
    tables = [
        pl.DataFrame({"ticker": f"T{i}", "timestamp": times, "close": 20 * np.exp(steps[i].cumsum())})
        for i in range(tickers)
    ]
    return pl.concat(tables).with_row_index("row", offset=1)


def places_of(events):
    """Return ticker and bar of each event."""
    return [(ticker, int((np.datetime64(when, "us") - START) / HOUR)) for _, ticker, when, _ in events.iter_rows()]


@pytest.mark.parametrize("market", [0.0, 0.02])
def test_events_are_those_of_a_loop_over_bars(market):
    bars, lookback, gap = 160, 20, 30
    # two of them 30 bars apart and 29, two with too few bars before them
    jumps = {(0, 60): 0.03, (0, 90): 0.03, (0, 119): 0.03, (2, 10): -0.02, (2, 100): -0.02}
    table = jumping(4, bars, jumps, market)
    returns = np.diff(np.log(table["close"].to_numpy().reshape(4, bars)), axis=1, prepend=np.nan)
    sizes = np.abs(returns - np.median(returns, axis=0))
    expected = []
    for i in range(4):
        last = -np.inf
        for bar in range(lookback + 1, bars):
            score = sizes[i, bar] / (1.4826 * np.median(sizes[i, bar - lookback : bar]))
            if score >= 8 and bar - last >= gap:
                expected.append((bar, f"T{i}", score))
                last = bar
    found = detect_events(table, 8, lookback, gap)
    assert places_of(found) == [(ticker, bar) for bar, ticker, _ in sorted(expected)]
    assert found["score"].to_list() == pytest.approx([score for *_, score in sorted(expected)])
    assert [bar for ticker, bar in places_of(found) if ticker == "T0"] == [60, 90]


def test_events_need_all_their_bars_before_and_after_them():
    bars = (49, 50, 79, 80)
    table = jumping(4, 100, dict.fromkeys(enumerate(bars), 0.05))
    for before, after in ((50, 20), (51, 20), (50, 19), (51, 19), (81, 19), (82, 0)):
        expected = [(f"T{i}", bar) for i, bar in enumerate(bars) if bar + 1 >= before and 99 - bar >= after]
        assert places_of(detect_events(table, 8, 20, 10, before, after)) == expected


def test_gap_is_counted_from_the_last_event_and_not_from_a_jump_between():
    table = jumping(4, 140, dict.fromkeys([(0, 60), (0, 80), (0, 100), (1, 70), (1, 99)], 0.05))
    assert places_of(detect_events(table, 8, 20, 30)) == [("T0", 60), ("T1", 70), ("T0", 100)]  # in time


@pytest.mark.parametrize(("tickers", "found"), [(1, 1), (2, 2), (3, 0)])
def test_shared_jump_is_no_event_of_three_or_more_tickers(tickers, found):
    events = detect_events(jumping(tickers, 100, {(i, 60): 0.05 for i in range(tickers)}), 8, 20, 10)
    assert len([bar for _, bar in places_of(events) if bar == 60]) == found


def test_detection_does_not_look_ahead():
    table = jumping(6, 400, {(1, 200): 0.05, (2, 390): 0.05}, market=0.02)
    whole = detect_events(table, lookback=100)
    past = detect_events(table.filter(pl.col("timestamp") <= START + 250 * HOUR), lookback=100)
    assert whole.filter(pl.col("timestamp") <= START + 250 * HOUR).equals(past)
    assert places_of(whole) == [("T1", 200), ("T2", 390)]
