"""Numbers of reports from runs that are written by hand: longer than what is averaged, of several seeds and lengths."""

import numpy as np
import polars as pl
import pytest

from obbo_lightning.config.parse import complete_config, parse_arguments
from obbo_lightning.config.registry import find_component
from obbo_lightning.experiments.comparison import read_comparison
from obbo_lightning.experiments.comparison_tables import comparison_tables
from obbo_lightning.experiments.estimate import estimate_seconds
from obbo_lightning.experiments.grid import Cell
from obbo_lightning.experiments.market_comparison import market_tables, read_market
from obbo_lightning.experiments.rates import Rates, fixed_value, stream_columns
from obbo_lightning.experiments.runs import Run, _fingerprint
from obbo_lightning.experiments.tables import plain
from obbo_lightning.runs.directory import RunDirectory


def made(root, label, seed, rounds, regret=1.0):
    """A run of ``rounds`` rounds; an evaluation every 50, and seconds that are 1, 2, 3, …"""
    rng = np.random.default_rng(100 * seed + rounds + len(label))
    directory = RunDirectory(root / f"{label}-{seed}-{rounds}")
    directory.path.mkdir()
    metrics = pl.DataFrame(
        {
            "round": np.arange(1.0, rounds + 1),
            "loss": rng.uniform(size=rounds),
            "test_loss": [float(t) if t % 50 == 0 else None for t in range(1, rounds + 1)],
            "test_loss_se": [0.5 if t % 50 == 0 else None for t in range(1, rounds + 1)],
            "regret/euclidean": regret * np.arange(1, rounds + 1) / rounds,
            "hypergradient_norm": rng.uniform(size=rounds),
            "residual": rng.uniform(size=rounds),
            "gradients": np.full(rounds, 20.0),
            "products": np.arange(rounds, dtype=float),
        }
    )
    pl.DataFrame({"round": range(1, rounds + 1), "seconds": np.arange(1.0, rounds + 1)}).write_csv(directory.timings)
    summary = {"algorithm": label, "seed": seed, "rounds": rounds, "metric": "loss", "test_tasks": 4, "skipped": 0}
    summary |= {"untrained_test_loss": 2.0, "test_loss": 1.0 + seed, "test_loss_se": 0.1, "gain": 1.0, "gain_se": 0.2}
    settings = {"algorithm": {"name": label, "lr": 0.1}, "seed": seed, "rounds": rounds}
    return Run(directory, settings, summary, metrics, find_component("data", "quadratic"), label)


def test_a_comparison_is_what_numpy_makes_of_long_runs(tmp_path):
    runs = [made(tmp_path, label, seed, 150) for label in ("obbo", "adam") for seed in (0, 1)]
    comparison = read_comparison(runs)
    for row, run in zip(comparison.runs.iter_rows(named=True), runs, strict=True):
        assert (row["label"], row["seed"]) == (run.label, run.settings["seed"])
        assert row["stream_last_100"] == pytest.approx(run.metrics["loss"].to_numpy()[50:].mean(), rel=1e-12)
        assert row["regret"] == 1.0
        assert row["calls"] == 20 + 149 / 2
    last = pl.col("label") == "adam", pl.col("seed") == 1
    assert comparison.timings.filter(*last)["round"].to_list() == [50, 100, 150]
    assert comparison.timings["seconds"].to_list()[:3] == [50 * 51 / 2, 100 * 101 / 2, 150 * 151 / 2]
    assert comparison.rounds.filter(*last)["calls"].to_list()[:2] == [20, 21]


def test_runs_of_different_lengths_are_not_paired(tmp_path):
    runs = [made(tmp_path, "obbo", seed, 60) for seed in (0, 1)] + [made(tmp_path, "adam", 0, 60)]
    _, paired = comparison_tables(read_comparison([*runs, made(tmp_path, "adam", 1, 70)]))
    assert paired.rows[0][:2] == ["adam", "1"]


@pytest.mark.parametrize(("regret", "cell"), [(123.456, "123.5"), (0.5, "0.500"), (0.004567, "0.00457"), (1.0, "1.0")])
def test_a_regret_has_as_many_digits_as_show_three(tmp_path, regret, cell):
    table, *_ = comparison_tables(read_comparison([made(tmp_path, "obbo", 0, 60, regret)]))
    assert table.rows[0][4] == cell


def test_huge_numbers_are_short_with_either_sign():
    assert [plain(value, 1) for value in (1e7, -1e7, -9999999.0)] == ["1e+07", "-1e+07", "-9999999.0"]


def test_among_several_values_with_as_many_lengths_the_smallest_is_taken():
    rows = [("obbo", 0, rounds, number, 1.0) for number in (8.0, 2.0, 4.0) for rounds in (50, 100)]
    rows.append(("obbo", 0, 50, 1.0, 1.0))
    rates = Rates(pl.DataFrame(rows, schema=stream_columns("condition_number"), orient="row"))
    assert fixed_value(rates, "rounds", "condition_number") == 2.0
    assert fixed_value(rates, "condition_number", "rounds") == 50.0


def lanes(root, label, seed, errors, regrets):
    run = made(root, label, seed, 60)
    count = len(errors)
    pl.DataFrame(
        {
            "ticker": [f"T{i}" for i in range(count)],
            "timestamp": [f"2021-01-{4 + i:02d} 10:00:00" for i in range(count)],  # a day each
            "naive_mse": np.arange(1.0, count + 1),
            "weight": np.ones(count),
            "regret": regrets[-1],
            "gradient_norm": np.ones(count),
            "test_mse": errors,
        }
    ).write_csv(run.directory.events)
    np.savez(run.directory.lanes, rounds=np.array([30, 60]), regret=regrets)
    return run


def test_events_are_means_over_seeds_and_their_middle_is_numpys(tmp_path):
    rng = np.random.default_rng(0)
    errors, regrets = rng.exponential(size=(2, 2, 6)), rng.exponential(size=(2, 2, 2, 6))
    runs = [
        lanes(tmp_path, label, seed, errors[i, seed], regrets[i, seed])
        for i, label in enumerate(("obbo", "adam"))
        for seed in (0, 1)
    ]
    comparison, left_out = read_market(runs)
    assert left_out == []
    for i, label in enumerate(("obbo", "adam")):
        assert np.allclose(comparison.column(label, "test_mse"), errors[i].mean(0))
        curves = regrets[i].mean(0)
        middle = comparison.regret.filter(pl.col("label") == label)
        median = np.median(curves, axis=1)
        assert np.allclose(middle["median"], median)
        assert np.allclose(middle["mad"], np.median(np.abs(curves - median[:, None]), axis=1))
    final, paired = market_tables(comparison)
    mine, theirs = errors.mean(1)
    expected = [mine.mean(), mine.std(ddof=1) / 6**0.5, np.median(mine), np.median(np.abs(mine - np.median(mine)))]
    assert final.rows[0][1:5] == [f"{value:.4f}" for value in expected]
    difference = theirs - mine
    assert paired.rows[0][1] == f"{difference.mean():+.4f} ± {difference.std(ddof=1) / 6**0.5:.4f}"


def test_a_plans_seconds_count_rounds_past_tasks_and_evaluations():
    ticks = iter(range(10_000))
    base = ["--config", "quadratic", "--rounds", "20", "--evaluation.every", "5", "--evaluation.tasks", "3"]
    cells = [
        Cell(name, complete_config(parse_arguments([*base, *flags])[0]))
        for name, flags in (
            ("obbo-0", ["--seed", "0"]),
            ("obbo-1", ["--seed", "1"]),
            ("oagd", ["--algorithm", "oagd", "--algorithm.window", "4"]),
        )
    ]
    # every interval is one tick: 20 rounds, and 3 test tasks for λ_1 and in rounds 5, 10, 15, 20; OAGD solves 4 rounds
    # in each. The second seed is not measured again.
    assert estimate_seconds(cells, 2, lambda: next(ticks)) == ((20 + 15) * 2 + 80 + 15) / 2


def test_runs_are_of_one_experiment_if_all_but_the_algorithm_is_the_same(tmp_path):
    yardstick = {"data": {"name": "market", "subset": 30, "start": 0.1}, "problem": {"proximity": 0.5}}
    yardstick |= {"regret_window": 10, "evaluation": {"tasks": 5, "every": 2}}
    run = made(tmp_path, "obbo", 0, 60)
    first = run._replace(stream=find_component("data", "market"), settings={**run.settings, **yardstick})

    def same(**changes):
        return _fingerprint(first._replace(settings={**first.settings, **changes})) == _fingerprint(first)

    assert same(algorithm={"name": "adam"}, seed=3, rounds=7)
    assert same(data={**yardstick["data"], "start": 9.0}, evaluation={"tasks": 5, "every": 50})
    assert not same(problem={"proximity": 0.25})
    assert not same(data={**yardstick["data"], "subset": 31})
    assert not same(regret_window=11)
    assert not same(evaluation={"tasks": 6, "every": 2})
