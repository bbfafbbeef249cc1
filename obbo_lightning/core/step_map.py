"""The map β ← β − η P⁻¹ (∇g + wd β) that one step of an optimizer applies, with η and P held fixed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

Entry = float | Tensor  # one number for all coordinates, or one for each
KNOWN = (SGD, Adam, AdamW, RMSprop, Adagrad)
SHORT = 1e-6  # η where there is no learning rate: so short that only the direction of a step matters


@dataclass(frozen=True)
class StepMap:
    """Φ(β) = β − η P⁻¹ (∇g(β) + wd β) − δ β, with diagonal P.

    Args:
        size: η P⁻¹, a number or one for each coordinate ``[p]``; 0 where a coordinate is not trained.
        decay: wd, weight decay that is part of the gradient.
        shrink: δ, weight decay apart from the gradient (AdamW).

    >>> double = lambda vector: 2 * vector  # a Hessian
    >>> StepMap(0.1, decay=1.0).curvature(double, torch.ones(2))  # η (2 + 1)
    tensor([0.3000, 0.3000])
    """

    size: Entry
    decay: Entry = 0.0
    shrink: Entry = 0.0

    def scaled(self, product: Callable[[Tensor], Tensor], vector: Tensor) -> Tensor:
        """Return product(η P⁻¹ v)."""
        if isinstance(self.size, Tensor):
            return product(self.size * vector)
        return self.size * product(vector)

    def curvature(self, hessian: Callable[[Tensor], Tensor], vector: Tensor) -> Tensor:
        """Return (I − ∂Φ/∂β)ᵀ v = (∇²_ββ g + wd) η P⁻¹ v + δ v."""
        found = self.scaled(hessian, vector)
        if isinstance(self.decay, Tensor) or self.decay:
            found = found + self.decay * (self.size * vector)
        if isinstance(self.shrink, Tensor) or self.shrink:
            found = found + self.shrink * vector
        return found

    def trained(self, vector: Tensor) -> Tensor:
        """Return a vector with 0 in the coordinates that are not trained."""
        if isinstance(self.size, Tensor):
            return vector.where(self.size != 0, 0.0)
        return vector if self.size else torch.zeros_like(vector)

    def stationarity(self, hessian: Callable[[Tensor], Tensor], vector: Tensor) -> Tensor:
        """Return (∇²_ββ g + wd + δ P/η) u, the derivative of what vanishes at Φ(β) = β, in the trained coordinates.

        It is symmetric, and `curvature` of v is this of u = η P⁻¹ v.
        """
        found = hessian(vector)
        if isinstance(self.decay, Tensor) or self.decay:
            found = found + self.decay * vector
        if isinstance(self.shrink, Tensor) or self.shrink:
            size = torch.as_tensor(self.size, dtype=vector.dtype, device=vector.device)
            found = found + self.shrink / size.where(size != 0, 1.0) * vector
        return self.trained(found)

    @property
    def maximizes(self) -> bool:
        """Whether some coordinate ascends."""
        return bool((self.size < 0).any()) if isinstance(self.size, Tensor) else self.size < 0


def step_map(optimizers: Sequence[Optimizer], parameters: Mapping[str, Tensor], dtype: torch.dtype) -> StepMap:
    """Return the map that the optimizers apply to these parameters, flat, from their present state.

    η is what a gradient moves β by in all, now and through momentum later. P is that of the present state; it is 1
    where there is none, that is before the first step and in coordinates whose gradients were all exactly 0. A
    parameter that no optimizer has is not trained. Learning rate and weight decay of an optimizer that is not `KNOWN`
    are used as those of gradient descent.

    >>> weight = torch.nn.Parameter(torch.zeros(3))
    >>> step_map([SGD([weight], lr=0.1, momentum=0.5)], {"weight": weight}, torch.float32).size  # 0.1 / (1 − 0.5)
    0.2
    """
    found: dict[int, tuple[Entry, Entry, Entry]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                found[id(parameter)] = _entries(optimizer, group, optimizer.state.get(parameter, {}), dtype)
    entries = [found.get(id(parameter), (0.0, 0.0, 0.0)) for parameter in parameters.values()]
    values = list(parameters.values())
    return StepMap(*(_joined([entry[i] for entry in entries], values, dtype) for i in range(3)))


def unknown_optimizers(optimizers: Sequence[Optimizer]) -> list[str]:
    """Return the names of the classes whose steps are not known."""
    return sorted({type(optimizer).__name__ for optimizer in optimizers if not isinstance(optimizer, KNOWN)})


def _entries(
    optimizer: Optimizer, group: Mapping[str, Any], state: Mapping[str, Any], dtype: torch.dtype
) -> tuple[Entry, Entry, Entry]:
    """Return η P⁻¹, wd and δ of one parameter."""
    lr, wd, shrink = _number(group.get("lr"), SHORT), _number(group.get("weight_decay"), 0.0), 0.0
    step = float(state.get("step", 0))
    size: Entry = lr
    if isinstance(optimizer, SGD):
        # m ← μ m + (1 − τ) g: a gradient moves β by lr (1 − τ)(1 + μ + μ² + …)
        if group["momentum"]:
            size = lr * (1 - group["dampening"]) / (1 - group["momentum"])
    elif isinstance(optimizer, (Adam, AdamW)):
        square = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
        if square is not None and step:
            # P = √(v / (1 − b₂^t)) + ε
            square = square.to(dtype)
            size = _over(lr, square, square / (1 - float(group["betas"][1]) ** step), group["eps"])
        if isinstance(optimizer, AdamW) or group.get("decoupled_weight_decay"):
            wd, shrink = 0.0, lr * wd
    elif isinstance(optimizer, RMSprop):
        if "square_avg" in state:
            # P = √(v − m²) + ε, with m = 0 unless the average is centred
            square = state["square_avg"].to(dtype)
            mean = state["grad_avg"].to(dtype) if group["centered"] else torch.zeros_like(square)
            size = _over(lr, square, (square - mean.square()).clamp(min=0), group["eps"])
        size = size / (1 - group["momentum"])
    elif isinstance(optimizer, Adagrad) and step:
        # P = √(Σ g²) + ε; the learning rate of the last step
        square = state["sum"].to(dtype)
        size = _over(lr / (1 + (step - 1) * group["lr_decay"]), square, square, group["eps"])
    if group.get("maximize"):  # β ← β − η P⁻¹ (−∇g + wd β): the decay keeps its sign
        size, wd = -size, -wd
    return size, wd, shrink


def _over(lr: float, seen: Tensor, square: Tensor, eps: float) -> Tensor:
    """Return lr / (√square + ε), and lr where no gradient has been seen."""
    return lr / (square.sqrt() + eps).where(seen > 0, 1.0)


def _number(value: Any, otherwise: float) -> float:
    return otherwise if value is None else float(value)


def _joined(entries: Sequence[Entry], parameters: Sequence[Tensor], dtype: torch.dtype) -> Entry:
    """Return one number where all are the same, else one for each coordinate."""
    numbers = {entry for entry in entries if not isinstance(entry, Tensor)}
    if len(numbers) == 1 and not any(isinstance(entry, Tensor) for entry in entries):
        return numbers.pop()
    return torch.cat(
        [
            torch.as_tensor(e, dtype=dtype, device=p.device).expand_as(p).flatten()
            for e, p in zip(entries, parameters, strict=True)
        ]
    )
