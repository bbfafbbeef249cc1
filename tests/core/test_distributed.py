"""Rounds that several processes share: their contributions add up to the round of one process."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Barrier

import pytest
import torch
from toy import Proximal, toy_point, toy_task

from obbo_lightning import OAGD, OBBO, OuterStep
from obbo_lightning.core.distributed import Shard
from obbo_lightning.core.memory import InnerState
from obbo_lightning.core.randomness import Key
from obbo_lightning.core.round import run_round
from obbo_lightning.hypergradients import ClosedForm, FixedPoint
from obbo_lightning.solvers import GradientDescent, InnerSGD
from obbo_lightning.streams.quadratic import QuadraticTasks

STREAM = QuadraticTasks(lanes=5, rounds=8)
# the shards of two processes, and which of the round's tasks each solves
DIVISIONS = {
    "lanes": ([Shard(lanes=slice(0, 2)), Shard(lanes=slice(2, 5))], [[0], [0]]),
    "tasks": ([Shard(first=0, tasks=4), Shard(first=2, tasks=4)], [[0, 1], [2, 3]]),
}


def run_rounds(problem, algorithm, outer, rounds, shard):
    """Return the rounds of one process."""
    step, states, finished = OuterStep(torch.nn.Parameter(outer), algorithm), InnerState(), []
    for t, tasks in enumerate(rounds):
        finished.append(run_round(problem, algorithm, step, tasks, states, Key(0, t), shard))
        states = finished[-1].states
    return finished


class AllReduce:
    """Sum over threads that take the place of processes."""

    def __init__(self, ranks):
        self.barrier, self.messages, self.ranks = Barrier(ranks, timeout=60), [None] * ranks, []

    def __call__(self, rank, flat):
        self.messages[rank] = flat
        self.ranks.append(rank)
        self.barrier.wait()
        total = torch.stack(self.messages).sum(0)
        self.barrier.wait()
        return total


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("cls", [OBBO, OAGD])
def test_two_processes_compute_the_rounds_of_one(cls, division):
    shards, indices = DIVISIONS[division]
    algorithm = cls(lr=0.05, window=2, inner=InnerSGD(3, 0.5), hypergradient=FixedPoint(3, lr=0.5))
    per_round, all_reduce = 1 if division == "lanes" else 4, AllReduce(2)

    def run(indices, shard):
        rounds = [[STREAM[per_round * t + j] for j in indices] for t in range(2)]
        return run_rounds(STREAM.problem, algorithm, STREAM.initial_outer() + 0.1, rounds, shard)

    expected = run(range(per_round), Shard())
    with ThreadPoolExecutor(2) as pool:
        reducing = [replace(shard, all_reduce=partial(all_reduce, rank)) for rank, shard in enumerate(shards)]
        found = list(pool.map(run, indices, reducing))
    assert sorted(all_reduce.ranks) == [0, 0, 1, 1]  # one message per round of each process
    for one, first, second in zip(expected, *found, strict=True):
        assert torch.equal(first.outer, second.outer)
        for name in ("outer", "loss", "inner_loss", "residual", "hypergradient_error"):
            assert torch.allclose(getattr(first, name), getattr(one, name), rtol=1e-12), name
        assert first.evaluations == second.evaluations == one.evaluations
    # each process has the inner states of its own lanes (zeros elsewhere) or of its own tasks
    momenta = [[state.solver_state for state in rounds[-1].states] for rounds in (expected, *found)]
    together = (
        [sum(pair) for pair in zip(*momenta[1:], strict=True)] if division == "lanes" else momenta[1] + momenta[2]
    )
    for one, other in zip(momenta[0], together, strict=True):
        assert torch.allclose(one, other, rtol=1e-12)


def test_a_lane_that_is_not_finite_in_another_process_is_skipped_in_every_process():
    def add_nan_of_another_rank(flat):
        nan = torch.zeros_like(flat)
        nan[4] = torch.nan  # the first coordinate of the hypergradient of lane 1; d = 4
        return flat + nan

    algorithm, start = OBBO(window=1, hypergradient=ClosedForm()), STREAM.initial_outer()
    step = OuterStep(torch.nn.Parameter(start.clone()), algorithm, on_nonfinite="skip")
    shard = Shard(all_reduce=add_nan_of_another_rank)
    found = run_round(STREAM.problem, algorithm, step, STREAM[0], InnerState(), Key(), shard)
    assert found.skipped.tolist() == [False, True, False, False, False]
    assert (found.outer == start).all(-1).tolist() == found.skipped.tolist()


class Stackable(Proximal):
    """Tasks of one lane can be solved as lanes of one task."""

    def stack_as_lanes(self, tasks):
        return {name: torch.cat([task[name] for task in tasks]) for name in tasks[0]}

    def initial_inner(self, outer, task):
        return outer


@pytest.mark.parametrize("inner", [GradientDescent(3, 0.2), InnerSGD(3, 0.2), GradientDescent(3, 0.2, start="outer")])
def test_tasks_solved_as_lanes_give_the_round_of_a_loop(inner):
    algorithm = OBBO(lr=0.1, inner=inner, hypergradient=FixedPoint(3, lr=0.2))
    rounds = [[toy_task(lanes=1, seed=3 * t + j) for j in range(3)] for t in range(2)]
    loop, lanes = (
        run_rounds(Stackable(), algorithm, toy_point(lanes=1), rounds, Shard(vmap=vmap))[-1] for vmap in (False, True)
    )
    assert torch.allclose(lanes.outer, loop.outer, rtol=1e-12)
    assert torch.allclose(lanes.loss, loop.loss, rtol=1e-12)
    assert lanes.evaluations == loop.evaluations
    for one, other in zip(lanes.estimates, loop.estimates, strict=True):  # each task has its own lane
        for name in ("value", "inner", "loss", "residual"):
            assert torch.allclose(getattr(one, name), getattr(other, name), rtol=1e-10), name
    for one, other in zip(lanes.states, loop.states, strict=True):
        for name, value in other.state_dict().items():
            found = getattr(one, name)
            assert (found is None) == (value is None)
            assert value is None or torch.allclose(found, value, rtol=1e-10), name


def test_a_sum_over_processes_keeps_shapes_and_dtypes():
    values = [torch.ones(2, 3), torch.full((4,), 0.1, dtype=torch.float64), torch.zeros(0)]
    found = Shard(all_reduce=lambda flat: 2 * flat).sum(values)
    for one, other in zip(values, found, strict=True):
        assert other.dtype == one.dtype
        assert torch.equal(other, 2 * one)
