"""Any network as a pure function of a flat vector of its parameters, which may be a parameter group of λ."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

from obbo_lightning.core.geometry import AdaptiveDiagonal
from obbo_lightning.core.parameter_groups import ParameterGroup
from obbo_lightning.networks.norms import with_accurate_batch_norms

Factory = Callable[[], nn.Module]


class FlatNetwork:
    """Logits as a function of (parameters, examples) and nothing else.

    The trainable parameters are one vector. The others (``requires_grad`` false) and the buffers are constants: they
    follow the vector to its device and dtype, and a forward pass changes none of them. Modules stay in the mode,
    training or evaluation, in which they were given.

    Args:
        network: a class or function without arguments that makes a network, or a network. From the first, `initial`
            makes a new network for every seed; its constants are those of seed 0. The second starts from its weights.

    >>> network = FlatNetwork(nn.Linear(3, 2))
    >>> network.size, network(network.initial(0), torch.zeros(4, 3)).shape
    (8, torch.Size([4, 2]))
    """

    def __init__(self, network: Factory | nn.Module) -> None:
        self._factory = None if isinstance(network, nn.Module) else network
        self.template = copy.deepcopy(network) if isinstance(network, nn.Module) else _make(network, seed=0)
        if any(isinstance(p, nn.UninitializedParameter) for p in self.template.parameters()):
            raise ValueError(f"problem.network must know the sizes of its layers, got {_name(network)} with lazy ones")
        self._trainable = {name: p for name, p in self.template.named_parameters() if p.requires_grad}
        if not self._trainable:
            raise ValueError(f"problem.network must have a trainable parameter, got {_name(network)} without any")
        self.size = sum(p.numel() for p in self._trainable.values())
        self.is_stochastic = any(is_noisy(module) for module in self.template.modules())
        self.transductive = any(  # whether a prediction depends on the other examples of its batch
            isinstance(m, _BatchNorm) and (m.training or m.running_mean is None) for m in self.template.modules()
        )
        noisy = with_accurate_batch_norms(without_running_statistics(copy.deepcopy(self.template)))
        self._noisy = FunctionCaller(noisy)
        self._quiet = FunctionCaller(without_noise(copy.deepcopy(noisy))) if self.is_stochastic else self._noisy
        self._is_deterministic = False  # not known yet
        self._constants: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}

    def initial(self, seed: int) -> Tensor:
        """Return the flat parameters ``[d]`` to start from."""
        network = self.template if self._factory is None else _make(self._factory, seed)
        return torch.cat([p.detach().flatten() for p in network.parameters() if p.requires_grad])

    def loaded(self, flat: Tensor) -> nn.Module:
        """Return an ordinary network with these parameters and the template's constants."""
        network = copy.deepcopy(self.template).to(flat.device, flat.dtype)
        network.load_state_dict(unflatten(flat.detach(), self._trainable), strict=False)  # it has the constants already
        return network

    def apply(self, flat: Tensor, function: Callable[..., Any], *arguments: Any, noise: int | None = None) -> Any:
        """Return ``function(network, *arguments)`` for the network with these parameters.

        Dropout draws from the seed ``noise``, and is left out where that is None.
        """
        state = {f"network.{name}": value for name, value in self._state(flat).items()}
        if noise is not None and self.is_stochastic:
            with seeded(noise, flat.device):
                return functional_call(self._noisy, state, (function, *arguments))
        before = None if self._is_deterministic else torch.get_rng_state()
        found = functional_call(self._quiet, state, (function, *arguments))
        if before is not None and not torch.equal(before, torch.get_rng_state()):
            raise ValueError(  # its loss would differ at every call
                f"problem.network must draw random numbers in modules of torch.nn such as nn.Dropout, got "
                f"{type(self.template).__name__}, which draws in another way"
            )
        self._is_deterministic = True
        return found

    def __call__(self, flat: Tensor, examples: Tensor, noise: int | None = None) -> Tensor:
        """Return logits ``[n, ways]``."""
        logits = self.apply(flat, nn.Module.__call__, examples, noise=noise)
        if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(examples):
            found = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ValueError(f"problem.network must return logits [{len(examples)}, ways], got {found}")
        return logits

    def _state(self, flat: Tensor) -> dict[str, Tensor]:
        place = (flat.device, flat.dtype)
        if place not in self._constants:
            frozen = {name: p.detach() for name, p in self.template.named_parameters() if not p.requires_grad}
            self._constants[place] = {
                name: value.to(flat.device, flat.dtype if value.is_floating_point() else value.dtype)
                for name, value in (frozen | dict(self.template.named_buffers())).items()
            }
        # copies, because a module may write to its buffers
        constants = {name: value.clone() for name, value in self._constants[place].items()}
        return unflatten(flat, self._trainable) | constants


class Weights(ParameterGroup):
    """All trainable parameters of a network, flat: the paper's adaptive geometry on R^d.

    With ``lr: auto`` all weights together move by s times their root mean square.

    Args:
        network: whose weights are the start; or a class or function without arguments that makes one from the seed.
        settings: ``geometry``, ``regularizer``, ``domain`` and ``lr`` of a `ParameterGroup`.

    >>> weights = Weights(nn.Linear(3, 2))
    >>> weights.size, weights.network(weights.start(), weights.start().new_ones(4, 3)).shape
    (8, torch.Size([4, 2]))
    """

    has_named_coordinates = False

    def __init__(self, network: Factory | nn.Module, **settings: Any) -> None:
        self.network = FlatNetwork(network)
        super().__init__(self.network.initial(0), **{"geometry": AdaptiveDiagonal()} | settings)

    def start(self, seed: int = 0) -> Tensor:
        """Return the network's own initialisation from ``seed``, or the weights that it came with."""
        return self.network.initial(seed)


class FunctionCaller(nn.Module):
    """Module that calls any function of a network, so that `functional_call` is not limited to its ``forward``."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.network, *arguments)


def unflatten(flat: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return views of a flat vector by the names and shapes of parameters."""
    pieces = flat.split([p.numel() for p in parameters.values()])
    return {name: piece.view_as(p) for (name, p), piece in zip(parameters.items(), pieces, strict=True)}


def without_noise(network: nn.Module) -> nn.Module:
    """Switch the dropout of a network off, and return it."""
    for module in network.modules():
        if is_noisy(module):
            module.training = False  # .eval() would also switch its submodules
    return network


def without_running_statistics(network: nn.Module) -> nn.Module:
    """Stop the norms that are in training mode from recording running statistics, and return the network."""
    for module in network.modules():
        if isinstance(module, _NormBase) and module.training:
            module.track_running_stats = False
    return network


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generators of the CPU and of ``device``, and restore them afterwards."""
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every GPU
        for one in cuda:
            with torch.cuda.device(one):
                torch.cuda.manual_seed(seed)
        yield


def _make(factory: Any, seed: int) -> nn.Module:
    try:
        inspect.signature(factory).bind()
    except (TypeError, ValueError) as error:
        wanted = "a network, or a class or function that makes one without arguments"
        raise ValueError(f"problem.network must be {wanted}, got {_name(factory)}: {error}") from None
    with seeded(seed, torch.device("cpu")):
        network = factory()
    if not isinstance(network, nn.Module):
        raise ValueError(f"problem.network must make an nn.Module, got {_name(factory)}, which made {network!r}")
    return network


def _name(network: Any) -> str:
    made = getattr(network, "func", network)  # of a partial
    return getattr(made, "__name__", None) or (type(made).__name__ if isinstance(made, nn.Module) else repr(made))


def is_noisy(module: nn.Module) -> bool:
    """Return whether this module itself draws random numbers in its present mode."""
    if isinstance(module, _DropoutNd):
        return module.training and module.p > 0
    # these two apply dropout without a dropout module
    return isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) and module.training and module.dropout > 0
