"""Online bilevel problems: two losses make a problem, everything else is optional."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from obbo_lightning.core.configurable import Configurable
from obbo_lightning.core.parameter_groups import ParameterGroups
from obbo_lightning.core.randomness import Sample

Task = dict[str, Tensor]


class Problem(Configurable, ABC):
    """An online bilevel problem: F_t(λ) = f_t(λ, β̂_t(λ)), β̂_t(λ) = argmin_β g_t(λ, β).

    Shapes: outer ``[lanes, d]``, inner ``[lanes, p]``, losses ``[lanes]``. A lane is one of several independent
    problems solved in one batch: the loss of a lane depends on that lane's row only. ``task`` is the data of round t;
    ``sample`` is None for the whole task, or a `Sample` to estimate the loss from (without bias), as SOBBO needs it.

    Optional methods return None where a problem has nothing better than automatic differentiation.

    >>> class Ridge(Problem):
    ...     def inner_loss(self, outer, inner, task, sample=None):
    ...         return 0.5 * (inner - task["train"]).square().sum(-1) + 0.5 * outer[:, 0] * inner.square().sum(-1)
    ...     def outer_loss(self, outer, inner, task, sample=None):
    ...         return 0.5 * (inner - task["validation"]).square().sum(-1)
    """

    groups: ParameterGroups | None = None
    """Parameter groups of λ, each with its own geometry, regularizer, domain and step size.

    Losses get their hyperparameters by ``self.groups.split(outer)``.
    """

    coordinate_names: tuple[str, ...] = ()
    """Names of the coordinates of λ, for exports of problems without parameter groups."""

    is_stochastic: bool = False
    """Whether the losses draw random numbers (dropout): from the `Sample` only, and none where there is no sample."""

    evaluation_score_names: tuple[str, ...] = ()
    """Names of `evaluation_scores`."""

    @abstractmethod
    def inner_loss(self, outer: Tensor, inner: Tensor, task: Task, sample: Sample | None = None) -> Tensor:
        """Return g_t(λ, β) ``[lanes]``."""

    @abstractmethod
    def outer_loss(self, outer: Tensor, inner: Tensor, task: Task, sample: Sample | None = None) -> Tensor:
        """Return f_t(λ, β) ``[lanes]``."""

    def provides(self, method: str) -> bool:
        """Return whether this problem implements an optional method."""
        return getattr(type(self), method) is not getattr(Problem, method)

    def for_gradients(self, task: Task) -> Task:
        """Return the task in the memory layout in which first derivatives are fastest; second ones use ``task``."""
        return task

    def select_lanes(self, task: Task, lanes: slice) -> "tuple[Problem, Task] | None":
        """Return this problem and a task restricted to ``lanes``, for processes that divide the lanes of a round."""
        return None

    def stack_as_lanes(self, tasks: Sequence[Task]) -> Task | None:
        """Return tasks of one lane as one task with a lane for each, so that they are solved together."""
        return None

    def initial_outer(self, seed: int) -> Tensor | None:
        """Return λ_1 ``[lanes, d]``: the start of the parameter groups, the initialisation of a network."""
        return None if self.groups is None else self.groups.start(seed)

    def initial_inner(self, outer: Tensor, task: Task) -> Tensor | None:
        """Return β_1, for methods that start each round from the previous inner variable."""
        return None

    def inner_from_outer(self, outer: Tensor) -> Tensor:
        """Return ω⁰ for methods that start each round from λ_t: λ_t itself, unless λ holds more than that."""
        return outer

    def notes(self) -> dict[str, str | int]:
        """Return what a reader of a run's summary should know of this problem, in a few words each."""
        return {}

    def scores(self, outer: Tensor, inner: Tensor, task: Task) -> dict[str, Tensor]:
        """Return further numbers to report of a task at (λ, β), such as accuracy, each ``[lanes]``."""
        return {}

    def evaluation_scores(self, outer: Tensor, inner: Tensor, task: Task) -> dict[str, Tensor]:
        """Return further `scores` that are computed for test tasks only; NaN where one cannot be computed."""
        return {}

    def solution(self, outer: Tensor, task: Task) -> Tensor | None:
        """Return β̂_t(λ), exactly."""
        return None

    def hypergradient(self, outer: Tensor, task: Task) -> tuple[Tensor, Tensor] | None:
        """Return ∇F_t(λ) and β̂_t(λ), exactly; together, because one factorisation gives both."""
        return None

    def mixed_term(
        self, outer: Tensor, inner: Tensor, task: Task, vector: Tensor, sample: Sample | None = None
    ) -> Tensor | None:
        """Return ∇²_λβ g_t(λ, β) · vector ``[lanes, d]`` without automatic differentiation."""
        return None

    def smoothness(self, outer: Tensor, task: Task) -> Tensor | None:
        """Return ℓ_{g,1}, an upper bound on the largest eigenvalue of ∇²_ββ g_t ``[lanes]``."""
        return None
