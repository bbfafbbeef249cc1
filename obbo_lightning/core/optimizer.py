"""The outer step as a torch optimizer."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from obbo_lightning.core.domains import Domain, RealSpace
from obbo_lightning.core.geometry import Distance, Euclidean, Geometry, require_support
from obbo_lightning.core.regularizers import ElasticNet, NoRegularizer
from obbo_lightning.core.validation import instance_of, positive


class BregmanProx(Optimizer):
    r"""λ⁺ = argmin_{λ ∈ X} ⟨q, λ⟩ + h(λ) + D_{φ_t}(λ, λ_t)/α, solved exactly       (eq. outer_step_minimization).

    The gradient of a parameter is q; the last axis is the vector, all others are lanes. Usable in any torch loop.

    Args:
        params: parameters, as for any torch optimizer. Their values must lie in ``domain``.
        lr: α.
        geometry: φ_t.
        regularizer: h.
        domain: X.

    Example: one ISTA step.

    >>> from obbo_lightning.core.regularizers import L1
    >>> outer = torch.nn.Parameter(torch.tensor([[1.0, 0.05]]))
    >>> outer.grad = torch.tensor([[1.0, 0.0]])
    >>> BregmanProx([outer], lr=0.1, regularizer=L1(1.0)).step()
    >>> outer.data
    tensor([[0.8000, 0.0000]])
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        geometry: Geometry | None = None,
        regularizer: ElasticNet | None = None,
        domain: Domain | None = None,
    ) -> None:
        positive("lr", lr)
        self.geometry = geometry or Euclidean()
        self.regularizer = regularizer or NoRegularizer()
        self.domain = domain or RealSpace()
        instance_of("geometry", self.geometry, Geometry)
        instance_of("regularizer", self.regularizer, ElasticNet)
        instance_of("domain", self.domain, Domain)
        require_support(self.geometry, self.regularizer, self.domain)
        super().__init__(params, {"lr": lr})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a step size or a start that is impossible, also for groups added later."""
        super().add_param_group(param_group)
        positive("lr", self.param_groups[-1]["lr"])
        for parameter in self.param_groups[-1]["params"]:
            require_start(parameter.detach(), self.domain, self.geometry)

    def __getstate__(self) -> dict[str, Any]:
        # torch keeps only what it knows of
        own = {"geometry": self.geometry, "regularizer": self.regularizer, "domain": self.domain}
        return {**super().__getstate__(), **own}

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Replace every parameter that has a gradient by the solution of its step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state: dict[str, Any] = self.state[parameter]
                    if not state:
                        state.update(self.geometry.initial_state(parameter))
                    distance = self.geometry.distance(parameter.grad, state)
                    parameter.copy_(
                        distance.step(parameter, parameter.grad, group["lr"], self.regularizer, self.domain)
                    )
        return loss


@dataclass(frozen=True)
class BregmanRule:
    """Makes the `BregmanProx` of an outer variable; refuses impossible settings before there is one."""

    lr: float
    geometry: Geometry
    regularizer: ElasticNet
    domain: Domain

    def __post_init__(self) -> None:
        positive("lr", self.lr)
        instance_of("geometry", self.geometry, Geometry)
        instance_of("regularizer", self.regularizer, ElasticNet)
        instance_of("domain", self.domain, Domain)
        require_support(self.geometry, self.regularizer, self.domain)

    def __call__(self, outer: Parameter) -> Optimizer:
        return BregmanProx([outer], self.lr, self.geometry, self.regularizer, self.domain)


@dataclass(frozen=True)
class ProjectedRule:
    """Makes a torch optimizer of an outer variable that is projected on X after every step.

    Attributes:
        optimizer: makes the optimizer from a list of parameters and ``lr``.
        lr: α.
        regularizer: must be none: a torch optimizer takes no composite step.
        domain: X.
    """

    optimizer: Callable[..., Optimizer]
    lr: float
    regularizer: ElasticNet
    domain: Domain

    def __post_init__(self) -> None:
        positive("lr", self.lr)
        instance_of("regularizer", self.regularizer, ElasticNet)
        instance_of("domain", self.domain, Domain)
        if self.regularizer.l1 or self.regularizer.l2:
            raise ValueError(
                f"regularizer must be none for an outer rule of torch.optim, which takes no composite step, "
                f"got {self.regularizer!r}"
            )

    def __call__(self, outer: Parameter) -> Optimizer:
        require_start(outer.detach(), self.domain)
        optimizer = self.optimizer([outer], lr=self.lr)
        if not isinstance(self.domain, RealSpace):
            optimizer.register_step_post_hook(partial(_project, self.domain))
        return optimizer


@torch.no_grad()
def _project(domain: Domain, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.copy_(domain.project(parameter))


def generalized_gradient(
    distance: Distance,
    outer: Tensor,
    direction: Tensor,
    lr: float,
    regularizer: ElasticNet | None = None,
    domain: Domain | None = None,
) -> Tensor:
    """G_X(λ, q, α) = (λ − λ⁺)/α                                                (eq. generalized_gradient).

    >>> generalized_gradient(Euclidean(), torch.ones(1, 2), torch.tensor([[2.0, 3.0]]), lr=0.5)
    tensor([[2., 3.]])
    """
    positive("lr", lr)
    if isinstance(distance, Geometry):
        require_support(distance, regularizer or NoRegularizer(), domain or RealSpace())
    after = distance.step(outer, direction, lr, regularizer or NoRegularizer(), domain or RealSpace())
    return (outer - after) / lr


def require_start(outer: Tensor, domain: Domain, geometry: Geometry | None = None) -> None:
    """Refuse an outer start that is not in X, or at which φ has no gradient."""
    if not outer.is_floating_point():
        raise ValueError(f"outer start must be floating-point, got {outer.dtype}")
    _require_lanes(outer, domain.contains(outer), f"lie in {domain!r}")
    if isinstance(geometry, Distance):
        _require_lanes(outer, geometry.accepts(outer), f"lie inside {domain!r}, where {geometry!r} is smooth")


def _require_lanes(outer: Tensor, good: Tensor, rule: str) -> None:
    if not bool(good.all()):
        lane = int((~good).reshape(-1).nonzero()[0])
        first = outer.reshape(-1, outer.shape[-1])[lane][:4].tolist()
        raise ValueError(f"outer start must {rule}; lane {lane} begins with {first}")
