"""`report` against plain NumPy on the files of the runs."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from obbo_lightning import cli
from obbo_lightning.experiments.comparison import finished_runs, read_comparison, tell_apart

pytestmark = pytest.mark.filterwarnings("ignore:the fixed point of the hypergradient:RuntimeWarning")
FAST = ["--evaluation.every", "2", "--evaluation.tasks", "2", "--problem.filters", "3", "--data.image_size", "16"]


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


def columns(path, name):
    with path.open() as file:
        return np.array([float(row[name]) for row in csv.DictReader(file)])


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
        for cell, values, digits in ((row[4], regrets, 1), (row[5], stream, 3), (row[6], tests, 3)):
            expected = f"{values.mean():.{digits}f}"
            if len(values) > 1:
                expected += f" ± {values.std(ddof=1) / len(values) ** 0.5:.{digits}f}"
            assert cell == expected
        assert row[8] == f"{calls.mean():.0f}"


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "report needs a directory with runs, got nothing"),
        (["nowhere"], "report needs directories, got 'nowhere'"),
        (["{empty}"], "report needs finished runs, and found none in"),
        (["{runs}", "--output"], "--output needs a value"),
        (["{runs}", "--format", "x"], "got '--format'"),
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


def test_runs_of_other_experiments_and_damaged_ones_are_named(runs, tmp_path, capsys):
    import shutil

    shutil.copytree(runs / "runs", tmp_path / "runs")
    (victim,) = list((tmp_path / "runs").glob("*/adam-*"))
    (victim / "metrics.csv").write_text("round,loss\n1\n")
    assert cli.main(["report", str(tmp_path / "runs")]) == 2
    assert f"{victim.name} cannot be reported" in capsys.readouterr().err
    config = (victim / "config.yaml").read_text()
    (victim / "config.yaml").write_text(config.replace("ways: 5", "ways: 4"))
    assert cli.main(["report", str(tmp_path / "runs")]) == 2
    assert "runs of one experiment" in capsys.readouterr().err


def test_runs_that_cannot_be_averaged_are_refused(runs, tmp_path, capsys):
    import shutil

    shutil.copytree(runs / "runs", tmp_path / "runs")
    (adam,) = (tmp_path / "runs").glob("*/adam-*")
    shutil.copytree(adam, adam.with_name("adam-again"))
    assert cli.main(["report", str(tmp_path / "runs")]) == 2
    assert "needs each seed once, got adam with seed 0" in capsys.readouterr().err
    config = adam.with_name("adam-again") / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("regret_window: 10", "regret_window: 3"))
    assert cli.main(["report", str(tmp_path / "runs")]) == 2
    assert "another regret_window" in capsys.readouterr().err
    config.write_text(text.replace("seed: 0", "seed: 7").replace("rounds: 5", "rounds: 6"))
    assert cli.main(["report", str(tmp_path / "runs")]) == 2
    assert "the same rounds for all seeds of adam" in capsys.readouterr().err
    config.write_text("nothing: 1")
    assert cli.main(["report", str(tmp_path / "runs")]) == 2
    assert "its config.yaml has no" in capsys.readouterr().err


def test_a_report_beside_its_runs_sees_the_new_ones(runs, tmp_path):
    import shutil

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
    import shutil

    shutil.copytree(runs / "runs", tmp_path / "runs")
    (unfinished,) = list((tmp_path / "runs").glob("*/adam-*"))
    (unfinished / "summary.json").unlink()
    assert read_comparison(finished_runs([Path(tmp_path / "runs")])).labels == ["obbo", "sobow"]


MARKET = ["--config", str(Path(__file__).parents[1] / "configs" / "market.yaml"), "--rounds", "20"]
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
    expected = [errors.mean(), errors.std(ddof=1) / 40**0.5, median, np.median(np.abs(errors - median))]
    assert rows["obbo, window = 1"][1:5] == [f"{value:.4f}" for value in expected]
    assert rows["sobow"][5] == f"{np.median(columns(theirs / 'events.csv', 'regret')):.3f}"
    assert rows["sobow"][7] == f"{(errors < others).sum()} / {(errors > others).sum()}"
    naive = columns(mine / "events.csv", "naive_mse")
    assert rows["last value"][1] == f"{naive.mean():.4f}"


def test_the_market_figures_are_there_and_are_made_again(market, tmp_path):
    names = {p.name for p in (market / "out").iterdir()}
    drawn = {"regret.png", "gradient_norms.png", "forecast_errors.png", "SIM003_subsets.png", "SIM003_forecasts.png"}
    assert drawn | {"events.csv", "regret.csv", "table.md"} == names
    assert cli.main(["report", str(market / "out"), "--output", str(tmp_path)]) == 0
    assert len(list(tmp_path.iterdir())) == 6  # one event alone needs its prices
    mine, again = (p.read_text().splitlines() for p in (market / "out" / "table.md", tmp_path / "table.md"))
    assert mine[2].split("|")[1:4] == again[2].split("|")[1:4]


def test_another_reference_is_compared_with_the_others(market, tmp_path):
    reference = ["--reference", "obbo, window = 3"]
    assert cli.main(["report", str(market / "runs"), "--output", str(tmp_path), *reference]) == 0
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert lines[2].startswith("| obbo, window = 3 |")
    assert "| obbo, window = 3 better / worse |" in lines[0]
    assert cli.main(["report", str(market / "runs"), "--output", str(tmp_path), "--reference", "mine"]) == 2


def test_mistakes_in_market_reports_are_one_line(market, tmp_path, capsys):
    runs = str(market / "runs")
    assert cli.main(["report", runs, "--output", str(tmp_path), "--event", "AMD 2021-11-08"]) == 2
    assert "--event must be one of the 40 events, got AMD 2021-11-08" in capsys.readouterr().err
    assert (
        cli.main(["fit", *MARKET, "--seed", "1", "--algorithm.window", "3", "--output", str(tmp_path / "seeds")]) == 0
    )
    assert cli.main(["report", runs, str(tmp_path / "seeds"), "--output", str(tmp_path)]) == 2
    assert "needs the same seeds for all" in capsys.readouterr().err
    (alone,) = (tmp_path / "seeds").glob("*/*")
    assert cli.main(["report", str(alone), "--output", str(alone)]) == 2
    assert "--output must not be a run directory" in capsys.readouterr().err
    assert cli.main(["fit", *MARKET, "--data.horizon", "9", "--output", str(tmp_path / "other")]) == 0
    capsys.readouterr()
    assert cli.main(["report", runs, str(tmp_path / "other"), "--output", str(tmp_path)]) == 2
    assert "runs of one experiment" in capsys.readouterr().err
