"""A module trained elsewhere, as a pure function of its hyperparameters and a flat vector of its parameters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from obbo_lightning.core.parameter_groups import ParameterGroups
from obbo_lightning.networks.flat import FunctionCaller, is_noisy, seeded
from obbo_lightning.networks.hyperparameters import Hyperparameters


class FunctionalModule:
    """Functions of a module at any (λ, β) that leave its parameters, buffers, modes and random numbers unchanged.

    Args:
        module: the module; it must contain one `Hyperparameters`.

    >>> from obbo_lightning import Positive
    >>> module = nn.Sequential(nn.Linear(2, 1), Hyperparameters(decay=Positive(0.1)))
    >>> functional = FunctionalModule(module)
    >>> penalty = lambda module, hyper: hyper["decay"] * module[0].weight.square().sum()
    >>> functional.apply(torch.tensor([0.5]), torch.ones(3), penalty, seed=0, evaluating=False)
    tensor(1.)
    """

    def __init__(self, module: nn.Module) -> None:
        found = [(name, m) for name, m in module.named_modules() if isinstance(m, Hyperparameters)]
        if len(found) != 1:
            raise ValueError(
                f"the module must have one Hyperparameters, such as self.hyper = Hyperparameters(...), got {len(found)}"
            )
        self._name, self.hyper = found[0]
        self.module = module
        self._caller = FunctionCaller(module)
        self._modules = list(module.modules())

    @property
    def groups(self) -> ParameterGroups:
        """Parameter groups of λ."""
        return self.hyper.groups

    def flat(self) -> Tensor:
        """Return a copy of the trainable parameters ``[p]`` in the dtype of λ."""
        return torch.cat([p.detach().flatten() for p in self._trainable().values()]).to(self.hyper.outer.dtype)

    def apply(
        self, outer: Tensor, flat: Tensor, function: Callable[..., Any], *arguments: Any, seed: int, evaluating: bool
    ) -> Any:
        """Return ``function(module, *arguments, hyper)`` at λ ``[d]`` and β ``[p]``; twice differentiable.

        Dropout is left out; a function that draws random numbers nevertheless draws the same ones at every call with
        the same ``seed``. With ``evaluating`` the module is in evaluation mode.
        """
        trainable = self._trainable()
        pieces = flat.split([p.numel() for p in trainable.values()])
        state = {name: piece.view_as(p) for (name, p), piece in zip(trainable.items(), pieces, strict=True)}
        # Copies, because a module may write to its buffers; in the precision of λ.
        others = {n: p.detach() for n, p in self.module.named_parameters() if n not in state}
        for name, value in (others | dict(self.module.named_buffers())).items():
            state[name] = value.to(flat.dtype, copy=True) if value.is_floating_point() else value.clone()
        state[f"{self._name}.outer".lstrip(".")] = outer.unsqueeze(0)
        named = {f"network.{name}": value for name, value in state.items()}
        with _without_noise(self._modules, evaluating), seeded(seed, flat.device):
            return functional_call(self._caller, named, (function, *arguments, self.groups.values(outer)))

    def _trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}


@contextmanager
def _without_noise(modules: list[nn.Module], evaluating: bool) -> Iterator[None]:
    """Switch dropout off, or all modules to evaluation mode; restore the modes afterwards."""
    switched = [m for m in modules if m.training and (evaluating or is_noisy(m))]
    for module in switched:
        module.training = False
    try:
        yield
    finally:
        for module in switched:
            module.training = True
