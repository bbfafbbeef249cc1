"""Which column of somebody's table is which of ours."""

from collections.abc import Mapping, Sequence
from pathlib import Path

OURS = ("ticker", "timestamp", "close")
# What finance sites and libraries call them, in any case; the first that a file has is taken.
USUAL = {
    "ticker": ("ticker", "symbol"),
    "timestamp": ("timestamp", "datetime", "date", "time"),
    "close": ("close",),
}
Columns = str | Mapping[str, str] | None


def named_columns(columns: Columns) -> dict[str, str]:
    """Ours to theirs, from a mapping or as words.

    >>> named_columns("timestamp=Date, close=Adj Close")
    {'timestamp': 'Date', 'close': 'Adj Close'}
    """
    if columns is None:
        return {}
    if isinstance(columns, str):
        sides = [pair.partition("=") for pair in columns.split(",")]
        pairs = [(ours.strip(), theirs.strip()) for ours, _, theirs in sides]
    else:
        pairs = list(columns.items())
    for ours, theirs in pairs:
        if not (ours and theirs):
            raise ValueError(f"data.columns must be like timestamp=Date,close=Close, got {columns!r}")
        if ours not in OURS:
            raise ValueError(f"data.columns must name {', '.join(OURS)}, as in close=Close, got {ours!r}")
    for side in zip(*pairs, strict=True):
        if len(set(side)) < len(side):
            raise ValueError(f"data.columns must name each column once, got {columns!r}")
    return dict(pairs)


def find_columns(there: Sequence[str], wanted: Sequence[str], named: Mapping[str, str], path: Path) -> dict[str, str]:
    """Ours to theirs, those that are there: by the names given, by ours, by the usual ones in any case.

    Args:
        there: the columns of a table.
        wanted: of ours.
        named: of `named_columns`; what it names must be there.
        path: of the table.
    """
    found = {}
    for ours in wanted:
        if ours in named and named[ours] not in there:
            raise ValueError(f"{path} must have the column {named[ours]!r} that data.columns names, {_only(there)}")
        theirs = named.get(ours, ours if ours in there else _usual(there, ours, path))
        if theirs is not None:
            found[ours] = theirs
    return found


def require_columns(found: Mapping[str, str], wanted: Sequence[str], there: Sequence[str], path: Path) -> None:
    """Refuse a table in which one is missing."""
    missing = [ours for ours in wanted if ours not in found]
    if missing:
        raise ValueError(
            f"{path} must have the columns {', '.join(wanted)}, and has no {', '.join(missing)}, {_only(there)} "
            f"(data.columns says which is which: {missing[0]}=…)"
        )


def _usual(there: Sequence[str], ours: str, path: Path) -> str | None:
    for usual in USUAL[ours]:
        same = [theirs for theirs in there if theirs.strip().lower() == usual]
        if len(same) > 1:
            raise ValueError(
                f"{path} must have one column for {ours}, and has {', '.join(same)} (data.columns chooses)"
            )
        if same:
            return same[0]
    return None


def _only(there: Sequence[str]) -> str:
    return f"only {', '.join(there)}"
