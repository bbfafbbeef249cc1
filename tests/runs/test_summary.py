"""summary.json against NumPy, and the closing table."""

import io
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import torch
from rich.console import Console
from small_runs import config_of
from torch import nn

from obbo_lightning import OBBO, OnSimplex, ParameterGroups, Stream
from obbo_lightning.networks.flat import Weights
from obbo_lightning.runs.summary import (
    PlainConsole,
    print_summary,
    replace_nonfinite,
    run_title,
    summarise,
    summarise_tuning,
)
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


@pytest.mark.parametrize(
    ("skipped", "lanes", "diverged"),
    [
        ([1] * 4, 1, True),  # fewer than ten rounds
        ([0] + [1] * 3, 1, False),
        ([0, 0] + [1] * 10, 1, True),
        ([1] * 11 + [0], 1, False),
        ([1, 1, 0] + [1] * 9, 1, False),
        ([0, 0] + [3] * 10, 3, True),
        ([3] * 11 + [2], 3, False),
    ],
)
def test_a_run_has_diverged_if_every_lane_was_skipped_in_its_last_ten_rounds(skipped, lanes, diverged):
    rounds, last = {"mse": [1.0] * len(skipped), "skipped": list(map(float, skipped))}, {"round": len(skipped)}
    found = summarise(CONFIG, make_stream(), rounds, last, {"mse": []}, {"mse": []}, lanes=lanes)
    assert found["diverged"] is diverged
    assert (found["skipped"], found["rounds_with_skips"]) == (sum(skipped), sum(map(bool, skipped)))


def tuned(summary=None, held_out=True):
    """Return a stand-in for the result of named parameter groups."""
    return SimpleNamespace(held_out=held_out, summary=lambda: summary or {})


@pytest.mark.parametrize("held_out", [True, False])
def test_an_outer_variable_without_names_has_a_gain_where_its_steps_are_automatic(held_out):
    (group,), gains = OBBO(lr="auto").resolved_groups(None), np.random.default_rng(0).normal(0.1, 0.1, 40)
    rounds = {"held_out_gain": gains.tolist()}
    start, final = torch.tensor([[3.0, 4.0]] * 3), torch.tensor([[3.0, 4.0], [3.0, 4.5], [3.0, 5.0]])
    assert summarise_tuning(tuned(), [group], rounds, {}, start, final) == {}
    found = summarise_tuning(tuned(held_out=held_out), [group], rounds, {"lr": "0.1"}, start, final)["outer"]
    assert found["gain"] == pytest.approx(gains.sum())
    assert found["gain_se"] == pytest.approx(gains.std(ddof=1) * 40**0.5)
    assert (found["moved"], found["held_out"]) == ("by 10 % of its norm", held_out)
    assert found["helped"] is held_out
    assert found["verdict"] == ("helped" if held_out else "no evidence that it helped")
    found = summarise_tuning(tuned(), [group], {"held_out_gain": [0.5]}, {"lr": 0.1}, 0 * final, final)["outer"]
    assert (found["gain_se"], found["helped"], found["moved"]) == (math.inf, False, "by 5.41")  # one round


def test_groups_with_names_have_the_result_of_their_path_and_weights_of_networks_no_values():
    groups = ParameterGroups(share=OnSimplex(2), many=OnSimplex(101), network=Weights(nn.Linear(1, 1)))
    resolved, outer = OBBO().resolved_groups(groups), torch.ones(1, groups.size)
    one = {"gain": 0.5, "gain_se": 0.1, "moved": "by 1", "verdict": "helped"}
    values = {name: {"start": [0.1] * n, "final": [0.2] * n} for name, n in (("share", 2), ("many", 101))}
    result = tuned({name: {**one, **both} for name, both in values.items()})
    found = summarise_tuning(result, resolved, {}, {"lr/share": 1.0}, outer, outer)
    assert found == {"share": {**one, **values["share"], "held_out": True}, "many": {**one, "held_out": True}}
    rounds = {"held_out_gain/network": [1.0, 1.0]}
    found = summarise_tuning(result, resolved, rounds, {"lr/network": 1.0}, outer, outer)["network"]
    assert (found["gain"], found["verdict"]) == (2.0, "helped")
    assert not {"start", "final"} & found.keys()


def test_gains_that_are_too_large_to_be_squared_are_no_evidence():
    (group,), outer = OBBO(lr="auto").resolved_groups(None), torch.ones(1, 1)
    for gains in ([1e200, 2e200, -1e200], [math.inf, 1.0, -math.inf]):
        found = summarise_tuning(tuned(), [group], {"held_out_gain": gains}, {"lr": 0.1}, outer, outer)["outer"]
        assert found["verdict"] == "no evidence that it helped"


def make_summary(**changes):
    values = {"metric": "accuracy", "higher_is_better": True, "test_tasks": 4, "rounds": 30}
    values |= {"skipped": 0, "rounds_with_skips": 0, "diverged": False}
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
    changes = {"test_tasks": 0, "rounds": 300, "skipped": 2, "rounds_with_skips": 2, "baselines": baselines}
    rows, lines = print_rows(**changes, notes={"network": "3 weights"})
    assert rows == [
        ["prequential accuracy (before learning from the round), last 100 rounds; higher is better", "0.625"],
        ["the same, all rounds", "0.375"],
        ["baseline: equal", "0.250"],
        ["baseline: truth", "not finite"],
        REGRET,
        ["rounds skipped as not finite: each counts as the one before it, and regrets are lower bounds", "2 of 300"],
        ["seconds", "62"],
    ]
    assert lines[-1] == "network: 3 weights"


def test_the_closing_table_has_a_short_line_for_each_group():
    one = {"gain": 0.01234, "gain_se": 0.00456, "held_out": True, "moved": "by a factor of 2", "verdict": "helped"}
    many = {**one, "gain_se": None, "held_out": False, "start": [0.1] * 4, "final": [0.2] * 4}
    rows, _ = print_rows(tuning={"decay": {**one, "start": [0.5], "final": [1.0]}, "share": many, "outer": one})
    assert rows[-4:-1] == [
        ["decay 0.5 → 1 (by a factor of 2)", "held-out gain 0.012 ± 0.0046: helped"],
        ["share (by a factor of 2)", "gain on the examples that produced it 0.012 ± unknown: helped"],
        ["outer (by a factor of 2)", "held-out gain 0.012 ± 0.0046: helped"],
    ]


def test_skipped_rounds_are_red():
    out = io.StringIO()
    console = PlainConsole(file=out, width=200, force_terminal=True, color_system="standard", legacy_windows=False)
    summary = make_summary(skipped=30, rounds_with_skips=10, diverged=True)
    print_summary(console, CONFIG, summary, [])
    (line,) = (line for line in out.getvalue().splitlines() if "skipped" in line)
    assert "\x1b[1;31m" in line
    assert "10 of 30, 30 in all lanes, and all of the last 10: the run has diverged" in line


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
