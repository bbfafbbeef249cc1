"""Division of a round among processes, and how their results become one round."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from obbo_lightning.core.memory import TaskEntry
from obbo_lightning.core.problem import Problem


@dataclass(frozen=True)
class Shard:
    """The tasks or the lanes of a round that one process computes; by default all of them.

    Results are sums over all processes. A process that has some of n tasks adds their sum divided by n; a process that
    has some lanes adds these lanes, and zeros in the others.
    With ``vmap`` the tasks are solved as lanes of one problem (`torch.func.vmap`) where the problem can.
    """

    first: int = 0  # index of this process's first task within the round
    tasks: int | None = None  # number of tasks of the round over all processes; None: those that this process is given
    lanes: slice | None = None  # lanes that this process computes; None: all of them
    all_reduce: Callable[[Tensor], Tensor] | None = None  # sum over all processes; None: there is only one
    vmap: bool = False

    def select(self, problem: Problem, outer: Tensor, entry: TaskEntry) -> tuple[Problem, Tensor, TaskEntry]:
        """Return the lanes of this process."""
        if self.lanes is None:
            return problem, outer, entry
        selected = problem.select_lanes(entry.task, self.lanes)
        if selected is None:
            raise ValueError(f"{type(problem).__name__} cannot be divided by lanes: it has no select_lanes")
        return selected[0], outer[self.lanes], TaskEntry(selected[1], entry.state.lanes(self.lanes))

    def mean(self, values: Sequence[Tensor], lanes: int) -> Tensor:
        """Return this process's contribution to the mean over the round's tasks, in all ``lanes``."""
        tasks = self.tasks or len(values)
        total = values[0] if len(values) == 1 else torch.stack(list(values)).sum(0)
        return self.scatter(total if tasks == 1 else total / tasks, lanes)

    def scatter(self, values: Tensor, lanes: int) -> Tensor:
        """Place the lanes of this process among all ``lanes``, zero elsewhere."""
        if self.lanes is None:
            return values
        whole = values.new_zeros((lanes, *values.shape[1:]))
        whole[self.lanes] = values
        return whole

    def sum(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Sum each tensor over all processes, in one message."""
        if self.all_reduce is None:
            return list(values)
        flat = self.all_reduce(torch.cat([value.flatten() for value in values]))
        pieces = flat.split([value.numel() for value in values])
        return [piece.view_as(value).to(value.dtype) for piece, value in zip(pieces, values, strict=True)]


def lanes_of_rank(rank: int, ranks: int, lanes: int) -> slice:
    """Return the consecutive lanes of a rank; the numbers of lanes differ by at most one.

    >>> [lanes_of_rank(rank, 3, 10) for rank in range(3)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 10, None)]
    """
    return slice(lanes * rank // ranks, lanes * (rank + 1) // ranks)


def tasks_of_rank(rank: int, ranks: int, tasks_per_round: int) -> range:
    """Return the indices of a round's tasks that a rank solves; all ranks solve a single task and divide its lanes.

    >>> [tasks_of_rank(rank, 2, 4) for rank in range(2)], tasks_of_rank(1, 2, 1)
    ([range(0, 2), range(2, 4)], range(0, 1))
    """
    each = max(1, tasks_per_round // ranks)
    return range(rank * each, (rank + 1) * each) if tasks_per_round > 1 else range(1)
