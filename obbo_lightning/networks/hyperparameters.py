"""Hyperparameters as a submodule of a module trained elsewhere, and that module as a pure function of them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from obbo_lightning.core.parameter_groups import ParameterGroup, ParameterGroups
from obbo_lightning.networks.flat import FunctionCaller, is_noisy, seeded, unflatten


class Hyperparameters(nn.Module, Mapping[str, Tensor]):
    """Named hyperparameters that `OnlineTuner` learns while the module around them is trained.

    A mapping: ``self.hyper["decay"]`` is a tensor, a number without an axis or a vector. λ is a buffer, so it is in the
    module's ``state_dict`` and not among its parameters. It stays in single precision where the module is made half.

    Args:
        groups: the parameter groups by name.
        named: the same as keywords.

    >>> from obbo_lightning import OnSimplex, Positive
    >>> hyper = Hyperparameters(decay=Positive(0.5), sources=OnSimplex(2))
    >>> hyper["decay"], hyper["sources"], list(hyper.state_dict())
    (tensor(0.5000), tensor([0.5000, 0.5000]), ['outer'])
    """

    outer: Tensor
    __eq__ = object.__eq__  # identity, as for every module; Mapping would compare contents
    __hash__ = object.__hash__

    def __init__(self, groups: Mapping[str, ParameterGroup] | None = None, **named: ParameterGroup) -> None:
        super().__init__()
        self.groups = ParameterGroups(groups, **named)
        self.register_buffer("outer", self.groups.start())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.groups.named:
            raise KeyError(f"hyper must be one of {', '.join(self.groups.named)}, got {name!r}")
        return self.groups.values(self.outer[0])[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.groups.named)

    def __len__(self) -> int:
        return len(self.groups.named)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={group.size}" for name, group in self.groups.named.items())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = self.outer
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.outer.dtype in (torch.float16, torch.bfloat16):  # in half precision small steps would be rounded away
            self.outer = before.to(self.outer.device)
        elif (
            self.outer.dtype != before.dtype
            and not before.is_meta
            and torch.equal(before.cpu(), self.groups.start(dtype=before.dtype))
        ):
            # the start itself, not what single precision has left of it: a third is not 0.3333333432674408
            self.outer = self.groups.start(dtype=self.outer.dtype).to(self.outer.device)
        return self


class FunctionalModule:
    """Functions of a module at any (λ, β) that leave its parameters, buffers, modes and random numbers unchanged."""

    def __init__(self, module: nn.Module) -> None:
        found = [(name, m) for name, m in module.named_modules() if isinstance(m, Hyperparameters)]
        if len(found) != 1:
            raise ValueError(
                f"the module must have one Hyperparameters, such as self.hyper = Hyperparameters(...), got {len(found)}"
            )
        self._name, self.hyper = found[0]
        self.module, self.groups = module, self.hyper.groups
        self._caller, self._modules = FunctionCaller(module), list(module.modules())

    def flat(self) -> Tensor:
        """Return a copy of the trainable parameters ``[p]`` in the dtype of λ."""
        return torch.cat([p.detach().flatten() for p in self.trainable().values()]).to(self.hyper.outer.dtype)

    def apply(
        self, outer: Tensor, flat: Tensor, function: Callable[..., Any], *arguments: Any, seed: int, evaluating: bool
    ) -> Any:
        """Return ``function(module, *arguments, hyper)`` at λ ``[d]`` and β ``[p]``; twice differentiable.

        Dropout is left out; a function that draws random numbers nevertheless draws the same ones at every call with
        the same ``seed``. With ``evaluating`` the module is in evaluation mode.
        """
        state = unflatten(flat, self.trainable())
        # Copies, because a module may write to its buffers; in the precision of λ.
        others = {n: p.detach() for n, p in self.module.named_parameters() if n not in state}
        for name, value in (others | dict(self.module.named_buffers())).items():
            state[name] = value.to(flat.dtype, copy=True) if value.is_floating_point() else value.clone()
        state[f"{self._name}.outer".lstrip(".")] = outer.unsqueeze(0)
        named = {f"network.{name}": value for name, value in state.items()}
        switched = [m for m in self._modules if m.training and (evaluating or is_noisy(m))]
        for module in switched:
            module.training = False
        try:
            with seeded(seed, flat.device):
                return functional_call(self._caller, named, (function, *arguments, self.groups.values(outer)))
        finally:
            for module in switched:
                module.training = True

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters by name, in the order of β."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}
