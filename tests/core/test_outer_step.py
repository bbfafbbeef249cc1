"""The outer step: memory, clipping, what is not finite, regrets, and exact continuation from a state."""

import itertools
import math

import pytest
import torch
from toy import F64, normal, toy_point

from obbo_lightning import OAGD, OBBO, SGDM, Adam, Interval, OnSimplex, OuterStep, ParameterGroups, Positive
from obbo_lightning.core.memory import InnerState, TaskEntry
from obbo_lightning.geometry import Euclidean


def make_step(algorithm, outer, **options):
    return OuterStep(torch.nn.Parameter(outer), algorithm, **options)


def euclidean(**settings):
    return OBBO(**{"lr": 1.0, "window": 1, "geometry": Euclidean()} | settings)


def test_clipping_is_per_lane_and_does_not_change_the_euclidean_regret():
    step = make_step(euclidean(clip=5.0), torch.zeros(2, 2, dtype=F64), regret_window=1)
    update = step(torch.tensor([[[30.0, 40.0], [0.3, 0.4]]], dtype=F64))
    assert torch.allclose(update.direction, torch.tensor([[3.0, 4.0], [0.3, 0.4]], dtype=F64))
    assert torch.allclose(update.regret["euclidean"], torch.tensor([2500.0, 0.25], dtype=F64))
    assert torch.allclose(update.regret["generalized"], torch.tensor([25.0, 0.25], dtype=F64))
    assert update.regret["exact"] is update.hypergradient_error is None
    # also where the square overflows
    update = make_step(OBBO(window=1, clip=2.0), torch.zeros(2, 2))(torch.tensor([[[3e30, 4e30], [0.0, 0.0]]]))
    assert torch.allclose(update.direction, torch.tensor([[1.2, 1.6], [0.0, 0.0]]))


def test_error_and_regrets_are_of_the_newest_task():
    step = make_step(OAGD(lr=0.1, window=2), torch.zeros(2, 2, dtype=F64), regret_window=2)
    past, newest, exact = torch.tensor(
        [[[9.0, 9.0], [9.0, 9.0]], [[3.0, 4.0], [1.0, 0.0]], [[0.0, 0.0], [1.0, 2.0]]], dtype=F64
    )
    update = step(torch.stack([past, newest]), exact)
    assert update.hypergradient_error.tolist() == [5.0, 2.0]
    assert update.hypergradient.equal(newest)
    # w_R = 2: half of each vector in the first round
    assert update.regret["euclidean"].tolist() == [25 / 4, 1 / 4]
    assert update.regret["exact"].tolist() == [0.0, 5 / 4]
    # q = (past + newest)/2, and the generalized gradient of a plain step is q itself
    for vector in (update.direction, update.generalized_gradient):
        assert torch.allclose(vector, (past + newest) / 2)
    assert torch.allclose(update.regret["generalized"], ((past + newest) / 2).square().sum(-1))


def test_the_euclidean_regret_has_a_window_of_its_own():
    gradients, regrets = normal(12, 1, 2, 3), []
    for window in (1, 6):
        step = make_step(OBBO(window=window), torch.zeros(2, 3, dtype=F64), regret_window=4)
        regrets.append([step(g).regret["euclidean"] for g in gradients][-1])
    assert torch.equal(*regrets)
    # and the generalized regret has no window
    step = make_step(euclidean(), torch.zeros(1, 1, dtype=F64), regret_window=5)
    for value in (1.0, 2.0):
        update = step(torch.full((1, 1, 1), value, dtype=F64))
    assert float(update.regret["generalized"]) == float(update.regret["geometry"]) == 1.0 + 4.0
    assert float(update.regret["euclidean"]) == pytest.approx(0.04 + 0.36)


def test_hypergradients_that_are_not_finite_are_refused_by_default():
    step = make_step(OBBO(), torch.zeros(3, 2))
    hypergradients = torch.zeros(1, 3, 2)
    hypergradients[0, 1, 0] = torch.inf
    with pytest.raises(FloatingPointError, match=r"1 of 3 lanes \(first: \[1\]\).*on_nonfinite 'skip'"):
        step(hypergradients)
    assert torch.equal(step.outer.detach(), torch.zeros(3, 2))
    assert step.memory.fill == 0


def test_a_skipped_lane_counts_as_zero_and_the_others_continue():
    step = make_step(euclidean(window=2), torch.zeros(2, 2, dtype=F64), on_nonfinite="skip")
    update = step(torch.tensor([[[1.0, torch.nan], [4.0, 2.0]]], dtype=F64))  # one coordinate skips the whole lane
    assert update.skipped.tolist() == [True, False]
    assert update.hypergradient.tolist() == [[0.0, 0.0], [4.0, 2.0]]
    assert update.direction.tolist() == [[0.0, 0.0], [2.0, 1.0]]
    assert update.outer.tolist() == [[0.0, 0.0], [-2.0, -1.0]]
    update = step(torch.tensor([[[6.0, 0.0], [0.0, 0.0]]], dtype=F64))
    assert update.skipped.tolist() == [False, False]
    assert update.direction.tolist() == [[3.0, 0.0], [2.0, 1.0]]
    # a past task that is not finite skips the lane, too
    update = make_step(OAGD(window=2), torch.zeros(1, 1), on_nonfinite="skip")(torch.tensor([[[torch.inf]], [[1.0]]]))
    assert update.skipped.tolist() == [True]
    assert update.direction.tolist() == [[0.5]]


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_skipped_round_counts_in_the_regret_as_the_one_before_it(window):
    def regrets(values):
        step = make_step(euclidean(lr=1e-3), torch.zeros(1, 1, dtype=F64), regret_window=window, on_nonfinite="skip")
        found = [step(torch.tensor([[[x]]], dtype=F64), torch.tensor([[2 * x]], dtype=F64)).regret for x in values]
        return [{name: pytest.approx(float(value)) for name, value in one.items()} for one in found]

    assert regrets([3.0, 4.0, math.nan, math.inf, 5.0, math.nan]) == regrets([3.0, 4.0, 4.0, 4.0, 5.0, 5.0])
    assert regrets([math.nan, 3.0]) == regrets([0.0, 3.0])  # there is no earlier one


@pytest.mark.parametrize("algorithm", [OBBO(lr=0.1, window=4), euclidean(lr=0.1, window=4)])
def test_a_skipped_lane_counts_its_last_step_again_also_per_group_and_the_other_lane_its_own(algorithm):
    """The regrets of steps, whose direction is an average over the window and not zero in a skipped round."""
    groups = ParameterGroups(decay=Positive(0.2), shift=Interval(-1.0, 1.0, size=2))
    step = make_step(algorithm, groups.start(lanes=2, dtype=F64), groups=groups, on_nonfinite="skip")
    vectors, updates = normal(6, 1, 2, 3), []
    vectors[3:5, :, 0, 1] = math.nan
    for vector in vectors:
        updates.append({n: v.clone() for n, v in step(vector).regret.items() if v is not None})
    for name in ("generalized", "geometry", "generalized/decay", "generalized/shift"):
        gained = torch.stack([after[name] - before[name] for before, after in itertools.pairwise(updates)])[1:]
        assert torch.allclose(gained[1:3, 0], gained[0, 0].expand(2), rtol=1e-12), name  # rounds 4 and 5 as round 3
        assert not torch.isclose(gained[3, 0], gained[0, 0]), name
        assert not torch.isclose(gained[1:3, 1], gained[0, 1]).any(), name


def test_a_step_that_overflows_counts_in_the_regret_of_steps_as_the_one_before_it():
    step = make_step(euclidean(lr=1e30), torch.ones(1, 1), on_nonfinite="skip")
    updates = [step(torch.tensor([[[x]]])) for x in (1e-30, 1e30)]
    assert [bool(update.skipped) for update in updates] == [False, True]
    for name in ("generalized", "geometry"):
        first, second = (float(update.regret[name]) for update in updates)
        assert first > 0
        assert second / first == pytest.approx(2)
    # its hypergradient is known
    assert float(updates[1].regret["euclidean"]) > 1e50


def test_the_exact_regret_continues_after_a_round_in_which_it_is_not_finite():
    step = make_step(OBBO(window=1), torch.zeros(2, 1, dtype=F64), on_nonfinite="skip", regret_window=1)
    step(torch.ones(1, 2, 1, dtype=F64), exact=torch.tensor([[torch.nan], [1.0]], dtype=F64))
    update = step(torch.ones(1, 2, 1, dtype=F64), exact=torch.tensor([[3.0], [1.0]], dtype=F64))
    assert update.regret["exact"].tolist() == [9.0, 2.0]
    assert update.hypergradient_error.tolist() == [2.0, 0.0]


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_lane_whose_step_overflows_keeps_its_lambda(policy):
    step = make_step(euclidean(lr=1e30), torch.ones(2, 1), on_nonfinite=policy)
    hypergradients = torch.tensor([[[1e30], [1e-30]]])
    if policy == "raise":
        with pytest.raises(FloatingPointError, match=r"not finite after its step in 1 of 2 lanes \(first: \[0\]\)"):
            step(hypergradients)
    else:
        update = step(hypergradients)
        assert update.skipped.tolist() == [True, False]
        assert update.regret["geometry"].isfinite().all()
    assert step.outer.tolist() == [[1.0], [0.0]]


@pytest.mark.parametrize("cls", [OBBO, Adam, SGDM])
@pytest.mark.parametrize("lr", [0.01, "auto"])
def test_a_step_of_parameter_groups_continues_exactly_from_its_state(cls, lr):
    groups = ParameterGroups(decay=Positive(0.2), sources=OnSimplex(3), shift=Interval(-1.0, 1.0))
    start, vectors = groups.start(lanes=2, dtype=F64), normal(60, 1, 2, 5)
    vectors[:2, :, 0] = 0  # lane 0 has no direction at first

    def continued(outer, state=None):
        step = make_step(cls(lr=lr), outer.clone(), regret_window=3, groups=groups)
        if state is not None:
            step.load_state_dict(state)
        return step

    whole, first = continued(start), continued(start)
    expected = [whole(vector) for vector in vectors]
    for vector in vectors[:25]:
        first(vector)
    state, outer = first.state_dict(), first.outer.detach().clone()
    for vector in vectors[:12]:  # more than a window; must not change the state
        first(vector)
    for _ in range(2):  # continuing must not change the state either
        step = continued(outer, state)
        for vector, one in zip(vectors[25:], expected[25:], strict=True):
            other = step(vector)
            assert torch.equal(other.outer, one.outer)
            assert ("lr/decay" in one.step_metrics) == (lr == "auto")
            for name, value in (one.step_metrics | one.regret).items():
                assert value is None or torch.equal(value, (other.step_metrics | other.regret)[name]), name


def test_a_state_has_the_tasks_of_all_processes_and_each_continues_with_its_own():
    def oagd_step():
        return make_step(OAGD(window=2), toy_point(), regret_window=3)

    def entry(number, state=None):
        return TaskEntry({"n": torch.tensor(number)}, state or InnerState())

    def numbers(step):
        return [[int(e.task["n"]) for e in entries] for entries in step.memory._past]

    one, other = oagd_step(), oagd_step()
    one.memory.keep([[entry(t, InnerState(toy_point(seed=t)))] for t in (1, 2)])
    state = one.state_dict(lambda rounds: [[*entries, entry(9)] for entries in rounds])
    past = state["memory"]["past"]
    assert [[int(e["task"]["n"]) for e in entries] for entries in past] == [[1, 9], [2, 9]]
    assert torch.equal(past[1][0]["state"]["inner"], toy_point(seed=2))
    assert numbers(one) == [[1], [2]]  # unchanged
    other.load_state_dict(state, lambda rounds: [entries[1:] for entries in rounds])
    assert numbers(other) == [[9], [9]]
    other.load_state_dict(state)
    assert numbers(other) == [[1, 9], [2, 9]]
