"""Escape untrusted strings (names of files, classes, tickers, labels) for terminals, matplotlib and spreadsheets.

HTML pages are escaped where they are written: `experiments.report`.
"""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# Beginnings of a formula in spreadsheets; a signed number is not a formula.
FORMULA = re.compile(r"'*[=+\-@\t\r]")
NUMBER = re.compile(r"[+-](?=[\d.]|inf|nan)([\d.,;:eE%±…/\[\]() +−-]|inf|nan)*")


def escape_terminal(text: str) -> str:
    r"""Return text for a terminal: control characters other than newlines and tabs become visible.

    >>> print(escape_terminal("\x1b[2Jmine"))
    \x1b[2Jmine
    """
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def escape_mathtext(text: str) -> str:
    """Return text for matplotlib: dollar signs are printed."""
    return escape_terminal(text).replace("$", r"\$")


def escape_cell(text: str) -> str:
    """Return text for a cell of a CSV file: an apostrophe is put before what a spreadsheet would compute.

    >>> escape_cell("=1+1"), escape_cell("-0.5 ± 0.1"), escape_cell("obbo"), escape_cell("-1+cmd|' /C calc'!A0")
    ("'=1+1", '-0.5 ± 0.1', 'obbo', "'-1+cmd|' /C calc'!A0")
    """
    return f"'{text}" if FORMULA.match(text) and not NUMBER.fullmatch(text) else text


def unescape_cell(text: str) -> str:
    """Return the text that `escape_cell` was given."""
    return text[1:] if text.startswith("'") and FORMULA.match(text) else text


def escape_table(table: "pl.DataFrame", change: Callable[[str], str] = escape_cell) -> "pl.DataFrame":
    """Return a table with all its strings, and its column names, escaped by `escape_cell`."""
    import polars as pl  # slow to import, and only tables need it

    changed = table.with_columns(pl.col(pl.String).map_elements(change, return_dtype=pl.String, skip_nulls=True))
    return changed.rename({name: change(name) for name in table.columns})


def unescape_table(table: "pl.DataFrame") -> "pl.DataFrame":
    """Return the table that `escape_table` was given."""
    return escape_table(table, unescape_cell)
