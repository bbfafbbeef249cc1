"""Learned offsets and scales of logits, for classes that are rare in training but not in validation."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from obbo_lightning.core.geometry import AdaptiveDiagonal
from obbo_lightning.core.parameter_groups import Interval, ParameterGroups
from obbo_lightning.core.validation import at_least, positive
from obbo_lightning.networks.flat import Factory
from obbo_lightning.networks.mlp import MLP
from obbo_lightning.problems.module import Batch, Hyper, ModuleProblem
from obbo_lightning.problems.sources import cross_entropy


class VectorScaling(ModuleProblem):
    """g_t(λ, β) = L(scale ⊙ z(β) + offset; training batch), f_t(λ, β) = L(z(β); balanced batch), L the cross-entropy.

    With scales of 1 and the logarithms of the classes' frequencies as offsets this is logit adjustment, whose logits
    z(β) are those of a training set in which no class is rare.

    A rare class has a small hypergradient only because it is rare, so the geometry of both parameter groups adapts to
    each coordinate.

    A task has ``train_x``, ``train_y``; ``validation_x``, ``validation_y`` and ``test_x``, ``test_y``, both balanced;
    and ``frequency``, the frequencies of the classes in training.

    Reference: Kini, Paraskevas, Oymak, Thrampoulidis, "Label-Imbalanced and Group-Sensitive Classification under
    Overparameterization", 2021.

    Args:
        network: a class or function without arguments that makes a network, or a network.
        ways: number of classes.
        reach: offsets lie between −reach and reach.
        factor: scales lie between 1/factor and factor.

    >>> VectorScaling(nn.Linear(4, 3), ways=3).initial_outer(0)  # offsets, scales
    tensor([[0., 0., 0., 1., 1., 1.]])
    """

    def __init__(
        self, network: Factory | nn.Module = MLP, ways: int = 5, reach: float = 5.0, factor: float = 2.0
    ) -> None:
        at_least("ways", ways, 2)
        positive("problem.reach", reach)
        if not positive("problem.factor", factor) > 1:
            raise ValueError(f"problem.factor must be more than 1, got {factor!r}")
        groups = ParameterGroups(
            offset=Interval(-reach, reach, start=0.0, size=ways, geometry=AdaptiveDiagonal()),
            scale=Interval(1 / factor, factor, start=1.0, size=ways, geometry=AdaptiveDiagonal()),
        )
        super().__init__(network, groups, scaled_cross_entropy, cross_entropy, recalls)


def scaled_cross_entropy(network: nn.Module, batch: Batch, hyper: Hyper) -> Tensor:
    """Return the mean cross-entropy of scale ⊙ z + offset."""
    return functional.cross_entropy(hyper["scale"] * network(batch["x"]) + hyper["offset"], batch["y"])


def recalls(network: nn.Module, batch: Batch, hyper: Hyper) -> dict[str, Tensor]:
    """Return the mean recall over classes, and the accuracy at the training frequencies, Σ_c frequency_c recall_c.

    A batch has examples of every class.
    """
    labels, frequency = batch["y"], batch["frequency"]
    hits = (network(batch["x"]).argmax(-1) == labels).to(frequency)
    of_class = torch.zeros_like(frequency).index_add(0, labels, hits) / labels.bincount(minlength=len(frequency))
    return {"balanced_accuracy": of_class.mean(), "accuracy": frequency @ of_class}
