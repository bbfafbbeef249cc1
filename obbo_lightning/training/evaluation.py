"""Evaluation of the outer variable λ on tasks that it does not learn from."""

import statistics
from collections.abc import Sequence
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
    """Return loss and scores of one task ``[lanes]``, adapted to from λ; pure.

    λ is evaluated, not the inner solver: where the problem has β̂(λ), that is used; a solver that samples solves the
    whole task. Warm-started solvers start from ``start``; ``seed`` is that of an inner solver's noise.
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


def evaluate_tasks(
    trainer: L.Trainer,
    module: Any,
    metric: str,
    tasks: Sequence[Task],
    outer: Tensor | None = None,
    start: InnerState | None = None,
) -> dict[str, list[float]]:
    """Return metric and `Problem.evaluation_scores` of every task and lane; every rank evaluates some of the tasks.

    λ and the inner state that warm-started solvers start from are those of the module unless they are given.
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
    return dict(zip(names, processes.shard.sum([scores])[0].flatten(1).tolist(), strict=True))


def center(scores: Sequence[float], tasks: int) -> tuple[float | None, float | None]:
    """Return mean and standard error of the scores of tasks, or the median where there are several lanes.

    >>> center([1.0, 2.0, 6.0], tasks=3), center([1.0, 2.0, 6.0, 1.0, 9.0, 3.0], tasks=3)
    ((3.0, 1.5275252316519468), (2.5, None))
    """
    if not scores:
        return None, None
    return (statistics.median(scores), None) if len(scores) > tasks else mean_and_error(scores)
