"""What one process computes of a round, where several share it; and how the parts become the round."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from obbo_lightning.core.memory import Warm
from obbo_lightning.core.problem import Problem, Task


@dataclass(frozen=True)
class Share:
    """Some of a round's tasks, or some of its lanes; by default everything.

    Every process adds its part to a sum over all of them: of a mean over tasks, or of lanes that are zero elsewhere.

    Attributes:
        first: which of the round's tasks is the first one of this process.
        tasks: how many tasks the round has in all processes together; None: those that this process is given.
        lanes: which lanes this process computes; None: all of them.
        total: the sum of a tensor over all processes; None: there is only one.
        side_by_side: solve the tasks as lanes of one problem (`torch.func.vmap`) where the problem can, not in a loop.
    """

    first: int = 0
    tasks: int | None = None
    lanes: slice | None = None
    total: Callable[[Tensor], Tensor] | None = None
    side_by_side: bool = False

    def view(self, problem: Problem, outer: Tensor, task: Task, warm: Warm) -> tuple[Problem, Tensor, Task, Warm]:
        """The lanes of this process."""
        if self.lanes is None:
            return problem, outer, task, warm
        part = problem.of_lanes(task, self.lanes)
        if part is None:
            raise ValueError(f"{type(problem).__name__} cannot be divided by lanes: it has no of_lanes")
        return part[0], outer[self.lanes], part[1], warm.lanes(self.lanes)

    def mean(self, values: Sequence[Tensor], lanes: int) -> Tensor:
        """This process's part of the mean over the round's tasks, in all ``lanes``."""
        tasks = self.tasks or len(values)
        total = values[0] if len(values) == 1 else torch.stack(list(values)).sum(0)
        return self.spread(total if tasks == 1 else total / tasks, lanes)

    def spread(self, values: Tensor, lanes: int) -> Tensor:
        """The lanes of this process among all, zero elsewhere."""
        if self.lanes is None:
            return values
        whole = values.new_zeros((lanes, *values.shape[1:]))
        whole[self.lanes] = values
        return whole

    def spread_warm(self, warm: Warm, lanes: int) -> Warm:
        """The same for a warm start."""
        return warm.map(lambda value: self.spread(value, lanes))

    def sum(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Each of the tensors summed over all processes, in one message."""
        if self.total is None:
            return list(values)
        flat = self.total(torch.cat([value.flatten() for value in values]))
        pieces = flat.split([value.numel() for value in values])
        return [piece.view_as(value).to(value.dtype) for piece, value in zip(pieces, values, strict=True)]


def lanes_of(rank: int, ranks: int, lanes: int) -> slice:
    """Neighbouring lanes, as many for each rank as for any other, give or take one.

    >>> [lanes_of(rank, 3, 10) for rank in range(3)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 10, None)]
    """
    return slice(lanes * rank // ranks, lanes * (rank + 1) // ranks)


def stack_warm(warms: list[Warm]) -> Warm:
    """Warm starts of several tasks as lanes of one problem."""
    return Warm(**{name: _stack([getattr(warm, name) for warm in warms]) for name in warms[0].state_dict()})


def _stack(values: list[Tensor | None]) -> Tensor | None:
    known = [value for value in values if value is not None]
    return torch.cat(known) if len(known) == len(values) else None
