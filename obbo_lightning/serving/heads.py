"""A network for another number of classes than it was trained with."""

from functools import partial

import torch
from torch import Tensor, nn

from obbo_lightning.networks.flat import Factory, seeded


def with_classes(network: nn.Module, make: Factory | None, ways: int, classes: int) -> nn.Module:
    """The same network with ``classes`` outputs, none of which is ahead of another.

    Everything but the last layer stays. Of each tensor that has a row for each class (weight and bias of a last layer)
    every new row is the mean of the learned ones: which of the learned rows a class would get is of no meaning, because
    tasks number their classes at random.

    Args:
        network: with what was learned.
        make: makes it anew, a partial of its class.
        ways: classes of a training task.
        classes: how many there are to be.
    """
    if not isinstance(make, partial) or "ways" not in make.keywords:
        raise ValueError(
            f"labels must be of {ways} classes for a network whose class has no argument ways, got {classes} classes"
        )
    with seeded(0, torch.device("cpu")):
        wider = make.func(*make.args, **{**make.keywords, "ways": classes})
    learned, made = network.state_dict(), wider.state_dict()
    wider.load_state_dict({name: _fitted(name, learned[name], made[name], ways) for name in made})
    return wider.to(next(iter(learned.values())).dtype)


def _fitted(name: str, learned: Tensor, made: Tensor, ways: int) -> Tensor:
    if learned.shape == made.shape:
        return learned
    if learned.shape[1:] != made.shape[1:] or len(learned) != ways:
        raise ValueError(
            f"labels must be of {ways} classes: {name} of the network is {list(learned.shape)}, and with another "
            f"number of classes {list(made.shape)}, which is no row for each"
        )
    return learned.mean(0, keepdim=True).expand_as(made)
