"""A market run's forecast, against the spline drawn by hand with dense linear algebra."""

import shutil
import warnings
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from as_played import as_if_played

from obbo_lightning import cli, forecast
from obbo_lightning.runs.checkpoints import list_checkpoints, read_checkpoint
from obbo_lightning.streams.market_data import simulate_market

SUBSET, SUBSETS, HORIZON = 30, 20, 10
SMALL = ["--config", "market", "--rounds", "20", "--checkpoint.every", "10"]
SMALL += ["--data.subset", "30", "--data.subsets", "20", "--trainer.enable_progress_bar", "false"]


def play(folder, prices, events, *flags):
    named = ["--data.prices", str(prices), "--data.events", str(events)]
    assert cli.main(["fit", *SMALL, *named, *flags, "--output", str(folder / "runs")]) == 0
    (run,) = (folder / "runs").glob("*/*")
    return run


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished run on a folder of Date,Close files: three tickers of 80 bars, an event in the 60th of each."""
    folder = tmp_path_factory.mktemp("market")
    prices, events = simulate_market(3, 60, 20, seed=1)
    (folder / "prices").mkdir()
    for (ticker,), part in prices.partition_by("ticker", as_dict=True).items():
        part.select(Date="timestamp", Open="close", Close="close").write_csv(folder / "prices" / f"{ticker}.csv")
    events.select("ticker", "timestamp").write_csv(folder / "events.csv")
    # A large step, so that the weights are apart from each other and from where they start.
    step = ["--algorithm.lr", "0.05", "--data.horizon", str(HORIZON)]
    return play(folder, folder / "prices", folder / "events.csv", *step), prices, folder


def assert_refused(capsys, arguments, message):
    capsys.readouterr()
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def by_hand(closes, bar, weight, bars):
    """min Σ (y − β)² + λ Σ (β_{i+1} − β_i)², y the standardised log prices; in prices, constant behind the event."""
    logs = np.log(closes[bar + 1 - SUBSET : bar + 1])
    y = (logs - logs.mean()) / logs.std()
    differences = np.diff(np.eye(SUBSET), axis=0)
    beta = np.linalg.solve(np.eye(SUBSET) + weight * differences.T @ differences, y)
    return np.exp(logs.mean() + logs.std() * np.concatenate([beta, np.full(bars, beta[-1])]))


@pytest.mark.parametrize("round_", [10, 20])
def test_curve_and_forecast_are_those_of_a_dense_solve_with_the_checkpoints_weights(made, round_):
    run, prices, _ = made
    file = run / "checkpoints" / f"round-{round_:08d}.ckpt"
    weights = read_checkpoint(file)["state_dict"]["outer"][:, 0].numpy()
    assert len(set(weights)) == 3
    found = forecast(run, checkpoint=file, bars=25)
    assert found.events["weight"].to_list() == weights.tolist()
    for lane, ticker in enumerate(("SIM000", "SIM001", "SIM002")):
        closes = prices.filter(pl.col("ticker") == ticker)["close"].to_numpy()
        curve = found.curves.filter(pl.col("ticker") == ticker)
        expected = by_hand(closes, 59, weights[lane], 25)
        assert curve["step"].to_list() == list(range(-29, 26))
        assert np.allclose(curve["fitted"][:SUBSET], expected[:SUBSET], rtol=1e-12)
        assert np.allclose(curve["forecast"][SUBSET:], expected[SUBSET:], rtol=1e-12)
        assert curve["fitted"][SUBSET:].null_count() == curve["forecast"][:SUBSET].len() - 5
        assert (curve["last_value"][SUBSET:] == closes[59]).all()
        assert np.allclose(curve["actual"][: SUBSET + 20], closes[30:80], rtol=1e-15)  # and none behind the last price
        assert curve["actual"][SUBSET + 20 :].null_count() == curve["timestamp"][SUBSET + 20 :].null_count() == 5
        event = found.events.row(lane, named=True)
        assert event["bars_known"] == 20
        assert event["rmse"] == pytest.approx(np.sqrt(np.mean((expected[-1] - closes[60:80]) ** 2)), rel=1e-12)
        assert event["last_value_rmse"] == pytest.approx(np.sqrt(np.mean((closes[59] - closes[60:80]) ** 2)), rel=1e-12)


def test_errors_of_the_runs_own_bars_are_those_of_the_run(made):
    run, _, _ = made
    found, judged = forecast(run).events, pl.read_csv(run / "events.csv")
    assert found["mse"].to_list() == judged["test_mse"].to_list()
    assert found["last_value_mse"].to_list() == judged["naive_mse"].to_list()


def test_prices_that_end_at_the_event_give_a_forecast_without_errors(made, tmp_path, capsys):
    run, prices, folder = made
    ended = tmp_path / "ended.csv"
    moment = pl.read_csv(folder / "events.csv", try_parse_dates=True)["timestamp"][0]
    kept = prices.filter(pl.col("timestamp") <= moment)
    kept.select(Symbol="ticker", WHEN="timestamp", Last="close").write_csv(ended)
    flags = ["--data.prices", str(ended), "--data.columns", "timestamp=WHEN,close=Last", "--bars", "7"]
    output = tmp_path / "new" / "next.csv"
    assert cli.main(["predict", str(run), *flags, "--output", str(output)]) == 0
    assert "nothing to judge by yet" in " ".join(capsys.readouterr().out.split())
    written = sorted(path.name for path in output.parent.iterdir())
    assert written == ["next.csv", "next.png", "next.svg", "next_events.csv"]
    curves, events = pl.read_csv(output), pl.read_csv(output.with_name("next_events.csv"))
    assert curves.filter(pl.col("step") > 0).select("timestamp", "actual").null_count().row(0) == (21, 21)
    assert events.select("rmse", "last_value_rmse", "mse", "last_value_mse").null_count().row(0) == (3, 3, 3, 3)
    whole = forecast(run, bars=7).curves
    assert np.allclose(curves["forecast"].drop_nulls(), whole["forecast"].drop_nulls(), rtol=1e-15)


def test_a_run_on_prices_that_end_at_the_event_is_played_and_forecast(made, tmp_path, capsys):
    first, prices, folder = made
    moment = pl.read_csv(folder / "events.csv", try_parse_dates=True)["timestamp"][0]
    prices.filter(pl.col("timestamp") <= moment).drop("row").write_parquet(tmp_path / "ended.parquet")
    run = play(tmp_path, tmp_path / "ended.parquet", folder / "events.csv", "--data.horizon", "0")
    found = forecast(run)
    assert found.events["bars_known"].to_list() == [0, 0, 0]
    assert found.events["weight"].to_list() == pl.read_csv(run / "events.csv")["weight"].to_list()
    assert "test_mse" not in pl.read_csv(run / "events.csv").columns
    # Its λ are of the same events, and yet of another run.
    file = list_checkpoints(run / "checkpoints")[-1]
    assert_refused(capsys, ["predict", str(first), "--checkpoint", str(file)], "is of another run: algorithm.lr")


def test_chosen_events_keep_their_own_weights_in_any_order(made, tmp_path):
    run, _, folder = made
    lines = (folder / "events.csv").read_text().splitlines()
    (tmp_path / "some.csv").write_text("\n".join([lines[0], lines[3], lines[1]]) + "\n")
    everything, some = forecast(run), forecast(run, events=tmp_path / "some.csv")
    assert some.events.equals(everything.events[[2, 0]])
    picked = everything.curves.filter(pl.col("ticker") == "SIM002")
    assert some.curves[: len(picked)].equals(picked)


def test_simulated_prices_are_made_again(tmp_path):
    assert cli.main(["fit", *SMALL, "--data.horizon", "5", "--seed", "3", "--output", str(tmp_path)]) == 0
    (run,) = tmp_path.glob("*/*")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = forecast(run)
    assert found.events["mse"].to_list() == pl.read_csv(run / "events.csv")["test_mse"].to_list()
    drawn = found.write(tmp_path / "many.csv")  # 40 events, of which a few are drawn
    assert all(path.stat().st_size for path in drawn)


def test_other_prices_are_noticed(made, tmp_path):
    run, prices, _ = made
    bent = prices.with_columns(close=pl.when(pl.col("row") == 50).then(1.0).otherwise("close")).drop("row")
    bent.write_parquet(tmp_path / "other.parquet")
    with pytest.warns(UserWarning, match="around 1 of 3 events are not those of the run; first SIM000"):
        forecast(run, prices=tmp_path / "other.parquet")


def spoiled(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    return copy


def swap_events(run):
    """Events and lanes that do not agree, as the run itself wrote them."""
    lines = (run / "events.csv").read_text().splitlines()
    (run / "events.csv").write_text("\n".join([lines[0], lines[2], lines[1], lines[3]]) + "\n")
    as_if_played(run)


def drop_an_event(run):
    lines = (run / "events.csv").read_text().splitlines()
    (run / "events.csv").write_text("\n".join(lines[:-1]) + "\n")
    as_if_played(run)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (swap_events, "events.csv must be of the same events as lanes.npz, and is not"),
        (drop_an_event, "events.csv must be of the same events as lanes.npz, and is not"),
        (lambda run: (run / "events.csv").unlink(), "events.csv is damaged: it is not what the run wrote"),
        (lambda run: (run / "lanes.npz").write_text("?"), "is damaged"),
        (lambda run: (run / "config.yaml").unlink(), "is no run directory"),
        (lambda run: [path.unlink() for path in list_checkpoints(run / "checkpoints")], "no checkpoint in"),
        (lambda run: list_checkpoints(run / "checkpoints")[-1].write_text("?"), "is damaged (its checksum differs)"),
    ],
)
def test_a_run_whose_files_do_not_agree_is_one_line(made, tmp_path, capsys, spoil, message):
    run = spoiled(made[0], tmp_path)
    spoil(run)
    assert_refused(capsys, ["predict", str(run), "--output", str(tmp_path / "out.csv")], message)
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--bars", "0"], "bars must be an integer of at least 1, got 0"),
        (["--bars", "many"], "predict: argument --bars: invalid int value: 'many'"),
        (["--steps", "3"], "predict: unrecognized arguments: --steps 3"),
        (["--data.prices", "nowhere.csv"], "data.prices must be a parquet or CSV file, or a folder of them, got 'nowh"),
        (["--data.columns", "price=Close"], "data.columns must name ticker, timestamp, close, as in close=Close"),
        (["--checkpoint", "none.ckpt"], "checkpoint none.ckpt does not exist"),
        (["--output", "forecast.png"], "output must be a CSV file, like forecast.csv, got 'forecast.png'"),
    ],
)
def test_mistakes_are_one_line(made, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    assert_refused(capsys, ["predict", str(made[0]), *flags], message)
    assert not list(tmp_path.iterdir())


def test_an_event_that_is_not_the_runs_is_refused(made, tmp_path, capsys):
    (tmp_path / "events.csv").write_text("ticker,timestamp\nSIM001,2021-01-06 20:30:00\nSIM001,2021-01-05 20:30:00\n")
    message = "events.csv, row 2: must be one of the 3 events of"
    assert_refused(capsys, ["predict", str(made[0]), "--data.events", str(tmp_path / "events.csv")], message)


def test_a_run_of_something_else_is_refused():
    other = Path(__file__).parents[1] / "fixtures" / "runs_of_0.1.0" / "quadratic"
    with (
        pytest.warns(UserWarning, match="has no manifest.json"),
        pytest.raises(ValueError, match="a forecast needs a run with --data market, got"),
    ):
        forecast(other)


def test_a_run_that_went_on_behind_its_events_forecasts_from_where_it_ended(made, tmp_path, capsys):
    _, prices, folder = made
    flags = ["--data.horizon", "10", "--data.beyond", "4", "--rounds", "24"]
    run = play(tmp_path, folder / "prices", folder / "events.csv", *flags)
    found = forecast(run)
    for ticker, weight in found.events.select("ticker", "weight").iter_rows():
        closes = prices.filter(pl.col("ticker") == ticker)["close"].to_numpy()
        curve = found.curves.filter(pl.col("ticker") == ticker)
        expected = by_hand(closes, 63, weight, 10)
        assert np.allclose(curve["fitted"][:SUBSET], expected[:SUBSET], rtol=1e-12)
        assert np.allclose(curve["forecast"][SUBSET:], expected[SUBSET:], rtol=1e-12)
    judged = pl.read_csv(run / "events.csv")
    assert np.allclose(found.events["mse"], judged["test_mse"], rtol=1e-12)
