"""Rates on quadratic streams: the fits, and that regret is sublinear."""

import csv
import math
from itertools import pairwise

import numpy as np
import polars as pl
import pytest
from scipy.stats import linregress, ttest_1samp

from obbo_lightning import cli
from obbo_lightning.experiments.rates import Rates, fit_power_law, has_rates, read_rates
from obbo_lightning.experiments.report_data import report_style

LENGTHS, NUMBERS, SEEDS = (50, 100, 200), (2.0, 4.0, 8.0), range(4)


def power_law(noise=0.0, over="condition_number"):
    """Return regret = 3 T^0.4 κ^2 for obbo and 5 T^0.7 κ^3 for oagd, with noise."""
    rng = np.random.default_rng(0)
    rows = []
    for label, scale, slope, exponent in (("obbo", 3, 0.4, 2), ("oagd", 5, 0.7, 3)):
        for seed in SEEDS:
            for rounds, number in [(t, 2.0) for t in LENGTHS] + [(100, k) for k in NUMBERS[1:]]:
                regret = scale * rounds**slope * number**exponent * math.exp(noise * rng.standard_normal())
                rows.append((label, seed, rounds, number, regret))
    return Rates(pl.DataFrame(rows, ["label", "seed", "rounds", over, "regret"], orient="row"))


def test_power_laws_are_found():
    rates, numbers, paired = power_law().tables()
    assert [row[-1] for row in rates.rows] == ["-0.60 [-0.60, -0.60]", "-0.30 [-0.30, -0.30]"]
    assert [row[-2] for row in numbers.rows] == ["2.00 [2.00, 2.00]", "3.00 [3.00, 3.00]"]
    assert [row[-1] for row in numbers.rows] == ["T/w + V₁ + κ² H₂", "T/w + H₁ + κ⁴ H₂"]
    assert rates.columns == ["algorithm", "seeds", "T = 50", "T = 100", "T = 200", "slope"]
    assert rates.rows[0][2] == f"{3 * 50**0.4 * 4 / 50:.3g}"
    assert paired.rows == [["oagd", f"{math.log10(5 / 3 * 200**0.3 * 2):+.2f} ± 0.00", "4 / 0, p = 0.12"]]


def test_rates_are_fitted_over_the_setting_that_the_stream_names():
    of_kappa, of_noise = power_law(), power_law(over="noise_scale")
    numbers, expected = of_noise.tables()[1], of_kappa.tables()[1]
    assert (numbers.name, expected.name) == ("noise_scales", "condition_numbers")
    columns = ["noise_scale = 2", "noise_scale = 4", "noise_scale = 8", "exponent of noise_scale"]
    assert numbers.columns == ["algorithm", "seeds", *columns]  # the paper has bounds in κ only
    assert [list(row) for row in numbers.rows] == [list(row[:-1]) for row in expected.rows]
    assert "noise_scale = 2" in of_noise.tables()[0].caption
    with report_style():
        assert [figure.name for figure in of_noise.figures("small")] == ["rates", "noise_scales"]


def test_intervals_are_those_of_scipy_and_seeds_without_all_points_are_not_fitted():
    rates = power_law(noise=0.3)
    x, y = next(rates.lines())[-1]["oagd"]
    slopes = [linregress(np.log(x), np.log(row)).slope for row in y]
    interval = ttest_1samp(slopes, 0).confidence_interval(0.95)
    slope, half = fit_power_law(x, y)
    assert np.allclose([slope - half, slope + half], [interval.low, interval.high], rtol=1e-12)
    assert half > 0.025
    assert fit_power_law(x, y[:1])[1] is None  # one seed has no interval
    fewer = Rates(rates.streams.filter((pl.col("seed") != 2) | (pl.col("rounds") != 200)))
    assert [row[1] for row in fewer.tables()[0].rows] == ["3", "3"]


def test_of_several_values_with_as_many_lengths_the_smallest_is_fixed():
    rows = [("obbo", 0, rounds, number, 1.0) for number in (8.0, 2.0, 4.0) for rounds in (50, 100)]
    rows.append(("obbo", 0, 50, 1.0, 1.0))
    rates = Rates(pl.DataFrame(rows, ["label", "seed", "rounds", "condition_number", "regret"], orient="row"))
    assert [regret for _, _, _, regret, _ in rates.lines()] == ["regret(T)/T at κ = 2", "regret at T = 50"]


def test_rates_have_a_row_for_each_run_with_an_exact_regret(make_run):
    expected = {
        (name, seed, rounds, number, 100.0 * rounds + number + seed)
        for name in ("sobow", "obbo")
        for seed in (0, 1)
        for rounds, number in ((4, 10.0), (8, 10.0), (4, 50.0))
    }
    runs = [
        make_run(name, seed, rounds, metrics={"regret/exact": regret}, data={"condition_number": number})
        for name, seed, rounds, number, regret in sorted(expected)
    ]
    assert has_rates(runs)
    assert not has_rates(runs[:1])
    bad = [make_run("obbo", seed, metrics={"regret/exact": v}) for seed, v in ((5, 0.0), (6, np.inf), (7, -1.0))]
    rates, left_out = read_rates([*runs, *bad])
    assert [one.rpartition(": ")[2] for one in left_out] == [f"its exact regret is {v}" for v in (0.0, np.inf, -1.0)]
    assert set(rates.streams.rows()) == expected
    with pytest.raises(ValueError, match=r"report needs an exact regret, and found none: .* its exact regret is 0\.0"):
        read_rates(bad[:1])


@pytest.mark.slow
def test_average_regret_falls_for_every_windowed_algorithm(tmp_path):
    """In the table, and computed by NumPy from the runs' own files; the constants are not the paper's."""
    base = ["--config", "quadratic", "--data.drift", "0.5", "--data.condition_number", "2"]
    base += ["--evaluation.tasks", "1", "--output", str(tmp_path / "runs"), "--trainer.enable_progress_bar", "false"]
    for algorithm in ("obbo", "sobbo", "sobow", "oagd"):
        for rounds in (16, 64, 256):
            window = str(math.isqrt(rounds))
            flags = ["--algorithm", algorithm, "--rounds", str(rounds), "--algorithm.window", window]
            flags += ["--regret_window", window, "--algorithm.inner.steps", "10", "--algorithm.lr", "0.015"]
            if algorithm != "sobbo":
                flags += ["--algorithm.hypergradient", "closed_form"]
            assert cli.main(["fit", *base, *flags]) == 0
    assert cli.main(["report", str(tmp_path / "runs"), "--output", str(tmp_path / "out")]) == 0
    with (tmp_path / "out" / "rates.csv").open() as file:
        rows = {row["algorithm"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["obbo", "sobbo", "sobow", "oagd"]
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"report.html", "rates.png", "rates.svg", "streams.csv"} <= files
    for name, row in rows.items():
        averages = {}
        for path in (tmp_path / "runs").glob(f"*/{name}-*"):
            regrets = np.genfromtxt(path / "metrics.csv", delimiter=",", names=True, deletechars="")["regret/exact"]
            averages[len(regrets)] = regrets[-1] / len(regrets)
        expected = [averages[t] for t in (16, 64, 256)]
        assert all(later < earlier for earlier, later in pairwise(expected)), (name, expected)
        assert [row[f"T = {t}"] for t in (16, 64, 256)] == [f"{value:.3g}" for value in expected]
        slope = np.polyfit(np.log([16, 64, 256]), np.log(expected), 1)[0]
        assert row["slope"] == f"{slope:.2f}"
        assert slope < 0
