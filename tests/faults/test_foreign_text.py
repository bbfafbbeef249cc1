"""Names that somebody else chose are text everywhere."""

import csv
import io
import warnings
from types import SimpleNamespace

import matplotlib.pyplot as plt
import polars as pl
import pytest
from rich.table import Table as RichTable

from obbo_lightning import cli
from obbo_lightning.experiments.drawing import finish, house_style, look_of, new_figure, save_drawing
from obbo_lightning.experiments.page import write_page
from obbo_lightning.experiments.tables import Table, as_csv, as_latex, as_markdown
from obbo_lightning.foreign_text import cell, cells, uncelled, uncelled_table, visible
from obbo_lightning.runs.console import PlainConsole
from obbo_lightning.runs.figures import draw_figures
from obbo_lightning.serving import forecast_files
from obbo_lightning.training.progress import RoundProgress
from obbo_lightning.training.run import warn_in_lines

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
    named = pl.DataFrame({"=1+1": [1.0]})
    assert cells(named).columns == ["'=1+1"]
    assert uncelled_table(cells(named)).equals(named)


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


def test_no_word_steers_a_terminal_or_runs_backwards(monkeypatch, capsys):
    steering = "\x1b[2J\x9b31m\x7f\u202egnp.exe\u2066\u200f"
    shown = visible(steering)
    assert not set(shown) & set("\x1b\x9b\x7f\u202e\u2066\u200f")
    assert "gnp.exe" in shown
    assert "\x1b" not in as_markdown(Table("t", "A table.", ("name",), [("\x1b[2J",)]))
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    warn_in_lines()
    assert warnings.formatwarning("\x1b[2J", UserWarning, "x.py", 1) == "obbo: warning: \\x1b[2J\n"
    said = []
    bar = RoundProgress(None, None)
    bar._progress = SimpleNamespace(update=lambda bar, shown: said.append(shown))
    bar.on_wait("\x1b[2J")
    assert said == [r"waiting for \x1b[2J"]


def test_a_forecast_has_no_formulas(tmp_path, monkeypatch):
    monkeypatch.setattr(forecast_files, "draw_forecast", lambda *given: None)
    monkeypatch.setattr(forecast_files, "save_drawing", lambda *given: [])
    table = pl.DataFrame({"ticker": ["=A"]})
    forecast_files.write_forecast(SimpleNamespace(curves=table, events=table), tmp_path / "x.csv")
    assert [(tmp_path / name).read_text() for name in ("x.csv", "x_events.csv")] == ["ticker\n'=A\n"] * 2


def test_latex_prints_what_it_would_obey():
    row = as_latex(Table("t", "A table.", ("name",), [(r"\input{x} $^_~#%&",)])).splitlines()[7].strip()
    expected = r"\textbackslash{}input\{x\} \$\textasciicircum{}\_\textasciitilde{}\#\%\& \\"
    assert row == expected


def test_the_figure_of_a_run_shows_dollars(tmp_path):
    header = "round,loss,test_loss,test_loss_se,regret/euclidean,regret/exact\n"
    (tmp_path / "metrics.csv").write_text(header + "1,1,1,,1,1\n2,1,1,,1,1\n")
    title = r"$\frac{mine$ of mine"  # matplotlib would refuse to typeset it
    assert draw_figures(tmp_path / "metrics.csv", tmp_path / "figures", "loss", 1.0, title, tmp_path / "baselines.csv")


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
