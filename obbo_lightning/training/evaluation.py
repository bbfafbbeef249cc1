"""Judging λ on tasks that nothing is learned from."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.memory import Warm
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import Key
from obbo_lightning.training.ranks import Ranks


def evaluate(
    problem: Problem, algorithm: Algorithm, outer: Tensor, task: Task, start: Warm, seed: int = 0
) -> dict[str, Tensor]:
    """Loss and scores of one task, per lane; pure.

    It is λ that is judged: where the problem knows β̂(λ), that is used and not what an inner solver makes of it; and a
    solver that learns from samples of a task is judged on what it makes of all of it.

    Args:
        problem: what f and g are.
        algorithm: brings the inner solver.
        outer: λ.
        task: to adapt to, and to be judged on.
        start: the inner variable that solvers with ``start: previous`` go on from.
        seed: of the noise of an inner solver, where it has some.
    """
    with torch.inference_mode(False):  # which Lightning's loops are in, and in which there are no gradients to adapt by
        task = {name: values.clone() if values.is_inference() else values for name, values in task.items()}
        start = start.to(outer.device)
        oracle = Oracle(problem, outer, task, Key(seed, -1), start.solver)
        inner = problem.solution(outer, task)
        if inner is None:
            first = start.inner
            if first is None and algorithm.inner.carries:
                first = problem.initial_inner(outer, task)
            inner = algorithm.inner.whole(oracle, first)
        scores = {"loss": oracle.outer_loss(inner), **problem.scores(outer, inner, task)}
        return {**scores, **problem.further_scores(outer, inner, task)}


class Scores(list[float]):
    """The metric of each test task (and lane).

    Attributes:
        further: other scores of the same, by their names.
    """

    def __init__(self, values: Iterable[float] = (), further: Mapping[str, list[float]] | None = None) -> None:
        super().__init__(values)
        self.further = dict(further or {})


def evaluate_all(
    judge: Callable[[Task], dict[str, Tensor]], tasks: Sequence[Task], names: Sequence[str], outer: Tensor, ranks: Ranks
) -> Scores:
    """Each rank judges some of the tasks, and all know the scores.

    Args:
        judge: `evaluate` for one task.
        tasks: all of them.
        names: of the scores; the first is the metric.
        outer: λ, which says how many lanes there are, of what kind of numbers.
        ranks: who else judges.
    """
    scores = outer.new_zeros(len(names), len(tasks), len(outer))
    for i in range(ranks.rank, len(tasks), ranks.size):
        found = judge(tasks[i])
        for k, name in enumerate(names):
            scores[k, i] = found[name]
    metric, *others = ranks.share.sum([scores])[0].flatten(1).tolist()
    return Scores(metric, dict(zip(names[1:], others, strict=True)))


def gathered(scores: Sequence[dict[str, Tensor]], ranks: int) -> list[dict[str, float]]:
    """Of every task, whichever rank judged it, in the order of the tasks: means over lanes."""
    own = [{name: float(values.mean()) for name, values in one.items()} for one in scores]
    if ranks == 1:
        return own
    found: list[list[dict[str, float]]] = [[] for _ in range(ranks)]
    torch.distributed.all_gather_object(found, own)
    # Task i is of rank i mod ranks.
    return [part[i] for i in range(max(map(len, found))) for part in found if i < len(part)]
