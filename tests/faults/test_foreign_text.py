"""Names that somebody else chose are text everywhere."""

import csv
import io

import matplotlib.pyplot as plt
import polars as pl
import pytest
from rich.table import Table as RichTable

from obbo_lightning import cli
from obbo_lightning.experiments.drawing import finish, house_style, look_of, new_figure, save_drawing
from obbo_lightning.experiments.page import write_page
from obbo_lightning.experiments.tables import Table, as_csv
from obbo_lightning.foreign_text import cell, cells, uncelled, uncelled_table
from obbo_lightning.runs.console import PlainConsole

FORMULAS = ["=1+1", "+cmd|' /C calc'!A0", "-2+3+cmd|x!A", "@SUM(A1)", "\tx", "\rx", "'=x", "-", "+A1"]
HARMLESS = ["obbo", "-0.5", "+1.5 %", "-0.153 ± 0.076", "1e-5", "-1e-05", "-inf", "nan", "", "'tis", "AMD", "a=b"]


@pytest.mark.parametrize("text", [*FORMULAS, *HARMLESS])
def test_a_cell_is_no_formula_and_comes_back_as_it_was(text):
    assert cell(text) == (f"'{text}" if text in FORMULAS else text)
    assert uncelled(cell(text)) == text


def test_tables_quote_what_a_spreadsheet_would_compute():
    written = as_csv(Table("t", "A table.", ("algorithm", "gain"), [("=1+1", "-0.5 ± 0.1")]))
    assert list(csv.reader(io.StringIO(written)))[1] == ["'=1+1", "-0.5 ± 0.1"]
    table = pl.DataFrame({"ticker": ["=A", "AMD", None], "weight": [-1.0, 2.0, 3.0]})
    assert cells(table)["ticker"].to_list() == ["'=A", "AMD", None]
    assert uncelled_table(cells(table)).equals(table)


def test_a_terminal_shows_markup_and_escapes(capsys):
    console = PlainConsole(file=io.StringIO(), force_terminal=True, color_system=None, width=80)
    table = RichTable("name", title="[bold]t[/bold]\x1b[2J")
    table.add_row("[red]x[/nowhere]\x1b]0;title\x07")
    console.print(table)
    console.print("[link=x]y \x1b[31m :smile:")
    shown = console.file.getvalue()
    assert "\x1b" not in shown
    assert "\x07" not in shown
    for text in ("[red]x[/nowhere]", "[bold]t[/bold]", "[link=x]y", ":smile:", r"\x1b[31m"):
        assert text in shown
    assert cli.main(["resume", "no\x1b[2Jwhere"]) == 2
    assert r"no\x1b[2Jwhere" in capsys.readouterr().err


def test_figures_and_pages_show_dollars_and_markup(tmp_path):
    label = r"$\frac{mine$ <script>alert(1)</script>"
    with house_style():
        figure, (axes,) = new_figure(2.0)
        axes.plot([1, 2], [1, 2], **look_of([label], label))
        drawing = finish(figure, axes, "drawn", "A figure.", label)
        save_drawing(drawing, tmp_path)  # matplotlib would refuse to typeset it
    plt.close("all")
    table = Table("t", "A table.", ("algorithm",), [(label,)])
    page = write_page(tmp_path / "page.html", label, [("x", label)], [table], [drawing], [label]).read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
