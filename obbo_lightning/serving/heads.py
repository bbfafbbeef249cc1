"""A network for another number of classes than it was trained with."""

from functools import partial

import torch
from torch import Tensor, nn

from obbo_lightning.networks.flat import Factory, seeded


def with_classes(network: nn.Module, make: Factory | None, ways: int, classes: int) -> nn.Module:
    """The same network with ``classes`` outputs.

    Everything but the last layer stays. Tensors that have a row for each class (weight and bias of a last layer) get
    the learned rows, in turn, as often as it takes: fewer classes use the first of them, more classes share them. Which
    row a class starts from means nothing, because tasks number their classes at random; but that rows differ is worth
    much, because a few steps from equal rows move them apart too slowly (docs/predicting.md has the numbers).

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
    return learned[torch.arange(len(made)) % ways]
