"""The map β ← β − η P⁻¹ (∇g + wd β) that one step of an optimizer applies, with η and P held fixed."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

Entry = float | Tensor  # one number for all coordinates, or one for each


@dataclass(frozen=True)
class StepMap:
    """Φ(β) = β − η P⁻¹ (∇g(β) + wd β) − δ β, with diagonal P.

    Args:
        size: η P⁻¹, a number or one for each coordinate ``[p]``.
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


def step_map(optimizers: Sequence[Optimizer], parameters: Mapping[str, Tensor], dtype: torch.dtype) -> StepMap:
    """Return the map that the optimizers apply to these parameters, flat, from their present state.

    η is what a gradient moves β by in all, now and through momentum later. P is that of the present state, I before
    there is one. A parameter that no optimizer has is not trained. Learning rate and weight decay of an optimizer that
    is not known are used as those of gradient descent, with a warning.

    >>> weight = torch.nn.Parameter(torch.zeros(3))
    >>> step_map([SGD([weight], lr=0.1, momentum=0.5)], {"weight": weight}, torch.float32).size  # 0.1 / (1 − 0.5)
    0.2
    """
    found: dict[int, tuple[Entry, Entry, Entry]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                found[id(parameter)] = _entries(optimizer, group, optimizer.state.get(parameter, {}))
    entries = [found.get(id(parameter), (0.0, 0.0, 0.0)) for parameter in parameters.values()]
    values = list(parameters.values())
    return StepMap(*(_joined([entry[i] for entry in entries], values, dtype) for i in range(3)))


def _entries(optimizer: Optimizer, group: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[Entry, Entry, Entry]:
    """Return η P⁻¹, wd and δ of one parameter."""
    lr, wd = float(group["lr"]), float(group.get("weight_decay", 0.0))
    lr = -lr if group.get("maximize") else lr
    size: Entry = lr
    if isinstance(optimizer, SGD):
        # m ← μ m + (1 − τ) g: a gradient moves β by lr (1 − τ)(1 + μ + μ² + …)
        if group["momentum"]:
            size = lr * (1 - group["dampening"]) / (1 - group["momentum"])
    elif isinstance(optimizer, Adam):  # and AdamW
        square = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
        if square is not None:
            # P = √(v / (1 − b₂^t)) + ε
            correction = 1 - group["betas"][1] ** float(state["step"])
            size = lr / ((square / correction).sqrt() + group["eps"])
        if isinstance(optimizer, AdamW) or group.get("decoupled_weight_decay"):
            return size, 0.0, lr * wd
    elif isinstance(optimizer, RMSprop):
        square = state.get("square_avg")
        if square is not None:
            if group["centered"]:
                square = square - state["grad_avg"].square()
            size = lr / (square.clamp(min=0).sqrt() + group["eps"])
        if group["momentum"]:
            size = size / (1 - group["momentum"])
    elif isinstance(optimizer, Adagrad):
        lr = lr / (1 + max(float(state["step"]) - 1, 0) * group["lr_decay"])
        size = lr / (state["sum"].sqrt() + group["eps"])
    else:
        warnings.warn(
            f"the steps of {type(optimizer).__name__} are not known to OnlineTuner: its lr is used as that of gradient "
            "descent (SGD, Adam, AdamW, RMSprop and Adagrad are known)",
            stacklevel=5,
        )
    return size, wd, 0.0


def _joined(entries: Sequence[Entry], parameters: Sequence[Tensor], dtype: torch.dtype) -> Entry:
    """Return one number where all are the same, else one for each coordinate."""
    numbers = {entry for entry in entries if not isinstance(entry, Tensor)}
    if len(numbers) == 1 and not any(isinstance(entry, Tensor) for entry in entries):
        return numbers.pop()
    return torch.cat(
        [
            torch.as_tensor(e, device=p.device).to(dtype).expand_as(p).flatten()
            for e, p in zip(entries, parameters, strict=True)
        ]
    )
