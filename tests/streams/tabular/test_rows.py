"""Rows of a table: read from CSV files, refused, generated."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from obbo_lightning.streams import ForgettingStream
from obbo_lightning.streams.tabular.rows import generate_rows, read_rows


def table(rows=60):
    rng = np.random.default_rng(0)
    a, b, noise = rng.normal(size=(3, rows))
    return pl.DataFrame({"a": a, "b": b, "y": a - b + noise})


@pytest.fixture
def csv(tmp_path):
    def write(frame):
        frame.write_csv(tmp_path / "rows.csv")
        return str(tmp_path / "rows.csv")

    return write


def test_two_values_are_classified_and_numbers_predicted(csv):
    frame = table().with_columns(word=pl.when(pl.col("y") > 0).then(pl.lit("up")).otherwise(pl.lit("down")))
    frame = frame.with_columns(two=pl.when(pl.col("y") > 0).then(10).otherwise(9))
    path = csv(frame)
    for target in ("word", "two"):
        stream = ForgettingStream(path, target, block=5, past=3, features=["a", "b"])
        assert stream.problem().kind == "classification"
        assert np.array_equal(stream.train.target.flatten(), (frame["y"] > 0).cast(pl.Float64).to_numpy())
    assert ForgettingStream(path, "y", block=5, past=3, features=["a"]).problem().kind == "regression"
    numbers = ForgettingStream(path, "two", block=5, past=3, features=["a"], kind="regression")
    assert numbers.problem().kind == "regression"
    assert set(numbers.train.target.flatten().tolist()) == {9.0, 10.0}


def test_columns_without_numbers_are_skipped_and_listed(csv):
    days = pl.Series("day", [f"2020-01-{1 + i // 4:02d}" for i in range(60)])
    path = csv(table().with_columns(days))
    rows = read_rows(Path(path), "y")
    assert rows.names == ("a", "b")
    assert [skipped.column for skipped in rows.skipped] == ["day"]
    with pytest.warns(UserWarning, match="columns without numbers are not used as features: day"):
        ForgettingStream(path, "y", block=5, past=3)


def broken(column, row, value):
    frame = table().with_columns(pl.all().cast(pl.String))
    values = frame[column].to_list()
    values[row] = value
    return frame.with_columns(pl.Series(column, values, dtype=pl.String))


@pytest.mark.parametrize(
    ("frame", "settings", "message"),
    [
        (table(), {"target": None}, r"data\.target must be a column of .*, which are a, b, y, got None"),
        (table(), {"target": "z"}, r"data\.target must be a column of .*, got 'z'"),
        (table(), {"features": ["a", "z"]}, r"data\.features must name columns of .* once each, of a, b, got 'z'"),
        (table(), {"features": ["a", "y"]}, r"data\.features must .* of a, b, got 'y'"),
        (table(), {"features": ["a", "a"]}, r"data\.features must .*, got \['a', 'a'\]"),
        (table(), {"features": []}, r"data\.features must .*, got \[\]"),
        (table(), {"kind": "ranking"}, r"data\.kind must be one of auto, classification, regression, got 'ranking'"),
        (table(), {"kind": "classification"}, r"data\.target must have two values for .*, got 'y' with 60"),
        (table(), {"block": 0}, r"data\.block must be an integer of at least 1, got 0"),
        (table(), {"past": 1}, r"data\.past must be an integer of at least 2, got 1"),
        (table(), {"clip": -1.0}, r"data\.clip must be a positive finite number, got -1\.0"),
        (table(19), {}, r"data\.csv must have at least 20 rows, data\.past 3 \+ 1 blocks of data\.block 5, got 19 in"),
        (table()[:0], {}, r"data\.csv must have rows, got .*, which has none"),
        (table().select("y"), {}, r"data\.csv must have a column of numbers besides 'y', got"),
        (
            broken("a", 16, "n/a"),
            {},
            r"rows\.csv, row 17, line 18: 'a' must be a finite number, got 'n/a'; data\.features",
        ),
        (broken("b", 3, None), {}, r"rows\.csv, row 4, line 5: 'b' must be a finite number, got nothing"),
        (broken("b", 3, "inf"), {}, r"rows\.csv, row 4, line 5: 'b' must be a finite number, got 'inf'"),
        (broken("y", 3, None), {}, r"rows\.csv, row 4, line 5: the target 'y' must have a value, got nothing"),
        (broken("y", 3, "nan"), {}, r"rows\.csv, row 4, line 5: 'y' must be a finite number, got 'nan'"),
        (broken("y", 3, "up"), {}, r"rows\.csv, row 4, line 5: 'y' must be a finite number, got 'up'"),
        (table().with_columns(y=2.5), {}, r"data\.target must be a column that varies, got 'y', which is 2\.5 in all"),
        (table().with_columns(y=pl.Series(["a", "b", "c"] * 20)), {}, r"data\.target must be numbers, or .* 3 texts"),
    ],
)
def test_unusable_tables_and_settings_are_refused(frame, settings, message, csv):
    with pytest.raises(ValueError, match=message) as refusal:
        ForgettingStream(csv(frame), **{"target": "y", "block": 5, "past": 3} | settings)
    assert "\n" not in str(refusal.value)


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data\.csv must be a CSV file that exists, got 'nowhere\.csv'"):
        ForgettingStream("nowhere.csv", "y")
    (tmp_path / "ragged.csv").write_text("a,y\n1,2\n1,2,3,4\n")
    with pytest.raises(ValueError, match=r"ragged\.csv cannot be read as CSV: "):
        ForgettingStream(str(tmp_path / "ragged.csv"), "y")
    with pytest.raises(ValueError, match=r"data\.target needs data\.csv, got 'y' without any"):
        ForgettingStream(target="y")
    with pytest.raises(ValueError, match=r"must have at least 93000 rows, .* got 30240 generated ones"):
        ForgettingStream(block=3000)


def test_true_coefficients_of_generated_rows_turn_at_three_speeds():
    rows = generate_rows("regression", seed=3)

    def direction(first):
        part = slice(first, first + 400)
        a, b = np.linalg.lstsq(rows.features[part], rows.target[part], rcond=None)[0][:2]
        return complex(a, b) / abs(complex(a, b))

    for first, speed in ((2000, 0.0), (6000, 0.02), (9700, 0.2), (15000, 0.0)):
        turned = direction(first + 800) / direction(first)
        assert abs(turned - np.exp(1j * speed * 800 / 48)) < 0.3  # a speed is radians in 48 rows
