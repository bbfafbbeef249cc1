"""The contract suite of streams: every registered stream passes, and each broken rule is noticed."""

from functools import partial
from itertools import count

import numpy as np
import polars as pl
import pytest
import torch

from obbo_lightning import FewShot, Metric, Quadratic, Stream, Tasks
from obbo_lightning.config.registry import component_names, find_component
from obbo_lightning.networks import MLP
from obbo_lightning.streams.few_shot import fc100
from obbo_lightning.testing import check_stream

F64 = torch.float64


def stream_arguments(name, root, monkeypatch):
    rng, labels = np.random.default_rng(0), np.repeat(np.arange(12), 10)
    if name == "fc100":
        fine, names = np.repeat(np.arange(100, dtype=np.uint8), 12), np.arange(100).astype(str)
        images = rng.integers(0, 256, (1200, 32, 32, 3), dtype=np.uint8)
        data = fc100.Cifar100(images, fine, np.zeros(1200, np.uint8), names)
        monkeypatch.setattr(fc100, "CHECKSUM", fc100.checksum(data))
        np.savez(root / "cifar100.npz", **data._asdict())
        return {"root": str(root)}
    if name == "images":
        np.savez(root / "own.npz", images=rng.integers(0, 256, (120, 16, 16), dtype=np.uint8), labels=labels)
    if name == "examples":
        np.savez(root / "own.npz", examples=rng.normal(size=(120, 4)), labels=labels)
    if name in ("images", "examples"):
        return {"path": str(root / "own.npz"), "ways": 2}
    if name == "follow":
        for t in range(4):
            support, query = rng.normal(size=(2, 4, 3))
            labels = {f"{kind}_labels": [0, 0, 1, 1] for kind in ("support", "query")}
            np.savez(root / f"{t}.npz", support=support, query=query, **labels)
        return {"path": str(root), "timeout": 0.05}
    return {"market": {"subset": 30, "subsets": 20, "horizon": 10}, "synthetic": {"image_size": 16}}.get(name, {})


@pytest.mark.parametrize("name", component_names("data"))
def test_every_registered_stream_keeps_the_contract(name, tmp_path, monkeypatch):
    fc100.load_cifar100.cache_clear()
    stream = find_component("data", name)(**stream_arguments(name, tmp_path, monkeypatch))
    if name == "follow":  # files do not name a problem
        monkeypatch.setattr(stream, "problem", partial(stream.problem, FewShot, network=MLP))
    check_stream(stream)
    assert set(stream.task_spec()) == set(stream.derived_arguments)
    fc100.load_cifar100.cache_clear()


def task_of(t, **changes):
    task = {name: torch.full((2, 3), 1.0 + t + ord(name), dtype=F64) for name in ("b", "c")}
    return {**task, **changes}


class Valid(Stream):
    """Two lanes, random access; the streams below break one rule each."""

    problem_type = Quadratic
    derived_arguments = ("inner_matrix", "coupling")

    def __init__(self):
        self.train, self.validation = Tasks(task_of, 10), Tasks(task_of, 2)
        self.lanes = pl.DataFrame({"name": ["one", "two"]})

    def task_spec(self):
        eye = torch.eye(3, dtype=F64).expand(2, 3, 3)
        return {"inner_matrix": eye, "coupling": eye}

    def start(self, problem, seed):
        return torch.zeros(2, 3, dtype=F64)


class TaskIterator:
    """Tasks one after the other, with a state; ``skipped`` of them are lost when it continues from one."""

    def __init__(self, first=0, skipped=0):
        self.t, self.skipped = first, skipped

    def __iter__(self):
        return self

    def __next__(self):
        self.t += 1
        return task_of(self.t)

    def state_dict(self):
        return {"t": self.t}

    def load_state_dict(self, state):
        self.t = state["t"] + self.skipped


class Iterable:
    """An iterable from a function that makes its iterators."""

    def __init__(self, make):
        self.make = make

    def __iter__(self):
        return self.make()


def valid_except(**changes):
    stream = Valid()
    for name, value in changes.items():
        setattr(stream, name, value)
    return stream


def with_train(train):
    return valid_except(train=train)


def with_tasks(task):
    return with_train(Tasks(task, 9))


def with_start(start):
    return valid_except(start=lambda problem, seed: start())


def test_valid_streams_pass_with_random_access_and_as_iterables():
    check_stream(Valid())
    check_stream(with_train(Iterable(TaskIterator)))
    check_stream(with_train(Iterable(lambda: iter([task_of(0), task_of(1)]))))
    check_stream(valid_except(validation=(), lanes=None))


def depends_on_the_last():
    """Return a task function whose tasks depend on which one was requested before."""
    last = [0]

    def task(t):
        backwards, last[0] = last[0] > t, t
        return task_of(t + 100 * backwards)

    return task


class Summed(Quadratic):
    def outer_loss(self, *arguments):
        return super().outer_loss(*arguments).sum()


SHARED, ONES, REQUESTS = torch.zeros(2, 3, dtype=F64), torch.ones(2, 3, dtype=F64), count(1)
INVALID = {
    "no dict": (with_tasks(lambda t: [torch.zeros(2)]), "a task must be a dict of tensors, got list"),
    "no tensor": (with_tasks(lambda t: task_of(t, b=3)), "got int for 'b'"),
    "empty": (with_train([]), "train must have a task, and has none"),
    "other keys": (
        with_tasks(lambda t: task_of(t) if t == 0 else {"b": ONES}),
        r"task 1 must have the keys \['b', 'c'\]",
    ),
    "other dtype": (
        with_tasks(lambda t: task_of(t, b=ONES if t == 0 else ONES.float())),
        "'b' must be torch.float64, got",
    ),
    "random": (
        with_tasks(lambda t: task_of(t + next(REQUESTS))),
        "train: task 2 must be the same whenever it is requested",
    ),
    "ordered": (with_tasks(depends_on_the_last()), "train: task 1 must be the same whenever it is requested"),
    "shared": (with_train([task_of(t) for t in range(3)]), "train: changing a task in place changes the task that is"),
    "shared test": (valid_except(test=[task_of(9)]), "test: changing a task in place"),
    "test keys": (valid_except(test=Tasks(lambda t: {"b": torch.ones(2)}, 2)), "test: task 0 must have the keys"),
    "endless test": (valid_except(test=TaskIterator()), "test must be a sequence of tasks, got TaskIterator"),
    "exhausted": (with_train(task_of(t) for t in range(3)), "second iteration must give the same tasks, got 0 of 3"),
    "half exhausted": (with_train(task_of(t) for t in range(9)), "second iteration must give .*, got another"),
    "other iteration": (
        with_train(Iterable(map(TaskIterator, count()).__next__)),
        "a second iteration must give the same tasks, got another",
    ),
    "wrong state": (with_train(Iterable(lambda: TaskIterator(skipped=1))), "from a state must give .*, got"),
    "no problem": (valid_except(problem_type=None), r"problem\(\) must return .*, and fails: problem must be"),
    "impossible problem": (
        valid_except(task_spec=lambda: {**Valid().task_spec(), "ridge": -1.0}),
        r"problem\(\) must return the problem of the stream, and fails: ridge must be",
    ),
    "summed loss": (valid_except(problem_type=Summed), r"outer_loss must be \[2\], got \[\]"),
    "random start": (with_start(lambda: torch.rand(2, 3, dtype=F64)), "start must depend on the seed alone"),
    "shared start": (with_start(lambda: SHARED), "start must depend on the seed alone"),
    "flat start": (with_start(lambda: torch.zeros(3, dtype=F64)), r"start must be λ \[lanes, d\], got the shape \[3\]"),
    "integer start": (with_start(lambda: torch.zeros(2, 3).long()), "must be floating-point, got torch.int64"),
    "infinite start": (with_start(lambda: ONES / 0), "start must be finite"),
    "infinite loss": (with_tasks(lambda t: task_of(t, c=ONES * torch.nan)), "outer_loss of the first task .* finite"),
    "metric": (valid_except(metric=Metric("accuracy")), "metric must be one of loss, got 'accuracy'"),
    "metric word": (valid_except(metric="loss"), "metric must be a Metric, got 'loss'"),
    "lanes": (valid_except(lanes=pl.DataFrame({"name": ["one"]})), "lanes has 1 rows, and λ has 2 lanes"),
}


@pytest.mark.parametrize("name", INVALID)
def test_a_stream_that_breaks_a_rule_is_noticed(name):
    stream, message = INVALID[name]
    with pytest.raises(AssertionError, match=message):
        check_stream(stream)
