"""What tasks say about λ_t: solved at it, judged, differentiated; nothing is learned yet."""

from typing import NamedTuple

import torch
from torch import Tensor

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.hypergradients import ClosedForm, FixedPoint, StochasticNeumann, Unrolled
from obbo_lightning.core.inner import ExactSolution, GradientDescent
from obbo_lightning.core.memory import Met, Warm
from obbo_lightning.core.oracle import Oracle, require_shape
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import Key
from obbo_lightning.core.share import Share, stack_warm


class Estimate(NamedTuple):
    """What one task says about λ_t.

    Attributes:
        hypergradient: d_t ``[lanes, d]``.
        inner: β_{t+1} ``[lanes, p]``.
        warm: where the task's next solve starts.
        loss: f_t(λ_t, β_{t+1}) ``[lanes]``, before anything was learned from the task by λ.
        residual: of the linear system, relative ``[lanes]``.
        calls: oracle calls: gradients and second-derivative products.
    """

    hypergradient: Tensor
    inner: Tensor
    warm: Warm
    loss: Tensor
    residual: Tensor
    calls: dict[str, int]


def estimate(problem: Problem, algorithm: Algorithm, outer: Tensor, task: Task, warm: Warm, key: Key) -> Estimate:
    """The hypergradient of one task at λ. Pure: the same arguments give the same estimate."""
    oracle = Oracle(problem, outer, task, key)
    first = warm.inner
    if first is None and algorithm.inner.carries:
        first = problem.initial_inner(outer, task)
    found = algorithm.hypergradient(oracle, algorithm.inner, first, warm.solve)
    carried = Warm(
        _last_finite(found.inner, first) if algorithm.inner.carries else None,
        _last_finite(found.solve, warm.solve),
    )
    return Estimate(found.value, found.inner, carried, found.loss, found.residual, oracle.calls)


class Solved(NamedTuple):
    """One task, and what is reported of it; all in the lanes of this process."""

    estimate: Estimate
    inner_loss: Tensor
    scores: dict[str, Tensor]
    exact: Tensor | None


def solve(
    problem: Problem, algorithm: Algorithm, share: Share, outer: Tensor, met: list[Met], key: Key
) -> list[Solved]:
    """The tasks of one round at λ_t, one after the other, or side by side where that is asked for and possible."""
    views = [share.view(problem, outer, task, warm) for task, warm in met]
    together = None
    if share.side_by_side and algorithm.side_by_side and len(met) > 1:
        together = problem.side_by_side([task for task, _ in met])
    if together is not None:
        warm = stack_warm([warm for _, warm in met])
        lanes = estimate(problem, algorithm, outer.expand(len(met), -1), together, warm, key)
        estimates = [_lane(lanes, j) for j in range(len(met))]
    else:
        estimates = [
            estimate(mine, algorithm, at, task, warm, key._replace(slot=share.first + j))
            for j, (mine, at, task, warm) in enumerate(views)
        ]
    return [
        _reported(algorithm, mine, at, task, found, key)
        for found, (mine, at, task, _) in zip(estimates, views, strict=True)
    ]


def _reported(algorithm: Algorithm, problem: Problem, outer: Tensor, task: Task, found: Estimate, key: Key) -> Solved:
    if key.task:  # of an earlier round: nobody asks
        return Solved(found, found.loss, {}, None)
    known = algorithm.hypergradient.exact
    exact = found.hypergradient if known else _exact_hypergradient(problem, outer, task)
    with torch.no_grad():  # to be reported, not learned from
        inner_loss = problem.inner_loss(outer, found.inner, problem.laid_out(task))
    return Solved(found, inner_loss, problem.scores(outer, found.inner, task), exact)


def _lane(found: Estimate, j: int) -> Estimate:
    """One of several tasks that were solved side by side; a call for all was a call for each."""
    row = slice(j, j + 1)
    warm = Warm(*(None if v is None else v[row] for v in (found.warm.inner, found.warm.solve)))
    return Estimate(found.hypergradient[row], found.inner[row], warm, found.loss[row], found.residual[row], found.calls)


def _exact_hypergradient(problem: Problem, outer: Tensor, task: Task) -> Tensor | None:
    known = problem.hypergradient(outer, task)
    return None if known is None else require_shape(problem, "hypergradient", known[0].detach(), outer.shape)


def _last_finite(found: Tensor | None, before: Tensor | None) -> Tensor | None:
    """A lane that blew up starts its next round from where this one started, not from NaN."""
    if found is None:
        return None
    finite = found.isfinite().all(-1, keepdim=True)
    return found.where(finite, 0.0 if before is None else before)


def require_fit(problem: Problem, algorithm: Algorithm) -> None:
    """Refuse an algorithm that asks a problem for what it does not have, before the first round."""
    name = type(problem).__name__
    solver, estimator = algorithm.inner, algorithm.hypergradient
    estimator.require_fit(problem)
    if isinstance(estimator, ClosedForm):
        if type(problem).hypergradient is Problem.hypergradient:
            raise ValueError(f"hypergradient 'ClosedForm' needs a closed form, and {name} has none")
        return
    if isinstance(estimator, Unrolled) and not isinstance(solver, GradientDescent):
        raise ValueError(f"hypergradient 'Unrolled' needs inner steps to go back through, got inner {solver!r}")
    if isinstance(estimator, Unrolled) and isinstance(solver, GradientDescent) and solver.precision != "full":
        raise ValueError(f"inner.precision must be full for hypergradient 'Unrolled', got {solver.precision!r}")
    if isinstance(solver, ExactSolution) and type(problem).solution is Problem.solution:
        raise ValueError(f"inner 'ExactSolution' needs a solution, and {name} has none")
    if isinstance(estimator, FixedPoint) and estimator.lr is None and solver.step_size is None:
        raise ValueError(f"hypergradient.lr must be given for inner {solver!r}, which has no step size, got None")
    unknown = type(problem).smoothness is Problem.smoothness
    if isinstance(estimator, StochasticNeumann) and estimator.smoothness is None and unknown:
        raise ValueError(f"hypergradient.smoothness must be given for {name}, which does not know its own, got None")
