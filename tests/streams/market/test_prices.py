"""Prices and events: time zones, faults, and the detection of jumps."""

import numpy as np
import polars as pl
import pytest

from obbo_lightning.streams.market.prices import detect_events, prices_around, read_events, read_prices, same_clock

HOUR = np.timedelta64(1, "h")
START = np.datetime64("2021-01-04T00:00:00", "us")
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
    with pytest.raises(ValueError, match=r"row 2: 'timestamp' must have a value like"):
        read_events(tmp_path / "events.csv")
    for unit in ("ns", "ms"):
        for zone, hour in ((None, 9), ("America/New_York", 14)):
            moment = pl.Series(["2021-01-04 09:30:00"]).str.to_datetime(time_unit=unit)
            table = pl.DataFrame({"ticker": "A", "timestamp": moment.dt.replace_time_zone(zone), "close": [1.5]})
            table.write_parquet(tmp_path / "A.parquet")
            found = read_prices(tmp_path / "A.parquet")
            assert found.schema["timestamp"] == pl.Datetime("us", "UTC" if zone else None)
            assert found["timestamp"].dt.hour().to_list() == [hour]


def bars(closes, times):
    moments = START + np.array(times) * HOUR
    return pl.DataFrame({"row": range(11, 11 + len(closes)), "timestamp": moments, "close": np.array(closes, float)})


@pytest.mark.parametrize(
    ("closes", "times", "fault"),
    [
        ([1, 0, 2, -1, 3], range(5), "row 12 of the prices: a price must be a positive number, got 0.0"),
        ([1, 2, np.inf, np.nan, 3], range(5), "row 13 of the prices: a price must be a positive number, got inf"),
        ([1, 2, 3, 4, 5], [0, 1, 1, 1, 2], "row 13 of the prices: timestamps must increase, got 2021-01-04 01:00:00"),
        ([1, 2, 3, 4, 5], [0, 3, 2, 1, 4], "row 13 of the prices: timestamps must increase, got 2021-01-04 02:00:00"),
        ([1, 2, 3, 4, 0], [0, 3, 2, 1, 4], "row 15 of the prices: a price must be a positive number, got 0.0"),
    ],
)
def test_first_fault_of_a_ticker_is_named(closes, times, fault):
    assert prices_around(bars(closes, times), START, 1, 0) == fault
    assert prices_around(None, START, 1, 0) == "the ticker must be in the prices, and is not"


@pytest.mark.parametrize(
    ("minutes", "before", "after", "expected"),
    [
        (240, 5, 5, [1e-9, 2, 3, 4, 5, 6, 7, 8, 9, 10]),  # the time of a bar
        (299, 5, 4, [1e-9, 2, 3, 4, 5, 6, 7, 8, 9]),  # until the next one
        (300, 2, 4, [5, 6, 7, 8, 9, 10]),
        (0, 1, 1, [1e-9, 2]),
        (540, 2, 0, [9, 10]),
        (240, 6, 5, "must have 6 prices up to it and 5 after it, and has 5 and 5"),
        (240, 5, 6, "must have 5 prices up to it and 6 after it, and has 5 and 5"),
        (541, 1, 0, "must lie in the prices, 2021-01-04 00:00:00 to 2021-01-04 09:00:00, and does not"),
        (-1, 1, 0, "must lie in the prices, 2021-01-04 00:00:00 to 2021-01-04 09:00:00, and does not"),
    ],
)
def test_bar_of_an_event_is_the_last_that_is_not_later(minutes, before, after, expected):
    found = prices_around(bars([1e-9, *range(2, 11)], range(10)), START + np.timedelta64(minutes, "m"), before, after)
    assert (found if isinstance(found, str) else found.tolist()) == expected


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
