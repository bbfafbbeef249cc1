"""What a stream is: where tasks come from, what problem they pose, and how it is scored."""

import inspect
from abc import ABC
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor, nn

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.recipes import Part
from obbo_lightning.streams.fingerprints import fingerprint_of

if TYPE_CHECKING:
    import polars as pl


class Metric(NamedTuple):
    """What a stream is judged by.

    Attributes:
        name: ``loss``, or one of the problem's `scores`.
        higher_is_better: its direction.
    """

    name: str = "loss"
    higher_is_better: bool = False


class Stream(Part, ABC):
    """Where tasks come from. Ours and yours: `fit`, `compare` and `report` know a stream by what is said here.

    A constructor's arguments are the flags of ``--data``, its docstring is their help. ``seed``, where it takes one,
    is the run's.

    Attributes:
        metric: what test tasks and rounds are scored by, with its direction.
        also: further scores of the problem that metrics.csv has of each round.
        problem_type: what is learned from the tasks, unless ``--problem`` names something else.
        network_type: what network is adapted in a problem that takes one, unless ``--problem.network`` names another.
        decided: which arguments of a problem or a network are not the user's to choose, because the tasks decide them;
            `facts` has their values.
        may_differ: settings of the stream in which runs may differ and still be compared.
        rates_over: the setting that rates are fitted over, besides the length.
        train: one task a round, in order: a sequence (task t is a function of t: random access), or an iterable of
            tasks, which may be endless. Where an iterator has ``state_dict`` and ``load_state_dict`` a resumed run asks
            it to go on; where it has not, the tasks that were played are drawn again and passed over.
        validation: tasks to choose settings on.
        test: tasks to judge a run on.
        lanes: what each lane is called, a row a lane; None where there is one lane or lanes have no names.
        skipped: what was left out when the data were read, with the reason.
    """

    metric: Metric = Metric()
    also: ClassVar[tuple[str, ...]] = ()
    problem_type: ClassVar[type[Problem] | None] = None
    network_type: ClassVar[type[nn.Module] | None] = None
    decided: ClassVar[tuple[str, ...]] = ()
    may_differ: ClassVar[tuple[str, ...]] = ()
    rates_over: ClassVar[str | None] = None

    train: Sequence[Task] | Iterable[Task]
    validation: Sequence[Task] = ()
    test: Sequence[Task] = ()
    lanes: "pl.DataFrame | None" = None
    skipped: Sequence[Any] = ()

    def facts(self) -> dict[str, Any]:
        """What the tasks decide of a problem or a network, by the names of its constructor's arguments."""
        return {}

    def inputs(self) -> dict[str, Any] | None:
        """How what a user has becomes what the tasks hold, in plain values that go with every checkpoint.

        `obbo_lightning.serving.inputs` says what they may be. None: only tensors as the tasks hold them can be served.
        """
        return None

    def problem(self, problem_type: type[Problem] | None = None, **settings: Any) -> Problem:
        """The problem that these tasks pose; a network that is still to be made is told what the tasks decide of it."""
        made = problem_type or self.problem_type
        if made is None:
            raise ValueError(f"problem must be given for {type(self).__name__}, which has none of its own, got none")
        taken = inspect.signature(made).parameters
        if "network" in taken:
            network = settings.get("network") or self.network_type or taken["network"].default
            settings["network"] = self._fitting(network)
        return made(**{name: value for name, value in self.facts().items() if name in taken} | settings)

    def start(self, problem: Problem, seed: int) -> Tensor:
        """λ_1 ``[lanes, d]``; the problem's own, where it has one."""
        outer = problem.initial_outer(seed)
        if outer is None:
            raise ValueError(f"{type(self).__name__} must say where λ starts, got none: it needs a method start")
        return outer

    def fingerprint(self, t: int, task: Task) -> str:
        """What tells task t of ``train`` from any other that could have been played; kept with the run.

        A run goes on with data that have grown where every task that was played has the fingerprint that it had.
        """
        return fingerprint_of(task)

    def place(self, t: int) -> str:
        """What task t of ``train`` is called when it is another one than was played."""
        return f"task {t + 1}"

    def baselines(self, problem: Problem, algorithm: Algorithm, rounds: int) -> dict[str, list[float]]:
        """What a learned λ must beat: the metric of each round, by a name in words; nothing where there is none."""
        return {}

    def origins(self) -> dict[str, str]:
        """Digests of what tasks are made from, by name (classes, events): which of them changed is said by them.

        Nothing for a stream that is made from its settings alone.
        """
        return {}

    def _fitting(self, network: Any) -> Any:
        """A network, or its class with those of the facts that it takes and that were not given to it."""
        if isinstance(network, nn.Module) or not callable(network):
            return network
        given = network.keywords if isinstance(network, partial) else {}
        taken = inspect.signature(network).parameters
        facts = {name: value for name, value in self.facts().items() if name in taken and name not in given}
        for name, value in facts.items():
            if value is None:
                called = getattr(getattr(network, "func", network), "__name__", network)
                raise ValueError(f"problem.network must do without {name}, which these tasks have not, got {called}")
        return partial(network, **facts)
