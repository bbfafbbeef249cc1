"""Base classes of algorithms, which are stateless: they choose inner solver, estimator, memory and optimizer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch.nn import Parameter
from torch.optim import Optimizer

from obbo_lightning.core.configurable import Configurable
from obbo_lightning.core.domains import Domain
from obbo_lightning.core.geometry import AdaptiveDiagonal, Geometry
from obbo_lightning.core.hypergradients import Estimator, FixedPoint
from obbo_lightning.core.inner_solvers import GradientDescent, InnerSolver
from obbo_lightning.core.memory import HypergradientWindow, Memory
from obbo_lightning.core.optimizer import BregmanProx, projected_optimizer, require_no_regularizer
from obbo_lightning.core.parameter_groups import SETTINGS, LearningRate, ParameterGroup, ParameterGroups, resolve_groups
from obbo_lightning.core.problem import Problem
from obbo_lightning.core.regularizers import ElasticNet
from obbo_lightning.core.step_size import DEFAULT_SCALE
from obbo_lightning.core.validation import instance_of, one_of, positive

DEFAULT_GROUP = ParameterGroup(None, AdaptiveDiagonal(), lr=1e-4)  # the one group of a λ without parameter groups


@dataclass(frozen=True, eq=False, kw_only=True)
class Algorithm(Configurable, ABC):
    """Composition of what a round computes; holds no state.

    Args:
        inner: inner solver (K, η).
        hypergradient: estimator of ∇F_t.
        clip: largest norm of q_t, per lane; None for no limit.
    """

    inner: InnerSolver = GradientDescent()
    hypergradient: Estimator = FixedPoint()
    clip: float | None = None

    def __post_init__(self) -> None:
        instance_of("inner", self.inner, InnerSolver)
        instance_of("hypergradient", self.hypergradient, Estimator)
        self.memory()  # refuses an impossible window before the first round
        if self.clip is not None:
            positive("clip", self.clip)

    def memory(self) -> Memory:
        """Return the empty memory that turns hypergradients into q_t."""
        return Memory()

    @abstractmethod
    def optimizer(self, outer: Parameter, groups: ParameterGroups | None = None) -> Optimizer:
        """Return the optimizer of λ; refuses a start outside of X, and parameter groups that do not fit."""

    def resolved_groups(self, groups: ParameterGroups | None) -> list[ParameterGroup]:
        """Return the parameter groups with the settings of this algorithm; one without a name where λ has none."""
        return resolve_groups(groups, DEFAULT_GROUP, {}, None)

    def require_compatible(self, problem: Problem) -> None:
        """Refuse, before the first round, a problem that lacks what this algorithm needs."""
        self.hypergradient.require_compatible(problem, self.inner)

    @property
    def supports_vmap(self) -> bool:
        """Whether tasks can be solved as lanes of one: lanes share a random sample, and each task needs its own."""
        sampled = self.inner.is_stochastic or self.hypergradient.is_stochastic
        return self.hypergradient.supports_lanes and not sampled


@dataclass(frozen=True, eq=False, kw_only=True)
class OuterStepAlgorithm(Algorithm):
    """Algorithm with the usual settings of an outer step, for λ with or without parameter groups.

    Args:
        lr: α, outer step size, or ``auto``: a step that grows with evidence. None: 1e-4, or each group's own.
        inner: inner solver (K, η).
        hypergradient: estimator of ∇F_t.
        regularizer: h.
        domain: X.
        clip: largest norm of q_t, per lane.
        scale: first typical change per round, where ``lr`` is ``auto``; its effect fades.
        groups: where λ has parameter groups, settings of some of them (lr, scale, geometry, regularizer, domain), by
            name.
    """

    lr: LearningRate | None = None
    geometry: Geometry | None = None
    regularizer: ElasticNet | None = None
    domain: Domain | None = None
    scale: float = DEFAULT_SCALE
    groups: Mapping[str, Mapping[str, Any]] | None = None

    fixed: ClassVar[tuple[str, ...]] = ()
    """Settings that the algorithm itself chooses, for every parameter group."""

    def __post_init__(self) -> None:
        super().__post_init__()
        settings, overrides = self._settings(), {} if self.groups is None else self.groups
        if not isinstance(overrides, Mapping):
            raise ValueError(f"algorithm.groups must be settings of parameter groups, by name, got {overrides!r}")
        for name, override in overrides.items():
            if not isinstance(override, Mapping):
                raise ValueError(f"algorithm.groups.{name} must be keys and values, got {override!r}")
            for key in override:
                one_of(f"algorithm.groups.{name}", key, [key for key in SETTINGS if key not in self.fixed])
        if self.geometry is not None and self.domain is None:  # it may be meant for the domains of groups
            instance_of("geometry", settings.pop("geometry"), Geometry)
        resolve_groups(None, DEFAULT_GROUP, settings, None)

    def _settings(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in SETTINGS}

    def optimizer(self, outer: Parameter, groups: ParameterGroups | None = None) -> Optimizer:
        if groups is not None:
            groups.require_size(outer)
        return self._make_optimizer(outer, self.resolved_groups(groups))

    def resolved_groups(self, groups: ParameterGroups | None) -> list[ParameterGroup]:
        return resolve_groups(groups, DEFAULT_GROUP, self._settings(), self.groups)

    @abstractmethod
    def _make_optimizer(self, outer: Parameter, groups: list[ParameterGroup]) -> Optimizer:
        """Return the optimizer of λ for groups with resolved settings."""


@dataclass(frozen=True, eq=False, kw_only=True)
class BregmanAlgorithm(OuterStepAlgorithm):
    """Window of hypergradients and a Bregman proximal step.

    Args:
        window: w, window length.
        geometry: φ_t.

    >>> BregmanAlgorithm(window=3, lr=0.1).memory().window
    3
    """

    window: int = 10

    def memory(self) -> Memory:
        return HypergradientWindow(self.window)

    def _make_optimizer(self, outer: Parameter, groups: list[ParameterGroup]) -> Optimizer:
        return BregmanProx([outer], groups=groups)


@dataclass(frozen=True, eq=False, kw_only=True)
class ProjectedAlgorithm(OuterStepAlgorithm):
    """Step of a torch optimizer on d_t, then the projection on X; no window.

    Args:
        regularizer: must be none.
    """

    geometry: Geometry | None = field(default=AdaptiveDiagonal(), init=False)  # units of ``lr: auto``

    rule: ClassVar[Callable[..., Optimizer]]
    fixed = ("geometry", "regularizer")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_no_regularizer("regularizer", self.regularizer)

    def _make_optimizer(self, outer: Parameter, groups: list[ParameterGroup]) -> Optimizer:
        return projected_optimizer(type(self).rule, outer, groups)
