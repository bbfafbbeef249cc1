"""Tables of rounds: written, continued, verified and read."""

import math
import os

import polars as pl
import pytest

from obbo_lightning.runs.table import RoundTable, read_rounds, require_rows, restore_last_row, restore_timings

COLUMNS = ["round", "loss", "test_loss", "regret/exact"]
ROWS = [
    {"round": 1, "loss": 0.1},
    {"round": 2, "loss": 1e-300, "test_loss": math.nan},
    {"round": 3, "loss": math.inf, "test_loss": 2 / 3},
]


def write(path, rows, columns=COLUMNS, **options):
    table = RoundTable(path, columns, **options)
    table.open(0)
    for row in rows:
        table.append(row)
    table.close()
    return table


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "metrics.csv", ROWS).path


def test_all_columns_are_numbers_with_all_digits_and_empty_cells_are_null(path, tmp_path):
    rounds = read_rounds(path)
    assert (rounds.columns, rounds.dtypes) == (COLUMNS, [pl.Float64] * 4)
    assert rounds["round"].to_list() == [1.0, 2.0, 3.0]
    assert rounds["loss"].to_list() == [row["loss"] for row in ROWS]
    assert rounds["test_loss"].is_null().to_list() == [True, False, False]
    assert [math.isnan(x) for x in rounds["test_loss"][1:]] == [True, False]
    assert rounds["test_loss"][2] == 2 / 3
    assert rounds["regret/exact"].to_list() == [None] * 3  # a column without any number
    (tmp_path / "none.csv").write_text("round,loss\n")
    assert read_rounds(tmp_path / "none.csv").shape == (0, 2)


@pytest.mark.parametrize("text", ["", "round,loss\n1,oops\n", "round,loss\n1,2,3\n"])
def test_a_file_that_is_no_table_is_refused_by_polars(text, tmp_path):
    (tmp_path / "metrics.csv").write_text(text)
    with pytest.raises(pl.exceptions.PolarsError):
        read_rounds(tmp_path / "metrics.csv")


@pytest.mark.parametrize(
    ("every", "rounds", "last"), [(1, 5, "5"), (4, 8, "8"), (4, 11, "8"), (4, 12, "12"), (1, 12, "12")]
)
def test_a_continued_table_drops_later_rows_and_returns_its_last_one(every, rounds, last, tmp_path):
    rows = [{"round": t, "x": 0.5 * t} for t in range(every, 13, every)]
    table = write(tmp_path / "x.csv", rows, ["round", "x"], every=every)
    assert table.open(rounds) == {"round": last, "x": str(0.5 * int(last))}
    table.replace_last({"round": last, "x": 9})
    table.append({"round": 99, "x": None})
    table.close()
    lines = (tmp_path / "x.csv").read_text().splitlines()
    assert lines[-2:] == [f"{last},9", "99,"]
    assert len(lines) == rounds // every + 2
    assert os.listdir(tmp_path) == ["x.csv"]


def test_a_table_that_is_too_short_or_has_other_columns_is_not_continued(path):
    for columns, rounds in ((COLUMNS, 5), (["round", "y"], 2)):
        with pytest.raises(ValueError, match=f"must hold {rounds} rounds to continue, got 3"):
            RoundTable(path, columns).open(rounds)


def test_the_first_row_names_the_columns_where_they_are_not_given(tmp_path):
    write(tmp_path / "x.csv", [{"round": 1, "a": 2}, {"round": 2, "b": 3}], columns=None)
    assert (tmp_path / "x.csv").read_text() == "round,a\n1,2\n2,\n"
    again = RoundTable(tmp_path / "x.csv")
    assert again.open(2) == {"round": "2", "a": ""}
    assert again.columns == ["round", "a"]
    again.close()


def test_a_replaced_row_is_written_once_and_a_zero_is_a_number(tmp_path):
    table = RoundTable(tmp_path / "metrics.csv", ["round", "loss", "skipped"])
    table.open(0)
    table.append({"round": 1, "loss": 0.0, "skipped": 0})
    table.append({"round": 2, "loss": 0.25})
    table.replace_last({"round": 2, "loss": 0.25, "skipped": 3})
    table.append({"round": 3, "loss": 1.5, "skipped": None})
    table.sync()
    table.close()
    assert (tmp_path / "metrics.csv").read_text() == "round,loss,skipped\n1,0.0,0\n2,0.25,3\n3,1.5,\n"


def test_some_columns_are_kept_in_memory_also_from_before_a_resume(path):
    table = RoundTable(path, COLUMNS, history=["loss", "test_loss"])
    table.open(2)
    table.append({"round": 3, "loss": 7.0, "test_loss": 1.0})
    table.replace_last({"round": 3, "loss": 8.0})
    table.close()
    assert table.history["loss"] == [0.1, 1e-300, 8.0]
    assert [math.isnan(value) for value in table.history["test_loss"]] == [True, True, True]


def test_a_mark_recognises_its_rows_and_restores_the_last_one(path):
    table = RoundTable(path, COLUMNS)
    table.open(3)
    mark = table.mark()
    table.append({"round": 4, "loss": 1.0})
    table.close()
    assert mark["rows"] == 3
    require_rows(path, mark)  # a row after it may be there
    with pytest.raises(ValueError, match="is damaged: it does not end with the last round"):
        require_rows(path, mark, complete=True)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], "3,another\n", lines[4]]))
    require_rows(path, mark)
    restore_last_row(path, mark)
    assert path.read_text() == "".join(lines)
    path.write_text("".join([lines[0], lines[2], lines[1], lines[3]]))
    with pytest.raises(ValueError, match="is damaged: its first 3 rounds are not those that the run wrote"):
        require_rows(path, mark)
    path.unlink()
    with pytest.raises(ValueError, match="is damaged: it cannot be read"):
        require_rows(path, mark)


@pytest.mark.parametrize("text", ["", "nothing", "round,seconds,evaluation_seconds\n2,1.0,\n", "round,seconds\n1,1\n"])
def test_damaged_timings_are_replaced_by_unknown_ones(text, tmp_path):
    path, whole = tmp_path / "timings.csv", "round,seconds,evaluation_seconds\n1,0.5,\n2,0.5,1.0\n"
    path.write_text(whole)
    restore_timings(path, 2)
    assert path.read_text() == whole
    path.write_text(text)
    restore_timings(path, 2)
    assert path.read_text() == "round,seconds,evaluation_seconds\n1,nan,\n2,nan,\n"
