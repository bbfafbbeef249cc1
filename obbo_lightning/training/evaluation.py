"""Evaluation of λ on tasks that it does not learn from."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.memory import InnerState
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import Key
from obbo_lightning.core.statistics import mean_and_error


def evaluate(
    problem: Problem, algorithm: Algorithm, outer: Tensor, task: Task, start: InnerState, seed: int = 0
) -> dict[str, Tensor]:
    """Return loss and scores of one task ``[lanes]``; pure.

    λ is evaluated, not the inner solver: where the problem has β̂(λ), that is used; a solver that samples solves the
    whole task.

    Args:
        problem: brings f and g.
        algorithm: brings the inner solver.
        outer: λ.
        task: to adapt to, and to be evaluated on.
        start: inner state that warm-started solvers start from.
        seed: of the noise of an inner solver, where it has some.
    """
    with torch.inference_mode(False):  # Lightning's loops use inference mode, which has no gradients to adapt by
        task = {name: values.clone() if values.is_inference() else values for name, values in task.items()}
        start = start.to(outer.device)
        oracle = Oracle(problem, outer, task, Key(seed, -1), start.solver_state)
        inner = problem.solution(outer, task)
        if inner is None:
            solver = algorithm.inner.without_sampling
            inner = solver(oracle, solver.warm_start(oracle, start.inner))
        scores = {"loss": oracle.outer_loss(inner), **problem.scores(outer, inner, task)}
        return {**scores, **problem.evaluation_scores(outer, inner, task)}


class Scores(list[float]):
    """The metric of each evaluated task (and lane).

    Attributes:
        others: other scores of the same tasks, by name.
    """

    def __init__(self, values: Iterable[float] = (), others: Mapping[str, list[float]] | None = None) -> None:
        super().__init__(values)
        self.others = dict(others or {})

    def center(self, tasks: int) -> tuple[float | None, float | None]:
        """Return mean and standard error over tasks, or the median where there are several lanes.

        >>> Scores([1.0, 2.0, 6.0]).center(tasks=3), Scores([1.0, 2.0, 6.0, 1.0, 9.0, 3.0]).center(tasks=3)
        ((3.0, 1.5275252316519468), (2.5, None))
        """
        if not self:
            return None, None
        return (statistics.median(self), None) if len(self) > tasks else mean_and_error(self)


def evaluate_tasks(
    trainer: L.Trainer,
    module: Any,
    metric: str,
    tasks: Sequence[Task],
    outer: Tensor | None = None,
    start: InnerState | None = None,
) -> Scores:
    """Evaluate λ on tasks, divided among the ranks; every rank gets all scores.

    Args:
        trainer: knows device and precision of the tasks.
        module: an `OnlineBilevelModule` in training.
        metric: name of the score; further ones are those of `Problem.evaluation_scores`.
        tasks: all of them.
        outer: λ; the module's where this is None.
        start: inner state that warm-started solvers start from; the module's where this is None.
    """
    names = [metric, *module.problem.evaluation_score_names]
    processes = module.processes
    outer = module.outer.detach() if outer is None else outer.to(module.outer)
    start = module.evaluation_start() if start is None else start
    scores = outer.new_zeros(len(names), len(tasks), len(outer))
    for i in range(processes.rank, len(tasks), processes.size):
        task = module.transfer_batch_to_device(tasks[i], module.device, 0)
        task = trainer.precision_plugin.convert_input(task)
        result = evaluate(module.problem, module.algorithm, outer, task, start, module.seed)
        for k, name in enumerate(names):
            scores[k, i] = result[name]
    values, *others = processes.shard.sum([scores])[0].flatten(1).tolist()
    return Scores(values, dict(zip(names[1:], others, strict=True)))


def gather_scores(scores: Sequence[dict[str, Tensor]], ranks: int) -> list[dict[str, float]]:
    """Return the scores of every task of all ranks, in the order of the tasks, as means over lanes."""
    own = [{name: float(values.mean()) for name, values in one.items()} for one in scores]
    if ranks == 1:
        return own
    gathered: list[list[dict[str, float]]] = [[] for _ in range(ranks)]
    torch.distributed.all_gather_object(gathered, own)
    # Rank r evaluates the tasks i with i mod ranks = r.
    return [part[i] for i in range(max(map(len, gathered))) for part in gathered if i < len(part)]
