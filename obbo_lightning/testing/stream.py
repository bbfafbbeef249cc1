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
    first = _check_train(stream.train, rounds)
    for name in ("validation", "test"):
        tasks = getattr(stream, name)
        assert has_random_access(tasks), f"{name} must be a sequence of tasks, got {type(tasks).__name__}"
        if len(tasks):
            _check_sequence(name, tasks, rounds, first)
    problem = _problem(stream)
    outer = _check_start(stream, problem)
    _check_losses(stream, problem, outer, first)
    lanes = stream.lanes
    assert lanes is None or len(lanes) == len(outer), f"lanes has {len(lanes)} rows, and λ has {len(outer)} lanes"


def _check_train(train: Sequence[Task] | Iterable[Task], rounds: int) -> Task:
    """Check the training tasks; return a copy of the first, which others are compared with."""
    if has_random_access(train):
        assert len(train), "train must have a task, and has none"
        first = _copy(train[0])
        _check_sequence("train", train, rounds, first)
        return first
    iterator: Any = iter(train)
    start = copy.deepcopy(iterator.state_dict()) if _has_state(iterator) else None
    tasks = [_copy(task) for task in islice(iterator, rounds)]
    assert tasks, "train must have a task, and has none"
    _check_form("train", tasks, tasks[0])
    again: Any = iter(train)
    if again is iterator and start is not None:  # a single iterator, set back to its start
        again.load_state_dict(start)
    _assert_same("train: a second iteration", tasks, list(islice(again, rounds)))
    if again is iterator and start is not None:
        again.load_state_dict(start)
    _check_state(train, tasks)
    return tasks[0]


def _check_sequence(name: str, tasks: Sequence[Task], rounds: int, like: Task) -> None:
    numbers = range(min(rounds, len(tasks)))
    returned = [tasks[t] for t in numbers]
    copies = [_copy(task) for task in returned]
    _check_form(name, copies, like)
    for task in returned:
        for value in task.values():
            value.zero_()
    changed = "changing a task in place changes the task that is returned next; it must be a copy"
    for t in reversed(numbers):
        found = tasks[t]
        _check_form(name, [found], like)
        same = _same(copies[t], found)
        assert same or not _is_zero(found) or _is_zero(copies[t]), f"{name}: {changed}"
        assert same, f"{name}: task {t} must be the same whenever it is requested, and is not"
        assert _same(found, tasks[t]), f"{name}: task {t} requested twice in a row must be the same, and is not"


def _check_form(name: str, tasks: Sequence[Task], like: Task) -> None:
    for t, task in enumerate(tasks):
        assert task.keys() == like.keys(), (
            f"{name}: task {t} must have the keys {sorted(like)} of the first training task, got {sorted(task)}"
        )
        for key, value in task.items():
            assert value.dtype == like[key].dtype, f"{name}: {key!r} must be {like[key].dtype}, got {value.dtype}"


def _has_state(iterator: Any) -> bool:
    return hasattr(iterator, "state_dict") and hasattr(iterator, "load_state_dict")


def _check_state(train: Iterable[Task], tasks: Sequence[Task]) -> None:
    """Check that an iterator with a state continues from it."""
    iterator: Any = iter(train)
    if not _has_state(iterator):
        return
    half = len(tasks) // 2
    list(islice(iterator, half))
    state = copy.deepcopy(iterator.state_dict())
    list(islice(iterator, 1))  # must not change the state that was returned
    other: Any = iter(train)
    other.load_state_dict(state)
    _assert_same("train: an iterator that continues from a state", tasks[half:], list(islice(other, len(tasks) - half)))


def _problem(stream: Stream) -> Problem:
    try:
        problem = stream.problem()
    except Exception as error:  # this runs the user's code
        raise AssertionError(f"problem() must return the problem of the stream, and fails: {error}") from error
    assert isinstance(problem, Problem), f"problem() must return a Problem, got {type(problem).__name__}"
    return problem


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
    inner = problem.initial_inner(outer, task)
    if inner is None:
        inner = problem.solution(outer, task)
    if inner is None:
        inner = problem.inner_from_outer(outer)
    for name in ("inner_loss", "outer_loss"):
        loss = getattr(problem, name)(outer, inner, task)
        assert loss.shape == outer.shape[:1], f"{name} must be [{len(outer)}], got {list(loss.shape)}"
        assert bool(loss.isfinite().all()), f"{name} of the first task must be finite, got {loss.tolist()}"
    assert isinstance(stream.metric, Metric), f"metric must be a Metric, got {stream.metric!r}"
    known = ["loss", *problem.scores(outer, inner, task)]
    assert stream.metric.name in known, f"metric must be one of {', '.join(known)}, got {stream.metric.name!r}"


def _copy(task: Any) -> Task:
    assert isinstance(task, dict), f"a task must be a dict of tensors, got {type(task).__name__}"
    for key, value in task.items():
        assert isinstance(value, Tensor), f"a task must be a dict of tensors, got {type(value).__name__} for {key!r}"
    return {key: value.clone() for key, value in task.items()}


def _same(one: Task, other: Task) -> bool:
    return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    both_nan = (one != one) & (other != other)  # NaN in both is the same task
    return bool(((one == other) | both_nan).all())


def _is_zero(task: Task) -> bool:
    return not any(bool(value.any()) for value in task.values())


def _assert_same(what: str, tasks: Sequence[Task], found: Sequence[Task]) -> None:
    assert len(tasks) == len(found), f"{what} must give the same tasks, got {len(found)} of {len(tasks)}"
    for t, (one, other) in enumerate(zip(tasks, found, strict=True)):
        assert _same(one, other), f"{what} must give the same tasks, got another task {t}"
