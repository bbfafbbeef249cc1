"""What f_t and g_t are. Two losses make a problem; everything else is optional."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from obbo_lightning.core.blocks import Blocks
from obbo_lightning.core.randomness import Sample
from obbo_lightning.core.recipes import Part

Task = dict[str, Tensor]


class Problem(Part, ABC):
    """An online bilevel problem: F_t(λ) = f_t(λ, β̂_t(λ)), β̂_t(λ) = argmin_β g_t(λ, β).

    Shapes: outer ``[lanes, d]``, inner ``[lanes, p]``, losses ``[lanes]``. A lane is one independent problem: the loss
    of a lane depends on that lane's row only. ``task`` is the data of round t; ``sample`` is None for the whole of it,
    or a `Sample` to estimate the loss from (without bias), which SOBBO asks for.

    The optional methods return None where a problem does not know better; algorithms then differentiate.

    >>> class Ridge(Problem):
    ...     def inner_loss(self, outer, inner, task, sample=None):
    ...         return 0.5 * (inner - task["train"]).square().sum(-1) + 0.5 * outer[:, 0] * inner.square().sum(-1)
    ...     def outer_loss(self, outer, inner, task, sample=None):
    ...         return 0.5 * (inner - task["validation"]).square().sum(-1)
    """

    names: ClassVar[tuple[str, ...]] = ()  # of the coordinates of λ, where they have some: an export uses them

    @abstractmethod
    def inner_loss(self, outer: Tensor, inner: Tensor, task: Task, sample: Sample | None = None) -> Tensor:
        """g_t(λ, β), one number a lane."""

    @abstractmethod
    def outer_loss(self, outer: Tensor, inner: Tensor, task: Task, sample: Sample | None = None) -> Tensor:
        """f_t(λ, β), one number a lane."""

    def knows(self, method: str) -> bool:
        """Whether this problem has an optional method of its own."""
        return getattr(type(self), method) is not getattr(Problem, method)

    def laid_out(self, task: Task) -> Task:
        """The same task, laid out in memory so that first derivatives are fastest; second ones use it as it came."""
        return task

    def of_lanes(self, task: Task, lanes: slice) -> "tuple[Problem, Task] | None":
        """This problem and a task of it with ``lanes`` alone, for processes that share the lanes of a round."""
        return None

    def as_lanes(self, tasks: Sequence[Task]) -> Task | None:
        """Tasks of one lane as one task with a lane for each, so that they are solved together."""
        return None

    @property
    def random(self) -> bool:
        """Whether the losses draw random numbers of their own (dropout); they then do so from the `Sample` alone.

        A loss without a sample is deterministic for every problem: such a problem leaves its noise out there.
        """
        return False

    @property
    def blocks(self) -> Blocks | None:
        """The named blocks of λ, each with its own geometry, regularizer, domain and step.

        A class that has them overrides this, with a property or with an attribute of the class; its losses get at
        their hyperparameters by ``self.blocks.split(outer)``.
        """
        return None

    def initial_outer(self, seed: int) -> Tensor | None:
        """λ_1 ``[lanes, d]``, for a problem that knows a good one: its blocks' start, a network's initialisation."""
        return None if self.blocks is None else self.blocks.start(seed)

    def initial_inner(self, outer: Tensor, task: Task) -> Tensor | None:
        """β_1, for methods that start each round from the last one's inner variable."""
        return None

    def inner_from_outer(self, outer: Tensor) -> Tensor:
        """ω⁰ for methods that start each round from λ_t; λ_t itself, unless λ holds more than an inner variable."""
        return outer

    def notes(self) -> dict[str, str | int]:
        """What a reader of a run's summary should know of this problem, in a few words each."""
        return {}

    def scores(self, outer: Tensor, inner: Tensor, task: Task) -> dict[str, Tensor]:
        """What else to report of a task at (λ, β), such as accuracy, one number a lane each."""
        return {}

    @property
    def further(self) -> tuple[str, ...]:
        """The names of `further_scores`."""
        return ()

    def further_scores(self, outer: Tensor, inner: Tensor, task: Task) -> dict[str, Tensor]:
        """More `scores`, of tasks alone that nothing is learned from; NaN where one cannot be computed."""
        return {}

    def solution(self, outer: Tensor, task: Task) -> Tensor | None:
        """β̂_t(λ), exactly."""
        return None

    def hypergradient(self, outer: Tensor, task: Task) -> tuple[Tensor, Tensor] | None:
        """∇F_t(λ) and β̂_t(λ), exactly; together, because one factorisation gives both."""
        return None

    def mixed_term(
        self, outer: Tensor, inner: Tensor, task: Task, vector: Tensor, sample: Sample | None = None
    ) -> Tensor | None:
        """∇²_λβ g_t(λ, β) · vector ``[lanes, d]`` without automatic differentiation."""
        return None

    def smoothness(self, outer: Tensor, task: Task) -> Tensor | None:
        """ℓ_{g,1}: an upper bound on the largest eigenvalue of ∇²_ββ g_t, one number a lane."""
        return None
