"""How much to regularize: the weight decay and the label smoothing of a network, learned while it is trained."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from obbo_lightning.core.blocks import Blocks, Interval, Positive
from obbo_lightning.core.domains import Box
from obbo_lightning.networks.cnn4 import CNN4
from obbo_lightning.networks.flat import Factory
from obbo_lightning.problems.module import Batch, Hyper, ModuleProblem
from obbo_lightning.problems.sources import accuracy, cross_entropy


class Regularized(ModuleProblem):
    """g_t(λ, β) = L(β; training batch, labels smoothed by s) + ½ decay ‖β‖², f_t(λ, β) = L(β; validation batch).

    L is the mean cross-entropy, and λ is (decay, s). A task has ``train_x``, ``train_y``; ``validation_x``,
    ``validation_y``; and ``test_x``, ``test_y``, which accuracy and cross-entropy are reported on.

    Args:
        network: a class or function that makes a network without arguments, or a network.
    """

    def __init__(self, network: Factory | nn.Module = CNN4) -> None:
        # beyond these decay does nothing, or a network without norms dies of it and nothing brings it back
        blocks = Blocks(decay=Positive(1e-3, domain=Box(1e-4, 1e-2)), smoothing=Interval(0.0, 0.3, start=0.1))
        super().__init__(network, blocks, regularized_cross_entropy, cross_entropy, accuracy_and_loss)


def regularized_cross_entropy(network: nn.Module, batch: Batch, hyper: Hyper) -> Tensor:
    """The mean cross-entropy, a share s of each label spread over all classes, and ½ decay times squared weights."""
    logs = functional.log_softmax(network(batch["x"]), -1)
    # −(1 − s) log p_y − s/C Σ_c log p_c
    fit = (1 - hyper["smoothing"]) * functional.nll_loss(logs, batch["y"]) - hyper["smoothing"] * logs.mean()
    weights = torch.cat([values.flatten() for values in network.parameters()])
    return fit + 0.5 * hyper["decay"] * weights.square().sum()


def accuracy_and_loss(network: nn.Module, batch: Batch, hyper: Hyper) -> dict[str, Tensor]:
    """How many of a batch are right, and their mean cross-entropy."""
    return accuracy(network, batch, hyper) | {"cross_entropy": cross_entropy(network, batch, hyper)}
