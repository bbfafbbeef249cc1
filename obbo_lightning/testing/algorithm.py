"""Contract of an algorithm, checked on small quadratic streams."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import keystr, tree_flatten_with_path

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.memory import InnerState
from obbo_lightning.core.outer_step import OuterStep
from obbo_lightning.core.problem import Task
from obbo_lightning.core.randomness import Key
from obbo_lightning.core.round import Round, online, run_round
from obbo_lightning.streams.quadratic import QuadraticTasks

ROUNDS = 8


def check_algorithm(make: Callable[..., Algorithm], **settings: Any) -> None:
    """Raise AssertionError where an algorithm breaks the contract, on small quadratic streams in float64.

    Args:
        make: class of the algorithm, or a function that makes it; it must take ``domain``.
        settings: arguments of ``make``. The stream has ℓ_{g,1} = 1, d = 4 and p = 8: choose step sizes accordingly.

    >>> from obbo_lightning import OBBO
    >>> check_algorithm(OBBO, lr=1e-2, window=3)
    """
    stream = QuadraticTasks(condition_number=[2.0, 5.0], lanes=2, rounds=ROUNDS, noise=0.1, radius=0.05)
    algorithm = make(domain=stream.domain, **settings)
    rounds = _run(stream, algorithm, stream)
    _check_rounds(stream, algorithm, rounds)
    _check_repetition(stream, algorithm, rounds)
    _check_resume(stream, algorithm, rounds)
    _check_nan(stream, algorithm, rounds)
    # A lane alone, in single precision, and on one task for long
    alone = QuadraticTasks(condition_number=2.0, rounds=ROUNDS, noise=0.1, radius=stream.domain.radius)
    outer = _run(alone, algorithm, alone)[-1].outer
    assert torch.allclose(outer, rounds[-1].outer[:1], rtol=1e-10, atol=1e-12), "a lane depends on its neighbours"
    single = QuadraticTasks(condition_number=2.0, rounds=ROUNDS, dtype=torch.float32)
    outer = _run(single, make(domain=single.domain, **settings), single)[-1].outer
    assert outer.dtype == torch.float32, f"float32 became {outer.dtype}"
    assert bool(outer.isfinite().all()), "float32 rounds are not finite"
    constant = QuadraticTasks(condition_number=2.0, rounds=40, drift=0.0)
    outer = _run(constant, make(domain=constant.domain, **settings), constant)[-1].outer
    first, last = (constant.problem.hypergradient(at, constant[0])[0] for at in (constant.initial_outer(), outer))
    assert float(last.norm()) < float(first.norm()), "40 rounds of the same task did not reduce its gradient"


def _run(
    stream: QuadraticTasks, algorithm: Algorithm, tasks: Iterable[Task], on_nonfinite: str = "raise"
) -> list[Round]:
    start = stream.initial_outer()
    return list(online(stream.problem, algorithm, tasks, start, regret_window=3, on_nonfinite=on_nonfinite))


def _check_rounds(stream: QuadraticTasks, algorithm: Algorithm, rounds: list[Round]) -> None:
    for t, finished in enumerate(rounds):
        inside = stream.domain.contains(finished.outer)
        assert bool(inside.all()), f"the outer variable leaves {stream.domain!r} in round {t}"
        assert finished.loss.shape == (2,), f"round {t}: loss must have shape (2,)"
        assert min(finished.evaluations.values()) >= 0, f"round {t}: negative evaluations {finished.evaluations}"
        assert all(r is None or r.shape == (2,) for r in finished.regret.values()), f"round {t}: regret is not per lane"
        if algorithm.clip is not None:
            longest = float(finished.direction.norm(dim=-1).max())
            assert longest <= algorithm.clip * (1 + 1e-9), f"round {t}: direction of norm {longest} was not clipped"


def _check_repetition(stream: QuadraticTasks, algorithm: Algorithm, rounds: list[Round]) -> None:
    tasks = [{name: values.clone() for name, values in task.items()} for task in stream]
    again = _run(stream, algorithm, tasks)
    assert torch.equal(rounds[-1].outer, again[-1].outer), "the same seed gave two different outer variables"
    for t, task in enumerate(tasks):
        for name, values in stream[t].items():
            assert torch.equal(task[name], values), f"{name!r} of task {t} was changed in place"


def _check_resume(stream: QuadraticTasks, algorithm: Algorithm, rounds: list[Round]) -> None:
    def run(start: int, stop: int, state: dict[str, Any] | None) -> dict[str, Any]:
        outer = Parameter(stream.initial_outer() if state is None else state["outer"].clone())
        step, inner_state = OuterStep(outer, algorithm, regret_window=3), InnerState()
        if state is not None:
            step.load_state_dict(state["step"])
            inner_state = InnerState(**state["inner_state"])
        for t in range(start, stop):
            inner_state = run_round(stream.problem, algorithm, step, stream[t], inner_state, Key(0, t)).states[0]
        return {"outer": outer.detach(), "step": step.state_dict(), "inner_state": inner_state.state_dict()}

    whole, half = run(0, ROUNDS, None), run(0, ROUNDS // 2, None)
    assert torch.equal(whole["outer"], rounds[-1].outer), "the parameter is not the λ that the round reports"
    assert bool((whole["outer"] != stream.initial_outer()).any()), f"{ROUNDS} rounds did not move the outer variable"
    expected = {keystr(path): value for path, value in tree_flatten_with_path(whole)[0]}
    for _ in range(2):  # a state that was resumed from can be resumed from again
        found = {keystr(path): value for path, value in tree_flatten_with_path(run(ROUNDS // 2, ROUNDS, half))[0]}
        assert found.keys() == expected.keys(), f"after a resume the state has {list(found)}, not {list(expected)}"
        for name, value in expected.items():
            same = torch.equal(value, found[name]) if isinstance(value, Tensor) else value == found[name]
            assert same, f"after a resume state{name} differs from an uninterrupted run"


def _check_nan(stream: QuadraticTasks, algorithm: Algorithm, rounds: list[Round]) -> None:
    nothing = {name: torch.full_like(values, torch.nan) for name, values in stream[0].items()}
    later = [task if t < ROUNDS // 2 else nothing for t, task in enumerate(stream)]
    found = _run(stream, algorithm, later, on_nonfinite="skip")
    for before, after in zip(rounds[: ROUNDS // 2], found, strict=False):
        assert torch.equal(before.outer, after.outer), "a later task changes an earlier round"
    tasks = [dict(task) for task in stream]
    tasks[2]["c"] = tasks[2]["c"].index_fill(0, torch.tensor([0]), torch.nan)
    found = _run(stream, algorithm, tasks, on_nonfinite="skip")
    assert found[2].skipped.tolist() == [True, False], "the lane with a NaN was not the one skipped"
    assert bool(found[-1].outer.isfinite().all()), "a skipped NaN reached the outer variable"
    assert torch.equal(found[-1].outer[1], rounds[-1].outer[1]), "a NaN in one lane changed another"
