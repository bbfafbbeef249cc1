"""Price files as people have them: names of columns, a file a ticker, dates without times."""

import polars as pl
import pytest
import torch
import yaml

from obbo_lightning import cli
from obbo_lightning.streams.market.prices import read_events, read_prices, simulate_market
from obbo_lightning.streams.market.stream import MarketStream

SMALL = {"subset": 30, "subsets": 20, "horizon": 10}
HEADINGS = ("ticker", "timestamp", "close")


@pytest.fixture(scope="module")
def tables():
    """Three tickers of 80 days, an event in the 60th of each."""
    prices, _ = simulate_market(3, 60, 20, seed=1)
    day = pl.date_range(pl.date(2021, 1, 4), pl.date(2021, 3, 24), eager=True)
    prices = prices.drop("row").with_columns(timestamp=pl.concat([day] * 3))
    return prices, prices.filter(pl.col("timestamp") == day[59]).drop("close")


@pytest.fixture
def folder(tables, tmp_path):
    """A file a ticker, with the columns of finance sites in three spellings; and events.csv beside the folder."""
    (tmp_path / "prices").mkdir()
    for (ticker,), part in tables[0].partition_by("ticker", as_dict=True).items():
        adjusted = part.with_columns(adjusted=pl.col("close") / 2, volume=pl.lit(10))
        names = {"SIM000": "Date", "SIM001": "DATE", "SIM002": "datetime"}
        table = adjusted.select(
            pl.col("timestamp").alias(names[ticker]), Open="close", Close="close", **{"Adj Close": "adjusted"}
        )
        table.write_csv(tmp_path / "prices" / f"{ticker}.csv")
    (tmp_path / "prices" / "README.md").write_text("no prices")
    tables[1].write_csv(tmp_path / "events.csv")
    return tmp_path


def stream(prices, events, **settings):
    return MarketStream(str(prices), str(events), **{**SMALL, **settings})


def test_a_file_a_ticker_is_one_file_with_all_of_them(tables, folder):
    tables[0].write_csv(folder / "all.csv")
    whole, parts = (stream(folder / name, folder / "events.csv") for name in ("all.csv", "prices"))
    assert torch.equal(whole.train.values, parts.train.values)
    assert whole.lanes.equals(parts.lanes)


def test_files_of_both_kinds_and_with_a_ticker_column_may_stand_in_a_folder(tables, folder):
    expected = stream(folder / "prices", folder / "events.csv").train.values
    for ticker in ("SIM000", "SIM001"):
        (folder / "prices" / f"{ticker}.csv").unlink()
    tables[0].filter(pl.col("ticker") != "SIM002").rename({"ticker": "Symbol"}).write_parquet(
        folder / "prices" / "two.parquet"
    )
    assert torch.allclose(stream(folder / "prices", folder / "events.csv").train.values, expected, rtol=1e-15)


def test_our_own_names_win_over_the_usual_ones(tables, tmp_path):
    decoys = tables[0].with_columns(Date=pl.lit("soon"), Close=pl.lit("dear"), symbol=pl.lit("X"))
    decoys.select("symbol", "Close", "Date", *HEADINGS).write_csv(tmp_path / "prices.csv")
    assert read_prices(tmp_path / "prices.csv").select("ticker", "close").equals(tables[0].select("ticker", "close"))


@pytest.mark.parametrize("columns", ["timestamp=Date, close=Adj Close", {"timestamp": "Date", "close": "Adj Close"}])
def test_columns_are_named_as_words_and_as_a_mapping(folder, columns):
    found = read_prices(folder / "prices" / "SIM000.csv", columns)
    usual = read_prices(folder / "prices" / "SIM000.csv")
    assert found["ticker"].unique().to_list() == ["SIM000"]
    assert (found["close"] == usual["close"] / 2).all()


def test_columns_of_flags_and_files_are_kept_in_the_settings(folder, capsys):
    (folder / "mine.yaml").write_text("data: {name: market, columns: {timestamp: Date, close: Adj Close}}\n")
    for flags in (["--config", str(folder / "mine.yaml")], ["--data.columns.close", "Adj Close"]):
        assert cli.main(["fit", "--config", "market", *flags, "--print_config"]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["data"]["columns"]["close"] == "Adj Close"
    words = "timestamp=Date,close=Close"
    assert cli.main(["fit", "--config", "market", "--data.columns", words, "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["data"]["columns"] == words


def test_events_have_the_names_of_the_prices_or_the_usual_ones(tables, tmp_path):
    named = "ticker=Stock,timestamp=Day,close=Last"
    tables[1].rename({"ticker": "Stock", "timestamp": "Day"}).write_csv(tmp_path / "one.csv")
    tables[1].rename({"ticker": "SYMBOL", "timestamp": "Date"}).write_csv(tmp_path / "two.csv")
    assert read_events(tmp_path / "one.csv", named).equals(read_events(tmp_path / "two.csv", named))


def text_in(name, text):
    return lambda folder: (folder / "prices" / name).write_text(text)


@pytest.mark.parametrize(
    ("spoil", "columns", "message"),
    [
        (text_in("A.csv", "Day,Close\n"), None, "A.csv must have the columns timestamp, close, and has no timestamp"),
        (text_in("A.csv", "Day,Close\n"), None, "only Day, Close (data.columns says which is which: timestamp=…)"),
        (text_in("A.csv", "Date,DATE,Close\n"), None, "A.csv must have one column for timestamp, and has Date, DATE"),
        (text_in("A.csv", "Date,Close\n2021-01-04,1\nsoon,1\n"), None, "A.csv, column Date, row 2: timestamp must be"),
        (text_in("A.csv", "Date,Close\n13/01/21,1\n"), None, "like 2021-01-04 or 2021-01-04 09:30:00, got '13/01/21'"),
        (text_in("A.csv", "Symbol,Date,Close\n,2021-01-04,1\n"), None, "A.csv, column Symbol, row 1: ticker must be"),
        (text_in("A.csv", "Date,Close\n2021-01-04T00:00:00Z,1\n"), None, "with a time zone where A.csv has them"),
        (
            text_in("SIM000.txt", "Date,Close\n2021-01-04,1\n"),
            None,
            "prices/SIM000.txt, ticker SIM000, row 1: time",
        ),
        (
            text_in("SIM001.csv", "Date,Close\n2021-01-04,null\n"),
            None,
            "prices/SIM001.csv, ticker SIM001, row 1: a p",
        ),
        (text_in("A.csv", "Date,Close\n2021-01-04,1\n"), "close=Last", "must have the column 'Last' that data.columns"),
        (lambda folder: None, "Close", "data.columns must be like timestamp=Date,close=Close, got 'Close'"),
        (lambda folder: None, "Close=close", "data.columns must name ticker, timestamp, close, as in close=Close, got"),
        (lambda folder: None, "close=A,close=B", "data.columns must name each column once, got 'close=A,close=B'"),
        (lambda folder: [p.unlink() for p in (folder / "prices").glob("*.csv")], None, "prices', which has none (.csv"),
    ],
)
def test_mistakes_in_files_and_columns_are_one_line(folder, capsys, spoil, columns, message):
    spoil(folder)
    flags = [word for key, value in SMALL.items() for word in (f"--data.{key}", str(value))]
    flags += ["--data.prices", str(folder / "prices"), "--data.events", str(folder / "events.csv")]
    flags += ["--data.columns", columns] if columns else []
    assert cli.main(["fit", "--config", "market", "--rounds", "20", *flags, "--output", str(folder / "runs")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (folder / "runs").exists()


def test_a_folder_is_no_file_of_events(folder):
    with pytest.raises(ValueError, match=r"data.events must be a parquet or CSV file, got .* which is a folder"):
        stream(folder / "prices", folder / "prices")
