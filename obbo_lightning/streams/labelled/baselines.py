"""What a learned λ must beat: the same inner solver with a λ that is not learned."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.memory import InnerState
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import Key
from obbo_lightning.problems.module import ModuleProblem
from obbo_lightning.streams.tasks import Tasks


def fixed_outer(
    problem: Problem,
    algorithm: Algorithm,
    tasks: Sequence[Task],
    outer: Callable[[int], Tensor],
    metric: str = "accuracy",
    seed: int = 0,
) -> list[Tensor]:
    """The metric of each round ``[lanes]`` where λ_t is a function of the round ``[lanes, d]``; no hypergradients."""
    warm, found = InnerState(), []
    for t, task in enumerate(tasks):
        at = outer(t)
        oracle = Oracle(problem, at, task, Key(seed, t), warm.solver_state)
        inner = algorithm.inner(oracle, algorithm.inner.warm_start(oracle, warm.inner))
        warm = InnerState(inner if algorithm.inner.warm_starts else None, None, oracle.solver_state)
        found.append(oracle.outer_loss(inner) if metric == "loss" else problem.scores(at, inner, task)[metric])
    return found


def on_validation_alone(
    problem: Problem, algorithm: Algorithm, tasks: Sequence[Task], metric: str = "accuracy"
) -> list[float]:
    """The same for a model that is trained on the validation examples and on nothing else."""
    if not isinstance(problem, ModuleProblem):
        raise ValueError(f"problem must be one of a module to be trained on its validation loss, got {problem!r}")
    plain = ModuleProblem(
        problem.network.template,
        problem.hyper,
        problem.validation_loss,
        problem.validation_loss,
        problem.score_function,
    )
    start = problem.hyper.start()

    def turned(t: int) -> Task:
        kept = {name: values for name, values in tasks[t].items() if not name.startswith("train_")}
        return kept | _as_training(tasks[t])

    return [
        float(value)
        for value in torch.cat(fixed_outer(plain, algorithm, Tasks(turned, len(tasks)), lambda t: start, metric))
    ]


def with_validation(tasks: Sequence[Task]) -> Sequence[Task]:
    """The same tasks with the validation examples among those to train on."""

    def joined(t: int) -> Task:
        task = tasks[t]
        return task | {name: torch.cat([task[name], more]) for name, more in _as_training(task).items()}

    return Tasks(joined, len(tasks))


def _as_training(task: Task) -> Task:
    """The validation batch as a training batch, alone."""
    return {n.replace("validation_", "train_", 1): v for n, v in task.items() if n.startswith("validation_")}
