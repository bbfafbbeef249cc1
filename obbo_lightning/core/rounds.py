"""One round, from the task to the new outer variable. Nothing else puts a round together."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.estimates import Estimate, require_fit, solve
from obbo_lightning.core.memory import Warm
from obbo_lightning.core.outer_step import OuterStep, StepRecord
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import Key
from obbo_lightning.core.share import Share
from obbo_lightning.core.validation import instance_of


class Round(NamedTuple):
    """A round that was played.

    Attributes:
        estimate: of the round's own task; where it has several, means over them, and the first one's inner variable.
        step: what became of it.
        inner_loss: g_t(λ_t, β_{t+1}) on the round's own task ``[lanes]``.
        scores: what else the problem reports of λ_t on the round's own task, such as accuracy ``[lanes]``.
        calls: oracle calls of the whole round, past tasks included.
        warms: where the next round starts, for each of this process's tasks.
    """

    estimate: Estimate
    step: StepRecord
    inner_loss: Tensor
    scores: dict[str, Tensor]
    calls: dict[str, int]
    warms: list[Warm]


def play(
    problem: Problem,
    algorithm: Algorithm,
    step: OuterStep,
    task: Task | Sequence[Task],
    warm: Warm | Sequence[Warm],
    key: Key,
) -> Round:
    """One round: λ_t meets its task, is judged on it, learns from it. The next round starts from ``warms``.

    A round may have several tasks, each with its own warm start: d_t is then the mean of their hypergradients.
    """
    tasks = [task] if isinstance(task, dict) else list(task)
    met = list(zip(tasks, [warm] * len(tasks) if isinstance(warm, Warm) else warm, strict=True))
    share, outer = step.share, step.outer.detach()
    recalled = step.memory.recall(met)
    solved = [
        solve(problem, algorithm, share, outer, past, key._replace(task=len(recalled) - 1 - i))
        for i, past in enumerate(recalled)
    ]
    if algorithm.hypergradient.contracts:
        _warn_if_diverging(torch.cat([one.estimate.residual for past in solved for one in past]))
    whole = _Whole(share, len(outer), share.tasks or len(met))
    newest = solved[-1]
    # d_t = (1/n) Σ_j d_{t,j}
    hypergradients = torch.stack([whole.mean([one.estimate.hypergradient for one in past]) for past in solved])
    exact = None if newest[0].exact is None else whole.mean([one.exact for one in newest if one.exact is not None])
    reported = {
        "loss": whole.mean([one.estimate.loss for one in newest]),
        "residual": whole.mean([one.estimate.residual for one in newest]),
        "inner_loss": whole.mean([one.inner_loss for one in newest]),
        **{f"scores.{name}": whole.mean([one.scores[name] for one in newest]) for name in newest[0].scores},
    }
    calls = {
        name: sum(one.estimate.calls[name] for past in solved for one in past) for name in ("gradients", "products")
    }
    reported, calls = whole.reduced(reported, calls)
    record = step(hypergradients, exact)
    ended = [[share.spread_warm(one.estimate.warm, len(outer)) for one in past] for past in solved]
    step.memory.keep([[(t, w) for (t, _), w in zip(*pair, strict=True)] for pair in zip(recalled, ended, strict=True)])
    estimate_of_all = newest[0].estimate._replace(
        hypergradient=hypergradients[-1], loss=reported["loss"], residual=reported["residual"], warm=ended[-1][0]
    )
    scores = {name.partition(".")[2]: value for name, value in reported.items() if name.startswith("scores.")}
    return Round(estimate_of_all, record, reported["inner_loss"], scores, calls, ended[-1])


class _Whole(NamedTuple):
    """From what this process has to what the round is."""

    share: Share
    lanes: int
    tasks: int

    def mean(self, values: Sequence[Tensor]) -> Tensor:
        """This process's part of the mean over the round's tasks, in all lanes."""
        total = values[0] if len(values) == 1 else torch.stack(list(values)).sum(0)
        return self.share.spread(total if self.tasks == 1 else total / self.tasks, self.lanes)

    def reduced(self, values: dict[str, Tensor], calls: dict[str, int]) -> tuple[dict[str, Tensor], dict[str, int]]:
        """What is reported, in one sum over all processes; processes that divide lanes make the same calls."""
        if self.share.total is None:
            return values, calls
        like = next(iter(values.values()))
        part = 1.0 if self.share.lanes is None else (self.share.lanes.stop - self.share.lanes.start) / self.lanes
        rows = [*values.values(), *(torch.full_like(like, part * count) for count in calls.values())]
        found = self.share.sum(torch.stack(rows))
        counts = found[len(values) :, 0].round().int().tolist()
        return dict(zip(values, found, strict=False)), dict(zip(calls, counts, strict=True))


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
    require_fit(problem, algorithm)
    instance_of("outer", outer, Tensor)
    if not outer.is_floating_point():
        raise ValueError(f"outer must be a floating-point tensor [lanes, d], got {outer.dtype}")
    parameter = outer if isinstance(outer, Parameter) else Parameter(outer.detach().clone())
    step = OuterStep(parameter, algorithm, regret_window, on_nonfinite)
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
            "the fixed point of the hypergradient does not contract (its residual grows): "
            "use a smaller inner.lr, a stronger inner curvature, or ConjugateGradient",
            RuntimeWarning,
            stacklevel=3,
        )
