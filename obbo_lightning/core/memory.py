"""What an algorithm carries from round to round: inner states, and past hypergradients or tasks."""

import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from obbo_lightning.core.problem import Task
from obbo_lightning.core.validation import at_least, fraction


@dataclass
class InnerState:
    """Inner state of a task, from which its next solve starts: β_t, linear solution, state of the inner solver.

    Attributes:
        inner: β_t ``[lanes, p]``; None where rounds do not start from the previous inner variable.
        linear_solution: solution of the linear system ``[lanes, p]``, for a warm-started estimator.
        solver_state: state of an inner solver, such as a momentum ``[lanes, …]``.

    >>> InnerState(torch.tensor([[1.0], [2.0]])).lanes(slice(1, 2)).inner
    tensor([[2.]])
    """

    inner: Tensor | None = None
    linear_solution: Tensor | None = None
    solver_state: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> "InnerState":
        """Return the state with ``function`` applied to every tensor."""
        return InnerState(**{name: None if v is None else function(v) for name, v in vars(self).items()})

    def lanes(self, lanes: slice) -> "InnerState":
        """Return some of the lanes."""
        return self.map(lambda value: value[lanes])

    def to(self, device: torch.device) -> "InnerState":
        """Return the state on another device."""
        return self.map(lambda value: value.to(device))

    @classmethod
    def join(cls, states: Sequence["InnerState"]) -> "InnerState":
        """Concatenate the lanes of several states; None where one of them has none."""
        joined = {}
        for name in vars(cls()):
            values = [getattr(state, name) for state in states]
            joined[name] = None if any(value is None for value in values) else torch.cat(values)
        return cls(**joined)

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain tensors."""
        return dict(vars(self))


class TaskEntry(NamedTuple):
    """A task to solve, and where its solvers start."""

    task: Task
    state: InnerState


# Turns the entries of past rounds as one process holds them into those of all processes, or back.
Exchange = Callable[[list[list[TaskEntry]]], list[list[TaskEntry]]]


class Memory:
    """Rule for what is solved in a round, and for q_t from the hypergradients; this one keeps nothing: q_t = d_t.

    >>> Memory().merge(torch.tensor([[[1.0]], [[3.0]]]))
    tensor([[3.]])
    """

    @property
    def fill(self) -> int:
        """Number of rounds that are remembered now."""
        return 0

    def recall(self, entries: list[TaskEntry]) -> list[list[TaskEntry]]:
        """Return what to solve at λ_t: tasks of this round and of past ones, newest round last; changes nothing."""
        return [entries]

    def merge(self, hypergradients: Tensor) -> Tensor:
        """Return q_t from the hypergradients ``[rounds, lanes, d]`` of what was recalled, newest last."""
        return hypergradients[-1]

    def keep(self, solved: list[list[TaskEntry]]) -> None:
        """Remember the recalled tasks with the states in which their solvers ended.

        Called after the outer step, so a round that raises does not change what is recalled next.
        """

    def exchange(self, exchange: Exchange) -> None:
        """Turn the remembered tasks of this process into those of all (before saving), or back (after loading)."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain tensors and numbers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""


class HypergradientWindow(Memory):
    """q_t = Σ_{i<w} ν^i d_{t−i} / Σ_{i<w} ν^i with d_s = 0 for s ≤ 0        (eq. time_smooth_hypergradient).

    The divisor is that of a full window from the first round on. A round costs two vector additions whatever w is, and
    nothing is ever subtracted, so no error outlives its window. Rounds are counted in cycles of w: ``newer`` sums the
    present cycle, and when a cycle is complete its slots are overwritten by their suffix sums in place (w additions
    once in w rounds), so the suffix that is still inside the window is always available.

    Args:
        window: w.
        discount: ν; 1 is the plain mean.

    >>> window = HypergradientWindow(2)
    >>> window.push(torch.tensor([[4.0]])), window.push(torch.tensor([[6.0]])), window.push(torch.tensor([[0.0]]))
    (tensor([[2.]]), tensor([[5.]]), tensor([[3.]]))
    """

    def __init__(self, window: int, discount: float = 1.0) -> None:
        self.window = at_least("window", window, 1)
        self.discount = fraction("discount", discount)
        self._weight = float(window if discount == 1 else sum(discount**i for i in range(window)))
        self.rounds = 0
        self._slots: Tensor | None = None  # [w, lanes, d]
        self._newer: Tensor | None = None  # [lanes, d]

    @property
    def fill(self) -> int:
        return min(self.rounds, self.window)

    @property
    def newest(self) -> Tensor | None:
        """The last d_t ``[lanes, d]``; no suffix sum overwrites the newest slot."""
        return None if self._slots is None else self._slots[(self.rounds - 1) % self.window]

    def merge(self, hypergradients: Tensor) -> Tensor:
        return self.push(hypergradients[-1])

    def push(self, hypergradient: Tensor) -> Tensor:
        """Add d_t and return q_t."""
        slots, newer = self._slots, self._newer
        if slots is None or newer is None:
            slots = hypergradient.new_zeros((self.window, *hypergradient.shape))
            newer = torch.zeros_like(hypergradient)
        shape, wanted = tuple(hypergradient.shape), tuple(newer.shape)
        if shape != wanted:
            raise ValueError(f"hypergradient must keep the shape {wanted}, got {shape}")
        slots, newer = slots.to(hypergradient.device), newer.to(hypergradient.device)
        k = self.rounds % self.window  # position in the cycle
        slots[k] = hypergradient
        # newer = Σ_{i≤k} ν^i d_{t−i}
        newer = hypergradient.clone() if k == 0 else self.discount * newer + hypergradient
        total = newer
        if k + 1 < self.window:
            # slot k+1 holds the sum over the last cycle's rounds inside the window, to be discounted by k+1 rounds
            total = newer + self.discount ** (k + 1) * slots[k + 1]
        else:
            for j in range(self.window - 2, -1, -1):
                slots[j].mul_(self.discount ** (self.window - 1 - j)).add_(slots[j + 1])
        self._slots, self._newer = slots, newer
        self.rounds += 1
        return total / self._weight

    def join(self, other: "HypergradientWindow") -> None:
        """Append the lanes of another window."""
        own, others = (self.window, self.discount, self.rounds), (other.window, other.discount, other.rounds)
        if own != others:
            rule = "agree in length, discount and rounds to be joined"
            raise ValueError(f"windows must {rule}, got {own} and {others}")
        if self._slots is not None and other._slots is not None:
            self._slots = torch.cat([self._slots, other._slots], dim=1)
        if self._newer is not None and other._newer is not None:
            self._newer = torch.cat([self._newer, other._newer])

    def state_dict(self) -> dict[str, Any]:
        settings = {"window": self.window, "discount": self.discount, "rounds": self.rounds}
        return settings | copy.deepcopy({"slots": self._slots, "newer": self._newer})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _require_same(state, window=self.window, discount=self.discount)
        self.rounds = state["rounds"]
        self._slots, self._newer = copy.deepcopy((state["slots"], state["newer"]))


class TaskWindow(Memory):
    """q_t = (1/w) Σ_{i<w} ∇f_{t−i}(λ_t): the last w tasks, all solved again at the current λ in every round (OAGD).

    Each task keeps its own inner state; a new task starts where the newest one of the previous round ended.

    Args:
        window: w.

    >>> memory = TaskWindow(2)
    >>> for number in range(3):
    ...     recalled = memory.recall([TaskEntry({"x": torch.tensor(number)}, InnerState())])
    ...     memory.keep(recalled)
    >>> [int(entry.task["x"]) for entries in recalled for entry in entries]
    [1, 2]
    """

    def __init__(self, window: int) -> None:
        self.window = at_least("window", window, 1)
        self._past: deque[list[TaskEntry]] = deque(maxlen=window)

    @property
    def fill(self) -> int:
        return len(self._past)

    def recall(self, entries: list[TaskEntry]) -> list[list[TaskEntry]]:
        return [*self._past, entries][-self.window :]

    def merge(self, hypergradients: Tensor) -> Tensor:
        return hypergradients.sum(0) / self.window

    def keep(self, solved: list[list[TaskEntry]]) -> None:
        # A caller may fill one dict with the tensors of the next task.
        self._past = deque(([TaskEntry(dict(task), state) for task, state in past] for past in solved), self.window)

    def exchange(self, exchange: Exchange) -> None:
        self._past = deque(exchange(list(self._past)), maxlen=self.window)

    def state_dict(self) -> dict[str, Any]:
        past = [
            [{"task": dict(one.task), "state": one.state.state_dict()} for one in entries] for entries in self._past
        ]
        return {"window": self.window, "past": past}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _require_same(state, window=self.window)
        if "past" not in state:
            raise ValueError(f"state must be that of a TaskWindow, got one with {sorted(state)}")
        past = ([TaskEntry(one["task"], InnerState(**one["state"])) for one in entries] for entries in state["past"])
        self._past = deque(past, maxlen=self.window)


def _require_same(state: dict[str, Any], **settings: Any) -> None:
    for name, value in settings.items():
        if state.get(name) != value:
            raise ValueError(f"{name} must be {state.get(name)!r} to continue from this state, got {value!r}")
