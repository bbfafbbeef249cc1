"""Hyperparameters as a submodule: saved and moved with the module, but not trained by its optimizer."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from obbo_lightning.core.parameter_groups import ParameterGroup, ParameterGroups


class Hyperparameters(nn.Module, Mapping[str, Tensor]):
    """Named hyperparameters that `OnlineTuner` learns while the module around them is trained.

    A mapping: ``self.hyper["decay"]`` is a tensor, a number without an axis or a vector. λ is a buffer, so it is in the
    module's ``state_dict`` and not among its parameters. It stays in single precision where the module is made half.

    Args:
        groups: the parameter groups by name.
        named: the same as keywords.

    >>> from obbo_lightning import OnSimplex, Positive
    >>> hyper = Hyperparameters(decay=Positive(1e-4), sources=OnSimplex(4))
    >>> hyper["decay"], hyper["sources"].sum(), list(hyper.state_dict())
    (tensor(1.0000e-04), tensor(1.), ['outer'])
    >>> list(hyper), "momentum" in hyper
    (['decay', 'sources'], False)
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
        return self
