"""The contract suite of streams: every registered stream passes, and each broken rule is noticed."""

from functools import partial

import numpy as np
import polars as pl
import pytest
import torch

from obbo_lightning import FewShot, Metric, Quadratic, Stream, Tasks
from obbo_lightning.config.registry import component_names, find_component
from obbo_lightning.networks import MLP
from obbo_lightning.streams.few_shot import fc100
from obbo_lightning.streams.few_shot.stream import FewShotStream
from obbo_lightning.testing import check_stream

F64 = torch.float64


def random_cifar100(root, monkeypatch):
    fine = np.repeat(np.arange(100), 12).astype(np.uint8)
    data = fc100.Cifar100(
        np.random.default_rng(0).integers(0, 256, (1200, 32, 32, 3), dtype=np.uint8),
        fine,
        fine // 5,
        np.zeros(1200, np.uint8),
        np.arange(100).astype(str),
        np.arange(20).astype(str),
    )
    monkeypatch.setattr(fc100, "CHECKSUM", fc100.checksum(data))
    np.savez(root / "cifar100.npz", **data._asdict())
    return {"root": str(root)}


def stream_arguments(name, root, monkeypatch):
    rng, labels = np.random.default_rng(0), np.repeat(np.arange(12), 10)
    if name == "fc100":
        return random_cifar100(root, monkeypatch)
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


class TaskIterable:
    """Tasks one after the other, from an iterator with a state.

    Args:
        skipped: number of tasks that an iterator skips when it continues from a state.
        differs: whether each iteration begins with another task.
    """

    def __init__(self, skipped=0, differs=False):
        self.skipped, self.differs, self.passes = skipped, differs, 0

    def __iter__(self):
        self.passes += 1
        return TaskIterator(self.passes if self.differs else 0, self.skipped)


class TaskIterator:
    def __init__(self, first, skipped):
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


def valid_except(**changes):
    stream = Valid()
    for name, value in changes.items():
        setattr(stream, name, value)
    return stream


def with_train(train):
    return valid_except(train=train)


def with_start(start):
    return valid_except(start=lambda problem, seed: start())


def test_valid_streams_pass_with_random_access_and_as_iterables():
    check_stream(Valid())
    check_stream(with_train(TaskIterable()))
    check_stream(with_train(type("Plain", (), {"__iter__": lambda self: iter([task_of(0), task_of(1)])})()))
    check_stream(valid_except(validation=(), lanes=None))


class EveryTimeAnother:
    """A different task at every request."""

    def __init__(self):
        self.requests = 0

    def __call__(self, t):
        self.requests += 1
        return task_of(t + self.requests)


class DependsOnTheLast:
    """A task that depends on which one was requested before."""

    def __init__(self):
        self.last = 0

    def __call__(self, t):
        backwards = self.last > t
        self.last = t
        return task_of(t + 100 * backwards)


class WithoutProblem(Valid):
    problem_type = None


class ImpossibleProblem(Valid):
    def task_spec(self):
        return {**super().task_spec(), "ridge": -1.0}


SHARED = torch.zeros(2, 3, dtype=F64)
INVALID = {
    "no dict": (with_train(Tasks(lambda t: [torch.zeros(2)], 3)), "a task must be a dict of tensors, got list"),
    "no tensor": (with_train(Tasks(lambda t: task_of(t, b=3), 3)), "got int for 'b'"),
    "empty": (with_train([]), "train must have a task, and has none"),
    "other keys": (
        with_train(Tasks(lambda t: task_of(t) if t == 0 else {"b": torch.ones(2, 3, dtype=F64)}, 3)),
        r"train: task 1 must have the keys \['b', 'c'\]",
    ),
    "other dtype": (
        with_train(Tasks(lambda t: task_of(t) if t == 0 else task_of(t, b=torch.ones(2, 3)), 3)),
        "train: 'b' must be torch.float64, got torch.float32",
    ),
    "random": (with_train(Tasks(EveryTimeAnother(), 9)), "train: task 2 must be the same whenever it is requested"),
    "ordered": (with_train(Tasks(DependsOnTheLast(), 9)), "train: task 1 must be the same whenever it is requested"),
    "shared": (with_train([task_of(t) for t in range(3)]), "train: changing a task in place changes the task that is"),
    "shared test": (valid_except(test=[task_of(9)]), "test: changing a task in place"),
    "test keys": (valid_except(test=Tasks(lambda t: {"b": torch.ones(2)}, 2)), "test: task 0 must have the keys"),
    "endless test": (valid_except(test=TaskIterable()), "test must be a sequence of tasks, got TaskIterable"),
    "exhausted": (with_train(task_of(t) for t in range(3)), "second iteration must give the same tasks, got 0 of 3"),
    "half exhausted": (
        with_train(task_of(t) for t in range(9)),
        "a second iteration must give the same tasks, got another task 0",
    ),
    "other iteration": (
        with_train(TaskIterable(differs=True)),
        "a second iteration must give the same tasks, got another",
    ),
    "wrong state": (
        with_train(TaskIterable(skipped=1)),
        "continues from a state must give the same tasks, got another",
    ),
    "no problem": (WithoutProblem(), r"problem\(\) must return the problem of the stream, and fails: problem must be"),
    "impossible problem": (ImpossibleProblem(), r"problem\(\) must return the problem .*, and fails: ridge must be"),
    "random start": (with_start(lambda: torch.rand(2, 3, dtype=F64)), "start must depend on the seed alone"),
    "shared start": (with_start(lambda: SHARED), "start must depend on the seed alone"),
    "flat start": (with_start(lambda: torch.zeros(3, dtype=F64)), r"start must be λ \[lanes, d\], got the shape \[3\]"),
    "integer start": (
        with_start(lambda: torch.zeros(2, 3, dtype=torch.long)),
        "must be floating-point, got torch.int64",
    ),
    "infinite start": (with_start(lambda: torch.full((2, 3), torch.inf, dtype=F64)), "start must be finite"),
    "infinite loss": (
        with_train(Tasks(lambda t: task_of(t, c=torch.full((2, 3), torch.nan, dtype=F64)), 3)),
        "outer_loss of the first task must be finite",
    ),
    "metric": (valid_except(metric=Metric("accuracy")), "metric must be one of loss, got 'accuracy'"),
    "metric word": (valid_except(metric="loss"), "metric must be a Metric, got 'loss'"),
    "lanes": (valid_except(lanes=pl.DataFrame({"name": ["one"]})), "lanes has 1 rows, and λ has 2 lanes"),
}


@pytest.mark.parametrize("name", INVALID)
def test_a_stream_that_breaks_a_rule_is_noticed(name):
    stream, message = INVALID[name]
    with pytest.raises(AssertionError, match=message):
        check_stream(stream)


def test_losses_must_be_one_number_per_lane():
    class Summed(Quadratic):
        def outer_loss(self, *arguments):
            return super().outer_loss(*arguments).sum()

    with pytest.raises(AssertionError, match=r"outer_loss must be \[2\], got \[\]"):
        check_stream(valid_except(problem_type=Summed))


class GaussianClasses:
    """A user's source of examples: class c is a normal distribution around c."""

    shape = (4,)

    def smallest(self, classes):
        return None

    def draw(self, classes, generator):
        return classes.unsqueeze(-1) + torch.randn(len(classes), 4, generator=generator)


class GaussianStream(FewShotStream):
    network_type = MLP

    def __init__(self, seed=0):
        splits = {"train": range(5), "validation": range(5, 10), "test": range(10, 15)}
        super().__init__(ways=3, seed=seed)
        self.make_tasks(GaussianClasses(), splits)


def test_few_shot_tasks_from_a_users_source_keep_the_contract():
    check_stream(GaussianStream())
