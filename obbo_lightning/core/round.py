"""One round, from the task to the new outer variable. A round is put together only here."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.distributed import Shard
from obbo_lightning.core.hypergradients import Hypergradient
from obbo_lightning.core.memory import InnerState, TaskEntry
from obbo_lightning.core.oracle import Oracle, require_finite, require_outer, require_shape
from obbo_lightning.core.outer_step import OuterStep, OuterUpdate
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import Key
from obbo_lightning.core.statistics import median
from obbo_lightning.core.validation import instance_of

Metrics = dict[str, float | int | None]
Solved = tuple[Problem, Tensor, Task, Hypergradient]  # a task solved at λ_t, in the lanes of this process
WHOLE_ROUND = Shard()


@dataclass(frozen=True, eq=False, kw_only=True)
class Round(OuterUpdate):
    """A finished round: its `OuterUpdate` (``outer`` is λ_{t+1}), and means over its tasks, over all processes.

    Attributes:
        loss: f_t(λ_t, β_{t+1}) ``[lanes]``, before λ has learned from the round.
        inner_loss: g_t(λ_t, β_{t+1}) ``[lanes]``.
        residual: of the linear system, relative ``[lanes]``.
        scores: further scores of the problem at λ_t, such as accuracy ``[lanes]``.
        evaluations: gradients and second-derivative products of the whole round, past tasks included.
        window_fill: number of rounds in the memory.
        estimates: of each task of this round that this process solved, in the lanes of this process.
        states: where the corresponding tasks of the next round start.
    """

    loss: Tensor
    inner_loss: Tensor
    residual: Tensor
    scores: dict[str, Tensor]
    evaluations: dict[str, int]
    window_fill: int
    estimates: list[Hypergradient]
    states: list[InnerState]

    def metrics(self) -> Metrics:
        """Return the round as numbers, medians over lanes; None for what an algorithm or a problem does not have."""
        generalized = self.generalized_gradient
        per_lane: dict[str, Tensor | None] = {
            "loss": self.loss,
            "inner_loss": self.inner_loss,
            **self.scores,
            **{f"regret/{name}": values for name, values in self.regret.items()},
            "hypergradient_norm": self.hypergradient.norm(dim=-1),
            "direction_norm": self.direction.norm(dim=-1),
            "generalized_norm": None if generalized is None else generalized.norm(dim=-1),
            "residual": self.residual,
            "hypergradient_error": self.hypergradient_error,
            **self.step_metrics,
        }
        known = {name: values for name, values in per_lane.items() if values is not None}
        numbers = torch.stack([median(values) for values in known.values()]).tolist()  # one transfer from the device
        metrics: Metrics = {**dict.fromkeys(per_lane), **dict(zip(known, numbers, strict=True)), **self.evaluations}
        return metrics | {"window_fill": self.window_fill, "skipped": int(self.skipped.sum())}


def run_round(
    problem: Problem,
    algorithm: Algorithm,
    step: OuterStep,
    task: Task | Sequence[Task],
    state: InnerState | Sequence[InnerState],
    key: Key,
    shard: Shard = WHOLE_ROUND,
    fold: int | None = None,
) -> Round:
    """Run one round: solve its tasks at λ_t, evaluate them, update λ.

    A round may have several tasks, each with its own inner state: d_t is then the mean of their hypergradients.

    Args:
        problem: has f_t and g_t.
        algorithm: what to compute in a round.
        step: holds λ_t, memory, optimizer and regrets; it is updated.
        task: the task of the round, or several.
        state: where each task's solvers start: `states` of the previous round.
        key: identifies the round's randomness.
        shard: the tasks or the lanes of this process, where several processes share a round.
        fold: number of the validation examples of this round; None: round mod ``step.folds``.

    >>> from obbo_lightning import OBBO
    >>> from obbo_lightning.streams.quadratic import QuadraticTasks
    >>> stream, algorithm = QuadraticTasks(), OBBO(window=2)
    >>> step = OuterStep(Parameter(stream.initial_outer()), algorithm)
    >>> run_round(stream.problem, algorithm, step, stream[0], InnerState(), Key(seed=0, round=0)).window_fill
    1
    """
    tasks = [task] if isinstance(task, dict) else list(task)
    states = [state] * len(tasks) if isinstance(state, InnerState) else state
    entries = [TaskEntry(*pair) for pair in zip(tasks, states, strict=True)]
    outer = step.outer.detach()
    # Recall: the tasks that are solved at λ_t; with OAGD also those of past rounds.
    recalled = step.memory.recall(entries)
    # Solve: each of them, oldest round first.
    solved = [
        _solve(problem, algorithm, shard, outer, past, key._replace(age=age))
        for age, past in zip(range(len(recalled) - 1, -1, -1), recalled, strict=True)
    ]
    estimates = [[estimate for *_, estimate in past] for past in solved]
    residuals = torch.cat([one.residual for past in estimates for one in past])
    # Ignore NaN, which comes from the task; a diverging iteration has a residual above 1 or infinity.
    if algorithm.hypergradient.contracts and float(residuals.nan_to_num(nan=0.0).max()) > 1:
        warnings.warn(
            "the fixed point of the hypergradient does not contract (its residual grows), so steps are less exact: use "
            "a smaller hypergradient.lr (inner.lr where it is not set), a stronger inner curvature, "
            "FixedPoint(while_contracting=True), as OnlineTuner does, or ConjugateGradient",
            RuntimeWarning,
            stacklevel=2,
        )
    # Combine: means over a round's tasks, over all processes.
    hypergradients, exact, means = _combine(algorithm, solved[-1], estimates, shard, len(outer))
    # Update: from d_t to λ_{t+1}.
    update = step(hypergradients, exact, key.round % step.folds if fold is None else fold)
    ended = []
    for past, found in zip(recalled, estimates, strict=True):
        after = [one.state.map(lambda values: shard.scatter(values, len(outer))) for one in found]
        ended.append([TaskEntry(entry.task, state) for entry, state in zip(past, after, strict=True)])
    step.memory.keep(ended)
    return Round(
        **means,
        **vars(update),
        window_fill=step.memory.fill,
        estimates=estimates[-1],
        states=[entry.state for entry in ended[-1]],
    )


def online(
    problem: Problem,
    algorithm: Algorithm,
    stream: Iterable[Task | Sequence[Task]],
    outer: Tensor,
    inner: Tensor | None = None,
    seed: int = 0,
    regret_window: int = 10,
    on_nonfinite: str = "raise",
    folds: int = 1,
) -> Iterator[Round]:
    """Run a stream from its first task; yields every round after λ has learned from it.

    Args:
        problem: has f_t and g_t.
        algorithm: what to compute in a round.
        stream: the tasks, in order; any iterable, also an endless one. A round of several tasks is a list.
        outer: λ_1 ``[lanes, d]``; a `Parameter` is updated in place, any other tensor is copied.
        inner: β_1 ``[lanes, p]``, where rounds start from the previous inner variable.
        seed: of all randomness.
        regret_window: w_R of the reported regrets.
        on_nonfinite: ``raise`` or ``skip``.
        folds: number of disjoint folds of validation examples that rounds use in turn; 1: new examples in every round.

    >>> from obbo_lightning import OBBO
    >>> from obbo_lightning.streams.quadratic import QuadraticTasks
    >>> stream = QuadraticTasks(rounds=3)
    >>> [round.window_fill for round in online(stream.problem, OBBO(window=2), stream, stream.initial_outer())]
    [1, 2, 2]
    """
    instance_of("problem", problem, Problem)
    instance_of("algorithm", algorithm, Algorithm)
    algorithm.require_compatible(problem)
    instance_of("outer", outer, Tensor)
    require_outer(outer)
    parameter = outer if isinstance(outer, Parameter) else Parameter(outer.detach().clone())
    step = OuterStep(parameter, algorithm, regret_window, on_nonfinite, groups=problem.groups, folds=folds)
    if inner is not None:
        instance_of("inner", inner, Tensor)
        if inner.ndim != 2 or len(inner) != len(outer):
            raise ValueError(f"inner must have shape [{len(outer)} lanes, p], got {tuple(inner.shape)}")
        if inner.dtype != outer.dtype:
            raise ValueError(f"inner must have the dtype of outer, {outer.dtype}, got {inner.dtype}")
        require_finite("inner start", inner)

    def rounds() -> Iterator[Round]:
        states: InnerState | list[InnerState] = InnerState(inner)
        for t, task in enumerate(stream):
            finished = run_round(problem, algorithm, step, task, states, Key(seed, t))
            states = finished.states if len(finished.states) > 1 else finished.states[0]
            yield finished

    return rounds()


def estimate_hypergradient(
    problem: Problem, algorithm: Algorithm, outer: Tensor, task: Task, state: InnerState, key: Key
) -> Hypergradient:
    """Estimate the hypergradient of one task at λ. Pure: the same arguments give the same estimate.

    Args:
        problem: has f_t and g_t.
        algorithm: has the inner solver and the estimator.
        outer: λ ``[lanes, d]``.
        task: to be solved.
        state: where its solvers start.
        key: identifies its randomness.

    >>> from obbo_lightning import OBBO
    >>> from obbo_lightning.streams.quadratic import QuadraticTasks
    >>> stream = QuadraticTasks()
    >>> found = estimate_hypergradient(stream.problem, OBBO(), stream.initial_outer(), stream[0], InnerState(), Key())
    >>> found.value.shape, found.evaluations  # 20 inner steps and 5 iterations of the fixed point
    (torch.Size([1, 4]), {'gradients': 22, 'products': 4})
    """
    oracle = Oracle(problem, outer, task, key, state.solver_state)
    start = algorithm.inner.warm_start(oracle, state.inner)
    result = algorithm.hypergradient(oracle, algorithm.inner, replace(state, inner=start))
    after = InnerState(
        _keep_finite(result.inner, start) if algorithm.inner.warm_starts else None,
        _keep_finite(result.state.linear_solution, state.linear_solution),
        _keep_finite(oracle.solver_state, state.solver_state),
    )
    return replace(result, state=after, evaluations=oracle.evaluations)


def _keep_finite(after: Tensor | None, before: Tensor | None) -> Tensor | None:
    """Let a lane that overflowed start its next round from where this one started."""
    if after is None:
        return None
    finite = after.isfinite().all(-1, keepdim=True)
    return after.where(finite, 0.0 if before is None else before)


def _solve(
    problem: Problem, algorithm: Algorithm, shard: Shard, outer: Tensor, entries: list[TaskEntry], key: Key
) -> list[Solved]:
    """Solve the tasks of one round at λ_t in a loop, or as lanes of one problem where requested and possible."""
    stacked = together = None
    if shard.vmap and algorithm.supports_vmap and len(entries) > 1:
        stacked = problem.stack_as_lanes([entry.task for entry in entries])
    if stacked is not None:
        joined = InnerState.join([entry.state for entry in entries])
        together = estimate_hypergradient(problem, algorithm, outer.expand(len(entries), -1), stacked, joined, key)
    solved = []
    for j, entry in enumerate(entries):
        own, at, (task, state) = shard.select(problem, outer, entry)
        if together is None:
            estimate = estimate_hypergradient(own, algorithm, at, task, state, key._replace(slot=shard.first + j))
        else:
            lane = slice(j, j + 1)
            tensors = {name: getattr(together, name)[lane] for name in ("value", "inner", "loss", "residual")}
            estimate = replace(together, state=together.state.lanes(lane), **tensors)  # its evaluations are for all
        solved.append((own, at, task, estimate))
    return solved


def _combine(
    algorithm: Algorithm, newest: list[Solved], estimates: list[list[Hypergradient]], shard: Shard, lanes: int
) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """Return d of each solved round, newest last ``[rounds, lanes, d]``, ∇F_t(λ_t) if known, and what is reported.

    Means are over tasks, and sums over processes, which exchange results only here. The all-reduce propagates NaN to
    every rank, so all ranks skip the round together.
    """
    inner_losses, scores, exact = [], [], []
    for problem, outer, task, estimate in newest:
        with torch.no_grad():  # reported only
            inner_losses.append(problem.inner_loss(outer, estimate.inner, problem.for_gradients(task)))
        scores.append(problem.scores(outer, estimate.inner, task))
        if algorithm.hypergradient.is_exact:
            exact.append(estimate.value)
        elif (known := problem.hypergradient(outer, task)) is not None:
            exact.append(require_shape(problem, "hypergradient", known[0].detach(), outer.shape))
    # d_t = (1/n) Σ_j d_{t,j}
    hypergradients = torch.stack([shard.mean([one.value for one in past], lanes) for past in estimates])
    # Processes that divide lanes make the same evaluations: each counts its fraction of them.
    fraction = 1.0 if shard.lanes is None else (shard.lanes.stop - shard.lanes.start) / lanes
    evaluations = [one.evaluations for past in estimates for one in past]
    counts = [fraction * sum(one[name] for one in evaluations) for name in ("gradients", "products")]
    reported = [[one.loss for one in estimates[-1]], inner_losses, [one.residual for one in estimates[-1]]]
    reported += [[one[name] for one in scores] for name in scores[0]]
    hypergradients, exact_mean, total, loss, inner_loss, residual, *score_means = shard.sum(
        [
            hypergradients,
            shard.mean(exact, lanes) if exact else hypergradients.new_zeros(0),
            hypergradients.new_tensor(counts),
            *(shard.mean(values, lanes) for values in reported),
        ]
    )
    means = {
        "loss": loss,
        "inner_loss": inner_loss,
        "residual": residual,
        "scores": dict(zip(scores[0], score_means, strict=True)),
        "evaluations": dict(zip(("gradients", "products"), total.round().int().tolist(), strict=True)),
    }
    return hypergradients, exact_mean if exact else None, means
