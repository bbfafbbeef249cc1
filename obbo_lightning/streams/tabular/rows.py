"""Rows in time with numbers and a target, from a CSV file, checked; or made up, with a drift that changes its speed."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from obbo_lightning.core.randomness import derive_seed
from obbo_lightning.core.validation import one_of

KINDS = ("auto", "classification", "regression")
DRAWN_ROWS = 48 * 630  # 600 rounds of 48 rows, after 30 blocks
PHASES = (0.0, 0.02, 0.2)  # radians that the truth turns by in 48 rows, each for 100 times as many, then again
DRAWN_COLUMNS = ("a", "b", "c", "d")  # the truth turns in the plane of a and b; c and d are noise
Numbers = NDArray[np.float64]


class LeftOut(NamedTuple):
    """A column that is no feature, and why."""

    column: str
    reason: str


class Rows(NamedTuple):
    """A table in the order of time.

    Attributes:
        names: of the features.
        features: ``[rows, features]``, finite.
        target: ``[rows]``; 0 and 1 for a classification.
        kind: ``classification`` or ``regression``.
        skipped: columns that are no features because they are not numbers.
        classes: what 0 and 1 are called in the file.
    """

    names: tuple[str, ...]
    features: Numbers
    target: Numbers
    kind: str
    skipped: tuple[LeftOut, ...] = ()
    classes: tuple[str, ...] = ("0", "1")


def read_rows(path: Path, target: str | None, features: Sequence[str] | None = None, kind: str = "auto") -> Rows:
    """The rows of a CSV file, in its order, which must be that of time.

    Args:
        path: of the file; its first line names the columns.
        target: the column to predict: two different values, numbers or words, or any numbers.
        features: the columns to predict it from; all others that are numbers where this is None.
        kind: ``classification`` for two values, ``regression`` for numbers, ``auto`` to look how many there are.
    """
    one_of("data.kind", kind, KINDS)
    table = _read(path)
    if target not in table.columns:
        raise ValueError(f"data.target must be a column of {path}, which are {_listed(table.columns)}, got {target!r}")
    wanted = _wanted(table, target, features, path)
    numbers = {name: table[name].str.strip_chars().cast(pl.Float64, strict=False) for name in wanted}
    # A column without a single number holds something else, such as dates; one with some is broken where it has none.
    words = [] if features is not None else [name for name in wanted if numbers[name].null_count() == len(table)]
    used = [name for name in wanted if name not in words]
    if not used:
        raise ValueError(f"data.csv must have a column of numbers besides {target!r}, got {path}, which has none")
    for name in used:
        _require_finite(path, name, table[name], numbers[name], "; data.features names the columns to use")
    y, found, classes = _target(path, target, table[target], kind)
    stacked = np.stack([numbers[name].to_numpy() for name in used], axis=1)
    return Rows(tuple(used), stacked, y, found, tuple(LeftOut(name, "it has no numbers") for name in words), classes)


def read_queries(path: Path, names: Sequence[str], target: str | None) -> tuple[Numbers, pl.Series | None]:
    """Rows whose target may not be known yet: their features ``[rows, features]``, and the target where all have one.

    Args:
        path: of a CSV file with at least these columns.
        names: of the features, in their order.
        target: the column that is predicted.
    """
    table = _read(path, "--query")
    missing = [name for name in names if name not in table.columns]
    if missing:
        raise ValueError(f"--query must have the columns {_listed(names)}, got {path} without {missing[0]!r}")
    numbers = {name: table[name].str.strip_chars().cast(pl.Float64, strict=False) for name in names}
    for name in names:
        _require_finite(path, name, table[name], numbers[name], key="--query")
    known = table.select(name for name in table.columns if name == target).drop_nulls()
    actual = known.to_series().str.strip_chars() if known.shape == (len(table), 1) else None
    return np.stack([numbers[name].to_numpy() for name in names], axis=1), actual


def _read(path: Path, key: str = "data.csv") -> pl.DataFrame:
    if not path.is_file():
        raise ValueError(f"{key} must be a CSV file that exists, got {str(path)!r}")
    try:
        table = pl.read_csv(path, infer_schema=False)  # words: what is no number is refused with its row
    except (pl.exceptions.PolarsError, OSError) as error:
        raise ValueError(f"{key} must be a CSV file, got {path}: {str(error).splitlines()[0]}") from None
    if table.is_empty():
        raise ValueError(f"{key} must have rows, got {path}, which has none")
    if len(table.columns) == 1 and any(sign in table.columns[0] for sign in ";\t|"):
        raise ValueError(f"{key} must have its columns separated by commas, got {path} with {table.columns[0]!r}")
    return table


def _wanted(table: pl.DataFrame, target: str, features: Sequence[str] | None, path: Path) -> list[str]:
    if features is None:
        return [name for name in table.columns if name != target]
    others = [name for name in table.columns if name != target]
    wrong = [name for name in features if name not in others]
    if wrong or not features or len(set(features)) < len(features):
        got = repr(wrong[0]) if wrong else repr(list(features))
        raise ValueError(f"data.features must name columns of {path} once each, of {_listed(others)}, got {got}")
    return list(features)


def _require_finite(
    path: Path, name: str, written: pl.Series, numbers: pl.Series, hint: str = "", key: str = "data.csv"
) -> None:
    bad = np.flatnonzero(~np.isfinite(numbers.fill_null(np.nan).to_numpy()))
    if len(bad):
        got = written[int(bad[0])]
        rule = f"must be a finite number, got {'nothing' if got is None else repr(got)}{hint}"
        raise ValueError(f"{key} {path}, row {bad[0] + 1}, line {bad[0] + 2}: {name!r} {rule}")


def _target(path: Path, name: str, written: pl.Series, kind: str) -> tuple[Numbers, str, tuple[str, ...]]:
    """The target as numbers, which kind it is, and what 0 and 1 are called."""
    if written.null_count():
        row = int(written.is_null().arg_true()[0]) + 1
        hint = "rows that are still to come go to `predict --query`"
        raise ValueError(
            f"data.csv {path}, row {row}, line {row + 1}: the target {name!r} must have a value, got nothing; {hint}"
        )
    written = written.str.strip_chars()
    numbers = written.cast(pl.Float64, strict=False)
    numeric = not numbers.null_count()
    values = (numbers if numeric else written).unique().sort()
    if len(values) == 1:
        raise ValueError(f"data.target must be a column that varies, got {name!r}, which is {values[0]!r} in all rows")
    if len(values) == 2 and kind != "regression":
        if numeric:
            _require_finite(path, name, written, numbers)
        ones = (numbers if numeric else written) == values[1]
        classes = (written.filter(~ones)[0], written.filter(ones)[0])
        return ones.cast(pl.Float64).to_numpy(), "classification", classes
    if kind == "classification":
        raise ValueError(
            f"data.target must have two values for data.kind classification, got {name!r} with {len(values)}"
        )
    if not numeric and numbers.null_count() == len(numbers):
        raise ValueError(f"data.target must be numbers, or have two values, got {name!r} with {len(values)} words")
    _require_finite(path, name, written, numbers)
    return numbers.to_numpy(), "regression", ()


def draw_rows(kind: str, seed: int) -> Rows:
    """Rows whose truth turns: not at all, slowly, fast, and again; for each speed another forgetting is right."""
    one_of("data.kind", kind, KINDS)
    kind = "classification" if kind == "auto" else kind
    rng = np.random.default_rng(derive_seed(seed, "forgetting"))
    features = rng.normal(size=(DRAWN_ROWS, len(DRAWN_COLUMNS)))
    phase = np.arange(DRAWN_ROWS) // 4800 % len(PHASES)
    angle = np.cumsum(np.array(PHASES)[phase]) / 48
    signal = 2 * (np.cos(angle) * features[:, 0] + np.sin(angle) * features[:, 1])
    if kind == "classification":
        target = (rng.random(DRAWN_ROWS) < 1 / (1 + np.exp(-signal))).astype(np.float64)
    else:
        target = signal + 2 * rng.normal(size=DRAWN_ROWS)
    return Rows(DRAWN_COLUMNS, features, target, kind)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
