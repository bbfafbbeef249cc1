"""Whom to trust: a model trained on several sources of labels, whose weights are learned."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from obbo_lightning.core.blocks import Blocks, OnSimplex
from obbo_lightning.core.validation import at_least, decay
from obbo_lightning.networks.flat import Factory
from obbo_lightning.networks.mlp import MLP
from obbo_lightning.problems.module import Batch, Hyper, ModuleProblem


class TrustedSources(ModuleProblem):
    """g_t(λ, β) = Σ_s λ_s L(β; source s), f_t(λ, β) = L(β; trusted examples), L the mean cross-entropy.

    A task has ``train_x``, ``train_y`` and ``train_source``, as many rows of each source; ``validation_x`` and
    ``validation_y``, which can be trusted; and ``test_x``, ``test_y``, which accuracy is reported on.

    Args:
        network: a class or function that makes a network without arguments, or a network.
        sources: how many there are.
        floor: smallest weight of a source, in parts of an equal one: none is given up for good.
    """

    def __init__(self, network: Factory | nn.Module = MLP, sources: int = 10, floor: float = 0.0) -> None:
        self.sources = at_least("sources", sources, 2)
        weights = OnSimplex(sources, floor=decay("floor", floor) / sources)
        super().__init__(network, Blocks(sources=weights), self.weighted, cross_entropy, accuracy)

    def weighted(self, network: nn.Module, batch: Batch, hyper: Hyper) -> Tensor:
        """Σ_s λ_s · mean over the rows of s, which is the mean over all rows of (number of sources) λ_s(i) l_i."""
        losses = functional.cross_entropy(network(batch["x"]), batch["y"], reduction="none")
        return self.sources * (hyper["sources"][batch["source"]] * losses).mean()


def cross_entropy(network: nn.Module, batch: Batch, hyper: Hyper) -> Tensor:
    """The mean cross-entropy of a batch."""
    return functional.cross_entropy(network(batch["x"]), batch["y"])


def accuracy(network: nn.Module, batch: Batch, hyper: Hyper) -> dict[str, Tensor]:
    """How many of a batch are right."""
    hits = network(batch["x"]).argmax(-1) == batch["y"]
    return {"accuracy": hits.to(torch.get_default_dtype()).mean()}
