"""StreamDataModule: which tasks are served in which round, on which rank, and after a resume."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Subset
from toy import Nonlinear, toy_point, toy_task

from obbo_lightning import OBBO, OnlineBilevelModule, Stream, StreamDataModule, Tasks, online
from obbo_lightning.hypergradients import FixedPoint
from obbo_lightning.solvers import GradientDescent
from obbo_lightning.training.datamodule import ArrivingRounds


def numbered(n):
    return {"n": torch.tensor([float(n)])}


def numbers(rounds):
    return [[int(task["n"]) for task in tasks] for tasks in rounds]


def on_rank(data, rank=0, ranks=1, finished=0):
    data.trainer = SimpleNamespace(global_step=finished, global_rank=rank, world_size=ranks)
    return data


class Counting:
    """Iterator of the tasks 0, 1, 2, … up to a number."""

    def __init__(self, length=50, make=numbered):
        self.state, self.length, self.make = {"next": 0}, length, make

    def __iter__(self):
        return self

    def __next__(self):
        if self.state["next"] >= self.length:
            raise StopIteration
        self.state["next"] += 1
        return self.make(self.state["next"] - 1)


class Resumable(Counting):
    """Has a state, which changes with the iterator: a saved one must be a copy."""

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = dict(state)


def test_the_remaining_rounds_are_served_and_their_length_counts_all():
    data = on_rank(StreamDataModule(Tasks(numbered, 21), tasks_per_round=2), finished=7)
    assert data.rounds == 10
    loader = data.train_dataloader()
    assert numbers(loader) == [[14, 15], [16, 17], [18, 19]]
    assert len(loader.dataset) == 10  # Lightning continues to count from the finished rounds
    second = on_rank(StreamDataModule(Tasks(numbered, 21), tasks_per_round=4), rank=1, ranks=2)
    assert numbers(second.train_dataloader()) == [[4 * t + 2, 4 * t + 3] for t in range(5)]


@pytest.mark.parametrize("workers", [1, 2])
def test_any_number_of_loader_processes_serves_the_same_rounds(workers):
    data = StreamDataModule(Tasks(numbered, 200), 9, tasks_per_round=2, workers=workers)
    assert numbers(on_rank(data, finished=4).train_dataloader()) == [[2 * t, 2 * t + 1] for t in range(4, 9)]


def test_a_loader_process_cannot_serve_arriving_tasks(monkeypatch):
    monkeypatch.setattr("obbo_lightning.training.datamodule.get_worker_info", SimpleNamespace)
    with pytest.raises(ValueError, match="workers must be 0 for a stream that arrives task by task, got more"):
        next(iter(ArrivingRounds(Counting(), 5, 1, range(1))))


class Numbered(Stream):
    """Numbered tasks, the number of a task among its fingerprint."""

    def __init__(self):
        self.train = Tasks(numbered, 12)
        self.validation, self.test = [numbered(1)], [numbered(2)]

    def fingerprint(self, t, task):
        return f"{t}:{int(task['n'])}"


def test_fingerprints_count_all_tasks_of_the_rounds_before():
    data = on_rank(StreamDataModule(Numbered(), tasks_per_round=3, record_fingerprints=True), finished=1)
    loader = data.train_dataloader()
    assert len(loader) == 4
    assert numbers(loader) == [[3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert [data.pop_fingerprints(t) for t in (1, 2, 3)] == [None, "3:3 4:4 5:5", "6:6 7:7 8:8"]
    assert data.pop_fingerprints(2) is None
    silent = on_rank(StreamDataModule(Numbered()))
    assert len(list(silent.train_dataloader())) == 12
    assert silent.pop_fingerprints(1) is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [[1], [2]]),
        ({"validation": [3, 4]}, [[3, 4], [2]]),
        ({"test": [3, 4]}, [[1], [3, 4]]),
        ({"validation": [], "test": [3]}, [[], [3]]),
    ],
)
def test_given_tasks_are_evaluated_instead_of_those_of_the_stream(given, expected):
    data = StreamDataModule(Numbered(), 5, **{split: list(map(numbered, tasks)) for split, tasks in given.items()})
    assert numbers([data.val_dataloader(), data.test_dataloader()]) == expected


@pytest.mark.parametrize(("asked", "count"), [(4, 4), (None, 9), (20, 9)])
def test_as_many_tasks_are_evaluated_as_asked_for_divided_among_ranks(asked, count):
    tasks = Tasks(numbered, 9)
    data = StreamDataModule(tasks, validation=tasks, test=Tasks(lambda n: numbered(10 + n), 9), evaluation_tasks=asked)
    assert numbers([data.val_dataloader(), data.test_dataloader()]) == [[*range(count)], [*range(10, 10 + count)]]
    assert numbers([on_rank(data, rank=1, ranks=2).val_dataloader()]) == [[*range(1, count, 2)]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stream": Tasks(numbered, 21), "rounds": 11, "tasks_per_round": 2}, "rounds must be at most the stream's 21"),
        ({"stream": Counting(3), "workers": 1}, "workers must be 0 for a stream that arrives task by task, got 1"),
        ({"stream": Counting(3), "rounds": 0}, "rounds must be an integer of at least 1"),
    ],
)
def test_impossible_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        StreamDataModule(**arguments)


@pytest.mark.parametrize(
    ("length", "rounds", "each", "served"), [(7, None, 2, 3), (7, 2, 2, 2), (6, 5, 2, 3), (0, 5, 1, 0)]
)
def test_arriving_rounds_are_complete_and_know_the_state_after_each(length, rounds, each, served):
    arriving = ArrivingRounds(Resumable(length), rounds, each, range(each))
    assert numbers(arriving) == [[each * t + i for i in range(each)] for t in range(served)]
    for t in range(max(1, served - 3), served + 1):  # also where a loader is ahead
        assert arriving.state_after(t) == {"next": each * t}
    assert arriving.state_after(served + 1) is None
    begun = ArrivingRounds(Resumable(length), rounds, each, range(each), finished=2, state={"next": 2 * each})
    assert begun.state_after(2) == {"next": 2 * each}
    assert begun.state_after(1) is None


@pytest.mark.parametrize("slots", [range(2), range(1, 2)])
def test_arriving_tasks_of_finished_rounds_are_skipped(slots):
    expected = [[tasks[slot] for slot in slots] for tasks in ([6, 7], [8, 9])]
    assert numbers(ArrivingRounds([numbered(n) for n in range(20)], 5, 2, slots, finished=3)) == expected
    resumed = ArrivingRounds(Resumable(), 5, 2, slots, finished=3, state={"next": 6})
    assert numbers(resumed) == expected


def test_a_used_iterator_without_a_state_cannot_continue():
    used = Counting()
    next(iter(ArrivingRounds(used, 5, 1, range(1))))
    with pytest.raises(ValueError, match="a stream without state_dict must be a new iterator to continue"):
        next(iter(ArrivingRounds(used, 5, 1, range(1), finished=2)))
    assert numbers([next(iter(ArrivingRounds(Counting(), 5, 1, range(1), finished=2)))]) == [[2]]
    with pytest.raises(TypeError, match="an arriving stream has no length"):
        len(ArrivingRounds(used, None, 1, range(1)))
    assert len(ArrivingRounds(used, 5, 1, range(1), finished=2)) == 5


def test_a_loaded_state_of_an_arriving_stream_stays_until_a_task_is_taken():
    again = on_rank(StreamDataModule(Resumable(9), rounds=4, tasks_per_round=2), finished=1)
    again.load_state_dict({"stream": {"next": 2}})
    assert again.state_dict() == {"stream": {"next": 2}}
    assert numbers(again.train_dataloader()) == [[2, 3], [4, 5], [6, 7]]


# Arriving streams in training.

ALGORITHM = OBBO(lr=0.05, window=4, inner=GradientDescent(steps=3, lr=0.2), hypergradient=FixedPoint(3))


def make_task(t):
    return toy_task(lanes=1, seed=t)


def make_module(**options):
    return OnlineBilevelModule(Nonlinear(), ALGORITHM, toy_point(1), **options)


def outer_after(rounds):
    *_, last = online(Nonlinear(), ALGORITHM, map(make_task, range(rounds)), toy_point(1))
    return last.outer


class Regenerated:
    """Iterable that makes its tasks again, without a state."""

    def __iter__(self):
        return map(make_task, range(50))


@pytest.mark.parametrize("make_stream", [lambda: Resumable(make=make_task), Regenerated], ids=["state", "no state"])
@pytest.mark.parametrize(("rounds", "each"), [(None, 1), (20, 1), (None, 2)], ids=["endless", "20", "two tasks"])
def test_an_arriving_stream_continues_where_it_was(make_trainer, tmp_path, make_stream, rounds, each):
    def train(steps, **options):
        module, trainer = make_module(tasks_per_round=each), make_trainer(max_steps=steps)
        trainer.fit(module, StreamDataModule(make_stream(), rounds, tasks_per_round=each), **options)
        trainer.save_checkpoint(tmp_path / "x.ckpt")
        return module.outer.detach()

    whole = train(15) if each > 1 else outer_after(15)
    train(7)
    state = torch.load(tmp_path / "x.ckpt", weights_only=True)["StreamDataModule"]["stream"]
    assert state in ({"next": 7 * each}, None)  # not what a loader has read ahead
    assert torch.equal(train(15, ckpt_path=tmp_path / "x.ckpt"), whole)


@pytest.mark.parametrize(
    ("stream", "rounds", "served"),
    [(lambda: Subset(Tasks(make_task, 9), range(5)), None, 5), (lambda: map(make_task, range(6)), 20, 6)],
    ids=["dataset of torch", "ends"],
)
def test_a_dataset_is_a_sequence_and_a_stream_that_ends_early_ends_the_run(make_trainer, stream, rounds, served):
    module, trainer = make_module(), make_trainer()
    trainer.fit(module, StreamDataModule(stream(), rounds))
    assert trainer.global_step == served
    assert torch.equal(module.outer.detach(), outer_after(served))
