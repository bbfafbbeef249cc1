"""The contract of a stream: ours meet it, and each rule is broken once."""

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


def cifar(root, monkeypatch):
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


def settings_of(name, root, monkeypatch):
    rng, labels = np.random.default_rng(0), np.repeat(np.arange(12), 10)
    if name == "fc100":
        return cifar(root, monkeypatch)
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
def test_every_registered_stream_meets_the_contract(name, tmp_path, monkeypatch):
    fc100.load_cifar100.cache_clear()
    stream = find_component("data", name)(**settings_of(name, tmp_path, monkeypatch))
    if name == "follow":  # files say nothing of the problem: it is named beside them
        monkeypatch.setattr(stream, "problem", partial(stream.problem, FewShot, network=MLP))
    check_stream(stream)
    assert set(stream.task_spec()) == set(stream.decided)
    fc100.load_cifar100.cache_clear()


def task_of(t, **changes):
    task = {name: torch.full((2, 3), 1.0 + t + ord(name), dtype=F64) for name in ("b", "c")}
    return {**task, **changes}


class Good(Stream):
    """Two lanes, by index; those below each break it in one place."""

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


class Walk:
    """Tasks one after the other, which can say where it is."""

    def __init__(self, lag=0, restless=False):
        self.lag, self.restless, self.passes = lag, restless, 0

    def __iter__(self):
        self.passes += 1
        return Walker(self.passes if self.restless else 0, self.lag)


class Walker:
    def __init__(self, first, lag):
        self.t, self.lag = first, lag

    def __iter__(self):
        return self

    def __next__(self):
        self.t += 1
        return task_of(self.t)

    def state_dict(self):
        return {"t": self.t}

    def load_state_dict(self, state):
        self.t = state["t"] + self.lag


def with_train(train):
    class Changed(Good):
        def __init__(self):
            super().__init__()
            self.train = train

    return Changed()


def with_attributes(**changes):
    stream = Good()
    for name, value in changes.items():
        setattr(stream, name, value)
    return stream


def test_good_streams_pass_by_index_and_by_iteration():
    check_stream(Good())
    check_stream(with_train(Walk()))
    check_stream(with_train(type("Plain", (), {"__iter__": lambda self: iter([task_of(0), task_of(1)])})()))
    check_stream(with_attributes(validation=(), lanes=None))


class Restless:
    """Another task every time it is asked."""

    def __init__(self):
        self.asked = 0

    def __call__(self, t):
        self.asked += 1
        return task_of(t + self.asked)


class AfterTheOther:
    """A task that depends on which one was asked for before."""

    def __init__(self):
        self.last = 0

    def __call__(self, t):
        ahead = self.last > t
        self.last = t
        return task_of(t + 100 * ahead)


class Unstartable(Good):
    def start(self, problem, seed):
        return torch.rand(2, 3, dtype=F64)


class SharedStart(Good):
    here = torch.zeros(2, 3, dtype=F64)

    def start(self, problem, seed):
        return self.here


def starting(value):
    class Changed(Good):
        def start(self, problem, seed):
            return value.clone()

    return Changed()


class Problemless(Good):
    problem_type = None


class Unmade(Good):
    def task_spec(self):
        return {**super().task_spec(), "ridge": -1.0}


BAD = {
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
    "restless": (with_train(Tasks(Restless(), 9)), "train: task 2 must be the same whenever it is drawn"),
    "ordered": (with_train(Tasks(AfterTheOther(), 9)), "train: task 1 must be the same whenever it is drawn"),
    "shared": (
        with_train([task_of(t) for t in range(3)]),
        "train: changing a task in place changes what is drawn next",
    ),
    "shared test": (with_attributes(test=[task_of(9)]), "test: changing a task in place"),
    "test keys": (with_attributes(test=Tasks(lambda t: {"b": torch.ones(2)}, 2)), "test: task 0 must have the keys"),
    "endless test": (with_attributes(test=Walk()), "test must be a sequence of tasks, got Walk"),
    "spent": (with_train(task_of(t) for t in range(3)), "a second iteration must give the same tasks, and gave 0 of 3"),
    "half spent": (
        with_train(task_of(t) for t in range(9)),
        "a second iteration must give the same tasks, and task 0 is another",
    ),
    "restless walk": (with_train(Walk(restless=True)), "a second iteration must give the same tasks, and task 0"),
    "forgetful walk": (
        with_train(Walk(lag=1)),
        "goes on from a state must give the same tasks, and task 0",
    ),
    "no problem": (Problemless(), r"problem\(\) must make the problem of the stream, and fails: problem must be given"),
    "bad problem": (Unmade(), r"problem\(\) must make the problem of the stream, and fails: ridge must be"),
    "random start": (Unstartable(), "start must depend on the seed alone"),
    "shared start": (SharedStart(), "start must depend on the seed alone"),
    "flat start": (starting(torch.zeros(3, dtype=F64)), r"start must be λ \[lanes, d\], got the shape \[3\]"),
    "whole start": (starting(torch.zeros(2, 3, dtype=torch.long)), "start must be floating-point, got torch.int64"),
    "infinite start": (starting(torch.full((2, 3), torch.inf, dtype=F64)), "start must be finite"),
    "infinite loss": (
        with_train(Tasks(lambda t: task_of(t, c=torch.full((2, 3), torch.nan, dtype=F64)), 3)),
        "outer_loss of the first task must be finite",
    ),
    "metric": (with_attributes(metric=Metric("accuracy")), "metric must be one of loss, got 'accuracy'"),
    "metric word": (with_attributes(metric="loss"), "metric must be a Metric, got 'loss'"),
    "lanes": (with_attributes(lanes=pl.DataFrame({"name": ["one"]})), "lanes has 1 rows, and λ has 2 lanes"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_a_stream_that_breaks_a_rule_is_caught(name):
    stream, message = BAD[name]
    with pytest.raises(AssertionError, match=message):
        check_stream(stream)


def test_losses_must_be_one_a_lane():
    class Summed(Quadratic):
        def outer_loss(self, *arguments):
            return super().outer_loss(*arguments).sum()

    with pytest.raises(AssertionError, match=r"outer_loss must be \[2\], got \[\]"):
        check_stream(with_attributes(problem_type=Summed))


def test_an_own_source_of_few_shot_examples_meets_it():
    class Blobs:
        shape = (4,)

        def smallest(self, classes):
            return None

        def draw(self, classes, generator):
            return classes.unsqueeze(-1) + torch.randn(len(classes), 4, generator=generator)

    class BlobStream(FewShotStream):
        network_type = find_component("network", "mlp")

        def __init__(self, seed=0):
            splits = {"train": range(5), "validation": range(5, 10), "test": range(10, 15)}
            super().__init__(ways=3, seed=seed)
            self.make_tasks(Blobs(), splits)

    check_stream(BlobStream())
