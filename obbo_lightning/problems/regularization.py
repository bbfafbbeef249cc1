"""Learned weight decay and label smoothing of a network."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from obbo_lightning.core.domains import Box
from obbo_lightning.core.parameter_groups import Interval, ParameterGroups, Positive
from obbo_lightning.networks.cnn4 import CNN4
from obbo_lightning.networks.flat import Factory
from obbo_lightning.problems.module import Batch, Hyper, ModuleProblem
from obbo_lightning.problems.sources import accuracy, cross_entropy


class Regularized(ModuleProblem):
    """g_t(λ, β) = L(β; training batch, labels smoothed by s) + ½ decay ‖β‖², f_t(λ, β) = L(β; validation batch).

    L is the mean cross-entropy, and λ is (decay, s). A task has ``train_x``, ``train_y``; ``validation_x``,
    ``validation_y``; and ``test_x``, ``test_y`` for accuracy and cross-entropy.

    Args:
        network: a class or function without arguments that makes a network, or a network.

    >>> list(Regularized(nn.Linear(4, 3)).groups.named)
    ['decay', 'smoothing']
    """

    def __init__(self, network: Factory | nn.Module = CNN4) -> None:
        # below, decay has no effect; above, a network without norms collapses to zero for good
        groups = ParameterGroups(decay=Positive(1e-3, domain=Box(1e-4, 1e-2)), smoothing=Interval(0.0, 0.3, start=0.1))
        super().__init__(network, groups, regularized_cross_entropy, cross_entropy, accuracy_and_loss)


def regularized_cross_entropy(network: nn.Module, batch: Batch, hyper: Hyper) -> Tensor:
    """Return the mean cross-entropy with a share s of each label spread over all classes, plus ½ decay ‖β‖²."""
    logs = functional.log_softmax(network(batch["x"]), -1)
    # −(1 − s) log p_y − s/C Σ_c log p_c
    fit = (1 - hyper["smoothing"]) * functional.nll_loss(logs, batch["y"]) - hyper["smoothing"] * logs.mean()
    weights = torch.cat([values.flatten() for values in network.parameters()])
    return fit + 0.5 * hyper["decay"] * weights.square().sum()


def accuracy_and_loss(network: nn.Module, batch: Batch, hyper: Hyper) -> dict[str, Tensor]:
    """Return accuracy and mean cross-entropy of a batch."""
    return accuracy(network, batch, hyper) | {"cross_entropy": cross_entropy(network, batch, hyper)}
