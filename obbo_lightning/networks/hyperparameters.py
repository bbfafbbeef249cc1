"""Hyperparameters as a part of your module: saved, moved and shown with it, but never trained by its optimizer."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from obbo_lightning.core.blocks import Block, Blocks


class Hyperparameters(nn.Module):
    """Named values that `OnlineTuner` learns while the module around them is trained.

    ``self.hyper["decay"]`` is a tensor: a number without an axis, or a vector. λ is a buffer, so it is in the module's
    ``state_dict`` and not among its parameters. It stays in single precision where the module is made half.

    Args:
        blocks: the blocks by name.
        named: the same as keywords.

    >>> from obbo_lightning import OnSimplex, Positive
    >>> hyper = Hyperparameters(decay=Positive(1e-4), sources=OnSimplex(4))
    >>> hyper["decay"], hyper["sources"].sum(), list(hyper.state_dict())
    (tensor(1.0000e-04), tensor(1.), ['outer'])
    """

    outer: Tensor

    def __init__(self, blocks: Mapping[str, Block] | None = None, **named: Block) -> None:
        super().__init__()
        self.blocks = Blocks(blocks, **named)
        self.register_buffer("outer", self.blocks.start())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.blocks.named:
            raise KeyError(f"hyper must be one of {', '.join(self.blocks.named)}, got {name!r}")
        return self.blocks.values(self.outer[0])[name]

    def keys(self) -> Iterable[str]:
        """The names; with them ``dict(hyper)`` works."""
        return self.blocks.named.keys()

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={block.size}" for name, block in self.blocks.named.items())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = self.outer
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.outer.dtype in (torch.float16, torch.bfloat16):  # weights of 1e-3 would not move by 0.1 %
            self.outer = before.to(self.outer.device)
        return self
