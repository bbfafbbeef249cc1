"""Comparisons of algorithms: numbers, standard errors and p-values against NumPy and SciPy, and the figures."""

import re
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from scipy import stats

from obbo_lightning.experiments.comparison import read_comparison
from obbo_lightning.experiments.report_data import report_style

SEEDS, TASKS, ROUNDS = 4, 6, 8
HARD = np.random.default_rng(9).normal(0, 0.1, TASKS)  # the same tasks are hard for all


@pytest.fixture
def random_run(make_run):
    """Return a function that makes a run with random numbers, scores of test tasks and baselines."""

    def make(label, seed, **summary):
        rng = np.random.default_rng([len(label), seed])
        names = ("accuracy", "regret/euclidean", "hypergradient_norm", "residual", "gradients", "products")
        initial = rng.uniform(0.2, 0.4, TASKS)
        test, inductive = (initial + HARD + rng.normal(0.1, 0.02, TASKS) for _ in range(2))
        last = [None] * (ROUNDS - 1)
        metrics = {name: rng.uniform(1, 2, ROUNDS) for name in names}
        metrics |= {"test_accuracy": [*last, test.mean()], "test_accuracy_se": [*last, 0.1]}
        summary |= {"test_tasks": TASKS, "initial_test_accuracy": initial.mean(), "test_accuracy": test.mean()}
        summary |= {"gain": (test - initial).mean()}
        run = make_run(label, seed, ROUNDS, "accuracy", "synthetic", metrics, **summary)
        columns = {"task": range(1, TASKS + 1), "initial_accuracy": initial, "accuracy": test}
        pl.DataFrame({**columns, "inductive_accuracy": inductive}).write_csv(run.directory.test_scores)
        baselines = {"round": range(1, ROUNDS + 1), **{name: rng.uniform(size=ROUNDS) for name in ("equal", "truth")}}
        pl.DataFrame(baselines).write_csv(run.directory.baselines)
        return run

    return make


@pytest.fixture
def compared(random_run):
    skipped = {"obbo": 0, "sobow": 2}
    runs = [random_run(label, seed, skipped=skipped[label]) for label in skipped for seed in range(SEEDS)]
    return runs, {table.name: table for table in read_comparison(runs).tables()}


def scores(runs, label, name):
    """Return ``[seeds, tasks]`` of a column of test_scores.csv."""
    return np.stack([pl.read_csv(run.directory.test_scores)[name] for run in runs if run.label == label])


def two_way(x):
    """Return the error of a mean over seeds and tasks that are both random: an analysis of variance, written out."""
    s, n = x.shape
    means, grand = (x.mean(1), x.mean(0)), x.mean()
    squares = [n * ((means[0] - grand) ** 2).sum() / (s - 1), s * ((means[1] - grand) ** 2).sum() / (n - 1)]
    noise = sum((x[i, j] - means[0][i] - means[1][j] + grand) ** 2 for i in range(s) for j in range(n))
    noise /= (s - 1) * (n - 1)
    return np.sqrt((max(squares[0], noise) + max(squares[1], noise) - noise) / (s * n))


def numbers(cell):
    return [float(word) for word in re.findall(r"[-+]?\d+\.?\d*(?:e[-+]?\d+)?", cell.replace("≥", ""))]


def test_means_and_errors_are_those_of_numpy(compared):
    runs, tables = compared
    table = tables["table"]
    for row in table.rows[:2]:
        cells = dict(zip(table.columns, row, strict=True))
        mine = [run for run in runs if run.label == row[0]]
        initial, test, inductive = (
            scores(runs, row[0], name) for name in ("initial_accuracy", "accuracy", "inductive_accuracy")
        )
        for name, digits, values in (
            ("regret", 1, [run.metrics["regret/euclidean"][-1] for run in mine]),
            ("prequential accuracy, last 100", 3, [run.metrics["accuracy"].mean() for run in mine]),
        ):
            expected = (np.mean(values), stats.sem(values))
            assert numbers(cells[name]) == pytest.approx(expected, abs=0.51 * 10**-digits)
        for name, values in (
            ("test accuracy", test),
            ("test accuracy, inductive", inductive),
            ("gain", test - initial),
        ):
            assert numbers(cells[name]) == pytest.approx([values.mean(), two_way(values)], abs=0.00051)
            assert two_way(values) > 2 * stats.sem(values.mean(1))  # what an error over seeds leaves out
        assert cells["regret"].startswith("≥ ") == (row[0] == "sobow")
    assert "≥ where rounds were skipped" in table.caption


def test_paired_differences_and_p_values_are_those_of_numpy_and_scipy(compared):
    runs, tables = compared
    (row,) = tables["paired"].rows
    regrets, prequential = (
        np.array([[get(run) for run in runs if run.label == label] for label in ("obbo", "sobow")])
        for get in (lambda run: run.metrics["regret/euclidean"][-1], lambda run: run.metrics["accuracy"].mean())
    )
    tests = np.stack([scores(runs, label, "accuracy") for label in ("obbo", "sobow")])
    errors = [*(stats.sem(values[1] - values[0]) for values in (regrets, prequential)), two_way(tests[1] - tests[0])]
    for values, error, cell, counts, digits in zip(
        (regrets, prequential, tests.mean(2)), errors, row[2::2], row[3::2], (1, 3, 3), strict=True
    ):
        differences = values[1] - values[0]
        assert numbers(cell) == pytest.approx([differences.mean(), error], abs=0.51 * 10**-digits)
        larger, smaller, p = numbers(counts)
        assert (larger, smaller) == ((differences > 0).sum(), (differences < 0).sum())
        assert p == pytest.approx(stats.binomtest(int(larger), int(larger + smaller)).pvalue, rel=0.05)


def test_baselines_of_each_seed_are_below_the_algorithms(compared):
    runs, tables = compared
    table = tables["table"]
    assert [row[0] for row in table.rows] == ["obbo", "sobow", "equal", "truth"]
    files = [run.directory.baselines for run in runs if run.label == "obbo"]
    values = np.array([np.loadtxt(file, delimiter=",", skiprows=1)[:, 1] for file in files])
    cell = table.rows[2][table.columns.index("prequential accuracy, last 100")]
    assert numbers(cell) == pytest.approx([values.mean(), stats.sem(values.mean(1))], abs=0.00051)
    assert table.rows[2][1:4] == ["", str(ROUNDS), str(SEEDS)]


def test_scores_of_methods_are_those_of_test_tasks_or_prequential(make_run):
    runs = [make_run("obbo", seed, test_loss=1.0 + seed, metrics={"loss": 2.0 * seed}) for seed in (0, 1)]
    assert read_comparison(runs).scores() == ("loss on test tasks; lower is better", False, {"obbo": (1.5, 0.5)})
    runs = [run._replace(summary={**run.summary, "test_tasks": 0}) for run in runs]
    measure, _, scores = read_comparison(runs).scores()
    assert (measure, scores) == ("prequential loss, all rounds; lower is better", {"obbo": (1.0, 1.0)})


def test_numbers_of_long_runs_are_those_of_numpy(make_run):
    rng, rounds = np.random.default_rng(0), np.arange(1, 151)
    tested = [float(t) if t % 50 == 0 else None for t in rounds]
    metrics = {"test_loss": tested, "gradients": 20.0, "products": np.arange(150.0)}
    runs = [
        make_run(label, seed, 150, metrics={**metrics, "loss": rng.uniform(size=150)})
        for label in ("obbo", "adam")
        for seed in (0, 1)
    ]
    for run in runs:
        pl.DataFrame({"round": rounds, "seconds": rounds.astype(float)}).write_csv(run.directory.timings)
    comparison = read_comparison(runs)
    for row, run in zip(comparison.runs.iter_rows(named=True), runs, strict=True):
        assert (row["label"], row["seed"]) == (run.label, run.config["seed"])
        assert row["prequential_last_100"] == pytest.approx(run.metrics["loss"].to_numpy()[50:].mean(), rel=1e-12)
        assert (row["regret"], row["gradient_evaluations"]) == (2.0, 20 + 149 / 2)
    last = pl.col("label") == "adam", pl.col("seed") == 1
    assert comparison.timings.filter(*last)["round"].to_list() == [50, 100, 150]
    assert comparison.timings["seconds"].to_list()[:3] == [50 * 51 / 2, 100 * 101 / 2, 150 * 151 / 2]
    assert comparison.rounds.filter(*last)["gradient_evaluations"].to_list()[:2] == [20, 21]


def test_what_was_not_measured_is_empty_what_is_not_finite_is_named_and_pairs_have_one_length(make_run):
    runs = [make_run("obbo", seed, test_loss=1.0 + seed, gain=0.5) for seed in (0, 1)]
    runs += [make_run("adam", 0, test_loss=None, metrics={"regret/euclidean": np.inf}, test_tasks=0)]
    comparison = read_comparison(runs)
    table, paired = comparison.tables()
    means = ["2.0 ± 0.0", "0.500 ± 0.000", "1.500 ± 0.500", "0.500 ± 0.000"]
    assert table.rows[0] == ["obbo", "0.1", "4", "2", *means, "4"]
    assert table.rows[1] == ["adam", "0.1", "4", "1", "not finite", "0.500", "", "", "4"]
    assert paired.rows[0][:2] == ["adam", "1"]
    _, paired = read_comparison([*runs, make_run("adam", 1, rounds=7)]).tables()
    assert paired.rows[0][:2] == ["adam", "1"]  # 4 and 7 rounds are no pair
    with pytest.raises(ValueError, match=r"--reference must be one of obbo; adam, got 'x'"):
        comparison.as_reported("x")
    assert comparison.as_reported("adam").labels == ["adam", "obbo"]


def test_a_run_that_diverged_has_no_score(make_run):
    runs = [make_run("obbo", seed, gain=0.5) for seed in (0, 1)]
    runs += [make_run("adam", seed, gain=0.5, skipped=2 * seed, diverged=bool(seed)) for seed in (0, 1)]
    comparison = read_comparison(runs)
    table, paired = comparison.tables()
    assert table.rows[0][4:-1] == ["2.0 ± 0.0", "0.500 ± 0.000", "1.000 ± 0.000", "0.500 ± 0.000"]
    assert table.rows[1][4:-1] == ["≥ 2.0 ± 0.0", *["not finite"] * 3]
    _, _, scores = comparison.scores()
    assert np.isnan(scores["adam"][0])
    assert scores["obbo"][0] == 1.0
    assert len(paired.rows) == 1


@pytest.mark.parametrize(("regret", "cell"), [(123.456, "123.5"), (0.5, "0.500"), (0.004567, "0.00457"), (1.0, "1.0")])
def test_a_regret_has_as_many_decimals_as_show_three_digits(make_run, regret, cell):
    table, *_ = read_comparison([make_run(metrics={"regret/euclidean": regret})]).tables()
    assert table.rows[0][4] == cell


@pytest.mark.parametrize(
    ("higher", "times", "scale"), [(False, 9.0, "log"), (False, 1.0, "linear"), (True, 9.0, "linear")]
)
def test_losses_of_distant_baselines_are_drawn_on_a_logarithmic_axis(random_run, higher, times, scale):
    found = read_comparison([random_run(label, 0) for label in ("obbo", "adam")])
    runs = found.runs.with_columns(higher_is_better=pl.lit(higher))
    far = found.baselines.with_columns(score=times * (1 + pl.col("score")))
    with report_style():
        figures = replace(found, runs=runs, baselines=far).figures("Losses")
    (prequential,) = (one.figure.axes[0] for one in figures if one.name == "prequential_accuracy")
    assert prequential.get_yscale() == scale
