"""Rows of a table in the order of time: features and a target, read from a CSV file or generated with drift."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from obbo_lightning.core.randomness import derive_seed
from obbo_lightning.core.validation import one_of
from obbo_lightning.streams.readers import read_table, require_file

KINDS = ("auto", "classification", "regression")
GENERATED_ROWS = 48 * 630  # 600 rounds of 48 rows, after 30 blocks
SPEEDS = (0.0, 0.02, 0.2)  # radians by which the true coefficients turn in 48 rows; each for 4800 rows, repeated
GENERATED_COLUMNS = ("a", "b", "c", "d")  # the true coefficients turn in the plane of a and b; c and d are noise
Numbers = NDArray[np.float64]


class SkippedColumn(NamedTuple):
    """A column that is not used as a feature, and the reason."""

    column: str
    reason: str


class Rows(NamedTuple):
    """Rows of a table in the order of time.

    Attributes:
        names: of the features.
        features: ``[rows, features]``, finite.
        target: ``[rows]``; 0 and 1 for a classification.
        kind: ``classification`` or ``regression``.
        skipped: columns without numbers.
        classes: values of the file that 0 and 1 stand for.
    """

    names: tuple[str, ...]
    features: Numbers
    target: Numbers
    kind: str
    skipped: tuple[SkippedColumn, ...] = ()
    classes: tuple[str, ...] = ("0", "1")


def read_rows(path: Path, target: str | None, features: Sequence[str] | None = None, kind: str = "auto") -> Rows:
    """Read the rows of a CSV file, which must be in the order of time.

    Args:
        path: of the file; its first line names the columns.
        target: column to predict: two different values, numbers or text, or any numbers.
        features: columns to predict it from; None: all others that are numbers.
        kind: ``classification`` for two values, ``regression`` for numbers, ``auto`` to decide by their number.
    """
    one_of("data.kind", kind, KINDS)
    table = _read_text(path, "data.csv")
    if target not in table.columns:
        raise ValueError(f"data.target must be a column of {path}, which are {_listed(table.columns)}, got {target!r}")
    others = [name for name in table.columns if name != target]
    if features is not None:
        _require_features(features, others, path)
    numbers = {name: _parse_numbers(table[name]) for name in features or others}
    # A column without any number, such as dates, is no feature; one with some numbers must have them in all rows.
    text = [] if features else [name for name, values in numbers.items() if values.null_count() == len(table)]
    used = [name for name in numbers if name not in text]
    if not used:
        raise ValueError(f"data.csv must have a column of numbers besides {target!r}, got {path}, which has none")
    for name in used:
        _require_finite("data.csv", path, table[name], numbers[name], "; data.features names the columns to use")
    y, found, classes = _parse_target(path, table[target], kind)
    stacked = np.stack([numbers[name].to_numpy() for name in used], axis=1)
    skipped = tuple(SkippedColumn(name, "it has no numbers") for name in text)
    return Rows(tuple(used), stacked, y, found, skipped, classes)


def read_queries(path: Path, names: Sequence[str], target: str | None) -> tuple[Numbers, pl.Series | None]:
    """Read rows whose target may not be known yet; return features ``[rows, features]``, and targets if all are known.

    Args:
        path: of a CSV file with at least these columns.
        names: of the features, in their order.
        target: column that is predicted.
    """
    table = _read_text(path, "--query")
    missing = [name for name in names if name not in table.columns]
    if missing:
        raise ValueError(f"--query must have the columns {_listed(names)}, got {path} without {missing[0]!r}")
    numbers = [_parse_numbers(table[name]) for name in names]
    for values in numbers:
        _require_finite("--query", path, table[values.name], values)
    known = table.select(name for name in table.columns if name == target).drop_nulls()
    actual = known.to_series().str.strip_chars() if known.shape == (len(table), 1) else None
    return np.stack([values.to_numpy() for values in numbers], axis=1), actual


def _read_text(path: Path, key: str) -> pl.DataFrame:
    """Return a CSV table as text, so that what is not a number can be named with its row."""
    require_file(key, path, "a CSV file")
    table = read_table(path, is_csv=True, infer_schema=False)
    if table.is_empty():
        raise ValueError(f"{key} must have rows, got {path}, which has none")
    if len(table.columns) == 1 and any(sign in table.columns[0] for sign in ";\t|"):
        raise ValueError(f"{key} must have its columns separated by commas, got {path} with {table.columns[0]!r}")
    return table


def _parse_numbers(text: pl.Series) -> pl.Series:
    return text.str.strip_chars().cast(pl.Float64, strict=False)


def _require_features(features: Sequence[str], columns: Sequence[str], path: Path) -> None:
    unknown = [name for name in features if name not in columns]
    if unknown or not features or len(set(features)) < len(features):
        got = repr(unknown[0]) if unknown else repr(list(features))
        raise ValueError(f"data.features must name columns of {path} once each, of {_listed(columns)}, got {got}")


def _require_finite(key: str, path: Path, text: pl.Series, numbers: pl.Series, hint: str = "") -> None:
    bad = np.flatnonzero(~np.isfinite(numbers.fill_null(np.nan).to_numpy()))
    if len(bad):
        got = text[int(bad[0])]
        rule = f"must be a finite number, got {'nothing' if got is None else repr(got)}{hint}"
        raise ValueError(f"{key} {path}, row {bad[0] + 1}, line {bad[0] + 2}: {text.name!r} {rule}")


def _parse_target(path: Path, text: pl.Series, kind: str) -> tuple[Numbers, str, tuple[str, ...]]:
    """Return the target as numbers, its kind, and the values that 0 and 1 stand for."""
    name = text.name
    if text.null_count():
        row = int(text.is_null().arg_true()[0]) + 1
        hint = "rows without a target go to `predict --query`"
        raise ValueError(
            f"data.csv {path}, row {row}, line {row + 1}: the target {name!r} must have a value, got nothing; {hint}"
        )
    text = text.str.strip_chars()
    numbers = _parse_numbers(text)
    numeric = not numbers.null_count()
    values = (numbers if numeric else text).unique().sort()
    if len(values) == 1:
        raise ValueError(f"data.target must be a column that varies, got {name!r}, which is {values[0]!r} in all rows")
    if len(values) == 2 and kind != "regression":
        if numeric:
            _require_finite("data.csv", path, text, numbers)
        ones = (numbers if numeric else text) == values[1]
        classes = (text.filter(~ones)[0], text.filter(ones)[0])
        return ones.cast(pl.Float64).to_numpy(), "classification", classes
    if kind == "classification":
        raise ValueError(
            f"data.target must have two values for data.kind classification, got {name!r} with {len(values)}"
        )
    if not numeric and numbers.null_count() == len(numbers):
        raise ValueError(f"data.target must be numbers, or have two values, got {name!r} with {len(values)} texts")
    _require_finite("data.csv", path, text, numbers)
    return numbers.to_numpy(), "regression", ()


def generate_rows(kind: str, seed: int) -> Rows:
    """Generate rows whose true coefficients turn at three speeds, each of which needs another forgetting factor."""
    one_of("data.kind", kind, KINDS)
    kind = "classification" if kind == "auto" else kind
    rng = np.random.default_rng(derive_seed(seed, "forgetting"))
    features = rng.normal(size=(GENERATED_ROWS, len(GENERATED_COLUMNS)))
    phase = np.arange(GENERATED_ROWS) // 4800 % len(SPEEDS)
    angle = np.cumsum(np.array(SPEEDS)[phase]) / 48
    signal = 2 * (np.cos(angle) * features[:, 0] + np.sin(angle) * features[:, 1])
    if kind == "classification":
        target = (rng.random(GENERATED_ROWS) < 1 / (1 + np.exp(-signal))).astype(np.float64)
    else:
        target = signal + 2 * rng.normal(size=GENERATED_ROWS)
    return Rows(GENERATED_COLUMNS, features, target, kind)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
