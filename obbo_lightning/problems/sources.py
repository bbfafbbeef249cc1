"""Learned weights of several sources of labels that a classifier is trained on."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from obbo_lightning.core.parameter_groups import OnSimplex, ParameterGroups
from obbo_lightning.core.validation import at_least, decay
from obbo_lightning.networks.flat import Factory
from obbo_lightning.networks.mlp import MLP
from obbo_lightning.problems.module import Batch, Hyper, ModuleProblem


class SourceWeights(ModuleProblem):
    """g_t(λ, β) = Σ_s λ_s L(β; source s), f_t(λ, β) = L(β; clean validation examples), L the mean cross-entropy.

    A task has ``train_x``, ``train_y`` and ``train_source``, with the same number of rows of each source;
    ``validation_x`` and ``validation_y``, with correct labels; and ``test_x``, ``test_y`` for the accuracy.

    Args:
        network: a class or function without arguments that makes a network, or a network.
        sources: number of sources.
        floor: smallest weight of a source, as a fraction of the equal weight.

    >>> SourceWeights(nn.Linear(4, 3), sources=4).initial_outer(0)
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """

    def __init__(self, network: Factory | nn.Module = MLP, sources: int = 10, floor: float = 0.0) -> None:
        self.sources = at_least("sources", sources, 2)
        weights = OnSimplex(sources, floor=decay("floor", floor) / sources)
        super().__init__(network, ParameterGroups(sources=weights), self.weighted_loss, cross_entropy, accuracy)

    def weighted_loss(self, network: nn.Module, batch: Batch, hyper: Hyper) -> Tensor:
        """Return Σ_s λ_s · mean over the rows of s, computed as the mean over all rows of S λ_s(i) l_i."""
        losses = functional.cross_entropy(network(batch["x"]), batch["y"], reduction="none")
        return self.sources * (hyper["sources"][batch["source"]] * losses).mean()


def cross_entropy(network: nn.Module, batch: Batch, hyper: Hyper) -> Tensor:
    """Return the mean cross-entropy of a batch."""
    return functional.cross_entropy(network(batch["x"]), batch["y"])


def accuracy(network: nn.Module, batch: Batch, hyper: Hyper) -> dict[str, Tensor]:
    """Return the share of a batch that is classified correctly."""
    hits = network(batch["x"]).argmax(-1) == batch["y"]
    return {"accuracy": hits.to(torch.get_default_dtype()).mean()}
