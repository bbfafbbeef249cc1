"""summary.json against NumPy, and the closing table."""

import io
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from rich.console import Console
from small_runs import config_of

from obbo_lightning import Stream
from obbo_lightning.runs.summary import print_summary, replace_nonfinite, run_title, summarise
from obbo_lightning.streams.stream import Metric

CONFIG = {"experiment": "one", "algorithm": {"name": "obbo", "window": 5}, "data": {"name": "quadratic"}, "seed": 7}
REGRETS = ("euclidean", "generalized", "geometry", "exact")


def make_stream(lanes=None, skipped=(), **options):
    stream = Stream()
    stream.metric, stream.lanes, stream.skipped = Metric("mse", **options), lanes, list(skipped)
    return stream


def make_rounds(count, seed=0):
    """Return columns of metrics.csv and its last row."""
    rng = np.random.default_rng(seed)
    columns = {"mse": rng.uniform(1, 2, count), "skipped": rng.integers(0, 3, count).astype(float)}
    last = {"round": count, **{f"regret/{kind}": rng.uniform() for kind in REGRETS}}
    return columns, last


@pytest.mark.parametrize("count", [30, 230])
def test_a_summary_is_what_numpy_makes_of_the_rows_and_the_scores(count):
    (rounds, last), rng = make_rounds(count), np.random.default_rng(1)
    before, after = rng.exponential(size=(2, 6))  # an even count, with a long tail
    further = rng.exponential(size=(2, 6))
    initial, final = ({"mse": a.tolist(), "loss": b.tolist()} for a, b in zip((before, after), further, strict=True))
    found = summarise(CONFIG, make_stream(), rounds, last, initial, final)
    median = np.median(after)
    expected = {
        "rounds": count,
        "test_tasks": 6,
        "initial_test_mse": before.mean(),
        "initial_test_mse_se": before.std(ddof=1) / 6**0.5,
        "initial_test_loss": further[0].mean(),
        "test_mse": after.mean(),
        "test_mse_se": after.std(ddof=1) / 6**0.5,
        "test_mse_median": median,
        "test_mse_mad": np.median(np.abs(after - median)),
        "test_loss": further[1].mean(),
        "gain": (before - after).mean(),
        "gain_se": (before - after).std(ddof=1) / 6**0.5,
        "prequential_mse": rounds["mse"].mean(),
        "prequential_mse_last_100": rounds["mse"][-100:].mean(),
        **{f"regret_{kind}": last[f"regret/{kind}"] for kind in REGRETS},
        "skipped": rounds["skipped"].sum(),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert (found["seed"], found["algorithm"], found["higher_is_better"]) == (7, "obbo", False)
    gain = summarise(CONFIG, make_stream(higher_is_better=True), rounds, last, initial, final)["gain"]
    assert gain == pytest.approx(-found["gain"])


def test_a_number_that_is_not_finite_or_missing_is_none_in_a_summary():
    rounds = {"mse": [1.0, np.nan, 2.0], "skipped": [0.0] * 3}
    last = {"round": 3, "regret/exact": np.inf, "regret/generalized": None, "regret/euclidean": "0.5"}
    found = replace_nonfinite(
        summarise(CONFIG, make_stream(), rounds, last, {"mse": [1.0, 2.0]}, {"mse": [np.nan, 1.0]})
    )
    missing = ("prequential_mse", "prequential_mse_last_100", "regret_exact", "regret_generalized", "regret_geometry")
    for name in (*missing, "test_mse", "test_mse_se", "gain", "gain_se"):
        assert found[name] is None, name
    assert (found["initial_test_mse"], found["regret_euclidean"]) == (1.5, 0.5)
    untested = replace_nonfinite(summarise(CONFIG, make_stream(), rounds, last, {"mse": []}, {"mse": []}))
    assert (untested["test_tasks"], untested["test_mse"], untested["gain"]) == (0, None, None)


def test_baselines_validation_and_the_last_value_of_lanes_are_summarised():
    (rounds, last), scores = make_rounds(3), {"mse": [1.0, 2.0]}
    lanes = pl.DataFrame({"naive_mse": [1.0, None, 4.0, 10.0]})
    baselines = {"equal": [0.25, 0.75, 0.5], "truth": [1.0, 1.0, 0.25]}
    last |= {"validation/mse": "0.25", "validation/mse_se": ""}
    plain = summarise(CONFIG, make_stream(), rounds, last, scores, scores)
    found = summarise(CONFIG, make_stream(lanes, ["one"]), rounds, last, scores, scores, 3, baselines)
    assert {name: value for name, value in found.items() if name not in plain} == {
        "validation_tasks": 3,
        "validation_mse": 0.25,
        "validation_mse_se": None,
        "baselines": {"equal": 0.5, "truth": 0.75},
        "events": 4,
        "events_skipped": 1,
        "last_value_mse": 5.0,
        "last_value_mse_median": 4.0,
    }
    unforecast = summarise(CONFIG, make_stream(lanes.rename({"naive_mse": "x"})), rounds, last, scores, scores)
    assert {*unforecast} - {*plain} == {"events", "events_skipped"}


def make_summary(**changes):
    values = {"metric": "accuracy", "higher_is_better": True, "test_tasks": 4, "rounds": 30, "skipped": 0}
    values |= {f"{when}test_accuracy{end}": 0.5 for when in ("", "initial_") for end in ("", "_se")}
    values |= {"test_accuracy_median": 0.25, "test_accuracy_mad": 0.125, "gain": 0.125, "gain_se": None}
    values |= {"prequential_accuracy": 0.375, "prequential_accuracy_last_100": 0.625, "seconds": 61.6}
    return values | {"regret_euclidean": 1234.5678, "regret_geometry": None, "regret_exact": None} | changes


def print_rows(config=CONFIG, figures=(), run=None, **changes):
    """Return the rows of the closing table, and all lines."""
    out = io.StringIO()
    print_summary(Console(file=out, width=200), config, make_summary(**changes), list(figures), run)
    lines = out.getvalue().splitlines()
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")], lines


REGRET = ["regret: squared norms of windowed hypergradients, summed over rounds; lower is better", "1235"]


def test_the_closing_table_names_every_number_and_which_direction_is_better():
    rows, lines = print_rows(figures=["regret.png"])
    assert lines[0].strip() == run_title(CONFIG) == "obbo, w = 5, quadratic stream, seed 7"
    assert rows == [
        ["accuracy on 4 test tasks before learning; higher is better", "0.500 ± 0.500"],
        ["accuracy on the same after 30 rounds", "0.500 ± 0.500"],
        ["gain by learning, paired; above 0 is better", "0.125"],
        ["prequential accuracy (before learning from the round), last 30 rounds; higher is better", "0.625"],
        REGRET,
        ["seconds", "62"],
    ]
    assert lines[-1] == "figure regret.png"


def test_the_closing_table_has_baselines_and_skipped_rounds():
    baselines = {"equal": 0.25, "truth": None}
    rows, lines = print_rows(test_tasks=0, rounds=300, skipped=2, baselines=baselines, notes={"network": "3 weights"})
    assert rows == [
        ["prequential accuracy (before learning from the round), last 100 rounds; higher is better", "0.625"],
        ["the same, all rounds", "0.375"],
        ["baseline: equal", "0.250"],
        ["baseline: truth", "not finite"],
        REGRET,
        ["rounds skipped as not finite: each counts as the one before it, and regrets are lower bounds", "2"],
        ["seconds", "62"],
    ]
    assert lines[-1] == "network: 3 weights"


def test_the_closing_table_of_events_compares_with_the_last_price():
    rows, _ = print_rows(higher_is_better=False, last_value_accuracy=2.0, last_value_accuracy_median=1.5, events=9)
    assert rows[0][0] == "forecast error (accuracy) on 9 events before learning; lower is better"
    assert ["its median ± median absolute deviation", "0.250 ± 0.125"] in rows
    assert ["baseline: forecast error (accuracy) of the last price as the forecast; its median", "2.000; 1.500"] in rows


def test_the_closing_table_has_validation_scores_and_the_regret_in_the_norm_of_the_geometry():
    rows, _ = print_rows(
        regret_geometry=2.5, validation_tasks=3, validation_accuracy=0.5, validation_accuracy_se=0.25, regret_exact=1.0
    )
    assert ["accuracy on 3 validation tasks after 30 rounds; higher is better", "0.500 ± 0.250"] in rows
    generalized = "generalized regret: squared lengths of the outer steps over α in the geometry's norm, summed"
    exact = "exact regret: squared norms of windowed true gradients, summed over rounds"
    assert rows[-4:-1] == [REGRET, [f"{generalized}; lower is better", "2.5"], [f"{exact}; lower is better", "1"]]


@pytest.mark.parametrize(
    ("flags", "commands"),
    [
        ([], ["predict RUN --support DIR --query DIR", "export RUN OUT", "resume RUN --rounds N"]),
        (["--config", "quadratic"], ["resume RUN --rounds N"]),
        (
            ["--config", "forgetting", "--data.csv", "rows.csv", "--data.target", "y"],
            ["predict RUN --query FILE.csv", "resume RUN --rounds N"],
        ),
    ],
)
def test_the_next_commands_are_those_of_the_problem(flags, commands):
    _, lines = print_rows(config_of(*flags), run=Path("RUN"))
    assert [line for line in lines if line.startswith("next")] == [
        f"next   python -m obbo_lightning {command}" for command in commands
    ]
