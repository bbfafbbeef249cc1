"""Market events: from files to forecasts."""

import csv
import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from toy import F64, SIX

from obbo_lightning import OBBO, cli, online
from obbo_lightning.domains import Box
from obbo_lightning.hypergradients import ClosedForm
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.streams.market.prices import detect_events, simulate_market
from obbo_lightning.streams.market.stream import MarketStream, training_mask

ROOT = Path(__file__).parents[2]
REAL = ROOT.parent / "shared" / "data" / "market"
SMALL = {"subset": 30, "subsets": 20, "horizon": 10}
FLAGS = ["--config", str(ROOT / "configs" / "market.yaml"), "--rounds", "20", "--checkpoint.every", "5"]
FLAGS += [word for key, value in SMALL.items() for word in (f"--data.{key}", str(value))]


@pytest.fixture
def files(tmp_path):
    """Three tickers of 80 bars, an event in the 60th of each; returns paths of both files."""
    prices, events = simulate_market(3, 60, 20, seed=1)
    prices.drop("row").write_parquet(tmp_path / "prices.parquet")
    events.write_csv(tmp_path / "events.csv")
    return tmp_path / "prices.parquet", tmp_path / "events.csv"


def small_stream(files, **settings):
    return MarketStream(str(files[0]), str(files[1]), **{**SMALL, **settings})


def read_rows(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def algorithm(**settings):
    return OBBO(lr=1e-2, window=3, hypergradient=ClosedForm(), domain=Box(1e-6, 1e6), **settings)


def play(stream, rounds, lanes=slice(None)):
    tasks = [{k: v[lanes] if v.ndim == 2 else v for k, v in stream.train[t].items()} for t in range(rounds)]
    return list(online(stream.problem(), algorithm(), tasks, stream.start(None, 0)[lanes]))


def test_rounds_are_rolling_views_that_end_before_the_event(files):
    stream = small_stream(files, transform="none")
    prices = pl.read_parquet(files[0]).partition_by("ticker")
    raw = np.stack([p["close"].to_numpy() for p in prices], axis=1)[10:70]  # 50 up to the event, 10 behind
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


def test_nothing_of_the_future_is_looked_at(files):
    known, poisoned = small_stream(files), small_stream(files)
    t = 9
    poisoned.train.values[t + 30 :] = torch.nan
    one, two = play(known, t + 1), play(poisoned, t + 1)
    assert torch.equal(one[-1].outer, two[-1].outer)
    assert bool(
        torch.isnan(poisoned.train[t + 1]["values"]).any() or torch.isnan(poisoned.train[t + 3]["values"]).any()
    )


def test_an_event_alone_equals_the_event_among_others(files):
    stream = small_stream(files)
    together = play(stream, 20)[-1].outer
    for lane in range(3):
        assert torch.equal(play(stream, 20, slice(lane, lane + 1))[-1].outer[0], together[lane])
    pl.read_csv(files[1])[1:2].write_csv(files[1])
    assert torch.equal(play(small_stream(files), 20)[-1].outer[0], together[1])


def test_validation_by_stride_and_at_random():
    stride = training_mask(30, "stride", 5, 2, 0)
    assert (~stride).nonzero().flatten().tolist() == [2, 7, 12, 17, 22, 27]
    one, again, other = (training_mask(30, "random", 5, 2, seed) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert int((~one).sum()) == 6
    assert bool(one[0])
    assert bool(one[-1])  # the interior only


def jump_table(jumps, bars=400, tickers=6):
    rng = np.random.default_rng(0)
    times = np.datetime64("2021-01-04T00:00:00", "us") + np.arange(bars) * np.timedelta64(1, "h")
    market = 0.02 * rng.normal(size=bars)  # all of them share it: it must not count
    tables = []
    for k in range(tickers):
        steps = market + 0.001 * rng.normal(size=bars)
        for bar, size in jumps.get(k, []):
            steps[bar] += size
        close = 50 * np.exp(np.cumsum(steps))
        tables.append(pl.DataFrame({"ticker": f"T{k}", "timestamp": times, "close": close}))
    return pl.concat(tables).with_row_index("row", offset=1), times


def test_auto_finds_what_was_planted_and_nothing_else():
    table, times = jump_table({1: [(200, 0.05), (230, -0.05), (330, 0.05)], 4: [(50, 0.05), (300, -0.04)]})
    found = detect_events(table, threshold=8, lookback=100, gap=60)
    expected = [("T1", times[200]), ("T4", times[300]), ("T1", times[330])]  # 230 is too near, 50 has no past
    assert [(t, np.datetime64(w)) for t, w in found.select("ticker", "timestamp").iter_rows()] == expected
    room = detect_events(table, threshold=8, lookback=100, gap=60, before=250, after=80)
    assert room["ticker"].to_list() == ["T4"]


def test_auto_does_not_look_ahead():
    table, times = jump_table({1: [(200, 0.05)], 2: [(390, 0.05)]})
    whole = detect_events(table, lookback=100)
    past = detect_events(table.filter(pl.col("timestamp") <= times[250]), lookback=100)
    assert whole.filter(pl.col("timestamp") <= times[250]).equals(past)
    assert len(whole) == 2


def spoil(column, value, row=25):
    def change(table):
        values = table[column].to_list()
        values[row] = value
        return table.with_columns(pl.Series(column, values, dtype=table.schema[column]))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoil("close", float("nan")), "ticker SIM000, row 26: a price must be a positive number, got nan"),
        (spoil("close", -3.0), "ticker SIM000, row 26: a price must be a positive number, got -3.0"),
        (spoil("close", 0.0, 100), "ticker SIM001, row 101: a price must be a positive number, got 0.0"),
        (lambda t: t[[*range(26), 25, *range(26, len(t))]], "row 27: timestamps must occur once"),
        (lambda t: t[[*range(24), 25, 24, *range(26, len(t))]], "row 26: timestamps must increase"),
        (lambda t: t.filter(pl.col("ticker") != "SIM001"), "event SIM001 2021-01-06 20:30:00: the ticker must be in"),
        (lambda t: t[20:], "event SIM000 2021-01-06 20:30:00: must have 50 prices up to it, and has 40"),
        (
            lambda t: pl.concat([t[:65], t[80:]]),
            "event SIM000 2021-01-06 20:30:00: must have 10 prices after it, and has 5",
        ),
        (
            lambda t: pl.concat([t[:40], t[80:]]),
            "must lie in the prices, 2021-01-04 09:30:00 to 2021-01-06 00:30:00, and does not",
        ),
    ],
)
def test_bad_prices_are_one_line_and_skipped_on_request(files, tmp_path, change, message, capsys):
    change(pl.read_parquet(files[0])).write_parquet(files[0])
    flags = [*FLAGS, "--data.prices", str(files[0]), "--data.events", str(files[1]), "--output", str(tmp_path / "runs")]
    assert cli.main(["fit", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()
    with pytest.warns(UserWarning, match="1 of 3 events skipped: "):
        stream = small_stream(files, on_bad_event="skip")
    assert len(stream.skipped) == 1
    assert len(stream.lanes) == 2
    assert message in str(stream.skipped[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p, e: p.unlink(), "prices.parquet', which does not exist"),
        (lambda p, e: p.write_text("no parquet"), "prices.parquet cannot be read as parquet"),
        (lambda p, e: pl.read_parquet(p).drop("close").write_parquet(p), "and has no close"),
        (lambda p, e: pl.read_parquet(p)[:0].write_parquet(p), "prices.parquet must have rows, and is empty"),
        (lambda p, e: pl.read_parquet(p).cast({"close": pl.Boolean}).write_parquet(p), "close must be numbers"),
        (lambda p, e: e.write_text(""), "events.csv cannot be read as CSV"),
        (lambda p, e: e.write_text("ticker,timestamp\n"), "events.csv must have rows, and is empty"),
        (lambda p, e: e.write_text("ticker,when\nA,2021-01-01\n"), "and has no timestamp"),
        (lambda p, e: e.write_text("ticker,timestamp\nSIM000,soon\n"), "row 1: timestamp must be there and readable"),
        (lambda p, e: e.write_text("ticker,timestamp\nSIM000,7\n"), "row 1: timestamp must be there and readable"),
        (lambda p, e: e.write_text("ticker,timestamp\nSIM000,11:00\n"), "row 1: timestamp must be there and readable"),
        (lambda p, e: pl.read_parquet(p).cast({"timestamp": pl.Int64}).write_parquet(p), "must be dates and times"),
        (lambda p, e: e.write_text("ticker,timestamp\nNONE,2021-01-06 20:30:00\n"), "the ticker must be in the prices"),
    ],
)
@pytest.mark.parametrize("on_bad_event", ["raise", "skip"])
def test_bad_files_are_one_line(files, tmp_path, make, message, on_bad_event, capsys):
    make(*files)
    flags = [
        *FLAGS,
        "--data.prices",
        str(files[0]),
        "--data.events",
        str(files[1]),
        "--data.on_bad_event",
        on_bad_event,
    ]
    assert cli.main(["fit", *flags, "--output", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


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
        (["--rounds", "21"], "rounds must be at most the stream's 20 tasks, 1 a round, got 21"),
    ],
)
def test_impossible_settings_are_one_line(flags, message, capsys):
    assert cli.main(["fit", *FLAGS, *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_csv_prices_are_parquet_prices(files, tmp_path):
    pl.read_parquet(files[0]).write_csv(tmp_path / "prices.csv", datetime_format="%Y-%m-%d %H:%M:%S")
    one, two = small_stream(files), small_stream((tmp_path / "prices.csv", files[1]))
    assert torch.allclose(one.train.values, two.train.values, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [*SIX, "entropy"])
def test_every_algorithm_plays_the_market(name, tmp_path, capsys):
    config = ROOT / "configs" / ("market_entropy.yaml" if name == "entropy" else "market.yaml")
    chosen = [] if name == "entropy" else ["--algorithm", name]
    assert cli.main(["fit", *FLAGS, "--config", str(config), *chosen, "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*/*")
    run = RunDirectory(path)
    rows = read_rows(run.events)
    assert list(rows[0]) == ["ticker", "timestamp", "naive_mse", "weight", "regret", "gradient_norm", "test_mse"]
    assert len(rows) == 40
    weights = np.array([float(row["weight"]) for row in rows])
    assert (weights > 0).all()
    assert not np.allclose(weights, 0.1, atol=1e-9)
    with np.load(run.lanes) as lanes:
        rounds, kept = lanes["rounds"], lanes["regret"]
    assert rounds.tolist() == [20]
    assert kept.shape == (1, 40)
    last = read_rows(run.metrics)[-1]
    regrets = np.array([float(row["regret"]) for row in rows])
    assert np.array_equal(regrets, kept[-1])
    assert float(last["regret/euclidean"]) == pytest.approx(np.median(regrets), rel=1e-12)
    assert float(last["test_mse"]) == pytest.approx(np.median([float(row["test_mse"]) for row in rows]), rel=1e-6)
    assert last["test_mse_se"] == ""
    summary = json.loads(run.summary.read_text())
    errors = np.array([float(row["test_mse"]) for row in rows])
    assert summary["test_mse"] == pytest.approx(errors.mean(), rel=1e-6)
    assert summary["test_mse_median"] == pytest.approx(np.median(errors), rel=1e-6)
    assert summary["test_mse_mad"] == pytest.approx(np.median(np.abs(errors - np.median(errors))), rel=1e-6)


def test_the_forecast_error_is_that_of_the_spline_drawn_by_hand(files):
    stream = small_stream(files, transform="none")
    problem, weight = stream.problem(), torch.full((3, 1), 2.0, dtype=F64)
    test = stream.test[0]
    found = problem.scores(weight, problem.solution(weight, test), test)["mse"]
    for lane in range(3):
        y = test["values"][lane].numpy()
        stiffness = np.diff(np.eye(30), axis=0).T @ np.diff(np.eye(30), axis=0)
        last = np.linalg.solve(np.eye(30) + 2.0 * stiffness, y)[-1]
        assert float(found[lane]) == pytest.approx(np.mean((test["validation_values"][lane].numpy() - last) ** 2))


def test_a_market_run_that_was_stopped_goes_on_exactly(tmp_path):
    import shutil

    arguments = ["fit", *FLAGS, "--output", str(tmp_path / "whole")]
    assert cli.main(arguments) == 0
    (whole,) = (tmp_path / "whole").glob("*/*")
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    for name in ("summary.json", "events.csv", "lanes.npz"):
        (cut / name).unlink()
    for old in (cut / "checkpoints").glob("round-00000020*"):
        old.unlink()
    assert cli.main(["resume", str(cut)]) == 0
    for name in ("metrics.csv", "events.csv"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes()
    with np.load(cut / "lanes.npz") as one, np.load(whole / "lanes.npz") as two:
        assert np.array_equal(one["regret"], two["regret"])


@pytest.mark.filterwarnings("ignore:nothing is left to play")
def test_a_market_run_that_was_killed_after_its_last_checkpoint_is_finished_by_resume(tmp_path):
    assert cli.main(["fit", *FLAGS, "--output", str(tmp_path)]) == 0
    (run,) = tmp_path.glob("*/*")
    before = (run / "events.csv").read_bytes()
    for name in ("summary.json", "events.csv", "lanes.npz"):
        (run / name).unlink()
    assert cli.main(["resume", str(run)]) == 0
    assert (run / "events.csv").read_bytes() == before
    assert (run / "summary.json").exists()


def test_the_figure_compares_medians_with_the_median_before_training(tmp_path, monkeypatch):
    from obbo_lightning.training import run as runs

    drawn = []
    monkeypatch.setattr(runs, "draw_figures", lambda *arguments: drawn.append(arguments) or [])
    assert cli.main(["fit", *FLAGS, "--output", str(tmp_path)]) == 0
    stream = MarketStream(**SMALL)
    problem, outer, test = stream.problem(), stream.start(None, 0), stream.test[0]
    errors = problem.scores(outer, problem.solution(outer, test), test)["mse"].numpy()
    assert drawn[0][3] == pytest.approx(np.median(errors), rel=1e-9)
    assert abs(np.mean(errors) - np.median(errors)) > 0.05  # a mean would have been something else


def test_skipped_events_are_listed_in_the_run_directory(files, tmp_path):
    spoil("close", -1.0)(pl.read_parquet(files[0])).write_parquet(files[0])
    flags = ["--data.prices", str(files[0]), "--data.events", str(files[1]), "--data.on_bad_event", "skip"]
    with pytest.warns(UserWarning, match="1 of 3 events skipped"):
        assert cli.main(["fit", *FLAGS, *flags, "--output", str(tmp_path / "runs")]) == 0
    (run,) = (tmp_path / "runs").glob("*/*")
    (row,) = read_rows(run / "skipped.csv")
    assert (row["ticker"], row["row"]) == ("SIM000", "1")
    assert "row 26: a price must be a positive number" in row["reason"]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["events"], summary["events_skipped"]) == (2, 1)


def zoned(path, zone):
    table = pl.read_parquet(path)
    table.with_columns(pl.col("timestamp").dt.replace_time_zone(zone)).write_parquet(path)


def test_time_zones_are_respected_or_refused(files, tmp_path):
    plain = small_stream(files)
    zoned(files[0], "America/New_York")
    with pytest.raises(ValueError, match=r"both have a time zone, or neither; only data.prices has one"):
        small_stream(files)
    files[1].write_text("ticker,timestamp\n" + "".join(f"SIM00{i},2021-01-06T20:30:00-05:00\n" for i in range(3)))
    assert torch.equal(small_stream(files).train.values, plain.train.values)


def test_tickers_may_look_like_numbers_and_prices_begin_with_whole_ones(files, tmp_path):
    names = {"SIM000": "000660", "SIM001": "1E5"}
    rename = pl.col("ticker").replace(names)
    prices = pl.read_parquet(files[0]).with_columns(rename)
    closes = [str(round(c)) if i < 30 else str(c) for i, c in enumerate(prices["close"])]
    prices.with_columns(close=pl.Series(closes)).write_csv(tmp_path / "prices.csv")
    pl.read_csv(files[1]).with_columns(rename).write_csv(files[1])
    stream = small_stream((tmp_path / "prices.csv", files[1]))
    assert stream.lanes["ticker"].to_list() == ["000660", "1E5", "SIM002"]


def test_an_event_counts_once(files):
    text = files[1].read_text()
    files[1].write_text(text + text.splitlines()[1] + "\n")
    with pytest.raises(ValueError, match=r"row 4, event SIM000 .* must occur once, and is in row 1 too"):
        small_stream(files)
    with pytest.warns(UserWarning, match="1 of 4 events skipped"):
        assert len(small_stream(files, on_bad_event="skip").lanes) == 3


def test_a_single_ticker_has_no_market_to_be_measured_against():
    table, times = jump_table({0: [(200, 0.5)]}, tickers=1)
    assert detect_events(table, lookback=100)["timestamp"].to_list() == [times[200].astype(object)]


@pytest.mark.slow
@pytest.mark.skipif(not (REAL / "prices.parquet").exists(), reason="needs ../shared/data/market/prices.parquet")
@pytest.mark.parametrize(
    "names",
    [
        ("obbo", "sobow", "adam"),
        pytest.param(("obbo", "sobow", "adam", "oagd"), marks=pytest.mark.nightly),  # it solves 25 times as much
    ],
    ids=len,
)
def test_on_the_real_events_obbo_has_the_lowest_median_regret_and_error(names, tmp_path):
    found = {}
    for name in names:
        flags = ["--config", str(ROOT / "configs" / "market.yaml"), "--algorithm", name]
        flags += ["--data.prices", str(REAL / "prices.parquet"), "--data.events", str(REAL / "events.csv")]
        assert cli.main(["fit", *flags, "--output", str(tmp_path / name)]) == 0
        (path,) = (tmp_path / name).glob("*/*")
        found[name] = json.loads((path / "summary.json").read_text())
        assert len(read_rows(path / "events.csv")) == 440
    for key in ("regret_euclidean", "test_mse_median"):
        assert min(found, key=lambda name: found[name][key]) == "obbo"
