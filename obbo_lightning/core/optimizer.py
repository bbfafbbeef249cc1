"""The outer step as a torch optimizer: the Bregman proximal step, and torch's own optimizers projected on X."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from obbo_lightning.core.domains import Domain, RealSpace
from obbo_lightning.core.geometry import Distance, Euclidean, Geometry, Rate
from obbo_lightning.core.parameter_groups import LearningRate, ParameterGroup
from obbo_lightning.core.regularizers import ElasticNet
from obbo_lightning.core.step_size import DEFAULT_SCALE, NEW_EXAMPLES, STATE, Fold, Measured, auto_length, measure
from obbo_lightning.core.validation import positive


class BregmanProx(Optimizer):
    r"""λ⁺ = argmin_{λ ∈ X} ⟨q, λ⟩ + h(λ) + D_{φ_t}(λ, λ_t)/α, solved exactly       (eq. outer_step_minimization).

    The gradient of a parameter is q; the last axis is the vector, all others are lanes. Usable in any torch loop. The
    ``lr`` of torch's own parameter group is α, or s where α is ``auto``, or a factor for the steps of all groups.

    Attributes:
        lengths: ‖G_X‖ of the last step in the geometry's own norm, of each group ``[lanes, groups]``: √(2 D)/α with
            D = D_{φ_t}(λ_{t+1}, λ_t), which is √⟨G, H_t G⟩ for φ_t = ½ λᵀ H_t λ.

    Args:
        params: parameters, as for any torch optimizer. Their values must lie in ``domain``.
        lr: α, or ``auto`` (`obbo_lightning.core.step_size`).
        geometry: φ_t.
        regularizer: h.
        domain: X.
        scale: first s, where ``lr`` is ``auto``.
        groups: resolved parameter groups of λ, instead of the settings above for all of it.

    >>> outer = torch.nn.Parameter(torch.tensor([[1.0, 0.05]]))
    >>> outer.grad = torch.tensor([[1.0, 0.0]])
    >>> BregmanProx([outer], lr=0.1, regularizer=ElasticNet(l1=1.0)).step()  # ISTA
    >>> outer.data
    tensor([[0.8000, 0.0000]])
    """

    takes_evidence = True  # ``step`` has the arguments ``newest`` and ``fold``

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: LearningRate = 1.0,
        geometry: Geometry | None = None,
        regularizer: ElasticNet | None = None,
        domain: Domain | None = None,
        scale: float = DEFAULT_SCALE,
        groups: Sequence[ParameterGroup] | None = None,
    ) -> None:
        self.groups = tuple(groups or [ParameterGroup(None, geometry or Euclidean(), regularizer, domain, lr, scale)])
        self.lengths: Tensor | None = None
        rate = self.groups[0].rate if not self.groups[0].name else lr
        super().__init__(params, {"lr": rate})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse an impossible step size or start, also for groups added later."""
        super().add_param_group(param_group)
        positive("lr", self.param_groups[-1]["lr"])
        for parameter in self.param_groups[-1]["params"]:
            for group in self.groups:
                require_start(parameter.detach()[..., group.where], group.domain, group.geometry)

    def __getstate__(self) -> dict[str, Any]:
        # torch keeps only its own attributes
        return {**super().__getstate__(), "groups": self.groups}

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, newest: Tensor | None = None, fold: Fold = NEW_EXAMPLES
    ) -> float | None:
        """Replace every parameter that has a gradient by the solution of its step.

        Args:
            closure: evaluates the loss, as for any torch optimizer.
            newest: d_t, where the gradient is an average q_t; ``lr: auto`` tests its steps on it.
            fold: the validation examples that gave d_t.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for param_group in self.param_groups:
            for parameter in param_group["params"]:
                if parameter.grad is not None:
                    evidence = parameter.grad if newest is None else newest, fold
                    updates = [self._update(parameter, group, param_group["lr"], *evidence) for group in self.groups]
                    self.lengths = torch.stack([length for _, length in updates], -1)
                    for group, (after, _) in zip(self.groups, updates, strict=True):
                        parameter[..., group.where].copy_(after)
        return loss

    def _update(
        self, parameter: Tensor, group: ParameterGroup, lr: float, newest: Tensor, fold: Fold
    ) -> tuple[Tensor, Tensor]:
        """Return argmin_{x ∈ X} ⟨q, x⟩ + h(x) + D_{φ_t}(x, λ)/α of one group, and the length of its step."""
        assert parameter.grad is not None
        outer, direction = parameter[..., group.where], parameter.grad[..., group.where]
        geometry, h, domain, state = group.geometry, group.regularizer, group.domain, self._state(parameter, group)
        rate: Rate = lr * group.factor
        if group.lr == "auto":
            measured = measure(geometry, domain, outer, direction, state)
            distance = geometry.distance(measured.relative, state)
            newest, move = newest[..., group.where], measured.relative
            if h.l1 or h.l2:  # evidence is about f + h
                slope = h.l1 * outer.sign() + h.l2 * outer
                newest = newest + slope
                move = move + geometry.auto_direction(outer, slope, domain) / measured.typical
            evidence = geometry, distance, domain, outer, newest, measured, move, fold, group.scale, state
            length = auto_length(*evidence) * (rate / group.scale)  # a scheduler multiplies the steps
            moves = length > 0
            rate = (length / measured.typical).where(moves, 1.0)
            state["lr"] = rate.where(moves, 0.0)
            added, h = geometry.auto_regularizer(outer, h, domain)
            after = distance.step(outer, measured.direction + added, rate, h, domain).where(moves, outer)
            rate = rate.squeeze(-1)
        else:
            distance = geometry.distance(direction, state)
            after = distance.step(outer, direction, rate, h, domain)
        # √(2 D_φ(λ⁺, λ))/α in double precision, because an entropy's D is a difference of nearly equal numbers
        divergence = distance.divergence(after.double(), outer.double())
        return after, (2 * divergence.clamp(min=0)).sqrt() / rate

    def generalized_gradient(self, before: Tensor, parameter: Tensor) -> Tensor:
        """Return G_X(λ_t, q_t, α) = (λ_t − λ_{t+1})/α of the last step, with the α of each group."""
        difference = before - parameter.detach()
        for group in self.groups:
            lr: Rate = self.param_groups[0]["lr"] * group.factor
            if group.lr == "auto":
                lr = self._state(parameter, group)["lr"]
                lr = lr.where(lr > 0, 1.0)  # λ has not moved
            difference[..., group.where] /= lr
        return difference

    def _state(self, parameter: Tensor, group: ParameterGroup) -> dict[str, Tensor]:
        """Return the state of a group; a λ without groups keeps it as torch's optimizers do."""
        state: dict[str, Any] = self.state[parameter]
        own: dict[str, Tensor] = state.setdefault(group.name, {}) if group.name else state
        if not own:
            own.update(group.geometry.initial_state(parameter.detach()[..., group.where]))
        return own


def projected_optimizer(
    make: Callable[..., Optimizer], outer: Parameter, groups: Sequence[ParameterGroup]
) -> Optimizer:
    """Return a torch optimizer of λ that is projected on X after every step.

    With ``auto`` the optimizer sees directions over their typical size, and its steps are those of `AdaptiveDiagonal`:
    s times the size of λ in all coordinates together. Where λ has groups or ``lr`` is ``auto``, the steps of ``make``
    must be proportional to ``lr`` and must not depend on λ: no weight decay.
    """
    for group in groups:
        key = f"algorithm.groups.{group.name}.regularizer" if group.name else "regularizer"
        require_no_regularizer(key, group.regularizer)
        require_start(outer.detach()[..., group.where], group.domain)
    domain, lr = groups[0].domain, groups[0].lr
    if groups[0].name or lr == "auto":
        optimizer = make([outer], lr=1.0)
        optimizer.takes_evidence = True  # type: ignore[attr-defined]
        steps = _StepsFromZero(optimizer, outer, groups)
        optimizer.register_step_pre_hook(steps.before)
        optimizer.register_step_post_hook(steps.after)
        return optimizer
    optimizer = make([outer], lr=lr)
    if not isinstance(domain, RealSpace):

        @torch.no_grad()
        def project(*_: Any) -> None:
            outer.copy_(domain.project(outer))

        optimizer.register_step_post_hook(project)
    return optimizer


class _StepsFromZero:
    """Let a torch optimizer with ``lr`` 1 step from zero, and take α times that step from λ_t, group by group.

    Its ``step`` takes the arguments ``newest`` and ``fold`` of `BregmanProx.step`.
    """

    def __init__(self, optimizer: Optimizer, outer: Parameter, groups: Sequence[ParameterGroup]) -> None:
        self.optimizer, self.outer, self.groups = optimizer, outer, groups
        self.start: Tensor | None = None
        self.newest: Tensor | None = None
        self.fold = NEW_EXAMPLES
        self.measured: dict[str, tuple[Measured, dict[str, Any]]] = {}  # of groups whose α is auto, with their states

    @torch.no_grad()
    def before(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Replace the gradient by directions over their typical size where α is auto, and λ by zero."""
        own = {name: value for name, value in kwargs.items() if name not in ("newest", "fold")}
        if self.outer.grad is None:
            return args, own
        self.newest, self.fold = kwargs.get("newest", self.outer.grad), kwargs.get("fold", NEW_EXAMPLES)
        self.start, self.measured = self.outer.detach().clone(), {}
        self.outer.grad = self.outer.grad.clone()  # it belongs to the caller
        state: dict[str, Any] = self.optimizer.state.get(self.outer, {})
        for group in self.groups:
            if group.lr == "auto":
                known = state.get(group.name, {}) if group.name else state
                known = {name: known[name] for name in STATE if name in known}
                outer, direction = self.outer[..., group.where], self.outer.grad[..., group.where]
                measured = measure(group.geometry, group.domain, outer, direction, known)
                direction.copy_(measured.relative)
                self.measured[group.name] = measured, known
        self.outer.zero_()
        return args, own

    @torch.no_grad()
    def after(self, *_: Any) -> None:
        """Set λ to λ_t + α times the step, projected on X."""
        if self.start is None or self.newest is None:
            return
        for group in self.groups:
            before, move = self.start[..., group.where], self.outer[..., group.where]
            rate: Rate = group.rate
            if group.name in self.measured:
                measured, known = self.measured[group.name]
                newest, domain = self.newest[..., group.where], group.domain
                evidence = newest, measured, -move, self.fold, group.scale, known
                rate = auto_length(group.geometry, Euclidean(), domain, before, *evidence)
            self.outer[..., group.where] = group.domain.project(before + rate * move)
        for name, (_, known) in self.measured.items():  # only now: torch fills the state in its step if it is empty
            self.optimizer.state[self.outer].update({name: known} if name else known)
        self.start = self.newest = None


def require_no_regularizer(name: str, regularizer: ElasticNet | None) -> None:
    """Refuse a regularizer for an optimizer that takes no composite step."""
    if regularizer is not None and (regularizer.l1 or regularizer.l2):
        raise ValueError(
            f"{name} must be none for an outer rule of torch.optim, which takes no composite step, got {regularizer!r}"
        )


def auto_metrics(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return α_t, s_t and c_t of the last step where α is auto ``[lanes]``: ``lr``, ``scale``, ``agreement``.

    Where λ has groups: ``lr/NAME``, ``scale/NAME``, ``agreement/NAME``.
    """
    state: dict[str, Any] = optimizer.state[parameter]
    by_group = {"": state} | {f"/{name}": own for name, own in state.items() if isinstance(own, dict)}
    found: dict[str, Tensor] = {}
    for suffix, own in by_group.items():
        if "log_scale" in own:
            values = {"lr": own["lr"], "scale": own["log_scale"].exp(), "agreement": own["agreement"]}
            found |= {f"{name}{suffix}": value.squeeze(-1) for name, value in values.items()}
    return found


def require_start(outer: Tensor, domain: Domain, geometry: Geometry | None = None) -> None:
    """Refuse an outer start that is not in X, or at which φ has no gradient."""
    if not outer.is_floating_point():
        raise ValueError(f"outer start must be floating-point, got {outer.dtype}")
    good, rule = domain.contains(outer), f"lie in {domain!r}"
    if bool(good.all()) and isinstance(geometry, Distance):
        good, rule = geometry.accepts(outer), f"lie inside {domain!r}, where {geometry!r} is smooth"
    if not bool(good.all()):
        lane = int((~good).reshape(-1).nonzero()[0])
        first = outer.reshape(-1, outer.shape[-1])[lane][:4].tolist()
        raise ValueError(f"outer start must {rule}; lane {lane} begins with {first}")
