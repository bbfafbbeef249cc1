"""Untrusted strings are text in terminals, CSV files, figures and HTML pages."""

import csv
import io
import warnings

import numpy as np
import polars as pl
import pytest
from rich.table import Table as RichTable

from obbo_lightning import cli
from obbo_lightning.escaping import escape_cell, escape_table, escape_terminal, unescape_cell, unescape_table
from obbo_lightning.experiments.report import write_page
from obbo_lightning.experiments.report_data import Table, finish_figure, line_style, new_figure, report_style
from obbo_lightning.runs.figures import draw_figures
from obbo_lightning.runs.summary import PlainConsole
from obbo_lightning.training.run import format_warnings

FORMULAS = ["=1+1", "+cmd|' /C calc'!A0", "-2+3+cmd|x!A", "@SUM(A1)", "\tx", "\rx", "'=x", "-", "+A1"]
HARMLESS = ["obbo", "-0.5", "+1.5 %", "-0.153 ± 0.076", "1e-5", "-1e-05", "-inf", "nan", "", "'tis", "AMD", "a=b"]
NOT_TYPESETTABLE = r"$\frac{mine$ <script>alert(1)</script>"  # matplotlib would fail to typeset it


@pytest.mark.parametrize("text", [*FORMULAS, *HARMLESS])
def test_only_formulas_in_cells_are_escaped(text):
    assert escape_cell(text) == (f"'{text}" if text in FORMULAS else text)
    assert unescape_cell(escape_cell(text)) == text


def test_cells_and_column_names_of_tables_are_escaped():
    table = pl.DataFrame({"=1+1": ["=A", "AMD", None], "weight": [-1.0, 2.0, 3.0]})
    escaped = escape_table(table)
    assert escaped.columns == ["'=1+1", "weight"]
    assert escaped["'=1+1"].to_list() == ["'=A", "AMD", None]
    assert unescape_table(escaped).equals(table)
    written = Table("t", "A table.", ("algorithm", "gain"), [("=1+1", "-0.5 ± 0.1")]).csv()
    assert list(csv.reader(io.StringIO(written)))[1] == ["'=1+1", "-0.5 ± 0.1"]


def test_terminal_shows_markup_and_escape_sequences(capsys):
    console = PlainConsole(file=io.StringIO(), force_terminal=True, color_system=None, width=80)
    table = RichTable("name", title="[bold]t[/bold]\x1b[2J")
    table.add_row("[red]x[/nowhere]\x1b]0;title\x07")
    console.print(table)
    console.print("[link=x]y \x1b[31m :smile:")
    shown = console.file.getvalue()
    assert not set(shown) & set("\x1b\x07")
    for text in ("[red]x[/nowhere]", "[bold]t[/bold]", "[link=x]y", ":smile:", r"\x1b[31m"):
        assert text in shown
    assert cli.main(["resume", "no\x1b[2Jwhere"]) == 2
    assert r"no\x1b[2Jwhere" in capsys.readouterr().err


def test_control_characters_are_escaped_wherever_text_is_printed(monkeypatch):
    shown = escape_terminal("\x1b[2J\x9b31m\x7f\u202egnp.exe\u2066\u200f")
    assert not set(shown) & set("\x1b\x9b\x7f\u202e\u2066\u200f")
    assert "gnp.exe" in shown
    assert "\x1b" not in Table("t", "A table.", ("name",), [("\x1b[2J",)]).markdown()
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    format_warnings()
    assert warnings.formatwarning("\x1b[2J", UserWarning, "x.py", 1) == "obbo: warning: \\x1b[2J\n"


def test_figures_of_runs_print_dollar_signs(tmp_path):
    names = ("round", "loss", "test_loss", "test_loss_se", "regret/euclidean", "regret/exact")
    rounds = {name: np.array([1.0, 2.0]) for name in names}
    assert draw_figures(tmp_path, rounds, "loss", 1.0, NOT_TYPESETTABLE, {NOT_TYPESETTABLE: [1.0, 1.0]})


def test_figures_and_pages_of_reports_print_dollar_signs_and_markup(tmp_path):
    label = NOT_TYPESETTABLE
    with report_style():
        figure, (axes,) = new_figure(2.0)
        axes.plot([1, 2], [1, 2], **line_style([label], label))
        drawn = finish_figure(figure, "drawn", "A figure.", label)
    table = Table("t", "A table.", ("algorithm",), [(label,)])
    write_page(tmp_path, label, [table], [drawn], [label])
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
