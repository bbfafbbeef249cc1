"""OAGD solves the last w tasks again in every round, from their own inner states and at the current λ."""

import torch
from toy import F64

from obbo_lightning import OAGD, online
from obbo_lightning.core.memory import InnerState
from obbo_lightning.core.randomness import Key
from obbo_lightning.core.round import estimate_hypergradient
from obbo_lightning.hypergradients import FixedPoint
from obbo_lightning.solvers import GradientDescent
from obbo_lightning.streams.quadratic import QuadraticTasks

INNER = GradientDescent(steps=3, lr=1.0)
OAGD_3 = OAGD(lr=0.1, window=3, inner=INNER, hypergradient=FixedPoint(2))


def test_oagd_is_its_definition():
    """q_t = (1/w) Σ ∇f_{t−i}(λ_t), every task from its own last inner variable."""
    stream, window, lr = QuadraticTasks(rounds=7, condition_number=4.0), 3, 0.05
    algorithm = OAGD(lr=lr, window=window, inner=INNER, hypergradient=FixedPoint(4))
    outer, states, newest = stream.initial_outer(), {}, InnerState(torch.zeros(1, 8, dtype=F64))
    for t, finished in enumerate(online(stream.problem, algorithm, stream, outer)):
        total = torch.zeros_like(outer)
        for s in range(max(0, t - window + 1), t + 1):
            state = states.get(s, newest)
            found = estimate_hypergradient(stream.problem, algorithm, outer, stream[s], state, Key(0, t))
            states[s] = found.state
            total += found.value
        newest = states[t]
        outer = stream.domain.project(outer - lr * total / window)
        assert torch.allclose(finished.outer, outer, rtol=1e-13, atol=1e-15)
        assert torch.allclose(finished.hypergradient, found.value, rtol=1e-12, atol=1e-14)


def test_tasks_are_remembered_where_a_stream_fills_one_dict_again_and_again():
    stream = QuadraticTasks(rounds=6)

    def one_dict():
        task = {}
        for fresh in stream:
            task.update(fresh)
            yield task

    ends = [list(online(stream.problem, OAGD_3, tasks, stream.initial_outer()))[-1] for tasks in (stream, one_dict())]
    assert torch.equal(ends[0].outer, ends[1].outer)
