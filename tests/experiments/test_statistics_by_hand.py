"""Every standard error, interval and p-value of small reports, recomputed from the runs' files by NumPy and SciPy."""

import csv
import re

import numpy as np
import polars as pl
import pytest
from matplotlib import pyplot as plt
from scipy import stats

from obbo_lightning.cli.report import shown_table
from obbo_lightning.config.registry import find_component
from obbo_lightning.experiments import report
from obbo_lightning.experiments.comparison import read_comparison
from obbo_lightning.experiments.comparison_figures import draw_comparison
from obbo_lightning.experiments.comparison_tables import comparison_tables
from obbo_lightning.experiments.drawing import house_style
from obbo_lightning.experiments.facts import facts_of
from obbo_lightning.experiments.market_comparison import market_tables, read_market
from obbo_lightning.experiments.rates import fit_power
from obbo_lightning.experiments.runs import Run, without_repetitions
from obbo_lightning.experiments.tables import Table
from obbo_lightning.runs.directory import RunDirectory

SEEDS, TASKS, ROUNDS = 4, 6, 8


def write_run(root, label, seed, skipped=0):
    rng = np.random.default_rng([len(label), seed])
    directory = RunDirectory(root / f"{label}-{seed}")
    directory.path.mkdir(parents=True)
    names = ("accuracy", "regret/euclidean", "hypergradient_norm", "residual", "gradients", "products")
    metrics = pl.DataFrame({"round": np.arange(1.0, ROUNDS + 1), **{name: rng.uniform(1, 2, ROUNDS) for name in names}})
    untrained = rng.uniform(0.2, 0.4, TASKS)
    hard = np.random.default_rng(9).normal(0, 0.1, TASKS)  # the same tasks are hard for all
    test, inductive = (untrained + hard + rng.normal(0.1, 0.02, TASKS) for _ in range(2))
    pl.DataFrame(
        {
            "task": range(1, TASKS + 1),
            "untrained_accuracy": untrained,
            "accuracy": test,
            "untrained_inductive_accuracy": untrained,
            "inductive_accuracy": inductive,
        }
    ).write_csv(directory.tests)
    pl.DataFrame({"round": range(1, ROUNDS + 1), "equal": rng.uniform(size=ROUNDS), "truth": rng.uniform(size=ROUNDS)})\
        .write_csv(directory.baselines)  # fmt: skip
    summary = {"algorithm": label, "seed": seed, "rounds": ROUNDS, "metric": "accuracy", "test_tasks": TASKS}
    summary |= {"skipped": skipped, "higher_is_better": True, "untrained_test_accuracy": untrained.mean()}
    summary |= {
        "test_accuracy": test.mean(),
        "test_accuracy_se": 0.1,
        "gain": (test - untrained).mean(),
        "gain_se": 0.1,
    }
    last = [None] * (ROUNDS - 1)
    metrics = metrics.with_columns(
        pl.Series("test_accuracy", [*last, test.mean()]), pl.Series("test_accuracy_se", [*last, 0.1])
    )
    settings = {"algorithm": {"name": label, "lr": 0.1}, "seed": seed, "rounds": ROUNDS, "data": {"name": "synthetic"}}
    settings |= {"regret_window": 10, "evaluation": {"tasks": TASKS}}
    return Run(directory, settings, summary, metrics, find_component("data", "synthetic"), label)


def scores(root, label):
    """``[seeds, tasks]`` by column, from tests.csv."""
    found = []
    for seed in range(SEEDS):
        with (root / f"{label}-{seed}" / "tests.csv").open() as file:
            found.append([{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)])
    return {name: np.array([[row[name] for row in rows] for rows in found]) for name in found[0][0]}


def of_both(x):
    """The error of a mean over seeds and tasks that are both drawn: a two-way analysis of variance, written out."""
    s, n = x.shape
    means, grand = (x.mean(1), x.mean(0)), x.mean()
    squares = [n * ((means[0] - grand) ** 2).sum() / (s - 1), s * ((means[1] - grand) ** 2).sum() / (n - 1)]
    noise = sum((x[i, j] - means[0][i] - means[1][j] + grand) ** 2 for i in range(s) for j in range(n))
    noise /= (s - 1) * (n - 1)
    return np.sqrt((max(squares[0], noise) + max(squares[1], noise) - noise) / (s * n))


def numbers(cell):
    return [float(word) for word in re.findall(r"[-+]?\d+\.?\d*(?:e[-+]?\d+)?", cell.replace("≥", ""))]


@pytest.fixture
def compared(tmp_path):
    skipped = {"obbo": 0, "sobow": 2}
    runs = [write_run(tmp_path, label, seed, skipped[label]) for label in skipped for seed in range(SEEDS)]
    tables = {table.name: table for table in comparison_tables(read_comparison(runs))}
    return tmp_path, runs, tables


def test_every_error_of_a_comparison_is_that_of_numpy(compared):
    root, runs, tables = compared
    final = tables["table"]
    for row in final.rows:
        cells = dict(zip(final.columns, row, strict=True))
        mine, by_task = [run for run in runs if run.label == row[0]], scores(root, row[0])
        for name, values in (
            ("regret", [run.metrics["regret/euclidean"][-1] for run in mine]),
            ("stream accuracy, last 100", [run.metrics["accuracy"].mean() for run in mine]),
        ):
            mean, error = numbers(cells[name])
            digits = 1 if name == "regret" else 3
            assert (mean, error) == pytest.approx((np.mean(values), stats.sem(values)), abs=0.51 * 10**-digits)
        for name, values in (
            ("test accuracy", by_task["accuracy"]),
            ("test accuracy, inductive", by_task["inductive_accuracy"]),
            ("gain", by_task["accuracy"] - by_task["untrained_accuracy"]),
        ):
            assert numbers(cells[name]) == pytest.approx([values.mean(), of_both(values)], abs=0.00051)
            assert of_both(values) > 2 * stats.sem(values.mean(1))  # what the error over seeds had left out
        assert cells["regret"].startswith("≥ ") == (row[0] == "sobow")
    assert "≥ where rounds were skipped" in final.caption


def test_every_difference_and_p_of_a_comparison_is_that_of_numpy_and_scipy(compared):
    root, runs, tables = compared
    (row,) = tables["paired"].rows
    regrets, streams = (
        np.array([[get(run) for run in runs if run.label == label] for label in ("obbo", "sobow")])
        for get in (lambda run: run.metrics["regret/euclidean"][-1], lambda run: run.metrics["accuracy"].mean())
    )
    tests = np.stack([scores(root, label)["accuracy"] for label in ("obbo", "sobow")])
    errors = [stats.sem(regrets[1] - regrets[0]), stats.sem(streams[1] - streams[0]), of_both(tests[1] - tests[0])]
    for values, error, cell, counts, digits in zip(
        (regrets, streams, tests.mean(2)), errors, row[2::2], row[3::2], (1, 3, 3), strict=True
    ):
        differences = values[1] - values[0]
        assert numbers(cell) == pytest.approx([differences.mean(), error], abs=0.51 * 10**-digits)
        larger, smaller, p = numbers(counts)
        assert (larger, smaller) == ((differences > 0).sum(), (differences < 0).sum())
        assert p == pytest.approx(stats.binomtest(int(larger), int(larger + smaller)).pvalue, rel=0.05)


def test_baselines_of_a_stream_stand_beside_the_algorithms(compared):
    root, _, tables = compared
    table = tables["baselines_table"]
    assert [row[0] for row in table.rows] == ["obbo", "sobow", "equal", "truth"]
    files = [root / f"obbo-{seed}" / "baselines.csv" for seed in range(SEEDS)]
    values = np.array([np.loadtxt(file, delimiter=",", skiprows=1)[:, 1] for file in files])
    assert numbers(table.rows[2][2]) == pytest.approx([values.mean(), stats.sem(values.mean(1))], abs=0.00051)


def test_every_error_interval_and_p_of_the_market_is_by_day(tmp_path):
    rng, count = np.random.default_rng(3), 60
    days = np.sort(rng.integers(1, 13, count))
    shared = rng.exponential(size=13)[days]
    errors = {label: shared + rng.exponential(0.3, count) for label in ("obbo", "adam")}
    runs = []
    for label, values in errors.items():
        run = write_run(tmp_path, label, 0)
        columns = {"ticker": [f"T{i}" for i in range(count)], "naive_mse": shared, "weight": values, "regret": values}
        columns |= {"gradient_norm": values, "test_mse": values}
        columns["timestamp"] = [f"2021-01-{day:02d} 10:30:00" for day in days]
        pl.DataFrame(columns).write_csv(run.directory.events)
        np.savez(run.directory.lanes, rounds=np.array([8]), regret=values[None])
        runs.append(run)
    final, paired = market_tables(read_market(runs)[0])

    def by_day(x):
        sums = np.array([(x[days == day] - x.mean()).sum() for day in np.unique(days)])
        return np.sqrt(len(sums) / (len(sums) - 1) * (sums**2).sum()) / len(x)

    for row, values in zip(final.rows, (*errors.values(), shared), strict=True):
        middle = np.median(values)
        expected = [values.mean(), by_day(values), middle, np.median(np.abs(values - middle))]
        assert [float(cell) for cell in row[1:5]] == pytest.approx(expected, abs=0.00006)
        assert by_day(values) > 1.3 * stats.sem(values)
    for row, values in zip(paired.rows, (errors["adam"], shared), strict=True):
        difference = values - errors["obbo"]
        assert numbers(row[1]) == pytest.approx([difference.mean(), by_day(difference)], abs=0.00006)
        groups = [difference[days == day] for day in np.unique(days)]
        drawn = np.random.default_rng(0).integers(0, len(groups), (4000, len(groups)))
        means = [np.concatenate([groups[i] for i in one]).mean() for one in drawn]
        assert numbers(row[2]) == pytest.approx(np.percentile(means, [2.5, 97.5]).tolist(), abs=0.00006)
        assert numbers(row[3]) == [(difference > 0).sum(), (difference < 0).sum()]
        signs = [group.mean() > 0 for group in groups]
        larger, smaller, p = numbers(row[4].replace("p <", "p ="))
        assert (larger, smaller) == (sum(signs), len(signs) - sum(signs))
        assert p == pytest.approx(max(stats.binomtest(sum(signs), len(signs)).pvalue, 1e-4), rel=0.05)


def test_the_interval_of_a_rate_is_students():
    x, rng = np.array([50.0, 100.0, 200.0]), np.random.default_rng(0)
    y = np.exp(-0.9 * np.log(x) + rng.normal(0, 0.05, (4, 3)))
    slopes = [stats.linregress(np.log(x), np.log(row)).slope for row in y]
    low, high = stats.t.interval(0.95, 3, np.mean(slopes), stats.sem(slopes))
    assert fit_power(x, y) == pytest.approx((np.mean(slopes), low, high), rel=1e-9)


def test_a_report_that_is_made_again_says_the_same(compared, tmp_path, monkeypatch):
    """Its tables, facts and settings, from the CSV files alone."""
    _, runs, _ = compared
    monkeypatch.setattr(report, "find_runs", lambda paths: (runs, []))
    monkeypatch.setattr(report, "draw_comparison", lambda found, title: [])  # figures are looked at elsewhere
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "config.yaml").touch()
    first = report.write_report([tmp_path / "runs"], tmp_path / "first", "one")
    again = report.write_report([tmp_path / "first"], tmp_path / "again", "one")
    assert {path.name for path in again.written} == {path.name for path in first.written}
    for path in first.written:
        if path.suffix in (".csv", ".md") and path.name != "facts.csv":
            assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name
    page = again.page.read_text()
    assert "outer step α" in page
    assert "regret window w_R" in page
    assert "higher is better" in page


@pytest.mark.parametrize(
    ("higher", "times", "scale"), [(False, 9.0, "log"), (False, 1.0, "linear"), (True, 9.0, "linear")]
)
def test_losses_of_what_needs_no_model_do_not_squash_the_others(tmp_path, higher, times, scale):
    found = read_comparison([write_run(tmp_path, label, 0) for label in ("obbo", "adam")])
    runs = found.runs.with_columns(higher_is_better=pl.lit(higher))
    far = found.baselines.with_columns(score=times * (1 + pl.col("score")))
    with house_style():
        drawings = draw_comparison(found._replace(runs=runs, baselines=far), "Losses")
    (stream,) = (one.figure.axes[0] for one in drawings if one.name == "stream_accuracy")
    assert stream.get_yscale() == scale
    for one in drawings:
        plt.close(one.figure)


def test_seeds_that_gave_the_same_run_count_once_and_are_said(tmp_path):
    runs = [write_run(tmp_path, label, seed) for label in ("obbo", "adam") for seed in (0, 1)]
    again = runs[0]._replace(settings={**runs[0].settings, "seed": 7}, summary={**runs[0].summary, "seed": 7})
    other = runs[0]._replace(label="sgdm")  # the same numbers of another method are its own
    kept = [(run.label, run.summary["seed"]) for run in without_repetitions([*runs, again, other])]
    assert kept == [("obbo", 0), ("obbo", 1), ("adam", 0), ("adam", 1), ("sgdm", 0)]
    facts = dict(facts_of(["obbo"], runs, repeated=1))
    assert facts["not counted"] == "1 whose seed changed nothing: no errors over seeds"
    assert "not counted" not in dict(facts_of(["obbo"], runs))


def test_a_table_that_is_too_wide_for_a_terminal_lies_on_its_side():
    table = Table("table", "Caption.", ["algorithm", "regret", "accuracy"], [["obbo", "1.0", "0.5"]])
    wide, narrow = shown_table(table, 80), shown_table(table, 20)
    assert [column.header for column in wide.columns] == ["algorithm", "regret", "accuracy"]
    assert [column.header for column in narrow.columns] == ["algorithm", "obbo"]
    assert [list(column.cells) for column in narrow.columns] == [["regret", "accuracy"], ["1.0", "0.5"]]
    assert (wide.caption, shown_table(table._replace(name="paired"), 80).caption) == (None, "Caption.")
