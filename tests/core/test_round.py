"""One round and a stream of rounds: what is reported, at which λ, and what the next round starts from."""

import statistics
from typing import ClassVar

import pytest
import torch
from toy import F64, Proximal, normal, toy_point, toy_task

from obbo_lightning import OAGD, OBBO, SOBOW, Adam, OuterStep, Problem, online
from obbo_lightning.core.distributed import Shard
from obbo_lightning.core.memory import HypergradientWindow, InnerState
from obbo_lightning.core.randomness import Key
from obbo_lightning.core.round import run_round
from obbo_lightning.hypergradients import ClosedForm, ConjugateGradient, FixedPoint
from obbo_lightning.problems.quadratic import Quadratic
from obbo_lightning.solvers import GradientDescent, InnerSGD
from obbo_lightning.streams.quadratic import QuadraticTasks

INNER = GradientDescent(steps=3, lr=1.0)


@pytest.mark.parametrize("cls", [OBBO, OAGD])
def test_the_losses_of_a_round_are_of_its_own_task_before_lambda_has_learned_from_it(cls):
    stream = QuadraticTasks(rounds=5, lanes=2)
    outer = stream.initial_outer()
    for t, finished in enumerate(online(stream.problem, cls(lr=0.1, window=2, inner=INNER), stream, outer)):
        inner = finished.estimates[0].inner
        assert torch.equal(finished.inner_loss, stream.problem.inner_loss(outer, inner, stream[t]))
        assert torch.equal(finished.loss, stream.problem.outer_loss(outer, inner, stream[t]))
        assert not torch.equal(finished.outer, outer)
        outer = finished.outer


@pytest.mark.parametrize("tasks_per_round", [1, 3])
def test_error_and_exact_regret_are_measured_against_the_mean_of_the_true_hypergradients(tasks_per_round):
    stream = QuadraticTasks(lanes=2, rounds=12, condition_number=3.0)
    algorithm = OBBO(lr=0.01, window=2, inner=INNER, hypergradient=FixedPoint(2))
    rounds = [[stream[tasks_per_round * t + j] for j in range(tasks_per_round)] for t in range(4)]
    outer, window, regret = stream.initial_outer(), HypergradientWindow(3), torch.zeros(2, dtype=F64)
    for tasks, finished in zip(rounds, online(stream.problem, algorithm, rounds, outer, regret_window=3), strict=True):
        truth = torch.stack([stream.problem.hypergradient(outer, task)[0] for task in tasks]).mean(0)
        mean = torch.stack([one.value for one in finished.estimates]).mean(0)
        assert torch.allclose(finished.hypergradient, mean, rtol=1e-12)
        assert torch.allclose(finished.hypergradient_error, (mean - truth).norm(dim=-1), rtol=1e-9)
        regret = regret + window.push(truth).square().sum(-1)
        assert torch.allclose(finished.regret["exact"], regret, rtol=1e-12)
        assert not torch.allclose(finished.regret["euclidean"], regret, rtol=1e-3)
        outer = finished.outer


def test_a_closed_form_is_evaluated_once_per_round():
    stream, evaluated = QuadraticTasks(rounds=3), []

    class Counted(Quadratic):
        def hypergradient(self, outer, task):
            evaluated.append(1)
            return super().hypergradient(outer, task)

    problem = Counted(stream.problem.inner_matrix, stream.problem.coupling)
    rounds = list(online(problem, OBBO(hypergradient=ClosedForm()), stream, stream.initial_outer()))
    assert len(evaluated) == 3
    assert torch.equal(rounds[-1].regret["exact"], rounds[-1].regret["euclidean"])


class Reported(Problem):
    """Losses and scores per lane are the task's numbers; the hypergradient is the task's slope."""

    def inner_loss(self, outer, inner, task, sample=None):
        return task["inner_loss"] + inner.square().sum(-1)

    def outer_loss(self, outer, inner, task, sample=None):
        return task["loss"] + (task["slope"] * outer).sum(-1)

    def initial_inner(self, outer, task):
        return torch.zeros_like(outer)

    def scores(self, outer, inner, task):
        return {"accuracy": task["accuracy"]}


@pytest.mark.parametrize("lanes", [1, 4, 5])
def test_metrics_are_medians_over_lanes_and_none_where_there_is_no_number(lanes):
    task = {name: normal(lanes, seed=i) for i, name in enumerate(("loss", "inner_loss", "accuracy"))}
    task["slope"] = normal(lanes, 2, seed=9)
    algorithms = [OBBO(lr="auto", window=4, inner=INNER, hypergradient=FixedPoint(2)), Adam(lr=0.1, inner=INNER)]
    for algorithm in algorithms:
        finished = next(online(Reported(), algorithm, [task], torch.zeros(lanes, 2, dtype=F64), regret_window=2))
        metrics = finished.metrics()

        def median(values):
            return pytest.approx(statistics.median(values.tolist()))

        norms = task["slope"].norm(dim=-1)
        expected = {name: median(task[name]) for name in ("loss", "inner_loss", "accuracy")}
        expected |= {"hypergradient_norm": median(norms), "regret/euclidean": median((norms / 2).square())}
        expected |= {"residual": 0.0, "regret/exact": None, "hypergradient_error": None}
        expected |= {"gradients": 3 + 2, "skipped": 0}
        if isinstance(algorithm, Adam):
            expected |= dict.fromkeys(("generalized_norm", "regret/generalized", "regret/geometry"))
            expected |= {"direction_norm": median(norms), "window_fill": 0}
        else:
            expected |= {"generalized_norm": median(finished.generalized_gradient.norm(dim=-1))}
            expected |= {"direction_norm": median(norms / 4), "window_fill": 1}
            expected |= {"lr": median(finished.step_metrics["lr"])}
        assert {name: metrics[name] for name in expected} == expected
        assert ("lr" in metrics) == ("lr" in expected)
        assert isinstance(metrics["loss"], float)


def test_a_lane_that_overflows_starts_its_next_round_from_where_it_was():
    stream = QuadraticTasks(rounds=4, lanes=2)
    tasks = [dict(task) for task in stream]
    tasks[1] = {name: torch.where(torch.tensor([[True], [False]]), torch.nan, v) for name, v in tasks[1].items()}
    algorithm = SOBOW(lr=1e-3, inner=InnerSGD(3, 0.5), hypergradient=ConjugateGradient(3, warm_start=True))
    rounds = list(online(stream.problem, algorithm, tasks, stream.initial_outer(), on_nonfinite="skip"))
    assert [r.skipped.tolist() for r in rounds] == [[False, False], [True, False], [False, False], [False, False]]
    before, after = rounds[0].states[0], rounds[1].states[0]
    for name in ("inner", "linear_solution", "solver_state"):
        assert torch.equal(getattr(after, name)[0], getattr(before, name)[0]), name
        assert not torch.equal(getattr(after, name)[1], getattr(before, name)[1]), name
        assert getattr(after, name).isfinite().all(), name


def test_no_state_is_carried_that_the_next_round_does_not_use():
    algorithm = OBBO(inner=GradientDescent(2, 0.1, start="outer"))
    finished = next(online(Proximal(), algorithm, [toy_task()], toy_point()))
    assert finished.states == [InnerState()]
    assert finished.regret["exact"] is finished.hypergradient_error is None  # the problem has no closed form


@pytest.mark.parametrize("tasks_per_round", [1, 2])
def test_online_is_a_loop_over_run_round(tasks_per_round):
    stream, start = QuadraticTasks(rounds=8, noise=0.1), normal(1, 8)
    rounds = [list(stream[t : t + tasks_per_round]) for t in range(0, 8, tasks_per_round)]
    rounds[2][0] = {name: values * torch.nan for name, values in rounds[2][0].items()}  # skipped
    algorithm = SOBOW(lr=0.01, inner=GradientDescent(3, 1.0, batch_size=2))
    outer = torch.nn.Parameter(stream.initial_outer())
    step, states = OuterStep(outer, algorithm, 4, "skip"), [InnerState(start)] * tasks_per_round
    for t, tasks in enumerate(rounds):
        last = run_round(stream.problem, algorithm, step, tasks, states, Key(5, t))
        states = last.states  # each task starts from the state of its own slot
    whole = list(online(stream.problem, algorithm, rounds, stream.initial_outer(), start, 5, 4, "skip"))[-1]
    assert torch.equal(outer.detach(), whole.outer)
    assert torch.equal(last.regret["euclidean"], whole.regret["euclidean"])
    assert torch.equal(states[-1].inner, whole.states[-1].inner)


class RecordedKeys(FixedPoint):
    """Records the key and the name of each task that it estimates."""

    seen: ClassVar[list] = []

    def __call__(self, oracle, *arguments):
        self.seen.append((oracle.key.round, oracle.key.age, oracle.key.slot, float(oracle.task["b"][0, 0])))
        return super().__call__(oracle, *arguments)


def test_the_key_of_a_task_has_its_age_and_its_slot_in_its_round():
    stream, RecordedKeys.seen = QuadraticTasks(rounds=6), []
    names = [float(task["b"][0, 0]) for task in stream]
    algorithm = OAGD(lr=0.01, window=2, inner=INNER, hypergradient=RecordedKeys(2))
    step = OuterStep(torch.nn.Parameter(stream.initial_outer()), algorithm)
    states = [InnerState(), InnerState()]
    for t in range(3):  # this process has the third and fourth of a round's four tasks
        tasks = [stream[2 * t], stream[2 * t + 1]]
        states = run_round(stream.problem, algorithm, step, tasks, states, Key(0, t), Shard(first=2, tasks=4)).states
    assert RecordedKeys.seen == [
        (0, 0, 2, names[0]), (0, 0, 3, names[1]),
        (1, 1, 2, names[0]), (1, 1, 3, names[1]), (1, 0, 2, names[2]), (1, 0, 3, names[3]),
        (2, 1, 2, names[2]), (2, 1, 3, names[3]), (2, 0, 2, names[4]), (2, 0, 3, names[5]),
    ]  # fmt: skip


@pytest.mark.parametrize("estimator", [FixedPoint(8, lr=3.0), FixedPoint(600, lr=1e3)], ids=["grows", "overflows"])
def test_a_fixed_point_that_does_not_contract_warns_also_beside_a_lane_that_is_not_finite(estimator, monkeypatch):
    stream = QuadraticTasks(rounds=1, lanes=2)  # ‖∇²g‖ = 1, so η < 2 contracts
    task = {name: value.clone() for name, value in stream[0].items()}
    task["c"][0] = torch.nan
    algorithm = OBBO(lr=1e-3, inner=INNER, hypergradient=estimator)
    arguments = stream.problem, algorithm, [task], stream.initial_outer()
    with pytest.warns(RuntimeWarning, match=r"does not contract.*smaller hypergradient.lr"):
        next(online(*arguments, on_nonfinite="skip"))
    monkeypatch.setattr(FixedPoint, "contracts", False)
    assert float(next(online(*arguments, on_nonfinite="skip")).residual[1]) > 1  # warnings are errors
