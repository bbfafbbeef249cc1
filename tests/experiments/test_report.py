"""`report` against plain NumPy on the files of the runs, its page, and ranks in several comparisons."""

import base64
import csv
import json
import math
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import polars as pl
import pytest

from obbo_lightning import cli, plot_comparison
from obbo_lightning.cli.report import terminal_table
from obbo_lightning.experiments.report import ranks_table, settings_table
from obbo_lightning.experiments.report_data import Table, report_style
from pages.market_event import draw

pytestmark = pytest.mark.filterwarnings("ignore:the fixed point of the hypergradient:RuntimeWarning")
COMMITTED = Path(__file__).parents[2] / "docs" / "experiments"
FAST = ["--evaluation.every", "2", "--evaluation.tasks", "2", "--rounds", "5", "--algorithm.inner.steps", "2"]
FAST += ["--problem.network.filters", "3", "--data.image_size", "16"]
MARKET = ["--config", "market", "--rounds", "20", "--data.subset", "30", "--data.subsets", "20", "--data.horizon", "10"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs") / "runs"
    for algorithm, seed in (("sobow", 0), ("sobow", 1), ("obbo", 0), ("obbo", 1), ("adam", 0)):
        assert cli.main(["fit", *FAST, "--algorithm", algorithm, "--seed", str(seed), "--output", str(root)]) == 0
    return root


@pytest.fixture(scope="module")
def report(runs):
    assert cli.main(["report", str(runs), "--output", str(runs.parent / "out"), "--title", "small"]) == 0
    return runs.parent / "out"


def read_rows(path):
    with path.open() as file:
        return {row["algorithm"]: row for row in csv.DictReader(file)}


def assert_shown(cell, value):
    mean = cell.split(" ")[0]
    assert float(mean) == pytest.approx(value, abs=0.51 * 10.0 ** -len(mean.partition(".")[2]))


def test_tables_are_of_the_files_of_the_runs(runs, report):
    rows, paired = read_rows(report / "table.csv"), read_rows(report / "paired.csv")
    assert (list(rows), list(paired)) == (["obbo", "sobow", "adam"], ["sobow", "adam"])
    assert (paired["sobow"]["pairs"], paired["adam"]["pairs"]) == ("2", "1")
    regrets = {}
    for name, row in rows.items():
        summaries = {path.parent: json.loads(path.read_text()) for path in runs.glob(f"*/{name}-*/summary.json")}
        rounds = [pl.read_csv(path / "metrics.csv") for path in sorted(summaries, key=lambda p: summaries[p]["seed"])]
        regrets[name] = np.array([one["regret/euclidean"][-1] for one in rounds])
        assert (row["rounds"], row["seeds"]) == ("5", str(len(rounds)))
        for key, values in (
            ("regret", regrets[name]),
            ("prequential accuracy, last 100", [one["accuracy"].mean() for one in rounds]),
            ("test accuracy", [one["test_accuracy"] for one in summaries.values()]),
            ("gradient evaluations", [(one["gradients"] + one["products"]).mean() for one in rounds]),
        ):
            assert_shown(row[key], np.mean(values))
    assert_shown(paired["sobow"]["regret"], (regrets["sobow"] - regrets["obbo"]).mean())


def test_the_page_stands_alone(report):
    page = (report / "report.html").read_text()
    assert not re.search("<(script|link|iframe)", page)
    images = re.findall("<img[^>]*>", page)
    assert len(images) == 3
    for image in images:
        assert re.search('alt="[^"]+"', image)
        data = re.search('src="data:image/svg[+]xml;base64,([^"]*)"', image)[1]
        assert ElementTree.fromstring(base64.b64decode(data)).tag == "{http://www.w3.org/2000/svg}svg"
    assert "http" not in page.replace("http-equiv", "")
    for text in ("prefers-color-scheme: dark", "@media print", 'name="viewport"', "python -m obbo_lightning report"):
        assert text in page
    with (report / "table.csv").open() as file:
        _, *rows = csv.reader(file)
    assert all(f"<td>{cell}</td>" in page for row in rows for cell in row)


def test_a_report_is_made_again_from_its_csv_files(report, tmp_path):
    title = "<script>alert(1)</script> & a title that is much longer than any figure is wide, and goes on and on"
    assert cli.main(["report", str(report), "--output", str(tmp_path / "again"), "--title", title]) == 0
    assert sorted(p.name for p in (tmp_path / "again").iterdir()) == sorted(p.name for p in report.iterdir())
    for path in (*report.glob("*.md"), *report.glob("*.csv")):
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name
    page = (tmp_path / "again" / "report.html").read_text()
    assert "<script>" not in page
    for text in ("regret_window", "algorithm.inner.name", "gradient_descent", "higher is better"):
        assert text in page


def test_the_figures_of_a_report_are_there_for_a_notebook(runs, report):
    backend = mpl.get_backend()
    figures = plot_comparison(runs)
    assert {f"{name}.png" for name in figures} == {path.name for path in report.glob("*.png")}
    assert mpl.get_backend() == backend
    assert {"obbo", "sobow"} <= {text.get_text() for text in figures["regret"].findobj(mpl.text.Text)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "report: the following arguments are required: DIR"),
        (["nowhere"], "nowhere must be a run directory, or have one below it, got none"),
        (["{empty}"], "empty must be a run directory, or have one below it, got none"),
        (["{runs}", "--output"], "report: argument --output: expected one argument"),
        (["{runs}", "--reference", "oagd"], "--reference must be one of obbo; sobow; adam, got 'oagd'"),
        (["{runs}", "--output", "{file}"], "file: File exists"),
        (["{runs}", "--output", "{run}"], "--output must not be a run directory"),
    ],
)
def test_mistakes_are_refused_in_one_line(arguments, message, runs, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    places = {"empty": tmp_path / "empty", "runs": runs, "file": tmp_path / "file", "run": next(runs.glob("*/adam-*"))}
    assert cli.main(["report", *(a.format(**places) for a in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_report_beside_its_runs_sees_new_ones_and_names_those_left_out(runs, tmp_path, capsys):
    shutil.copytree(runs, tmp_path / "runs")
    (adam,) = (tmp_path / "runs").glob("*/adam-*")
    shutil.move(adam / "summary.json", tmp_path)
    assert cli.main(["report", str(tmp_path / "runs")]) == 1
    assert capsys.readouterr().err == f"obbo: {adam} is left out: it is not finished\n"
    report = tmp_path / "runs" / "report"
    assert f"{adam} is left out" in (report / "report.html").read_text()
    assert "adam" not in (report / "table.md").read_text()
    shutil.move(tmp_path / "summary.json", adam)
    assert cli.main(["report", str(tmp_path / "runs")]) == 0
    assert "adam" in (report / "table.md").read_text()


@pytest.fixture(scope="module")
def market(tmp_path_factory):
    root = tmp_path_factory.mktemp("market")
    for algorithm, window in (("sobow", "3"), ("obbo", "3"), ("obbo", "1"), ("adam", None)):
        flags = ["--algorithm", algorithm] + (["--algorithm.window", window] if window else [])
        assert cli.main(["fit", *MARKET, *flags, "--output", str(root / "runs")]) == 0
    assert cli.main(["report", str(root / "runs"), "--output", str(root / "out")]) == 0
    return root


def test_the_market_table_is_that_of_numpy(market):
    rows = read_rows(market / "out" / "table.csv")
    assert list(rows) == ["obbo, window = 1", "obbo, window = 3", "sobow", "adam", "last value"]
    (sobow,) = (market / "runs").glob("*/sobow-*")
    events = pl.read_csv(sobow / "events.csv")
    assert_shown(rows["sobow"]["mean"], events["test_mse"].mean())
    assert_shown(rows["sobow"]["median"], events["test_mse"].median())
    assert_shown(rows["sobow"]["median regret"], events["regret"].median())
    assert_shown(rows["last value"]["mean"], events["naive_mse"].mean())
    assert rows["sobow"]["standard error"] == ""  # of one day


def test_a_market_report_has_its_figures_and_is_made_again_with_another_reference(market, tmp_path):
    names = {p.name for p in (market / "out").iterdir()}
    figures = {"regret", "gradient_norms", "forecast_errors"}
    files = {f"{name}.{kind}" for name in figures for kind in ("png", "svg")}
    files |= {f"{name}.{kind}" for name in ("table", "paired", "settings") for kind in ("md", "csv")}
    assert files | {"events.csv", "regret.csv", "report.html"} == names
    reference = ["--reference", "obbo, window = 3"]
    assert cli.main(["report", str(market / "out"), "--output", str(tmp_path), *reference]) == 0
    assert {p.name for p in tmp_path.iterdir()} == names
    assert (tmp_path / "table.md").read_text().splitlines()[2].startswith("| obbo, window = 3 |")
    assert "obbo, window = 3" not in read_rows(tmp_path / "paired.csv")


def test_an_event_is_drawn_with_the_forecast_of_every_run(market):
    with report_style():
        subsets, forecasts = draw(market / "runs", "SIM003", "2021-01-06")
    assert (subsets.name, forecasts.name) == ("SIM003_subsets", "SIM003_forecasts")
    labels = [text.get_text().partition(":")[0] for text in forecasts.figure.legends[0].get_texts()]
    assert labels == ["seen", "held out", "obbo, window = 1", "obbo, window = 3", "sobow", "adam"]


def test_settings_are_a_row_per_key_without_the_folders_of_a_machine(make_run):
    runs = [make_run("obbo", seed, data={"path": "/home/me/data.npz"}) for seed in (0, 1)] + [make_run("adam")]
    runs[-1].config["algorithm"]["clip"] = 3.0
    table = settings_table(runs)
    assert table.columns == ["setting", "obbo", "adam"]
    rows = {key: cells for key, *cells in table.rows}
    assert rows["data.path"] == ["data.npz", ""]
    assert (rows["seed"], rows["rounds"]) == (["0, 1", "0"], ["4", "4"])
    assert (rows["algorithm.lr"], rows["algorithm.clip"]) == (["0.1", "0.1"], ["", "3"])


def test_a_table_that_is_too_wide_for_a_terminal_is_transposed():
    table = Table("table", "Caption.", ["algorithm", "regret", "accuracy"], [["obbo", "1.0", "0.5"]])
    wide, narrow = terminal_table(table, 80), terminal_table(table, 20)
    assert [column.header for column in wide.columns] == ["algorithm", "regret", "accuracy"]
    assert [column.header for column in narrow.columns] == ["algorithm", "obbo"]
    assert [list(column.cells) for column in narrow.columns] == [["regret", "accuracy"], ["1.0", "0.5"]]
    assert (wide.caption, terminal_table(table._replace(name="paired"), 80).caption) == (None, "Caption.")


def test_ranks_follow_the_direction_and_what_is_not_finite_is_last():
    scores = {"a": (0.5, 0.01), "b": (0.7, 0.02), "c": (math.nan, None), "d": (0.7, 0.02)}
    for higher, ranks in (
        (True, {"b": "1", "d": "1", "a": "3", "c": "4"}),
        (False, {"a": "1", "b": "2", "d": "2", "c": "4"}),
    ):
        rows = ranks_table({"x": ("", higher, scores)}).rows
        assert {row[0]: row[1].rpartition("(")[2].strip(")") for row in rows} == ranks
        assert ["c", "not finite (4)", "4.0"] in rows


def test_those_within_two_standard_errors_of_the_difference_are_not_told_from_the_first():
    scores = {"first": (1.0, 0.3), "near": (1.99, 0.4), "far": (2.01, 0.4), "alone": (1.1, None)}
    for changes, expected in (({}, {"first", "near"}), ({"first": (1.0, None)}, {"first"})):  # 2 √(0.3² + 0.4²)
        table = ranks_table({"x": ("", False, {**scores, **changes})})
        assert {row[0] for row in table.rows if row[1].startswith("• ")} == expected


def test_methods_of_all_comparisons_come_first_in_the_order_of_their_mean_rank():
    one = ("accuracy", True, {"adam": (0.9, 0.01), "obbo": (0.8, 0.01), "sgdm": (0.95, None)})
    two = ("loss", False, {"adam": (0.5, 0.2), "obbo": (0.1, 0.01)})
    table = ranks_table({"one": one, "two": two})
    assert table.columns == ["method", "one: accuracy", "two: loss", "mean rank"]
    assert table.rows == [
        ["obbo", "0.800 ± 0.010 (3)", "• 0.100 ± 0.010 (1)", "2.0"],
        ["adam", "0.900 ± 0.010 (2)", "• 0.500 ± 0.200 (2)", "2.0"],
        ["sgdm", "• 0.950 (1)", "", "1.0 (in 1)"],
    ]


def test_ranks_of_two_reports_are_a_page_and_folders_of_the_same_name_are_refused(tmp_path, monkeypatch, capsys):
    scores = pl.read_csv(COMMITTED / "fc100" / "runs.csv").filter(pl.col("label") == "adam")["test"].to_numpy()
    monkeypatch.chdir(tmp_path)
    command, folder = ["report", "--by_folder"], str(COMMITTED / "default")
    assert cli.main([*command, folder, str(COMMITTED / "fc100"), "--title", "All <of> them"]) == 0
    page = (tmp_path / "ranks" / "report.html").read_text()
    assert "All &lt;of&gt; them" in page
    assert "fc100: accuracy on test tasks; higher is better" in page
    for shown in ("• 0.499 ± 0.013 (1)", f"{scores.mean():.3f} ± {scores.std(ddof=1) / len(scores) ** 0.5:.3f}"):
        assert shown in page
    assert sorted(p.name for p in (tmp_path / "ranks").glob("ranks.*")) == ["ranks.csv", "ranks.md"]
    capsys.readouterr()
    assert cli.main([*command, folder, folder]) == 2
    assert "--by_folder needs folders of different names, got default, default" in capsys.readouterr().err
    assert cli.main([*command, str(COMMITTED / "quadratic")]) == 2
    assert "needs comparisons of methods, got one of rates" in capsys.readouterr().err
