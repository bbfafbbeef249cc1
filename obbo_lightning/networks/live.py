"""A module that somebody else trains, as a pure function of a flat vector of its parameters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from obbo_lightning.core.blocks import Blocks
from obbo_lightning.networks.flat import Applied, is_noisy, seeded
from obbo_lightning.networks.hyperparameters import Hyperparameters


class LiveNetwork:
    """Functions of a module at any (λ, β), which leave it as it was: parameters, buffers, modes and random numbers.

    Args:
        module: the module; it has one `Hyperparameters` in it.
    """

    def __init__(self, module: nn.Module) -> None:
        found = [(name, m) for name, m in module.named_modules() if isinstance(m, Hyperparameters)]
        if len(found) != 1:
            raise ValueError(
                f"the module must have one Hyperparameters, such as self.hyper = Hyperparameters(...), got {len(found)}"
            )
        self._name, self.hyper = found[0]
        self.module = module
        self._applied = Applied(module)
        self._modules = list(module.modules())

    @property
    def blocks(self) -> Blocks:
        """Of λ."""
        return self.hyper.blocks

    def flat(self) -> Tensor:
        """The parameters that learn ``[p]``, in λ's dtype; a copy."""
        return torch.cat([p.detach().flatten() for p in self._learning().values()]).to(self.hyper.outer.dtype)

    def apply(
        self, outer: Tensor, flat: Tensor, function: Callable[..., Any], *arguments: Any, seed: int, judging: bool
    ) -> Any:
        """``function(module, *arguments, hyper)`` at λ ``[d]`` and β ``[p]``; can be differentiated through twice.

        Noise (dropout) is left out; where a function draws random numbers nevertheless, it draws the same at every call
        with the same ``seed``. With ``judging`` the module is in evaluation mode.
        """
        learning = self._learning()
        pieces = flat.split([p.numel() for p in learning.values()])
        state = {name: piece.view_as(p) for (name, p), piece in zip(learning.items(), pieces, strict=True)}
        # copies, because a module may write to its buffers; and as precise as λ is
        others = {n: p.detach() for n, p in self.module.named_parameters() if n not in state}
        for name, value in (others | dict(self.module.named_buffers())).items():
            state[name] = value.to(flat.dtype, copy=True) if value.is_floating_point() else value.clone()
        state[f"{self._name}.outer".lstrip(".")] = outer.unsqueeze(0)
        named = {f"network.{name}": value for name, value in state.items()}
        with _mode(self._modules, judging), seeded(seed, flat.device):
            return functional_call(self._applied, named, (function, *arguments, self.blocks.values(outer)))

    def _learning(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}


@contextmanager
def _mode(modules: list[nn.Module], judging: bool) -> Iterator[None]:
    """Evaluation mode, or the mode that the modules are in without their noise; afterwards as before."""
    off = [m for m in modules if m.training and (judging or is_noisy(m))]
    for one in off:
        one.training = False
    try:
        yield
    finally:
        for one in off:
            one.training = True
