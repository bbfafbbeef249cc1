"""Tasks by round."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, overload

from obbo_lightning.core.problem import Task
from obbo_lightning.core.validation import at_least


def has_random_access(tasks: Any) -> "TypeGuard[Sequence[Task]]":
    """Whether task t can be asked for by its number; otherwise tasks come one after the other."""
    return hasattr(tasks, "__len__") and hasattr(tasks, "__getitem__")


class TaskSequence(Sequence[Task]):
    """A stream of ``length`` tasks, each a pure function of its round: random access, no hidden state."""

    length: int

    @abstractmethod
    def task(self, t: int) -> Task:
        """The task of round t, counted from 0."""

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...

    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self.task(t) for t in range(*index.indices(self.length))]
        if not -self.length <= index < self.length:
            raise IndexError(f"round must lie in 0..{self.length - 1}, got {index}")
        return self.task(index % self.length)


class Tasks(TaskSequence):
    """Tasks from a function of the round.

    Args:
        make: the task of round t, counted from 0; the same t must give the same task.
        length: how many.

    >>> import torch
    >>> tasks = Tasks(lambda t: {"x": torch.full((1, 2), float(t))}, length=1000)
    >>> tasks[7]["x"]
    tensor([[7., 7.]])
    """

    def __init__(self, make: Callable[[int], Task], length: int) -> None:
        self.make = make
        self.length = at_least("length", length, 1)

    def task(self, t: int) -> Task:
        return self.make(t)
