"""One round, from the task to the new outer variable. Nothing else puts a round together."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.estimates import Estimate, Judged, Solved, judge, solve
from obbo_lightning.core.memory import Warm
from obbo_lightning.core.outer_step import OuterStep, StepRecord
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import Key
from obbo_lightning.core.share import Share
from obbo_lightning.core.validation import instance_of

ALONE = Share()


class Round(NamedTuple):
    """A round that was played: means over its tasks, in whatever process each was solved.

    Attributes:
        loss: f_t(λ_t, β_{t+1}) ``[lanes]``, before anything was learned from the round.
        inner_loss: g_t(λ_t, β_{t+1}) ``[lanes]``.
        residual: of the linear system, relative ``[lanes]``.
        scores: what else the problem reports of λ_t, such as accuracy ``[lanes]``.
        calls: oracle calls of the whole round, past tasks included.
        step: what became of it, from d_t to λ_{t+1}.
        estimates: of each task of this round that this process solved, in the lanes of this process.
        warms: where each of these tasks' successors starts in the next round.
    """

    loss: Tensor
    inner_loss: Tensor
    residual: Tensor
    scores: dict[str, Tensor]
    calls: dict[str, int]
    step: StepRecord
    estimates: list[Estimate]
    warms: list[Warm]


def play(
    problem: Problem,
    algorithm: Algorithm,
    step: OuterStep,
    task: Task | Sequence[Task],
    warm: Warm | Sequence[Warm],
    key: Key,
    share: Share = ALONE,
) -> Round:
    """One round: λ_t meets its task, is judged on it, learns from it. The next round starts from ``warms``.

    A round may have several tasks, each with its own warm start: d_t is then the mean of their hypergradients. Where
    several processes share a round, each is given its tasks, or its lanes, by ``share``.
    """
    tasks = [task] if isinstance(task, dict) else list(task)
    met = list(zip(tasks, [warm] * len(tasks) if isinstance(warm, Warm) else warm, strict=True))
    outer = step.outer.detach()
    # Recall: what is solved at λ_t: the round's own tasks, and with OAGD those of the rounds before.
    recalled = step.memory.recall(met)
    # Solve: each of them, oldest round first.
    ages = range(len(recalled) - 1, -1, -1)
    solved = [
        solve(problem, algorithm, share, outer, past, key._replace(age=age))
        for past, age in zip(recalled, ages, strict=True)
    ]
    judged = [judge(algorithm, one) for one in solved[-1]]
    if algorithm.hypergradient.contracts:
        _warn_if_diverging(torch.cat([one.estimate.residual for past in solved for one in past]))
    # Combine: means over a round's tasks, whoever solved them.
    combined = combine(solved, judged, share, len(outer))
    # Learn: from d_t to λ_{t+1}.
    record = step(combined.hypergradients, combined.exact)
    ended = [[share.spread_warm(one.estimate.warm, len(outer)) for one in past] for past in solved]
    step.memory.keep([[(t, w) for (t, _), w in zip(*pair, strict=True)] for pair in zip(recalled, ended, strict=True)])
    estimates = [one.estimate for one in solved[-1]]
    return Round(*combined.reported, combined.scores, combined.calls, record, estimates, ended[-1])


class Combined(NamedTuple):
    """A round, from what each process has of it.

    Attributes:
        hypergradients: of each round that was solved, newest last ``[rounds, lanes, d]``.
        exact: ∇F_t(λ_t) ``[lanes, d]``, where the problem knows it.
        reported: loss, inner loss and residual of the round's own tasks.
        scores: of the same.
        calls: oracle calls in all processes.
    """

    hypergradients: Tensor
    exact: Tensor | None
    reported: tuple[Tensor, Tensor, Tensor]
    scores: dict[str, Tensor]
    calls: dict[str, int]


def combine(solved: list[list[Solved]], judged: list[Judged], share: Share, lanes: int) -> Combined:
    """Means over tasks and sums over processes; the only place where processes exchange what they found.

    What is not finite in one process is then not finite in any: all of them decide alike.
    """
    newest = [one.estimate for one in solved[-1]]
    # d_t = (1/n) Σ_j d_{t,j}
    hypergradients = torch.stack([share.mean([one.estimate.hypergradient for one in past], lanes) for past in solved])
    exact = [one.exact for one in judged if one.exact is not None]
    exact_mean = share.mean(exact, lanes) if exact else hypergradients.new_zeros(0)
    loss = share.mean([one.loss for one in newest], lanes)
    inner_loss = share.mean([one.inner_loss for one in judged], lanes)
    residual = share.mean([one.residual for one in newest], lanes)
    scores = {name: share.mean([one.scores[name] for one in judged], lanes) for name in judged[0].scores}
    # Processes that divide lanes make the same calls.
    part = 1.0 if share.lanes is None else (share.lanes.stop - share.lanes.start) / lanes
    counted = [one.estimate.calls for past in solved for one in past]
    calls = hypergradients.new_tensor([part * sum(c[name] for c in counted) for name in ("gradients", "products")])
    hypergradients, exact_mean, calls, loss, inner_loss, residual, *found = share.sum(
        [hypergradients, exact_mean, calls, loss, inner_loss, residual, *scores.values()]
    )
    gradients, products = calls.round().int().tolist()
    return Combined(
        hypergradients,
        exact_mean if exact else None,
        (loss, inner_loss, residual),
        dict(zip(scores, found, strict=True)),
        {"gradients": gradients, "products": products},
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
) -> Iterator[Round]:
    """Play a stream from its first task; yields every round after it was learned from.

    Args:
        problem: what f_t and g_t are.
        algorithm: what to do in a round.
        stream: the tasks, in order; any iterable, also one that never ends. A round of several tasks is a list.
        outer: λ_1 ``[lanes, d]``; a `Parameter` is updated in place, any other tensor is copied.
        inner: β_1 ``[lanes, p]``, where rounds start from the last one's inner variable.
        seed: of all randomness.
        regret_window: w_R of the reported regrets.
        on_nonfinite: ``raise`` or ``skip``.
    """
    instance_of("problem", problem, Problem)
    instance_of("algorithm", algorithm, Algorithm)
    algorithm.require_fit(problem)
    instance_of("outer", outer, Tensor)
    if not outer.is_floating_point():
        raise ValueError(f"outer must be a floating-point tensor [lanes, d], got {outer.dtype}")
    parameter = outer if isinstance(outer, Parameter) else Parameter(outer.detach().clone())
    step = OuterStep(parameter, algorithm, regret_window, on_nonfinite, blocks=problem.blocks)
    if inner is not None:
        _require_inner(inner, parameter)
    return _rounds(problem, algorithm, stream, step, Warm(inner), seed)


def _rounds(
    problem: Problem,
    algorithm: Algorithm,
    stream: Iterable[Task | Sequence[Task]],
    step: OuterStep,
    warm: Warm,
    seed: int,
) -> Iterator[Round]:
    warms: Warm | list[Warm] = warm
    for t, task in enumerate(stream):
        played = play(problem, algorithm, step, task, warms, Key(seed, t))
        warms = played.warms if len(played.warms) > 1 else played.warms[0]
        yield played


def _require_inner(inner: Tensor, outer: Tensor) -> None:
    instance_of("inner", inner, Tensor)
    if inner.ndim != 2 or inner.shape[0] != outer.shape[0]:
        raise ValueError(f"inner must have shape [{outer.shape[0]} lanes, p], got {tuple(inner.shape)}")
    if inner.dtype != outer.dtype:
        raise ValueError(f"inner must have the dtype of outer, {outer.dtype}, got {inner.dtype}")
    if not bool(inner.isfinite().all()):
        raise ValueError(f"inner start must be finite, got {int((~inner.isfinite()).sum())} values that are not")


def _warn_if_diverging(residual: Tensor) -> None:
    if float(residual.nan_to_num(nan=0.0).max()) > 1:  # a NaN comes from the task, an overflow is infinite
        warnings.warn(
            "the fixed point of the hypergradient does not contract (its residual grows), so steps are less exact: a "
            "smaller inner.lr (lr of OnlineTuner), a stronger inner curvature or ConjugateGradient mends it; where "
            "scores are good, leave it",
            RuntimeWarning,
            stacklevel=3,
        )
