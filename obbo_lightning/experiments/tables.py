"""Tables as people read them, in Markdown, CSV and LaTeX."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from obbo_lightning.escaping import escape_cell, escape_terminal


class Table(NamedTuple):
    """Cells that are already text.

    Attributes:
        name: of its files.
        caption: what it shows, with units; ends with a full stop.
        columns: the header; the first column names the rows.
        rows: as many cells each.
    """

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def plain(value: float, digits: int, sign: str = "") -> str:
    """With so many digits; one that has blown up in fewer.

    >>> plain(0.5, 3), plain(1.5, 1, "+"), plain(3.2858e35, 1)
    ('0.500', '+1.5', '3.29e+35')
    """
    return f"{value:{sign}.{digits}f}" if abs(value) < 1e7 else f"{value:{sign}.3g}"


def write_table(table: Table, directory: Path) -> list[Path]:
    """``name.md``, ``name.csv`` and ``name.tex``."""
    written = []
    for suffix, text in ((".md", as_markdown(table)), (".csv", as_csv(table)), (".tex", as_latex(table))):
        path = directory / f"{table.name}{suffix}"
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def as_markdown(table: Table) -> str:
    r"""A pipe table.

    >>> print(as_markdown(Table("t", "Regret.", ("algorithm", "‖d‖ | regret"), [("obbo", "1.0 ± 0.1")])), end="")
    | algorithm | ‖d‖ \| regret |
    |---|---|
    | obbo | 1.0 ± 0.1 |
    """
    lines = [_piped(table.columns), "|" + "---|" * len(table.columns), *map(_piped, table.rows)]
    return "\n".join(lines) + "\n"


def _piped(cells: Sequence[str]) -> str:
    return "| " + " | ".join(escape_terminal(one).replace("\n", " ").replace("|", r"\|") for one in cells) + " |"


def as_csv(table: Table) -> str:
    """The same text, one line a row."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([map(escape_cell, row) for row in (table.columns, *table.rows)])
    return file.getvalue()


def as_latex(table: Table) -> str:
    r"""A table for a paper: booktabs, label ``tab:name``.

    >>> print(as_latex(Table("t", "Regret, w = 10.", ("algorithm", "α"), [("a", "1 ± 0.1"), ("a_b", "50 %")])), end="")
    \begin{table}
      \centering
      \caption{Regret, w = 10.}\label{tab:t}
      \begin{tabular}{lr}
        \toprule
        algorithm & $\alpha$ \\
        \midrule
        a & 1 $\pm$ 0.1 \\
        a\_b & 50 \% \\
        \bottomrule
      \end{tabular}
    \end{table}
    """
    rows = [" & ".join(map(_latex, cells)) + r" \\" for cells in (table.columns, *table.rows)]
    lines = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{_latex(table.caption)}}}\label{{tab:{table.name}}}",
        rf"  \begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}",
        r"    \toprule",
        f"    {rows[0]}",
        r"    \midrule",
        *(f"    {row}" for row in rows[1:]),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


# What TeX would not print as it stands; the symbols are those that our headers and captions use.
LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    "|": "$|$",
    "±": r"$\pm$",
    "−": "$-$",
    "‖": r"$\|$",
    "√": r"$\surd$",
    "≥": r"$\geq$",
    "α": r"$\alpha$",
    "η": r"$\eta$",
    "ρ": r"$\rho$",
    "κ": r"$\kappa$",
    "λ": r"$\lambda$",
    "ν": r"$\nu$",
    "²": "$^2$",
    "³": "$^3$",
    "⁴": "$^4$",
    "₁": "$_1$",
    "₂": "$_2$",
    "…": r"\dots{}",
}


def _latex(text: str) -> str:
    return "".join(LATEX.get(sign, sign) for sign in text)
