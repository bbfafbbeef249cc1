"""What two ranks make of their parts, without a second process: collectives are answered by the test."""

from types import SimpleNamespace

import pytest
import torch

from obbo_lightning.hypergradients import InnerState
from obbo_lightning.training.distributed import Ranks
from obbo_lightning.training.evaluation import gathered


def rank(number, lanes=1, tasks=1, other=None):
    """Rank ``number`` of two; a sum over ranks adds what the other one has."""
    strategy = SimpleNamespace(reduce=lambda values, reduce_op: values + other)
    return Ranks(SimpleNamespace(global_rank=number, world_size=2, strategy=strategy), lanes, tasks)


@pytest.fixture
def answers(monkeypatch):
    """What ``all_gather_object`` finds of both ranks, one answer a call."""
    waiting = []

    def gather(found, value):
        found[:] = waiting.pop(0)

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    return waiting


def test_the_signal_of_one_rank_is_that_of_all_and_two_are_not_added():
    cpu = torch.device("cpu")
    assert rank(0, tasks=2, other=torch.tensor([0.0, 0.0])).any(15, cpu) == 15
    assert rank(0, tasks=2, other=torch.tensor([0.0, 15.0])).any(0, cpu) == 15
    assert rank(1, tasks=2, other=torch.tensor([15.0, 0.0])).any(2, cpu) == 15


def test_every_rank_has_its_own_tasks_or_its_own_lanes():
    by_tasks = rank(1, tasks=4)
    assert by_tasks.own(["a", "b", "c", "d"]) == ["c", "d"]
    assert (by_tasks.share.first, by_tasks.share.tasks, by_tasks.share.lanes) == (2, 4, None)
    by_lanes = rank(1, lanes=5)
    assert (by_lanes.share.first, by_lanes.share.tasks, by_lanes.share.lanes) == (0, 1, slice(2, 5))
    # the mean over all four tasks is the sum of what each rank has of it
    values = [torch.tensor([float(v)]) for v in (1, 2, 3, 6)]
    assert float(sum(rank(r, tasks=4).share.mean(values[2 * r : 2 * r + 2], 1) for r in range(2))) == 3.0


def test_warm_starts_are_gathered_in_the_order_of_the_tasks(answers):
    state = [{"inner": torch.full((1, 2), float(n)), "solve": None} for n in range(4)]
    answers.append([state[:2], state[2:]])
    found = rank(1, tasks=4).gather_warms([InnerState(**one) for one in state[2:]])
    assert [float(warm.inner[0, 0]) for warm in found] == [0.0, 1.0, 2.0, 3.0]
    task = {"x": torch.zeros(1)}
    answers.append([[[(task, one) for one in state[:2]]], [[(task, one) for one in state[2:]]]])
    (met,) = rank(0, tasks=4).gather_rounds([[(task, InnerState(**one)) for one in state[:2]]])
    assert [float(warm.inner[0, 0]) for _, warm in met] == [0.0, 1.0, 2.0, 3.0]


def test_warm_starts_of_lanes_are_joined_from_the_ranks_that_own_them(answers):
    lanes = torch.arange(1.0, 6.0).unsqueeze(-1)
    first, second = lanes.clone(), lanes.clone()
    first[2:], second[:2] = 0, 0  # each has zeros where the other computes
    parts = [{"inner": part, "solve": 10 * part} for part in (first, second)]
    answers.append([[parts[0]], [parts[1]]])
    (found,) = rank(0, lanes=5).gather_warms([InnerState(**parts[0])])
    assert found.inner.equal(lanes)
    assert found.solve.equal(10 * lanes)
    task = {"x": torch.zeros(1)}
    answers.append([[[(task, parts[0])]], [[(task, parts[1])]]])
    ((met,),) = rank(0, lanes=5).gather_rounds([[(task, InnerState(**parts[0]))]])
    assert met[1].inner.equal(lanes)


def test_scores_of_ranks_are_put_back_into_the_order_of_the_tasks(answers):
    answers.append([[{"loss": 0.0}, {"loss": 2.0}, {"loss": 4.0}], [{"loss": 1.0}, {"loss": 3.0}]])
    assert [one["loss"] for one in gathered([], 2)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    two_lanes = {"loss": torch.tensor([1.0, 4.0])}
    assert gathered([two_lanes], 1) == [{"loss": 2.5}]


def test_of_remembered_rounds_a_rank_keeps_its_own_tasks():
    rounds = [["a", "b", "c", "d"], ["e", "f", "g", "h"]]
    assert rank(0, tasks=4).own_rounds(rounds) == [["a", "b"], ["e", "f"]]
    assert rank(1, tasks=4).own_rounds(rounds) == [["c", "d"], ["g", "h"]]


def test_what_one_rank_does_not_carry_is_joined_to_nothing_and_one_process_asks_nobody(answers):
    part = {"inner": torch.zeros(3, 1), "solve": None, "solver": None}
    answers.append([[part], [part]])
    (found,) = rank(0, lanes=3).gather_warms([InnerState(**part)])
    assert found.solve is None
    assert found.inner.shape == (3, 1)
    alone = Ranks(SimpleNamespace(global_rank=0, world_size=1, strategy=None), 3, 1)
    warm = InnerState(torch.zeros(3, 1))
    assert alone.gather_warms([warm]) == [warm]
    assert alone.gather_rounds([[({}, warm)]]) == [[({}, warm)]]
    assert alone.any(15, torch.device("cpu")) == 15
    assert (alone.share.total, alone.share.lanes) == (None, None)
