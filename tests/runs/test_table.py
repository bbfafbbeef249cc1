"""The table of rounds: written and cut, and read in one way."""

import csv
import math

import polars as pl
import pytest

from obbo_lightning.runs.table import RoundTable, read_rounds

COLUMNS = ["round", "loss", "test_loss", "regret/exact"]
ROWS = [
    {"round": 1, "loss": 0.1},
    {"round": 2, "loss": 1e-300, "test_loss": math.nan},
    {"round": 3, "loss": math.inf, "test_loss": 2 / 3},
]


@pytest.fixture
def table(tmp_path):
    table = RoundTable(tmp_path / "metrics.csv", COLUMNS)
    table.cut(0)
    for row in ROWS:
        table.append(row)
    table.close()
    return table.path


def test_all_columns_are_numbers_and_empty_cells_are_null(table):
    found = read_rounds(table)
    assert found.columns == COLUMNS
    assert found.dtypes == [pl.Float64] * 4
    assert found["round"].to_list() == [1.0, 2.0, 3.0]
    assert found["test_loss"].is_null().to_list() == [True, False, False]
    assert found["regret/exact"].to_list() == [None] * 3  # a column without any number


def test_numbers_are_read_to_the_last_bit(table):
    with table.open(newline="") as file:
        written = [row["loss"] for row in csv.DictReader(file)]
    assert read_rounds(table)["loss"].to_list() == [float(text) for text in written]
    assert [math.isnan(x) for x in read_rounds(table)["test_loss"][1:]] == [True, False]
    assert read_rounds(table)["test_loss"][2] == 2 / 3


def test_a_header_alone_has_no_rounds(tmp_path):
    (tmp_path / "metrics.csv").write_text("round,loss\n")
    assert read_rounds(tmp_path / "metrics.csv").shape == (0, 2)


@pytest.mark.parametrize("text", ["", "round,loss\n1,oops\n", "round,loss\n1,2,3\n"])
def test_what_is_no_table_is_refused_by_polars(text, tmp_path):
    (tmp_path / "metrics.csv").write_text(text)
    with pytest.raises(pl.exceptions.PolarsError):
        read_rounds(tmp_path / "metrics.csv")


def test_a_table_is_cut_where_its_run_goes_on(table):
    again = RoundTable(table, COLUMNS)
    again.cut(2)
    again.append({"round": 3, "loss": 7.0})
    again.close()
    assert read_rounds(table)["loss"].to_list() == [0.1, 1e-300, 7.0]
    with pytest.raises(ValueError, match="must hold 5 rounds to continue from, got 3"):
        again.cut(5)


def test_a_row_that_is_amended_stands_once_and_a_zero_is_written(tmp_path):
    written = RoundTable(tmp_path / "metrics.csv", ["round", "loss", "skipped"])
    written.cut(0)
    written.append({"round": 1, "loss": 0.0, "skipped": 0})
    written.append({"round": 2, "loss": 0.25})
    written.amend({"round": 2, "loss": 0.25, "skipped": 3})
    written.append({"round": 3, "loss": 1.5, "skipped": None})
    written.sync()
    written.close()
    assert (tmp_path / "metrics.csv").read_text() == "round,loss,skipped\n1,0.0,0\n2,0.25,3\n3,1.5,\n"
