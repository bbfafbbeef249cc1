"""TuningResult against quadratics whose gain is known, and in words."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import t as student
from torch import nn
from toy import F64

from obbo_lightning import Interval, OnSimplex, ParameterGroups, Positive, Real, Weights
from obbo_lightning.core.tuning_result import TuningResult, bound_reached, how_far
from obbo_lightning.domains import Box, RealSpace, Simplex

REAL = ParameterGroups(x=Real(size=3))


def finished(hypergradient, outer, skipped=False):
    return SimpleNamespace(
        hypergradient=torch.as_tensor(hypergradient).reshape(1, -1),
        outer=outer.reshape(1, -1),
        skipped=torch.tensor([skipped]),
    )


def follow(result, gradient, steps, lr, outer, window=1):
    """Return λ_T after steps of gradient descent along the mean of the last hypergradients."""
    past = []
    for t in range(steps):
        past = [*past, gradient(outer, t)][-window:]
        after = outer - lr * sum(past) / len(past)
        result.add(outer.reshape(1, -1), finished(past[-1], after), t % result.folds)
        outer = after
    return outer


def make(groups=REAL, **options):
    result = TuningResult(**options)
    result.attach(groups)
    return result


def test_without_noise_the_gain_of_short_steps_is_that_of_the_quadratic():
    curvature, start = torch.tensor([1.0, 2.0, 0.5], dtype=F64), torch.tensor([1.0, -2.0, 3.0], dtype=F64)

    def loss(outer):
        return float((curvature * outer.square()).sum() / 2)

    errors = []
    for lr in (0.02, 0.002):
        for options in ({"folds": 4}, {"folds": 2}, {"new_examples": True}):
            result = make(**options)
            outer = follow(result, lambda at, t: curvature * at, round(4 / lr), lr, start)
            found = result.summary()["x"]
            errors.append(1 - found["gain"] / (loss(start) - loss(outer)))
            assert found["verdict"] == "helped"
            assert found["final"] == outer.tolist()
    assert all(0 < error < 0.25 for error in errors)  # a lower bound
    assert all(10 * short == pytest.approx(long, rel=0.3) for long, short in zip(errors[:3], errors[3:], strict=True))


def simulate(seed, folds, optimum, lr=0.01, steps=300, noise=1.0, batch_noise=0.0, window=1):
    """Return a result and the true gain, where each fold has a hypergradient with a noise of its own."""
    rng = np.random.default_rng(seed)
    result = make(**({"new_examples": True} if folds == "new" else {"folds": folds}))
    own = noise * rng.standard_normal((result.folds, 3)) * math.sqrt(result.folds)

    def gradient(at, t):
        fresh = rng.standard_normal(3) * (2 * noise if folds == "new" else batch_noise)
        return at - optimum + torch.tensor(fresh + (0 if folds == "new" else own[t % result.folds]))

    start = torch.zeros(3, dtype=F64)
    outer = follow(result, gradient, steps, lr, start, window)
    return result.summary()["x"], float((start - optimum).square().sum() - (outer - optimum).square().sum()) / 2


CASES = {
    "four folds": {"folds": 4},
    "two folds": {"folds": 2},
    "noisy batches": {"folds": 4, "batch_noise": 2.0},
    "window of all folds": {"folds": 4, "window": 10},
    "long": {"folds": 4, "steps": 600},
    "short": {"folds": 4, "steps": 40},
    "new examples": {"folds": "new"},
}


@pytest.mark.parametrize("case", CASES)
def test_where_there_is_nothing_to_learn_the_verdict_is_almost_never_that_it_helped(case):
    runs = 40
    found = [simulate(seed, optimum=0.0, **CASES[case]) for seed in range(runs)]
    assert np.mean([true for _, true in found]) < 0
    assert sum(one["helped"] for one, _ in found) <= 0.1 * runs
    # what the folds have in common by chance is subtracted: about as much below the error as above it
    assert np.median([one["gain"] / one["gain_se"] for one, _ in found]) < 1.0


@pytest.mark.parametrize("case", CASES)
def test_a_gain_far_above_the_noise_is_estimated_and_called_a_help(case):
    found = [simulate(seed, optimum=6.0, **CASES[case]) for seed in range(20)]
    gains, truths = ([one["gain"] for one, _ in found], [true for _, true in found])
    assert 0.7 < np.mean(gains) / np.mean(truths) < 1.1
    if case != "two folds":  # Student's t with one degree of freedom needs twelve standard errors
        assert sum(one["helped"] for one, _ in found) >= 16


def test_gain_and_error_are_those_of_their_formulas():
    gradients = torch.randn(12, 3, generator=torch.Generator().manual_seed(1), dtype=F64)
    path = torch.randn(13, 3, generator=torch.Generator().manual_seed(2), dtype=F64).cumsum(0)
    result, new = make(folds=4), make(new_examples=True)
    sums = np.zeros((4, 3))
    for t in range(12):
        for one in (result, new):
            one.add(path[t : t + 1], finished(gradients[t], path[t + 1]), t % 4)
        sums[t % 4] -= (gradients[t] * (path[t] - path[max(t - 4, 0)])).numpy()
    mean, error = sums.mean(0), sums.std(0, ddof=1) / 2
    expected = sum(a - (s**2 / max(a, s) if a > 0 else 0) for a, s in zip(mean, error, strict=True))
    found = result.summary()["x"]
    assert found["gain"] == pytest.approx(expected)
    assert found["gain_se"] == pytest.approx(sums.sum(1).std(ddof=1) / 2)
    assert found["helped"] == (expected > student.ppf(0.975, 3) * found["gain_se"])
    assert new.summary()["x"]["gain_se"] == math.inf  # rounds 4 to 7 of 8 are visited once
    assert result.metrics() == {
        "tuner/gain/x": found["gain"],
        "tuner/gain_se/x": found["gain_se"],
        "tuner/helped/x": float(found["helped"]),
    }
    assert "tuner/gain_se/x" not in new.metrics()


def test_one_fold_gives_no_evidence():
    result = make(folds=1)
    follow(result, lambda at, t: at, 50, 0.1, torch.ones(3, dtype=F64))
    found = result.summary()["x"]
    assert found["gain"] > 1
    assert (found["verdict"], found["gain_se"]) == ("no evidence that it helped", math.inf)
    (line,) = result.lines()
    assert "on the examples that produced it: no evidence that it helped" in line
    assert not result.held_out


def test_a_constant_changes_nothing_on_the_simplex():
    groups, outer = ParameterGroups(sources=OnSimplex(3)), torch.full((3,), 1 / 3, dtype=F64)
    summaries = []
    for constant in (0.0, 50.0):
        result, at = make(groups, folds=2), outer
        for t in range(20):
            slope = torch.tensor([1.0, -0.5, 0.2], dtype=F64) + (t % 2) / 10
            after = (at * (-0.02 * slope).exp()) / (at * (-0.02 * slope).exp()).sum()
            result.add(at.reshape(1, -1), finished(slope + constant, after), t % 2)
            at = after
        summaries.append(result.summary()["sources"])
    assert summaries[1]["gain"] == pytest.approx(summaries[0]["gain"], rel=1e-10)
    assert summaries[1]["gain_se"] == pytest.approx(summaries[0]["gain_se"], abs=1e-10)


def test_skipped_steps_are_counted_and_measured_by_the_next_visit():
    result, same = make(folds=2), make(folds=2)
    point = torch.zeros(3, dtype=F64)
    for t in range(12):
        after = point - 0.1
        skips = t == 4
        slope = torch.full((3,), 0.0 if skips else 1.0, dtype=F64)
        result.add(point.reshape(1, -1), finished(slope, after, skipped=skips), t % 2)
        same.add(point.reshape(1, -1), finished(torch.ones(3, dtype=F64), after), t % 2)
        point = after
    assert (result.count, result.skipped, result.visits) == (12, 1, [5, 6])
    assert result.summary()["x"]["gain"] == pytest.approx(same.summary()["x"]["gain"])
    assert result.lines()[-1] == "OnlineTuner: 1 of 12 outer steps were skipped: not finite"


def test_a_result_continues_from_its_state():
    whole, first = make(folds=4), make(folds=4)
    gradient = lambda at, t: at + math.sin(5 * t)  # noqa: E731
    middle = follow(first, gradient, 10, 0.1, torch.ones(3, dtype=F64))
    state = copy.deepcopy(first.state_dict())
    follow(first, gradient, 3, 0.1, middle)  # the state is a copy
    again = make(folds=4)
    again.load_state_dict(state)
    outer = middle
    for t in range(10, 25):
        after = outer - 0.1 * gradient(outer, t)
        again.add(outer.reshape(1, -1), finished(gradient(outer, t), after), t % 4)
        outer = after
    follow(whole, gradient, 25, 0.1, torch.ones(3, dtype=F64))
    assert again.summary() == whole.summary()
    assert make(folds=2).summary() == {}


def test_the_weights_of_a_network_are_left_out():
    groups = ParameterGroups(init=Weights(nn.Linear(2, 2)), decay=Positive(0.5), other=Real(0.0))
    result = make(groups, folds=2)
    at = groups.start(dtype=F64)
    result.add(at, finished(torch.ones(8, dtype=F64), at[0] + 1), 0)
    assert list(result.summary()) == ["decay", "other"]
    assert result.summary()["decay"]["final"] == [1.5]
    assert result.gains.shape == (2, 2)
    alone = make(ParameterGroups(init=Weights(nn.Linear(2, 2))), folds=2)
    alone.add(at[:, :6], finished(torch.ones(6, dtype=F64), at[0, :6]), 0)
    assert (alone.summary(), alone.lines(), alone.metrics()) == ({}, [], {})


def test_a_bound_that_was_reached_is_in_the_sentence():
    groups = ParameterGroups(decay=Positive(0.5), smoothing=Interval(0.0, 0.3))
    for final, ends in (
        ([0.0005, 0.1], ["no evidence that it helped; reached its lower bound 0.0005", "it helped"]),
        ([500.0, 0.3], ["reached its upper bound 500", "reached its upper bound 0.3"]),
        ([400.0, 0.0], ["it helped", "reached its lower bound 0"]),
    ):
        result, at = make(groups, folds=2), groups.start(dtype=F64)
        result.add(at, finished(torch.ones(2, dtype=F64), torch.tensor(final, dtype=F64)), 0)
        lines = result.lines()
        assert [line.endswith(end) for line, end in zip(lines, ends, strict=True)] == [True, True], lines
    assert lines[0].startswith(
        "OnlineTuner: decay 0.5 → 400 (by a factor of 800); 1 outer steps are too few to measure"
    )


@pytest.mark.parametrize(
    ("domain", "values", "expected"),
    [
        (Box(0.0, 1.0), [0.5], None),
        (Box(0.0, 1.0), [0.0, 1.0], "lower bound 0 and its upper bound 1"),
        (Box(0.0, 1.0), [0.9995], "upper bound 1"),
        (Box(0.01, 100.0), [0.02], None),
        (Box(0.01, 100.0), [0.010005], "lower bound 0.01"),
        (Box(0.01, math.inf), [0.010005], "lower bound 0.01"),
        (Box(-math.inf, 5.0), [5.0], "upper bound 5"),
        (Box(-math.inf, math.inf), [5.0], None),
        (Simplex(), [1.0, 0.0], None),
        (RealSpace(), [1.0], None),
    ],
)
def test_bounds_of_boxes(domain, values, expected):
    assert bound_reached(domain, torch.tensor(values, dtype=F64)) == expected


def test_how_far_values_moved():
    start, final = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.1, 0.65, 0.25])
    assert how_far(OnSimplex(3), start, final) == "40 % of the weight moved"
    assert how_far(Positive([0.5, 0.25, 0.25]), start, final) == "by a factor of 0.2"
    assert how_far(Real(size=3), start, final - 1) == "by -1.4"
    assert how_far(Interval(0.0, 1.0, size=3), start, final + 0.1) == "by +0.5"


def test_a_line_shows_six_values_at_most():
    groups = ParameterGroups(sources=OnSimplex(7))
    result, at = make(groups, folds=2), groups.start(dtype=F64)
    result.add(at, finished(torch.ones(7, dtype=F64), at[0]), 0)
    assert "sources [0.143, 0.143, 0.143, 0.143, 0.143, 0.143, …] → [" in result.lines()[0]
