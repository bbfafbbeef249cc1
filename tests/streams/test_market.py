"""Market events as lanes: prices and events, jumps, tasks, forecasts, fingerprints, refusals and runs."""

import json
import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from small_runs import read_table
from toy import F64, SIX

from obbo_lightning import OBBO, online
from obbo_lightning.domains import Box
from obbo_lightning.hypergradients import ClosedForm
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.streams import MarketStream
from obbo_lightning.streams.market import (
    detect_events,
    prices_around,
    read_events,
    read_prices,
    same_clock,
    simulate_market,
    training_mask,
)

REAL = Path(__file__).parents[3] / "shared" / "data" / "market"
HOUR = np.timedelta64(1, "h")
START = np.datetime64("2021-01-04T00:00:00", "us")
SMALL = {"subset": 30, "subsets": 20, "horizon": 10}
FLAGS = ["--config", "market", "--rounds", "20", "--checkpoint.every", "5"]
FLAGS += [word for key, value in SMALL.items() for word in (f"--data.{key}", str(value))]
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


def test_events_need_all_their_bars_before_and_after_them_and_a_gap():
    bars = (49, 50, 79, 80)
    table = jumping(4, 100, dict.fromkeys(enumerate(bars), 0.05))
    for before, after in ((50, 20), (51, 20), (50, 19), (51, 19), (81, 19), (82, 0)):
        expected = [(f"T{i}", bar) for i, bar in enumerate(bars) if bar + 1 >= before and 99 - bar >= after]
        assert places_of(detect_events(table, 8, 20, 10, before, after)) == expected
    # the gap is counted from the last event, and not from a jump between
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


@pytest.fixture
def files(tmp_path):
    """Paths of prices and events: three tickers of 80 bars, an event at the 60th bar of each."""
    prices, events = simulate_market(3, 60, 20, seed=1)
    prices.drop("row").write_parquet(tmp_path / "prices.parquet")
    events.write_csv(tmp_path / "events.csv")
    return tmp_path / "prices.parquet", tmp_path / "events.csv"


def small_stream(files, **settings):
    return MarketStream(str(files[0]), str(files[1]), **{**SMALL, **settings})


def run_rounds(stream, rounds, lanes=slice(None)):
    """Return the outer variable after some rounds on some lanes."""
    algorithm = OBBO(lr=1e-2, window=3, hypergradient=ClosedForm(), domain=Box(1e-6, 1e6))
    tasks = [{k: v[lanes] if v.ndim == 2 else v for k, v in stream.train[t].items()} for t in range(rounds)]
    *_, last = online(stream.problem(), algorithm, tasks, stream.start(None, 0)[lanes])
    return last.outer


def test_tasks_are_rolling_views_that_end_at_the_event(files):
    stream = small_stream(files, transform="none")
    prices = pl.read_parquet(files[0]).partition_by("ticker")
    raw = np.stack([p["close"].to_numpy() for p in prices], axis=1)[10:70]  # 50 up to the event, 10 after it
    assert np.array_equal(stream.train.values.numpy(), raw)
    assert len(stream.train) == 20
    task, mask = stream.train[7], stream.train.training
    window = raw[7:37]
    mean, deviation = window[mask].mean(0), window[mask].std(0)
    assert np.allclose(task["values"].numpy().T, (window[mask] - mean) / deviation)
    assert np.allclose(task["validation_values"].numpy().T, (window[~mask] - mean) / deviation)
    assert task["sites"].tolist() == [i for i in range(30) if i % 5 != 2]
    test = stream.test[0]
    mean, deviation = raw[20:50].mean(0), raw[20:50].std(0)
    assert np.allclose(test["values"].numpy().T, (raw[20:50] - mean) / deviation)
    assert np.allclose(test["validation_values"].numpy().T, (raw[50:] - mean) / deviation)
    assert test["validation_sites"].tolist() == list(range(30, 40))
    (validation,) = stream.validation
    assert max(validation["sites"].max(), validation["validation_sites"].max()) < 30
    assert not torch.equal(stream.train[19]["values"], validation["values"])  # which begins one bar later


def test_rounds_do_not_look_ahead(files):
    known, poisoned, t = small_stream(files), small_stream(files), 9
    poisoned.train.values[t + 30 :] = torch.nan
    assert torch.equal(run_rounds(known, t + 1), run_rounds(poisoned, t + 1))
    assert any(bool(poisoned.train[t + later]["values"].isnan().any()) for later in (1, 3))


def test_event_alone_equals_the_event_among_others(files):
    stream = small_stream(files)
    together = run_rounds(stream, 20)
    for lane in range(3):
        assert torch.equal(run_rounds(stream, 20, slice(lane, lane + 1))[0], together[lane])
    pl.read_csv(files[1])[1:2].write_csv(files[1])
    assert torch.equal(run_rounds(small_stream(files), 20)[0], together[1])


def test_random_validation_takes_interior_observations():
    masks = [training_mask(8, "random", 2, 0, seed) for seed in range(30)]
    assert len(torch.stack(masks).unique(dim=0)) > 1
    for training in masks:
        assert training[[0, -1]].all()
        assert int((~training).sum()) == 4


def test_forecast_errors_are_those_of_dense_algebra_and_of_the_last_price(files):
    stream = small_stream(files, transform="none")
    problem, weight = stream.problem(), torch.full((3, 1), 2.0, dtype=F64)
    test = stream.test[0]
    found = problem.scores(weight, problem.solution(weight, test), test)["mse"]
    stiffness = np.diff(np.eye(30), axis=0).T @ np.diff(np.eye(30), axis=0)
    for lane in range(3):
        prices = stream.train.values[20:60, lane].numpy()
        seen, ahead = ((part - prices[:30].mean()) / prices[:30].std() for part in (prices[:30], prices[30:]))
        last = np.linalg.solve(np.eye(30) + 2.0 * stiffness, seen)[-1]
        assert float(found[lane]) == pytest.approx(np.mean((ahead - last) ** 2))
        assert stream.lanes["naive_mse"][lane] == pytest.approx(np.mean((ahead - seen[-1]) ** 2), rel=1e-10)


def test_rounds_beyond_the_event_are_before_the_forecast(files):
    first, beyond = small_stream(files, horizon=6), small_stream(files, horizon=6, beyond=4)
    log = np.log(pl.read_parquet(files[0])["close"].to_numpy().reshape(3, 80).T)
    assert torch.equal(beyond.train.values[:50], first.train.values[:50])
    assert len(beyond.train) == 24
    assert torch.allclose(beyond.train.values, torch.from_numpy(log[10:70]))
    assert torch.allclose(beyond.validation.values[:30], torch.from_numpy(log[34:64]))
    seen, ahead = log[34:64], log[64:70]
    naive = (((ahead - seen[-1]) / seen.std(0)) ** 2).mean(0)
    assert np.allclose(beyond.lanes["naive_mse"].to_numpy(), naive)


def test_fingerprints_and_digests_name_the_bar_and_the_event_that_changed(files):
    first, event = small_stream(files), "SIM001 2021-01-06 20:30:00"
    prices = pl.read_parquet(files[0])
    digests, prints = first.source_digests(), [first.fingerprint(t, None) for t in range(20)]
    assert list(digests) == [f"SIM00{i} 2021-01-06 20:30:00" for i in range(3)]
    in_event = pl.col("ticker") == "SIM001"
    for bar in (9, 10, 39, 40, 58, 59, 60):  # 50 bars up to the 60th, 30 of them in the first round
        moved = pl.when(in_event & (pl.int_range(pl.len()).over("ticker") == bar)).then(1.1).otherwise(1.0)
        prices.with_columns(pl.col("close") * moved).write_parquet(files[0])
        other = small_stream(files)
        changed = [name for name, digest in other.source_digests().items() if digest != digests[name]]
        assert changed == ([event] if 10 <= bar <= 59 else [])
        rounds = [t for t in range(20) if other.fingerprint(t, None) != prints[t]]
        assert rounds == ([max(0, bar - 39)] if 10 <= bar < 59 else [])
        if rounds:
            where = "one of the first 30 bars of an event" if bar < 40 else f"bar {bar - 9} of every event"
            assert first.describe(rounds[0]) == where


def spoil(value, row=25):
    return lambda table: table.with_columns(close=pl.when(pl.int_range(pl.len()) == row).then(value).otherwise("close"))


def of_files(files, *flags):
    return [*FLAGS, "--data.prices", files[0], "--data.events", files[1], *flags]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoil(float("nan")), "row 26 of the prices: a price must be a positive number, got nan"),
        (spoil(0.0, 100), "row 101 of the prices: a price must be a positive number, got 0.0"),
        (lambda t: t[[*range(26), 25, *range(26, len(t))]], "row 27 of the prices: timestamps must increase"),
        (lambda t: t.filter(pl.col("ticker") != "SIM001"), "event SIM001 2021-01-06 20:30:00: the ticker must be in"),
        (lambda t: t[20:], "SIM000 2021-01-06 20:30:00: must have 50 prices up to it and 10 after it, and has 40 and"),
        (lambda t: pl.concat([t[:40], t[80:]]), "must lie in the prices, 2021-01-04 09:30:00 to 2021-01-06 00:30:00"),
    ],
)
def test_events_with_bad_prices_are_refused_or_skipped(files, change, message, refusal):
    change(pl.read_parquet(files[0])).write_parquet(files[0])
    assert message in refusal(*of_files(files))
    with pytest.warns(UserWarning, match=f"1 of 3 events skipped: .*{re.escape(message)}"):
        stream = small_stream(files, on_bad_event="skip")
    assert len(stream.skipped) == 1
    assert len(stream.lanes) == 2


def test_bad_events_are_named_with_their_file_and_row(files):
    prices = pl.read_parquet(files[0])
    pl.concat([prices[:120], prices[119:120], prices[120:]]).write_parquet(files[0])  # a bar of SIM001 twice
    lines = ["ticker,timestamp", *("SIM000,2021-01-06 20:30:00", "SIM001,2021-01-06 20:30:00") * 3]
    files[1].write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=r"^\S+events.csv, row 2, event SIM001 .* skip leaves it out\)"):
        small_stream(files)
    with pytest.warns(UserWarning, match="5 of 6 events skipped"):
        stream = small_stream(files, on_bad_event="skip")
    assert stream.lanes["ticker"].to_list() == ["SIM000"]
    assert [(bad["row"], bad["ticker"]) for bad in stream.skipped] == [(i, f"SIM00{1 - i % 2}") for i in range(2, 7)]
    repeated = {bad["reason"] for bad in stream.skipped if bad["ticker"] == "SIM000"}
    assert repeated == {"must occur once, and is in row 1 too"}
    with pytest.raises(ValueError, match=r"^\S+prices.parquet, row \d+, event SIM001 .* timestamps must increase"):
        MarketStream(str(files[0]), **SMALL, lookback=20, threshold=5.0)
    with pytest.raises(ValueError, match=r"data.events 'auto' found no jump of 900.0 deviations in \S+prices.parquet"):
        MarketStream(str(files[0]), **SMALL, lookback=20, threshold=900.0)


@pytest.mark.parametrize(
    ("prices", "events", "message"),
    [
        (lambda t: t.drop("close"), None, "and the columns ticker, timestamp, close, got"),
        (lambda t: t[:0], None, "prices.parquet must have rows, and the columns"),
        (lambda t: t.cast({"close": pl.Boolean}), None, "close must be numbers"),
        (lambda t: t.cast({"timestamp": pl.Int64}), None, "row 1: 'timestamp' must have"),
        (None, "", "events.csv cannot be read as CSV"),
        (None, "ticker,timestamp\n", "must have rows, and the columns ticker, timestamp, got 0 rows"),
        (None, "ticker,when\nA,2021-01-01\n", "got 1 rows of ticker, when"),
        *((None, f"ticker,timestamp\nA,{w}\n", "row 1: 'timestamp' must have a value") for w in ("soon", 7, "11:00")),
        (None, "ticker,timestamp\nNONE,2021-01-06 20:30:00\n", "the ticker must be in the prices"),
    ],
)
@pytest.mark.parametrize("on_bad_event", ["raise", "skip"])
def test_unusable_files_are_refused(files, prices, events, message, on_bad_event, refusal):
    if prices:
        prices(pl.read_parquet(files[0])).write_parquet(files[0])
    else:
        files[1].write_text(events)
    assert message in refusal(*of_files(files, "--data.on_bad_event", on_bad_event))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data.subset", "3"], "data.subset must be an integer of at least 4, got 3"),
        (["--data.validation", "last"], "data.validation must be one of stride, random, got 'last'"),
        (["--data.offset", "5"], "data.offset must lie in 0..4, below data.stride, got 5"),
        (["--data.transform", "sqrt"], "data.transform must be one of log, none"),
        (["--data.stride", "20"], "data.stride must be at most half of data.subset, 15, got 20"),
        (["--data.events", "mine.csv"], "data.events needs data.prices, got 'mine.csv' without any"),
        (["--data.start", "0"], "data.start must be"),
        (["--data.prices", "no.csv"], "data.prices must be a parquet or CSV file that exists, got 'no.csv'"),
        (["--rounds", "21"], "rounds must be at most the stream's 20 tasks, 1 per round, got 21"),
    ],
)
def test_impossible_settings_are_refused(flags, message, refusal):
    assert message in refusal(*FLAGS, *flags)


def test_prices_in_csv_files_equal_those_in_parquet_and_tickers_stay_text(files, tmp_path):
    pl.read_parquet(files[0]).write_csv(tmp_path / "prices.csv", datetime_format="%Y-%m-%d %H:%M:%S")
    one, two = small_stream(files), small_stream((tmp_path / "prices.csv", files[1]))
    assert torch.allclose(one.train.values, two.train.values, rtol=0, atol=1e-12)
    rename = pl.col("ticker").replace({"SIM000": "000660", "SIM001": "1E5"})
    prices = pl.read_parquet(files[0]).with_columns(rename)
    closes = [str(round(c)) if i < 30 else str(c) for i, c in enumerate(prices["close"])]
    prices.with_columns(close=pl.Series(closes)).write_csv(tmp_path / "prices.csv")
    pl.read_csv(files[1]).with_columns(rename).write_csv(files[1])
    stream = small_stream((tmp_path / "prices.csv", files[1]))
    assert stream.lanes["ticker"].to_list() == ["000660", "1E5", "SIM002"]


def test_time_zones_are_respected_or_refused(files):
    plain, prices = small_stream(files), pl.read_parquet(files[0])
    prices.with_columns(pl.col("timestamp").dt.replace_time_zone("America/New_York")).write_parquet(files[0])
    with pytest.raises(ValueError, match=r"both have a time zone, or neither; only data.prices has one"):
        small_stream(files)
    files[1].write_text("ticker,timestamp\n" + "".join(f"SIM00{i},2021-01-06T20:30:00-05:00\n" for i in range(3)))
    assert torch.equal(small_stream(files).train.values, plain.train.values)


@pytest.mark.parametrize("name", [*SIX, "entropy"])
def test_every_algorithm_runs_on_the_market(name, fit):
    chosen = ["--config", "market_entropy"] if name == "entropy" else ["--algorithm", name]
    run = RunDirectory(fit(*FLAGS, *chosen))
    rows = read_table(run.events)
    assert list(rows[0]) == ["ticker", "timestamp", "naive_mse", "weight", "regret", "gradient_norm", "test_mse"]
    assert len(rows) == 40
    weights, regrets, errors = (np.array([float(row[k]) for row in rows]) for k in ("weight", "regret", "test_mse"))
    assert (weights > 0).all()
    assert not np.allclose(weights, 0.1, atol=1e-9)
    with np.load(run.lanes) as lanes:
        rounds, kept = lanes["rounds"], lanes["regret"]
    assert rounds.tolist() == [20]
    assert kept.shape == (1, 40)
    assert np.array_equal(regrets, kept[-1])
    last, summary = read_table(run.metrics)[-1], json.loads(run.summary.read_text())
    assert float(last["regret/euclidean"]) == pytest.approx(np.median(regrets), rel=1e-12)
    assert float(last["test_mse"]) == pytest.approx(np.median(errors), rel=1e-6)
    assert last["test_mse_se"] == ""
    assert summary["test_mse"] == pytest.approx(errors.mean(), rel=1e-6)
    assert summary["test_mse_median"] == pytest.approx(np.median(errors), rel=1e-6)
    assert summary["test_mse_mad"] == pytest.approx(np.median(np.abs(errors - np.median(errors))), rel=1e-6)


def test_figure_compares_medians_with_the_initial_median(fit, monkeypatch):
    drawn = []
    monkeypatch.setattr("obbo_lightning.training.run.draw_figures", lambda *arguments: drawn.append(arguments) or [])
    fit(*FLAGS)
    stream = MarketStream(**SMALL)
    problem, outer, test = stream.problem(), stream.start(None, 0), stream.test[0]
    errors = problem.scores(outer, problem.solution(outer, test), test)["mse"].numpy()
    assert drawn[0][3] == pytest.approx(np.median(errors), rel=1e-9)
    assert abs(np.mean(errors) - np.median(errors)) > 0.05  # so a mean would be noticed


@pytest.mark.slow
@pytest.mark.skipif(not (REAL / "prices.parquet").exists(), reason="needs ../shared/data/market/prices.parquet")
@pytest.mark.parametrize(
    "names",
    [
        ("obbo", "sobow", "adam"),
        pytest.param(("obbo", "sobow", "adam", "oagd"), marks=pytest.mark.nightly),  # solves 25 times as much
    ],
    ids=len,
)
def test_on_the_real_events_obbo_has_the_lowest_median_regret_and_error(names, fit):
    found, files = {}, ["--data.prices", REAL / "prices.parquet", "--data.events", REAL / "events.csv"]
    for name in names:
        run = fit("--config", "market", "--algorithm", name, *files, output=name)
        found[name] = json.loads((run / "summary.json").read_text())
        assert len(read_table(run / "events.csv")) == 440
    for key in ("regret_euclidean", "test_mse_median"):
        assert min(found, key=lambda name: found[name][key]) == "obbo"
