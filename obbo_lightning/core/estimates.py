"""What tasks say about λ_t: solved at it, differentiated, judged; nothing is learned yet."""

from typing import NamedTuple

import torch
from torch import Tensor

from obbo_lightning.core.algorithm import Algorithm
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
    oracle = Oracle(problem, outer, task, key, warm.solver)
    first = warm.inner
    if first is None and algorithm.inner.carries:
        first = problem.initial_inner(outer, task)
    found = algorithm.hypergradient(oracle, algorithm.inner, first, warm.solve)
    carried = Warm(
        _last_finite(found.inner, first) if algorithm.inner.carries else None,
        _last_finite(found.solve, warm.solve),
        _last_finite(oracle.carried, warm.solver),
    )
    return Estimate(found.value, found.inner, carried, found.loss, found.residual, oracle.calls)


class Solved(NamedTuple):
    """A task that was solved at λ_t, in the lanes of this process."""

    problem: Problem
    outer: Tensor
    task: Task
    estimate: Estimate


def solve(
    problem: Problem, algorithm: Algorithm, share: Share, outer: Tensor, met: list[Met], key: Key
) -> list[Solved]:
    """The tasks of one round at λ_t, one after the other, or side by side where that is asked for and possible."""
    views = [share.view(problem, outer, task, warm) for task, warm in met]
    together = None
    if share.side_by_side and algorithm.takes_lanes and len(met) > 1:
        together = problem.as_lanes([task for task, _ in met])
    if together is not None:
        warm = stack_warm([warm for _, warm in met])
        lanes = estimate(problem, algorithm, outer.expand(len(met), -1), together, warm, key)
        estimates = [_lane(lanes, j) for j in range(len(met))]
    else:
        estimates = [
            estimate(mine, algorithm, at, task, warm, key._replace(place=share.first + j))
            for j, (mine, at, task, warm) in enumerate(views)
        ]
    return [Solved(mine, at, task, found) for (mine, at, task, _), found in zip(views, estimates, strict=True)]


class Judged(NamedTuple):
    """What is reported of a round's own task, besides its estimate; in the lanes of this process."""

    inner_loss: Tensor
    scores: dict[str, Tensor]
    exact: Tensor | None


def judge(algorithm: Algorithm, solved: Solved) -> Judged:
    """g_t(λ_t, β_{t+1}), the problem's scores, and ∇F_t(λ_t) where the problem knows it."""
    problem, outer, task, found = solved
    exact: Tensor | None = found.hypergradient
    if not algorithm.hypergradient.exact:
        known = problem.hypergradient(outer, task)
        exact = None if known is None else require_shape(problem, "hypergradient", known[0].detach(), outer.shape)
    with torch.no_grad():  # to be reported, not learned from
        inner_loss = problem.inner_loss(outer, found.inner, problem.laid_out(task))
    return Judged(inner_loss, problem.scores(outer, found.inner, task), exact)


def _lane(found: Estimate, j: int) -> Estimate:
    """One of several tasks that were solved side by side; a call for all was a call for each."""
    row = slice(j, j + 1)
    warm = found.warm.lanes(row)
    return Estimate(found.hypergradient[row], found.inner[row], warm, found.loss[row], found.residual[row], found.calls)


def _last_finite(found: Tensor | None, before: Tensor | None) -> Tensor | None:
    """A lane that blew up starts its next round from where this one started, not from NaN."""
    if found is None:
        return None
    finite = found.isfinite().all(-1, keepdim=True)
    return found.where(finite, 0.0 if before is None else before)
