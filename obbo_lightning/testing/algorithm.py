"""Contract of an algorithm, checked on small quadratic streams."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.memory import InnerState
from obbo_lightning.core.outer_step import OuterStep
from obbo_lightning.core.problem import Task
from obbo_lightning.core.randomness import Key
from obbo_lightning.core.round import Round, online, run_round
from obbo_lightning.streams.quadratic import QuadraticTasks

Factory = Callable[..., Algorithm]
ROUNDS = 8


def check_algorithm(make: Factory, **settings: Any) -> None:
    """Raise AssertionError where an algorithm breaks the contract, on small quadratic streams in float64.

    Args:
        make: class of the algorithm, or a function that makes it; it must take ``domain``.
        settings: arguments of ``make``. The stream has ℓ_{g,1} = 1, d = 4 and p = 8: choose step sizes accordingly.

    >>> from obbo_lightning import OBBO
    >>> check_algorithm(OBBO, lr=1e-2, window=3)
    """
    stream = QuadraticTasks(condition_number=[2.0, 5.0], lanes=2, rounds=ROUNDS, noise=0.1, radius=0.05)
    algorithm = make(domain=stream.domain, **settings)
    rounds = _run(stream, algorithm)
    _check_deterministic(stream, algorithm, rounds)
    _check_rounds(stream, algorithm, rounds)
    _check_in_place(stream, algorithm)
    _check_resume(stream, algorithm)
    _check_no_look_ahead(stream, algorithm, rounds)
    _check_tasks_untouched(stream, algorithm)
    _check_lanes(stream, algorithm, rounds)
    _check_nonfinite(stream, algorithm, rounds)
    _check_single_precision(make, settings)
    _check_progress(make, settings)


def _run(stream: QuadraticTasks, algorithm: Algorithm, **options: Any) -> list[Round]:
    return list(online(stream.problem, algorithm, stream, stream.initial_outer(), regret_window=3, **options))


def _check_deterministic(stream: QuadraticTasks, algorithm: Algorithm, rounds: list[Round]) -> None:
    again = _run(stream, algorithm)
    assert torch.equal(rounds[-1].outer, again[-1].outer), "the same seed gave two different outer variables"


def _check_rounds(stream: QuadraticTasks, algorithm: Algorithm, rounds: list[Round]) -> None:
    for t, finished in enumerate(rounds):
        inside = stream.domain.contains(finished.outer)
        assert bool(inside.all()), f"the outer variable leaves {stream.domain!r} in round {t}"
        assert finished.loss.shape == (2,), f"round {t}: loss must have shape (2,)"
        counts = finished.evaluations
        assert all(count >= 0 for count in counts.values()), f"round {t}: negative number of evaluations {counts}"
        assert all(r is None or r.shape == (2,) for r in finished.regret.values()), f"round {t}: regret is not per lane"
        if algorithm.clip is not None:
            longest = float(finished.direction.norm(dim=-1).max())
            assert longest <= algorithm.clip * (1 + 1e-9), f"round {t}: direction of norm {longest} was not clipped"


def _check_in_place(stream: QuadraticTasks, algorithm: Algorithm) -> None:
    outer = Parameter(stream.initial_outer())
    last = list(online(stream.problem, algorithm, stream, outer))[-1]
    assert torch.equal(outer.detach(), last.outer), "the parameter is not the λ that the round reports"
    assert bool((outer.detach() != stream.initial_outer()).any()), f"{ROUNDS} rounds did not move the outer variable"


def _check_resume(stream: QuadraticTasks, algorithm: Algorithm) -> None:
    half = ROUNDS // 2
    whole = _resumable(stream, algorithm, 0, ROUNDS, None)
    first = _resumable(stream, algorithm, 0, half, None)
    for _ in range(2):  # a state that was resumed from can be resumed from again
        second = _resumable(stream, algorithm, half, ROUNDS, first)
        _assert_same("state", whole, second)


def _resumable(
    stream: QuadraticTasks, algorithm: Algorithm, start: int, stop: int, state: dict[str, Any] | None
) -> dict[str, Any]:
    outer = Parameter(stream.initial_outer() if state is None else state["outer"].clone())
    step, inner_state = OuterStep(outer, algorithm, regret_window=3), InnerState()
    if state is not None:
        step.load_state_dict(state["step"])
        inner_state = InnerState(**state["inner_state"])
    for t in range(start, stop):
        inner_state = run_round(stream.problem, algorithm, step, stream[t], inner_state, Key(0, t)).states[0]
    return {"outer": outer.detach(), "step": step.state_dict(), "inner_state": inner_state.state_dict()}


def _assert_same(where: str, one: Any, other: Any) -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, other), f"after a resume {where} differs from an uninterrupted run"
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), f"after a resume {where} has the keys {list(other)}, not {list(one)}"
        for name in one:
            _assert_same(f"{where}.{name}", one[name], other[name])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), f"after a resume {where} has {len(other)} entries, not {len(one)}"
        for i, pair in enumerate(zip(one, other, strict=True)):
            _assert_same(f"{where}.{i}", *pair)
    else:
        assert one == other, f"after a resume {where} is {other!r}, not {one!r}"


def _check_no_look_ahead(stream: QuadraticTasks, algorithm: Algorithm, rounds: list[Round]) -> None:
    cut = ROUNDS // 2
    with_nan: list[Task] = [
        task if t < cut else {name: torch.full_like(value, torch.nan) for name, value in task.items()}
        for t, task in enumerate(stream)
    ]
    again = online(stream.problem, algorithm, with_nan, stream.initial_outer(), regret_window=3)
    found = [next(again) for _ in range(cut)][-1]
    assert torch.equal(rounds[cut - 1].outer, found.outer), "a later task changes an earlier round"


def _check_tasks_untouched(stream: QuadraticTasks, algorithm: Algorithm) -> None:
    tasks = [dict(task) for task in stream]
    list(online(stream.problem, algorithm, tasks, stream.initial_outer()))
    for t, task in enumerate(tasks):
        for name, value in stream[t].items():
            assert torch.equal(task[name], value), f"{name!r} of task {t} was changed in place"


def _check_lanes(stream: QuadraticTasks, algorithm: Algorithm, rounds: list[Round]) -> None:
    alone = QuadraticTasks(condition_number=2.0, rounds=ROUNDS, noise=0.1, radius=stream.domain.radius)
    first, both = _run(alone, algorithm)[-1].outer, rounds[-1].outer
    assert torch.allclose(first, both[:1], rtol=1e-10, atol=1e-12), "a lane's result depends on its neighbours"


def _check_nonfinite(stream: QuadraticTasks, algorithm: Algorithm, rounds: list[Round]) -> None:
    tasks = [dict(task) for task in stream]
    tasks[2]["c"] = tasks[2]["c"].clone()
    tasks[2]["c"][0] = torch.nan
    with_nan = list(
        online(stream.problem, algorithm, tasks, stream.initial_outer(), regret_window=3, on_nonfinite="skip")
    )
    assert with_nan[2].skipped.tolist() == [True, False], "the lane with a NaN was not the one skipped"
    assert bool(with_nan[-1].outer.isfinite().all()), "a skipped NaN reached the outer variable"
    assert torch.equal(with_nan[-1].outer[1], rounds[-1].outer[1]), "a NaN in one lane changed another"


def _check_single_precision(make: Factory, settings: dict[str, Any]) -> None:
    stream = QuadraticTasks(condition_number=2.0, rounds=ROUNDS, dtype=torch.float32)
    outer = _run(stream, make(domain=stream.domain, **settings))[-1].outer
    assert outer.dtype == torch.float32, f"float32 became {outer.dtype}"
    assert bool(outer.isfinite().all()), "float32 rounds are not finite"


def _check_progress(make: Factory, settings: dict[str, Any]) -> None:
    stream = QuadraticTasks(condition_number=2.0, rounds=40, drift=0.0)
    outer = _run(stream, make(domain=stream.domain, **settings))[-1].outer
    first, _ = stream.problem.hypergradient(stream.initial_outer(), stream[0])
    last, _ = stream.problem.hypergradient(outer, stream[0])
    assert float(last.norm()) < float(first.norm()), "40 rounds of the same task did not reduce its gradient"
