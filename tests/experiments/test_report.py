"""`report` against plain NumPy on the files of the runs."""

import base64
import csv
import json
import shutil
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from small_runs import rewrite_provenance

from obbo_lightning import cli, plot_comparison
from obbo_lightning.config.registry import qualified_name
from obbo_lightning.experiments.drawing import look_of
from obbo_lightning.experiments.runs import find_runs, tell_apart
from obbo_lightning.streams.stream import Stream

pytestmark = pytest.mark.filterwarnings("ignore:the fixed point of the hypergradient:RuntimeWarning")
FAST = [
    "--evaluation.every",
    "2",
    "--evaluation.tasks",
    "2",
    "--problem.network.filters",
    "3",
    "--data.image_size",
    "16",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for algorithm, seed in (("sobow", 0), ("sobow", 1), ("obbo", 0), ("obbo", 1), ("adam", 0)):
        flags = ["--algorithm", algorithm, "--seed", str(seed), "--rounds", "5", "--algorithm.inner.steps", "2"]
        assert cli.main(["fit", *FAST, *flags, "--output", str(root / "runs")]) == 0
    return root


@pytest.fixture(scope="module")
def report(runs):
    assert cli.main(["report", str(runs / "runs"), "--output", str(runs / "out"), "--title", "small"]) == 0
    return runs / "out"


def read_rows(path):
    with path.open() as file:
        return {row["algorithm"]: row for row in csv.DictReader(file)}


def columns(path, name):
    with path.open() as file:
        return np.array([float(row[name]) for row in csv.DictReader(file)])


def days(run):
    with (run / "events.csv").open() as file:
        return [row["timestamp"][:10] for row in csv.DictReader(file)]


def test_the_figures_of_a_report_are_there_for_a_notebook(runs, report):
    import matplotlib as mpl

    backend = mpl.get_backend()
    figures = plot_comparison(runs / "runs")
    assert {f"{name}.png" for name in figures} == {path.name for path in report.glob("*.png")}
    assert mpl.get_backend() == backend
    labels = {text.get_text() for text in figures["regret"].findobj(mpl.text.Text)}
    assert {"obbo", "sobow"} <= labels


def test_the_table_is_what_numpy_makes_of_the_runs(runs, report):
    lines = (report / "table.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [row[0] for row in rows] == ["obbo", "sobow", "adam"]
    for row in rows:
        found = [p for p in (runs / "runs").glob("*/*") if p.name.startswith(row[0])]
        regrets = np.array([columns(p / "metrics.csv", "regret/euclidean")[-1] for p in found])
        stream = np.array([columns(p / "metrics.csv", "accuracy").mean() for p in found])
        tests = np.array([json.loads((p / "summary.json").read_text())["test_accuracy"] for p in found])
        calls = columns(found[0] / "metrics.csv", "gradients") + columns(found[0] / "metrics.csv", "products")
        assert row[2:4] == ["5", str(len(found))]
        digits_of_regret = len(row[4].split(" ")[0].partition(".")[2])
        assert float(row[4].split(" ")[0]) == pytest.approx(regrets.mean(), rel=0.01)  # digits enough
        assert row[6].split(" ")[0] == f"{tests.mean():.3f}"  # its error has tasks in it, see test_statistics_by_hand
        for cell, values, digits in ((row[4], regrets, digits_of_regret), (row[5], stream, 3)):
            expected = f"{values.mean():.{digits}f}"
            if len(values) > 1:
                expected += f" ± {values.std(ddof=1) / len(values) ** 0.5:.{digits}f}"
            assert cell == expected
        assert row[-1] == f"{calls.mean():.0f}"


def test_the_paired_differences_are_what_numpy_makes_of_the_runs(runs, report):
    rows = read_rows(report / "paired.csv")
    assert list(rows) == ["sobow", "adam"]
    regrets = {}
    for name in ("obbo", "sobow"):
        found = sorted(p for p in (runs / "runs").glob("*/*") if p.name.startswith(name))
        seeds = {json.loads((p / "summary.json").read_text())["seed"]: p for p in found}
        regrets[name] = np.array([columns(seeds[s] / "metrics.csv", "regret/euclidean")[-1] for s in (0, 1)])
    differences = regrets["sobow"] - regrets["obbo"]
    digits = len(rows["sobow"]["regret"].split(" ")[0].partition(".")[2])
    assert digits >= 4  # these regrets are small
    assert (
        rows["sobow"]["regret"] == f"{differences.mean():+.{digits}f} ± {differences.std(ddof=1) / 2**0.5:.{digits}f}"
    )
    assert rows["sobow"]["larger / smaller"].split(",")[0].count("/") == 1
    assert (rows["sobow"]["pairs"], rows["adam"]["pairs"]) == ("2", "1")


def test_tables_say_the_same_in_every_format(report):
    for name in ("table", "paired"):
        with (report / f"{name}.csv").open() as file:
            rows = list(csv.reader(file))
        markdown = (report / f"{name}.md").read_text().splitlines()
        assert [[cell.strip() for cell in line.strip("|").split("|")] for line in (markdown[0], *markdown[2:])] == rows
        latex = (report / f"{name}.tex").read_text()
        assert latex.count(r"\\") == len(rows)
        assert latex.count(" & ") == len(rows) * (len(rows[0]) - 1)
        page = (report / "report.html").read_text()
        assert all(f"<td>{cell}</td>" in page for row in rows[1:] for cell in row)


def test_the_page_stands_alone(report):
    page = (report / "report.html").read_text()
    found = Links()
    found.feed(page)
    assert [source.split(",")[0] for source in found.sources] == ["data:image/svg+xml;base64"] * 5
    assert all(found.alternatives)
    for source in found.sources:
        svg = ElementTree.fromstring(base64.b64decode(source.split(",")[1]))
        assert svg.tag == "{http://www.w3.org/2000/svg}svg"
    assert "http" not in page.replace("http-equiv", "")
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page
    assert 'name="viewport"' in page


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.sources, self.alternatives = [], []

    def handle_starttag(self, tag, attributes):
        assert tag not in ("script", "link", "iframe")
        if tag == "img":
            self.sources.append(dict(attributes)["src"])
            self.alternatives.append(dict(attributes)["alt"])


def test_names_cannot_break_the_page(runs, tmp_path):
    title = "<script>alert(1)</script> & a title that is much longer than any figure is wide, and goes on and on"
    assert cli.main(["report", str(runs / "runs"), "--output", str(tmp_path), "--title", title]) == 0
    assert "<script>" not in (tmp_path / "report.html").read_text()


def test_every_round_of_every_run_is_in_the_csv(runs, report):
    with (report / "rounds.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 25
    (path,) = list((runs / "runs").glob("*/adam-*"))
    mine = np.array([float(row["hypergradient_norm"]) for row in rows if row["label"] == "adam"])
    assert np.allclose(mine, columns(path / "metrics.csv", "hypergradient_norm"), rtol=1e-5)


def test_a_report_is_made_again_from_its_own_csv_files(report, tmp_path):
    assert cli.main(["report", str(report), "--output", str(tmp_path / "again"), "--title", "small"]) == 0
    assert sorted(p.name for p in (tmp_path / "again").iterdir()) == sorted(p.name for p in report.iterdir())
    for name in ("table.md", "runs.csv", "rounds.csv"):
        assert (tmp_path / "again" / name).read_bytes() == (report / name).read_bytes()


def test_variants_of_an_algorithm_are_told_apart():
    one = {"name": "obbo", "lr": 1e-4, "inner": {"steps": 3}}
    assert tell_apart([one, {**one, "lr": 1e-2}, {"name": "adam", "lr": 1.0}]) == [
        "obbo, lr = 0.0001",
        "obbo, lr = 0.01",
        "adam",
    ]
    assert tell_apart([one, {**one, "inner": {"steps": 4}}])[1] == "obbo, inner.steps = 4"
    adaptive, plain = {"name": "adaptive_diagonal", "decay": 0.9}, {"name": "euclidean"}
    assert tell_apart([{**one, "geometry": adaptive}, {**one, "geometry": plain}]) == [
        "obbo, geometry = adaptive_diagonal",
        "obbo, geometry = euclidean",
    ]
    assert tell_apart([one, {**one, "clip": 3.0}])[1] == "obbo, clip = 3"  # the other has none


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "report: the following arguments are required: DIR"),
        (["nowhere"], "report needs directories, got 'nowhere'"),
        (["{empty}"], "report needs finished runs, and found none in"),
        (["{runs}", "--output"], "report: argument --output: expected one argument"),
        (["{runs}", "--format", "x"], "report: unrecognized arguments: --format x"),
        (["{runs}", "--reference", "oagd"], "--reference must be one of obbo; sobow; adam, got 'oagd'"),
        (["{runs}", "--event", "AMD 2021-11-08"], "--event needs market runs with their prices"),
        (["{runs}", "--output", "{file}"], "--output must be a folder that can be made"),
    ],
)
def test_mistakes_are_one_line(arguments, message, runs, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    places = {"empty": str(tmp_path / "empty"), "runs": str(runs / "runs"), "file": str(tmp_path / "file")}
    assert cli.main(["report", *(a.format(**places) for a in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.fixture
def copied(runs, tmp_path):
    shutil.copytree(runs / "runs", tmp_path / "runs")
    (adam,) = (tmp_path / "runs").glob("*/adam-*")
    return tmp_path, adam


def labels(folder):
    with (folder / "report" / "table.csv").open() as file:
        return [row["algorithm"] for row in csv.DictReader(file)]


def truncate(adam):
    text = (adam / "metrics.csv").read_text()
    (adam / "metrics.csv").write_text(text[: len(text) // 2])


def scribble(adam):
    text = (adam / "metrics.csv").read_text().splitlines()
    text[2] = text[2].replace(",", ",oops", 3)
    (adam / "metrics.csv").write_text("\n".join(text) + "\n")


def edit(name, old, new):
    def damage(adam):
        text = (adam / name).read_text()
        assert old in text
        (adam / name).write_text(text.replace(old, new))

    return damage


def play_with(name, old, new):
    def play(adam):
        edit(name, old, new)(adam)
        rewrite_provenance(adam)

    return play


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda adam: (adam / "metrics.csv").write_text("round,loss\n1\n"), "it is damaged: "),
        (lambda adam: (adam / "metrics.csv").unlink(), "it is damaged: ValueError"),
        (truncate, "it is damaged: "),
        (scribble, "it is damaged: "),
        (lambda adam: (adam / "summary.json").write_text('{"rounds": 5'), "it is damaged: JSONDecodeError"),
        (lambda adam: (adam / "summary.json").unlink(), "it is not finished"),
        (lambda adam: (adam / "config.yaml").write_text("nothing: 1"), "its config.yaml has no algorithm"),
        (lambda adam: (adam / "config.yaml").write_text("a: [1"), "its config.yaml cannot be read"),
        (edit("config.yaml", "ways: 5", "ways: 4"), "it is damaged: ProvenanceError data.ways must stay 5, with which"),
        (edit("summary.json", '"rounds"', ' "rounds"'), "it is damaged: ProvenanceError"),
        (edit("metrics.csv", "\n5,", "\n5,0"), "it is damaged: ValueError"),
        (play_with("config.yaml", "ways: 5", "ways: 4"), "it is of another experiment, with another data than"),
        (
            play_with("config.yaml", "regret_window: 10", "regret_window: 3"),
            "it is of another experiment, with another regret_window",
        ),
    ],
)
def test_what_cannot_be_used_is_named_and_the_rest_is_reported(damage, reason, copied, capsys):
    folder, adam = copied
    damage(adam)
    assert cli.main(["report", str(folder / "runs"), "--output", str(folder / "report")]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"obbo: {adam} is left out: {reason}")
    assert error.count("\n") == 1
    assert labels(folder) == ["obbo", "sobow"]
    assert f"{adam} is left out" in (folder / "report" / "report.html").read_text()


def test_runs_that_cannot_be_averaged_are_left_out(copied, capsys):
    folder, adam = copied
    again = adam.with_name("adam-again")
    shutil.copytree(adam, again)
    command = ["report", str(folder / "runs"), "--output", str(folder / "report")]
    assert cli.main(command) == 1
    assert "is left out: adam with seed 0 is in" in capsys.readouterr().err
    assert labels(folder) == ["obbo", "sobow", "adam"]
    play_with("config.yaml", "seed: 0", "seed: 7")(again)
    play_with("config.yaml", "rounds: 5", "rounds: 6")(again)
    assert cli.main(command) == 1
    assert "is left out: 6 rounds, where the other seeds of adam have 5" in capsys.readouterr().err


def test_an_algorithm_that_we_do_not_know_is_reported_too(copied):
    folder, adam = copied
    play_with("config.yaml", "name: adam", "name: mine")(adam)
    play_with("summary.json", '"adam"', '"mine"')(adam)
    assert cli.main(["report", str(folder / "runs"), "--output", str(folder / "report")]) == 0
    assert labels(folder) == ["obbo", "sobow", "mine"]


def test_your_algorithms_have_short_names_and_are_told_apart(copied):
    folder, adam = copied
    for file in ("mine", "yours"):
        own = adam.with_name(file)
        shutil.copytree(adam, own)
        play_with("config.yaml", "name: adam", f"name: /somewhere/{file}.py:Sparse")(own)
    assert cli.main(["report", str(folder / "runs"), "--output", str(folder / "report")]) == 0
    assert labels(folder) == ["obbo", "sobow", "adam", "Sparse_mine", "Sparse_yours"]
    looks = [look_of(labels(folder), label) for label in ("Sparse_mine", "Sparse_yours")]
    assert looks[0]["linestyle"] != looks[1]["linestyle"]


def test_data_that_cannot_be_loaded_any_more_are_reported(copied):
    folder, _ = copied
    for run in (folder / "runs").glob("*/*"):
        play_with("config.yaml", "name: synthetic", "name: /gone/mine.py:Drawn")(run)
    assert cli.main(["report", str(folder / "runs"), "--output", str(folder / "report")]) == 0
    assert labels(folder) == ["obbo", "sobow", "adam"]
    assert "mine.py:Drawn" in (folder / "report" / "report.html").read_text()
    assert "/gone" not in (folder / "report" / "report.html").read_text()


class Measured(Stream):
    """Data of a user, with a metric and a setting in which runs may differ."""

    may_differ = ("folder", "scale")


def test_what_runs_may_differ_in_is_what_their_stream_says(copied, capsys):
    folder, adam = copied
    for run in (folder / "runs").glob("*/*"):
        play_with("config.yaml", "name: synthetic", f"name: {qualified_name(Measured)}\n  folder: {run}\n  scale: 1.0")(
            run
        )
    again = adam.with_name("adam-again")
    shutil.copytree(adam, again)
    play_with("config.yaml", "scale: 1.0", "scale: 2.0")(again)
    assert cli.main(["report", str(folder / "runs"), "--output", str(folder / "report")]) == 0
    assert labels(folder) == ["obbo", "sobow", "adam, scale = 1", "adam, scale = 2"]


def test_a_metric_is_what_the_summary_says_whatever_it_is_called(copied):
    folder, _ = copied
    for run in (folder / "runs").glob("*/*"):
        for name in ("summary.json", "metrics.csv"):
            play_with(name, "accuracy", "surprise")(run)
    assert cli.main(["report", str(folder / "runs"), "--output", str(folder / "report")]) == 0
    assert {"stream_surprise.png", "test_surprise.png", "surprise_against_compute.png"} <= {
        path.name for path in (folder / "report").iterdir()
    }
    assert "test surprise" in (folder / "report" / "table.md").read_text().splitlines()[0]
    said = (folder / "report" / "table.tex").read_text()
    assert "gain is how much better the test surprise is than that of the untrained" in said
    assert "accuracy" not in said


def test_a_report_beside_its_runs_sees_the_new_ones(runs, tmp_path):
    shutil.copytree(runs / "runs", tmp_path / "runs")
    (adam,) = (tmp_path / "runs").glob("*/adam-*")
    shutil.move(adam, tmp_path / "aside")
    assert cli.main(["report", str(tmp_path / "runs")]) == 0
    table = tmp_path / "runs" / "report" / "table.md"
    assert "adam" not in table.read_text()
    shutil.move(tmp_path / "aside", adam)
    assert cli.main(["report", str(tmp_path / "runs")]) == 0
    assert "adam" in table.read_text()


def test_unfinished_runs_are_left_out(runs, tmp_path):
    shutil.copytree(runs / "runs", tmp_path / "runs")
    (unfinished,) = list((tmp_path / "runs").glob("*/adam-*"))
    (unfinished / "summary.json").unlink()
    found, left_out = find_runs([Path(tmp_path / "runs")])
    assert {run.settings["algorithm"]["name"] for run in found} == {"obbo", "sobow"}
    assert [one.path for one in left_out] == [unfinished]


MARKET = ["--config", str(Path(__file__).parents[2] / "configs" / "market.yaml"), "--rounds", "20"]
MARKET += ["--data.subset", "30", "--data.subsets", "20", "--data.horizon", "10"]


@pytest.fixture(scope="module")
def market(tmp_path_factory):
    root = tmp_path_factory.mktemp("market")
    for algorithm, window in (("sobow", "3"), ("obbo", "3"), ("obbo", "1"), ("adam", None)):
        flags = ["--algorithm", algorithm] + (["--algorithm.window", window] if window else [])
        assert cli.main(["fit", *MARKET, *flags, "--output", str(root / "runs")]) == 0
    event = ["--event", "SIM003 2021-01-06"]
    assert cli.main(["report", str(root / "runs"), "--output", str(root / "out"), *event]) == 0
    return root


def test_the_market_table_is_what_numpy_makes_of_the_events(market):
    lines = (market / "out" / "table.md").read_text().splitlines()
    rows = {cells[0]: cells for cells in ([c.strip() for c in line.strip("|").split("|")] for line in lines[2:])}
    assert list(rows) == ["obbo, window = 1", "obbo, window = 3", "sobow", "adam", "last value"]
    (mine,) = [p for p in (market / "runs").glob("*/obbo-*") if "window: 1\n" in (p / "config.yaml").read_text()]
    (theirs,) = (market / "runs").glob("*/sobow-*")
    errors, others = (columns(p / "events.csv", "test_mse") for p in (mine, theirs))
    median = np.median(errors)
    expected = [errors.mean(), median, np.median(np.abs(errors - median))]
    assert len(set(days(mine))) == 1  # so there is no error by day (test_statistics_by_hand.py has several)
    assert rows["obbo, window = 1"][1:5] == [f"{expected[0]:.4f}", "", *(f"{value:.4f}" for value in expected[1:])]
    assert rows["sobow"][5] == f"{np.median(columns(theirs / 'events.csv', 'regret')):.3f}"
    pairs = read_rows(market / "out" / "paired.csv")["sobow"]
    assert pairs["events larger / smaller"] == f"{(others > errors).sum()} / {(others < errors).sum()}"
    difference, _, error = pairs["difference of the mean squared error"].partition(" ± ")
    assert float(difference) == pytest.approx((others - errors).mean(), abs=6e-5)
    assert error == ""
    naive = columns(mine / "events.csv", "naive_mse")
    assert rows["last value"][1] == f"{naive.mean():.4f}"


def test_the_market_figures_are_there_and_are_made_again(market, tmp_path):
    names = {p.name for p in (market / "out").iterdir()}
    drawn = {"regret", "gradient_norms", "forecast_errors", "SIM003_subsets", "SIM003_forecasts"}
    files = {f"{name}.{kind}" for name in drawn for kind in ("png", "svg")}
    files |= {f"{name}.{kind}" for name in ("table", "paired", "settings") for kind in ("md", "csv", "tex")}
    assert files | {"events.csv", "regret.csv", "facts.csv", "report.html"} == names
    assert cli.main(["report", str(market / "out"), "--output", str(tmp_path)]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {n for n in names if not n.startswith("SIM003")}  # needs its prices
    mine, again = (p.read_text().splitlines() for p in (market / "out" / "table.md", tmp_path / "table.md"))
    assert mine[2].split("|")[1:4] == again[2].split("|")[1:4]


def test_another_reference_is_compared_with_the_others(market, tmp_path):
    reference = ["--reference", "obbo, window = 3"]
    assert cli.main(["report", str(market / "runs"), "--output", str(tmp_path), *reference]) == 0
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert lines[2].startswith("| obbo, window = 3 |")
    assert "obbo, window = 3" not in read_rows(tmp_path / "paired.csv")
    assert cli.main(["report", str(market / "runs"), "--output", str(tmp_path), "--reference", "mine"]) == 2


def test_mistakes_in_market_reports_are_one_line(market, tmp_path, capsys):
    runs = str(market / "runs")
    assert cli.main(["report", runs, "--output", str(tmp_path), "--event", "AMD 2021-11-08"]) == 2
    assert "--event must be one of the 40 events, got AMD 2021-11-08" in capsys.readouterr().err
    assert (
        cli.main(["fit", *MARKET, "--seed", "1", "--algorithm.window", "3", "--output", str(tmp_path / "seeds")]) == 0
    )
    capsys.readouterr()
    assert cli.main(["report", runs, str(tmp_path / "seeds"), "--output", str(tmp_path / "out")]) == 1
    assert "is left out: not all algorithms have the seed 1" in capsys.readouterr().err
    (alone,) = (tmp_path / "seeds").glob("*/*")
    assert cli.main(["report", str(alone), "--output", str(alone)]) == 2
    assert "--output must not be a run directory" in capsys.readouterr().err
    assert cli.main(["fit", *MARKET, "--data.horizon", "9", "--output", str(tmp_path / "other")]) == 0
    capsys.readouterr()
    assert cli.main(["report", runs, str(tmp_path / "other"), "--output", str(tmp_path / "out")]) == 1
    assert "is left out: it is of another experiment, with another data than" in capsys.readouterr().err
