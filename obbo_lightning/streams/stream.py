"""Base class of streams: where tasks come from, what problem they pose, how it is scored; lazy task sequences."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeGuard, overload

from torch import Tensor, nn

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.configurable import Configurable
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.validation import at_least
from obbo_lightning.streams.fingerprints import fingerprint_of

if TYPE_CHECKING:
    import polars as pl


class Metric(NamedTuple):
    """Score that a stream is evaluated by: ``loss``, or one of the problem's `scores`, and its direction."""

    name: str = "loss"
    higher_is_better: bool = False


class Stream(Configurable, ABC):
    """Source of tasks; `fit`, `compare` and `report` use nothing of a stream but this interface.

    The constructor's arguments are the flags of ``--data``, its docstring is their help text. ``seed``, where it takes
    one, is the run's.

    Attributes:
        metric: score of test tasks and rounds, with its direction.
        extra_metrics: further scores of the problem that metrics.csv has for each round.
        problem_type: problem that the tasks pose, unless ``--problem`` names another.
        network_type: network of a problem that takes one, unless ``--problem.network`` names another.
        derived_arguments: arguments of a problem or a network that follow from the tasks, so that users do not set
            them; `task_spec` has their values.
        may_differ: settings of the stream in which runs may differ and still be compared.
        rates_over: setting that rates are fitted over, besides the length.
        folds: number of disjoint folds of validation examples that tasks use in turn: task t has those of fold
            t mod ``folds``. 1: every task has new ones.
        train: one task per round, in order: a sequence (task t is a function of t: random access), or an iterable of
            tasks, which may be endless. An iterator with ``state_dict`` and ``load_state_dict`` continues after a
            resume; for any other the tasks of finished rounds are made again and skipped.
        validation: tasks to choose settings on.
        test: tasks to evaluate a run on.
        lanes: names of the lanes, one row per lane; None where there is one lane or lanes have no names.
        skipped: what was left out when the data were read, with the reason.
    """

    metric: Metric = Metric()
    extra_metrics: ClassVar[tuple[str, ...]] = ()
    problem_type: ClassVar[type[Problem] | None] = None
    network_type: ClassVar[type[nn.Module] | None] = None
    derived_arguments: ClassVar[tuple[str, ...]] = ()
    may_differ: ClassVar[tuple[str, ...]] = ()
    rates_over: ClassVar[str | None] = None
    folds: int = 1

    train: Sequence[Task] | Iterable[Task]
    validation: Sequence[Task] = ()
    test: Sequence[Task] = ()
    lanes: "pl.DataFrame | None" = None
    skipped: Sequence[Any] = ()

    def task_spec(self) -> dict[str, Any]:
        """Return arguments of a problem or a network that follow from the tasks, by name (``ways``, ``shape``)."""
        return {}

    def folds_of(self, tasks_per_round: int) -> int:
        """Return the number of folds that rounds use in turn: several tasks of one round have different folds."""
        return self.folds if tasks_per_round == 1 else 1

    def inputs(self) -> dict[str, Any] | None:
        """Return how a user's data become the tensors of a task, in plain values that every checkpoint holds.

        See `obbo_lightning.inference.inputs`. None: predictions take tensors only.
        """
        return None

    def problem(self, problem_type: type[Problem] | None = None, **settings: Any) -> Problem:
        """Return the problem that these tasks pose; a network class gets the arguments that follow from the tasks."""
        made = problem_type or self.problem_type
        if made is None:
            raise ValueError(f"problem must be given for {type(self).__name__}, which has none of its own, got none")
        taken = inspect.signature(made).parameters
        if "network" in taken:
            network = settings.get("network") or self.network_type or taken["network"].default
            is_class = callable(network) and not isinstance(network, nn.Module)
            settings["network"] = self._with_task_spec(network) if is_class else network
        return made(**{name: value for name, value in self.task_spec().items() if name in taken} | settings)

    def start(self, problem: Problem, seed: int) -> Tensor:
        """Return λ_1 ``[lanes, d]``; the problem's own, where it has one."""
        outer = problem.initial_outer(seed)
        if outer is None:
            raise ValueError(f"{type(self).__name__} must define where λ starts, got none: it needs a method start")
        return outer

    def fingerprint(self, t: int, task: Task) -> str:
        """Return a digest that identifies task t of ``train``; the run records it.

        A run continues with grown data only if every task of its finished rounds has the recorded fingerprint.
        """
        return fingerprint_of(task)

    def describe(self, t: int) -> str:
        """Return the name of task t of ``train`` for an error message."""
        return f"task {t + 1}"

    def baselines(self, problem: Problem, algorithm: Algorithm, rounds: int) -> dict[str, list[float]]:
        """Return baselines: the metric of each round, by a name in words; empty where there are none."""
        return {}

    def source_digests(self) -> dict[str, str]:
        """Return digests of the data that tasks are made from, by name (classes, events), to find what has changed.

        Empty for a stream that depends on its settings only.
        """
        return {}

    def _with_task_spec(self, network: Callable[..., nn.Module]) -> "partial[nn.Module]":
        """Return a network class with the arguments that follow from the tasks and were not given."""
        needed = inspect.signature(network).parameters.keys() - getattr(network, "keywords", {}).keys()
        derived = {name: value for name, value in self.task_spec().items() if name in needed}
        for name, value in derived.items():
            if value is None:
                called = getattr(getattr(network, "func", network), "__name__", network)
                raise ValueError(f"problem.network must not need {name}, which these tasks do not have, got {called}")
        return partial(network, **derived)


def has_random_access(tasks: Any) -> "TypeGuard[Sequence[Task]]":
    """Return whether tasks can be indexed; otherwise they can only be iterated over."""
    return hasattr(tasks, "__len__") and hasattr(tasks, "__getitem__")


class TaskSequence(Sequence[Task]):
    """Sequence of ``length`` tasks, each a pure function of its index: random access, no hidden state."""

    length: int

    @abstractmethod
    def task(self, t: int) -> Task:
        """Return task t, counted from 0."""

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
    """Tasks from a function of the index.

    Args:
        make: returns task t, counted from 0; it must return the same task for the same t.
        length: number of tasks.

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
