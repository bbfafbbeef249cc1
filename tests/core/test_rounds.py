from typing import ClassVar

import pytest
import torch
from toy import F64, Nonlinear, Proximal, toy_point, toy_task

from obbo_lightning import (
    OAGD,
    OBBO,
    SOBOW,
    Adam,
    ClosedForm,
    ConjugateGradient,
    Euclidean,
    FixedPoint,
    GradientDescent,
    HypergradientWindow,
    Key,
    OuterStep,
    Problem,
    Warm,
    estimate,
    online,
    play,
)
from obbo_lightning.core.share import Share
from obbo_lightning.streams.quadratic import QuadraticStream


class Watching(Problem):
    """Wraps a problem and remembers which tasks its outer loss met, and at which λ."""

    def __init__(self, problem):
        self.problem, self.met = problem, []

    def inner_loss(self, outer, inner, task, sample=None):
        return self.problem.inner_loss(outer, inner, task, sample)

    def outer_loss(self, outer, inner, task, sample=None):
        self.met.append((float(task["b"][0, 0]), outer.detach().clone()))
        return self.problem.outer_loss(outer, inner, task, sample)

    def initial_inner(self, outer, task):
        return self.problem.initial_inner(outer, task)


INNER = GradientDescent(steps=3, lr=1.0)


def test_oagd_solves_the_last_w_tasks_in_order_at_the_current_outer_variable():
    stream = QuadraticStream(rounds=6)
    names = [float(task["b"][0, 0]) for task in stream]
    watching = Watching(stream.problem)
    rounds = online(
        watching, OAGD(lr=0.1, window=3, inner=INNER, hypergradient=FixedPoint(2)), stream, stream.initial_outer()
    )
    outer = stream.initial_outer()
    for t, played in enumerate(rounds):
        met, watching.met = watching.met, []
        assert [name for name, _ in met] == names[max(0, t - 2) : t + 1]
        assert all(torch.equal(where, outer) for _, where in met)
        outer = played.step.outer
        assert played.calls["gradients"] == len(met) * played.estimates[0].calls["gradients"]


def test_oagd_is_its_definition():
    """q_t = (1/w) Σ ∇f_{t−i}(λ_t), every task from its own last inner variable, written out by hand."""
    stream, window, lr = QuadraticStream(rounds=7, condition_number=4.0), 3, 0.05
    algorithm = OAGD(lr=lr, window=window, inner=INNER, hypergradient=FixedPoint(4))
    outer, inners, newest = stream.initial_outer(), {}, Warm(torch.zeros(1, 8, dtype=F64))
    for t, played in enumerate(online(stream.problem, algorithm, stream, outer)):
        total = torch.zeros_like(outer)
        for s in range(max(0, t - window + 1), t + 1):
            found = estimate(stream.problem, algorithm, outer, stream[s], inners.get(s, newest), Key(0, t))
            inners[s] = found.warm
            total += found.hypergradient
        newest = inners[t]
        outer = stream.domain.project(outer - lr * total / window)
        assert torch.allclose(played.step.outer, outer, rtol=1e-13, atol=1e-15)
        assert torch.allclose(played.step.hypergradient, found.hypergradient, rtol=1e-12, atol=1e-14)


class OneAtATime:
    """A stream that is poisoned everywhere but at the tasks handed over so far, and watches what is read."""

    def __init__(self, stream):
        self.stream, self.tasks = stream, [{k: torch.full_like(v, torch.nan) for k, v in t.items()} for t in stream]

    def __iter__(self):
        for t, task in enumerate(self.stream):
            self.tasks[t].update(task)
            yield self.tasks[t]


def test_poisoned_later_tasks_change_nothing_for_oagd():
    stream = QuadraticStream(rounds=8)
    algorithm = OAGD(lr=0.1, window=3, inner=INNER, hypergradient=FixedPoint(2))
    clean = [r.step.outer for r in online(stream.problem, algorithm, stream, stream.initial_outer())]
    poisoned = [r.step.outer for r in online(stream.problem, algorithm, OneAtATime(stream), stream.initial_outer())]
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))


def test_oagd_remembers_tasks_although_the_stream_reuses_one_dict():
    stream = QuadraticStream(rounds=6)

    def reusing():
        task = {}
        for fresh in stream:
            task.update(fresh)
            yield task

    algorithm = OAGD(lr=0.1, window=3, inner=INNER, hypergradient=FixedPoint(2))
    ends = [list(online(stream.problem, algorithm, s, stream.initial_outer()))[-1] for s in (stream, reusing())]
    assert torch.equal(ends[0].step.outer, ends[1].step.outer)


def test_tasks_of_one_round_have_their_own_randomness():
    """OAGD re-solves the same task in several slots: equal keys would give equal draws."""
    drawn = []

    class Drawing(Nonlinear):
        def inner_loss(self, outer, inner, task, sample=None):
            if sample is not None:
                drawn.append(sample.seed)
            return super().inner_loss(outer, inner, task, sample)

    algorithm = OAGD(window=3, inner=GradientDescent(1, 0.1, batch_size=2))
    list(online(Drawing(), algorithm, [toy_task()] * 3, toy_point()))
    assert len(drawn) == len(set(drawn)) == 1 + 2 + 3


def test_the_loss_of_a_round_is_judged_before_it_is_learned_from():
    stream = QuadraticStream(rounds=5)
    algorithm = OBBO(lr=0.1, window=2, hypergradient=ClosedForm())
    outer = stream.initial_outer()
    for t, played in enumerate(online(stream.problem, algorithm, stream, outer)):
        expected = stream.problem.outer_loss(outer, stream.problem.solution(outer, stream[t]), stream[t])
        assert torch.allclose(played.loss, expected, rtol=1e-14)
        outer = played.step.outer


def test_obbo_is_its_definition():
    """Algorithm 1 with a plain list for the window and a plain formula for the step."""
    problem, tasks = Nonlinear(), [toy_task(seed=s) for s in range(9)]
    lr, window, decay, rho = 0.05, 4, 0.9, 1e-8
    algorithm = OBBO(lr=lr, window=window, inner=GradientDescent(4, 0.3), hypergradient=FixedPoint(3), clip=0.02)
    outer, inner, past, moment = toy_point(), torch.zeros(2, 3, dtype=F64), [], torch.zeros(2, 3, dtype=F64)
    for played, task in zip(online(problem, algorithm, tasks, outer), tasks, strict=True):
        found = estimate(problem, algorithm, outer, task, Warm(inner), Key())
        inner = found.inner
        past.append(found.hypergradient)
        q = sum(past[-window:]) / window
        q = q * torch.clamp(0.02 / q.norm(dim=-1, keepdim=True), max=1)
        moment = decay * moment + (1 - decay) * q**2
        outer = outer - lr * q / (moment.sqrt() + rho)
        assert torch.allclose(played.step.direction, q, rtol=1e-12)
        assert torch.allclose(played.step.outer, outer, rtol=1e-12)
        assert torch.allclose(played.step.generalized, q / (moment.sqrt() + rho), rtol=1e-9)


def step_of(algorithm, outer, **options):
    return OuterStep(torch.nn.Parameter(outer), algorithm, **options)


def test_clipping_is_per_lane_and_leaves_the_yardstick_alone():
    step = step_of(
        OBBO(lr=1.0, window=1, geometry=Euclidean(), clip=5.0), torch.zeros(2, 2, dtype=F64), regret_window=1
    )
    record = step(torch.tensor([[[30.0, 40.0], [0.3, 0.4]]], dtype=F64))
    assert torch.allclose(record.direction, torch.tensor([[3.0, 4.0], [0.3, 0.4]], dtype=F64))
    assert torch.allclose(record.regret["euclidean"], torch.tensor([2500.0, 0.25], dtype=F64))
    assert torch.allclose(record.regret["generalized"], torch.tensor([25.0, 0.25], dtype=F64))
    assert record.regret["exact"] is None


def test_the_yardstick_does_not_depend_on_the_algorithms_window():
    gradients = torch.randn(12, 1, 2, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    regrets = []
    for window in (1, 6):
        step = step_of(OBBO(window=window), torch.zeros(2, 3, dtype=F64), regret_window=4)
        regrets.append([step(g).regret["euclidean"] for g in gradients][-1])
    assert torch.equal(*regrets)


class Slope(Problem):
    """F_t(λ) = ⟨task, λ⟩ a lane: its hypergradient is the task."""

    def inner_loss(self, outer, inner, task, sample=None):
        return inner.square().sum(-1)

    def outer_loss(self, outer, inner, task, sample=None):
        return (task["slope"] * outer).sum(-1)

    def hypergradient(self, outer, task):
        return task["slope"], torch.zeros_like(outer)

    def scores(self, outer, inner, task):
        return {"score": task["slope"].sum(-1)}


def played_with(total, slope, **options):
    """One round whose sums over processes ``total`` makes; w_R = 1."""
    algorithm = OBBO(lr=1.0, window=1, geometry=Euclidean(), hypergradient=ClosedForm())
    step = step_of(algorithm, torch.zeros_like(slope), regret_window=1, **options)
    return play(Slope(), algorithm, step, {"slope": slope}, Warm(), Key(), Share(total=total))


def test_everything_of_a_round_is_summed_over_processes_in_one_message():
    messages = []

    def half(values):
        messages.append(values)
        return values / 2

    played = played_with(half, torch.full((1, 1), 8.0))
    assert len(messages) == 1
    assert float(played.step.hypergradient) == 4.0
    assert float(played.step.outer) == -4.0
    assert float(played.scores["score"]) == 4.0
    assert played.step.regret["exact"].tolist() == [16.0]
    assert played.step.hypergradient_error.tolist() == [0.0]


def test_what_is_not_finite_in_another_process_is_skipped_in_every_one():
    def from_another_rank(values):
        poison = torch.zeros_like(values)
        poison[1] = torch.nan  # the second lane's hypergradient comes second
        return values + poison

    played = played_with(from_another_rank, torch.ones(2, 1, dtype=F64), on_nonfinite="skip")
    assert played.step.skipped.tolist() == [False, True]
    assert played.step.outer.tolist() == [[-1.0], [0.0]]


def test_the_exact_regret_survives_a_round_in_which_it_is_not_finite():
    step = step_of(OBBO(window=1), torch.zeros(2, 1, dtype=F64), on_nonfinite="skip", regret_window=1)
    step(torch.ones(1, 2, 1, dtype=F64), exact=torch.tensor([[torch.nan], [1.0]], dtype=F64))
    record = step(torch.ones(1, 2, 1, dtype=F64), exact=torch.tensor([[3.0], [1.0]], dtype=F64))
    assert record.regret["exact"].tolist() == [9.0, 2.0]
    assert record.hypergradient_error.tolist() == [2.0, 0.0]


def test_a_past_task_that_is_not_finite_counts_as_skipped():
    step = step_of(OAGD(window=2), torch.zeros(1, 1), on_nonfinite="skip")
    record = step(torch.tensor([[[torch.inf]], [[1.0]]]))
    assert record.skipped.tolist() == [True]
    assert record.direction.tolist() == [[0.5]]


def test_the_generalized_regret_has_no_window_of_its_own():
    step = step_of(OBBO(lr=1.0, window=1, geometry=Euclidean()), torch.zeros(1, 1, dtype=F64), regret_window=5)
    for value in (1.0, 2.0):
        record = step(torch.full((1, 1, 1), value, dtype=F64))
    assert float(record.regret["generalized"]) == 1.0 + 4.0
    assert float(record.regret["euclidean"]) == pytest.approx(0.04 + 0.36)


def test_clipping_survives_what_overflows_when_squared():
    step = step_of(OBBO(window=1, clip=2.0), torch.zeros(2, 2))
    record = step(torch.tensor([[[3e30, 4e30], [0.0, 0.0]]]))
    assert torch.allclose(record.direction, torch.tensor([[1.2, 1.6], [0.0, 0.0]]))


def test_a_closed_form_is_evaluated_once_a_round():
    stream, asked = QuadraticStream(rounds=3), []

    class Counting(type(stream.problem)):
        def hypergradient(self, outer, task):
            asked.append(1)
            return super().hypergradient(outer, task)

    problem = Counting(stream.problem.inner_matrix, stream.problem.coupling)
    rounds = list(online(problem, OBBO(hypergradient=ClosedForm()), stream, stream.initial_outer()))
    assert len(asked) == 3
    assert torch.equal(rounds[-1].step.regret["exact"], rounds[-1].step.regret["euclidean"])


def test_one_state_can_be_resumed_from_twice():
    stream = QuadraticStream(rounds=8)
    for algorithm in (OBBO(lr=0.1, hypergradient=ClosedForm()), Adam(lr=0.1, hypergradient=ClosedForm())):
        first = OuterStep(torch.nn.Parameter(stream.initial_outer()), algorithm)
        for t in range(3):
            play(stream.problem, algorithm, first, stream[t], Warm(), Key(0, t))
        state, outer, ends = first.state_dict(), first.outer.detach().clone(), []
        for _ in range(2):
            step = OuterStep(torch.nn.Parameter(outer.clone()), algorithm)
            step.load_state_dict(state)
            for t in range(3, 8):
                play(stream.problem, algorithm, step, stream[t], Warm(), Key(0, t))
            ends.append(step.outer.detach())
        assert torch.equal(*ends)


def test_nonfinite_hypergradients_are_refused_by_default():
    step = step_of(OBBO(), torch.zeros(3, 2))
    bad = torch.zeros(1, 3, 2)
    bad[0, 1, 0] = torch.inf
    with pytest.raises(FloatingPointError, match=r"1 of 3 lanes \(first: \[1\]\).*on_nonfinite 'skip'"):
        step(bad)
    assert torch.equal(step.outer.detach(), torch.zeros(3, 2))
    assert step.memory.fill == 0


def test_a_skipped_lane_counts_as_zero_and_the_others_go_on():
    algorithm = OBBO(lr=1.0, window=2, geometry=Euclidean())
    step = step_of(algorithm, torch.zeros(2, 1, dtype=F64), on_nonfinite="skip")
    record = step(torch.tensor([[[torch.nan], [4.0]]], dtype=F64))
    assert record.skipped.tolist() == [True, False]
    assert record.direction.tolist() == [[0.0], [2.0]]
    record = step(torch.tensor([[[6.0], [0.0]]], dtype=F64))
    assert record.direction.tolist() == [[3.0], [2.0]]


def test_a_lane_that_blew_up_starts_again_from_where_it_was():
    stream = QuadraticStream(rounds=4, lanes=2)
    tasks = [dict(task) for task in stream]
    tasks[1] = {name: torch.where(torch.tensor([[True], [False]]), torch.nan, v) for name, v in tasks[1].items()}
    algorithm = SOBOW(lr=1e-3, inner=INNER, hypergradient=ConjugateGradient(3, warm_start=True))
    rounds = list(online(stream.problem, algorithm, tasks, stream.initial_outer(), on_nonfinite="skip"))
    assert [r.step.skipped.tolist() for r in rounds] == [[False, False], [True, False], [False, False], [False, False]]
    before, after = rounds[0].estimates[0].warm, rounds[1].estimates[0].warm
    assert torch.equal(after.inner[0], before.inner[0])
    assert torch.equal(after.solve[0], before.solve[0])


def test_a_fixed_point_that_does_not_contract_is_warned_about():
    stream = QuadraticStream(rounds=1)
    algorithm = OBBO(lr=1e-3, hypergradient=FixedPoint(8, lr=3.0), inner=INNER)  # η‖∇²g‖ = 3 > 2
    with pytest.warns(RuntimeWarning, match=r"does not contract.*smaller inner.lr"):
        played = next(online(stream.problem, algorithm, stream, stream.initial_outer()))
    assert float(played.residual) > 1
    overflowing = OBBO(lr=1e-3, hypergradient=FixedPoint(600, lr=1e3), inner=INNER)
    with pytest.warns(RuntimeWarning, match="does not contract"):
        next(online(stream.problem, overflowing, stream, stream.initial_outer(), on_nonfinite="skip"))


def test_hypergradient_error_and_exact_regret_are_measured_against_the_truth():
    stream = QuadraticStream(rounds=6, condition_number=3.0)
    algorithm = OBBO(lr=0.01, window=2, inner=INNER, hypergradient=FixedPoint(2))
    outer, total, window = stream.initial_outer(), 0.0, HypergradientWindow(3)
    for t, played in enumerate(online(stream.problem, algorithm, stream, outer, regret_window=3)):
        truth, _ = stream.problem.hypergradient(outer, stream[t])
        error = (played.estimates[0].hypergradient - truth).norm(dim=-1)
        assert torch.allclose(played.step.hypergradient_error, error, rtol=1e-12)
        total += float(window.push(truth).square().sum())
        outer = played.step.outer
    assert abs(float(played.step.regret["exact"]) - total) <= 1e-12 * total
    assert float(played.step.regret["euclidean"]) != float(played.step.regret["exact"])


def test_problems_without_a_closed_form_report_no_exact_regret():
    task = toy_task()
    algorithm = OBBO(inner=GradientDescent(2, 0.1, start="outer"))
    played = next(online(Proximal(), algorithm, [task], toy_point()))
    assert played.step.hypergradient_error is None
    assert played.step.regret["exact"] is None
    assert played.estimates[0].warm == Warm()  # nothing is carried that nobody will use


def test_a_parameter_is_updated_in_place_and_a_tensor_is_left_alone():
    stream = QuadraticStream(rounds=3)
    start = stream.initial_outer()
    parameter = torch.nn.Parameter(start.clone())
    algorithm = OBBO(lr=0.1, hypergradient=ClosedForm())
    last = [list(online(stream.problem, algorithm, stream, p))[-1].step.outer for p in (start, parameter)]
    assert torch.equal(*last)
    assert torch.equal(start, stream.initial_outer())
    assert torch.equal(parameter.detach(), last[0])


def test_a_round_can_be_played_by_hand():
    stream = QuadraticStream(rounds=5)
    algorithm = SOBOW(lr=0.01, inner=INNER)
    step, warm = OuterStep(torch.nn.Parameter(stream.initial_outer()), algorithm), Warm()
    for t, task in enumerate(stream):
        warm = play(stream.problem, algorithm, step, task, warm, Key(0, t)).warms[0]
    whole = list(online(stream.problem, algorithm, stream, stream.initial_outer()))[-1]
    assert torch.equal(step.outer.detach(), whole.step.outer)


def test_both_losses_of_a_round_are_those_before_the_outer_variable_moved():
    stream = QuadraticStream(rounds=4, lanes=2)
    outer = stream.initial_outer()
    for t, played in enumerate(online(stream.problem, OBBO(lr=0.1, window=2, inner=INNER), stream, outer)):
        inner = played.estimates[0].inner
        assert torch.equal(played.inner_loss, stream.problem.inner_loss(outer, inner, stream[t]))
        assert torch.equal(played.loss, stream.problem.outer_loss(outer, inner, stream[t]))
        outer = played.step.outer


class Watched(FixedPoint):
    """Remembers which task it was told to estimate."""

    seen: ClassVar[list] = []

    def differentiate(self, oracle, solver, inner, solve):
        self.seen.append((oracle.key.round, oracle.key.age, oracle.key.place, float(oracle.task["b"][0, 0])))
        return super().differentiate(oracle, solver, inner, solve)


def test_a_key_says_the_age_of_a_task_and_its_place_in_its_round():
    stream, Watched.seen = QuadraticStream(rounds=6), []
    names = [float(task["b"][0, 0]) for task in stream]
    algorithm = OAGD(lr=0.01, window=2, inner=INNER, hypergradient=Watched(2))
    step = step_of(algorithm, stream.initial_outer())
    warms = [Warm(), Warm()]
    for t in range(3):  # this process has the third and fourth of a round's four tasks
        tasks = [stream[2 * t], stream[2 * t + 1]]
        warms = play(stream.problem, algorithm, step, tasks, warms, Key(0, t), Share(first=2, tasks=4)).warms
    assert Watched.seen == [
        (0, 0, 2, names[0]), (0, 0, 3, names[1]),
        (1, 1, 2, names[0]), (1, 1, 3, names[1]), (1, 0, 2, names[2]), (1, 0, 3, names[3]),
        (2, 1, 2, names[2]), (2, 1, 3, names[3]), (2, 0, 2, names[4]), (2, 0, 3, names[5]),
    ]  # fmt: skip
    assert len({Key(0, 1, age, place).seed_for("inner") for age in (0, 1) for place in (0, 1, 2)}) == 6


def test_a_lane_with_one_bad_coordinate_is_skipped_whole():
    algorithm = OBBO(lr=1.0, window=1, geometry=Euclidean())
    step = step_of(algorithm, torch.zeros(2, 3, dtype=F64), on_nonfinite="skip")
    record = step(torch.tensor([[[1.0, torch.nan, 1.0], [1.0, 2.0, 3.0]]], dtype=F64))
    assert record.skipped.tolist() == [True, False]
    assert record.hypergradient.tolist() == [[0.0, 0.0, 0.0], [1.0, 2.0, 3.0]]
    assert record.outer.tolist() == [[0.0, 0.0, 0.0], [-1.0, -2.0, -3.0]]


def test_a_state_has_the_tasks_of_all_processes_and_each_goes_on_with_its_own():
    def stepping():
        return OuterStep(torch.nn.Parameter(toy_point()), OAGD(window=2), regret_window=3)

    def names(step):
        return [[int(task["n"]) for task, _ in met] for met in step.memory._past]

    one, other = stepping(), stepping()
    one.memory.keep([[({"n": torch.tensor(t)}, Warm(toy_point(seed=t)))] for t in (1, 2)])
    state = one.state_dict(lambda rounds: [[*met, ({"n": torch.tensor(9)}, Warm())] for met in rounds])
    assert names(one) == [[1], [2]]  # its own are as they were
    assert [[int(met["task"]["n"]) for met in past] for past in state["memory"]["past"]] == [[1, 9], [2, 9]]
    other.load_state_dict(state, lambda rounds: [met[1:] for met in rounds])
    assert names(other) == [[9], [9]]
    other.load_state_dict(state)
    assert names(other) == [[1, 9], [2, 9]]
    assert other.regret["geometry"].memory.window == other.regret["generalized"].memory.window == 1
    assert other.regret["exact"].memory.window == 3


def test_a_stream_is_played_with_the_seed_the_window_the_start_and_the_policy_that_were_given(monkeypatch):
    from obbo_lightning.core import rounds

    asked = []

    def noting(problem, algorithm, step, task, warm, key, *share):
        asked.append((warm, key, step))
        return play(problem, algorithm, step, task, warm, key, *share)

    monkeypatch.setattr(rounds, "play", noting)
    tasks, start = [toy_task(seed=t) for t in range(2)], toy_point(seed=7)
    algorithm = OBBO(inner=GradientDescent(steps=3, lr=0.2), hypergradient=FixedPoint(3, lr=0.2))
    played = list(rounds.online(Nonlinear(), algorithm, tasks, toy_point(), start, 5, 4, "skip"))
    assert [(key.seed, key.round) for _, key, _ in asked] == [(5, 0), (5, 1)]
    assert asked[0][0].inner is start
    assert asked[1][0] is played[0].warms[0]
    step = asked[0][2]
    assert (step.regret["euclidean"].memory.window, step.on_nonfinite) == (4, "skip")
