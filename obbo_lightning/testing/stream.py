"""Contract of a stream: the same tasks whenever they are requested, a problem, a start and a metric."""

import copy
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.streams.stream import Metric, Stream, has_random_access


def check_stream(stream: Stream, rounds: int = 3) -> None:
    """Raise AssertionError where a stream breaks the contract of `Stream`.

    Args:
        stream: yours.
        rounds: number of tasks of each split that are checked.

    >>> from obbo_lightning.streams.quadratic import QuadraticStream
    >>> check_stream(QuadraticStream())
    """
    train = stream.train
    if has_random_access(train):
        assert len(train), "train must have a task, and has none"
        first = _copy("train", 0, train[0], None)
        _check_sequence("train", train, rounds, first)
    else:
        first = _check_iterable(train, rounds)
    for name in ("validation", "test"):
        tasks = getattr(stream, name)
        assert has_random_access(tasks), f"{name} must be a sequence of tasks, got {type(tasks).__name__}"
        _check_sequence(name, tasks, rounds, first)
    try:
        problem = stream.problem()
    except Exception as error:  # this runs the user's code
        raise AssertionError(f"problem() must return the problem of the stream, and fails: {error}") from error
    assert isinstance(problem, Problem), f"problem() must return a Problem, got {type(problem).__name__}"
    outer = _check_start(stream, problem)
    _check_losses(stream, problem, outer, first)
    lanes = stream.lanes
    assert lanes is None or len(lanes) == len(outer), f"lanes has {len(lanes)} rows, and λ has {len(outer)} lanes"


def _check_sequence(name: str, tasks: Sequence[Task], rounds: int, like: Task) -> None:
    numbers = range(min(rounds, len(tasks)))
    returned = [tasks[t] for t in numbers]
    copies = [_copy(name, t, task, like) for t, task in enumerate(returned)]
    for task in returned:
        for value in task.values():
            value.zero_()
    changed = "changing a task in place changes the task that is returned next; it must be a copy"
    for t in reversed(numbers):
        found = tasks[t]
        same = _same(copies[t], _copy(name, t, found, like))
        zero = [not any(bool(value.any()) for value in task.values()) for task in (found, copies[t])]
        assert same or zero != [True, False], f"{name}: {changed}"
        assert same, f"{name}: task {t} must be the same whenever it is requested, and is not"
        assert _same(found, tasks[t]), f"{name}: task {t} requested twice in a row must be the same, and is not"


def _check_iterable(train: Iterable[Task], rounds: int) -> Task:
    """Check tasks that come one after the other, from an iterator that may have a state; return the first."""
    iterator: Any = iter(train)
    has_state = hasattr(iterator, "state_dict") and hasattr(iterator, "load_state_dict")
    start = copy.deepcopy(iterator.state_dict()) if has_state else None

    def begin() -> Any:
        again: Any = iter(train)
        if again is iterator and has_state:  # a single iterator, set back to its start
            again.load_state_dict(start)
        return again

    tasks: list[Task] = []
    for t, task in enumerate(islice(iterator, rounds)):
        tasks.append(_copy("train", t, task, tasks[0] if tasks else None))
    assert tasks, "train must have a task, and has none"
    _assert_same("train: a second iteration", tasks, list(islice(begin(), rounds)))
    if has_state:
        half, first = len(tasks) // 2, begin()
        list(islice(first, half))
        state = copy.deepcopy(first.state_dict())
        list(islice(first, 1))  # must not change the state that was returned
        other: Any = iter(train)
        other.load_state_dict(state)
        found = list(islice(other, len(tasks) - half))
        _assert_same("train: an iterator that continues from a state", tasks[half:], found)
    return tasks[0]


def _check_start(stream: Stream, problem: Problem) -> Tensor:
    outer = stream.start(problem, 0)
    assert outer.ndim == 2, f"start must be λ [lanes, d], got the shape {list(outer.shape)}"
    assert outer.is_floating_point(), f"start must be floating-point, got {outer.dtype}"
    assert bool(outer.isfinite().all()), "start must be finite, and is not"
    before = outer.clone()
    outer.add_(1)  # a caller may change its copy
    torch.rand(1)  # advances the global generator
    assert torch.equal(before, stream.start(problem, 0)), "start must depend on the seed alone, and does not"
    return before


def _check_losses(stream: Stream, problem: Problem, outer: Tensor, task: Task) -> None:
    starts = (problem.initial_inner(outer, task), problem.solution(outer, task), problem.inner_from_outer(outer))
    inner = next(start for start in starts if start is not None)
    for name in ("inner_loss", "outer_loss"):
        loss = getattr(problem, name)(outer, inner, task)
        assert loss.shape == outer.shape[:1], f"{name} must be [{len(outer)}], got {list(loss.shape)}"
        assert bool(loss.isfinite().all()), f"{name} of the first task must be finite, got {loss.tolist()}"
    assert isinstance(stream.metric, Metric), f"metric must be a Metric, got {stream.metric!r}"
    known = ["loss", *problem.scores(outer, inner, task)]
    assert stream.metric.name in known, f"metric must be one of {', '.join(known)}, got {stream.metric.name!r}"


def _copy(name: str, t: int, task: Any, like: Task | None) -> Task:
    """Return a copy of a task, which must have the keys and dtypes of ``like``."""
    assert isinstance(task, dict), f"a task must be a dict of tensors, got {type(task).__name__}"
    for key, value in task.items():
        assert isinstance(value, Tensor), f"a task must be a dict of tensors, got {type(value).__name__} for {key!r}"
    if like is not None:
        keys = f"the keys {sorted(like)} of the first training task"
        assert task.keys() == like.keys(), f"{name}: task {t} must have {keys}, got {sorted(task)}"
        for key, value in task.items():
            assert value.dtype == like[key].dtype, f"{name}: {key!r} must be {like[key].dtype}, got {value.dtype}"
    return {key: value.clone() for key, value in task.items()}


def _same(one: Task, other: Task) -> bool:
    try:
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        return False
    return True


def _assert_same(what: str, tasks: Sequence[Task], found: Sequence[Task]) -> None:
    assert len(tasks) == len(found), f"{what} must give the same tasks, got {len(found)} of {len(tasks)}"
    for t, (one, other) in enumerate(zip(tasks, found, strict=True)):
        assert _same(one, other), f"{what} must give the same tasks, got another task {t}"
