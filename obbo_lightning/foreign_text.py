r"""Words that others chose (names of files, classes, tickers, labels) as what they are: text, and never a command.

A terminal obeys escape sequences, a spreadsheet computes a cell that begins like a formula, and matplotlib typesets
what stands between dollars. Pages and LaTeX tables escape for themselves (`page.py` and `tables.py` of experiments).
"""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# What spreadsheets take for a formula; a number with a sign is none.
FORMULA = re.compile(r"'*[=+\-@\t\r]")
NUMBER = re.compile(r"[+-](?=[\d.]|inf|nan)([\d.,;:eE%±…/\[\]() +−-]|inf|nan)*")


def visible(text: str) -> str:
    r"""For a terminal: control characters, but for the end of a line and tabs, are shown and not obeyed.

    >>> print(visible("\x1b[2Jmine"))
    \x1b[2Jmine
    """
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def drawn(text: str) -> str:
    r"""For matplotlib: a dollar is a dollar.

    >>> print(drawn("$x$"))
    \$x\$
    """
    return visible(text).replace("$", r"\$")


def cell(text: str) -> str:
    """For a CSV file: what a spreadsheet would compute begins with an apostrophe.

    >>> cell("=1+1"), cell("-0.5 ± 0.1"), cell("obbo"), cell("-1+cmd|' /C calc'!A0")
    ("'=1+1", '-0.5 ± 0.1', 'obbo', "'-1+cmd|' /C calc'!A0")
    """
    return f"'{text}" if FORMULA.match(text) and not NUMBER.fullmatch(text) else text


def uncelled(text: str) -> str:
    """What `cell` was given."""
    return text[1:] if text.startswith("'") and FORMULA.match(text) else text


def cells(table: "pl.DataFrame") -> "pl.DataFrame":
    """`cell` for all words of a table, and for its header."""
    return _mapped(table, cell).rename({name: cell(name) for name in table.columns})


def uncelled_table(table: "pl.DataFrame") -> "pl.DataFrame":
    """What `cells` was given."""
    return _mapped(table, uncelled).rename({name: uncelled(name) for name in table.columns})


def _mapped(table: "pl.DataFrame", change: Callable[[str], str]) -> "pl.DataFrame":
    import polars as pl  # a refusal needs none

    words = [name for name, kind in table.schema.items() if kind == pl.String]
    changed = {n: pl.Series([v if v is None else change(v) for v in table[n]], dtype=pl.String) for n in words}
    return table.with_columns(**changed)
