"""Classifier heads for another number of classes than in training."""

from functools import partial

import torch
from torch import Tensor, nn

from obbo_lightning.networks.flat import Factory, seeded


def resize_classifier(network: nn.Module, make: Factory | None, ways: int, classes: int) -> nn.Module:
    """Return the same network with ``classes`` outputs.

    Everything but the last layer stays. Tensors that have a row for each class (weight and bias of a last layer) repeat
    the learned rows: fewer classes use the first of them, more classes share them. Which row a class starts from has no
    meaning, because tasks number their classes at random; but rows must differ, because a few steps from equal rows
    separate them too slowly (docs/predicting.md has the numbers).

    Args:
        network: the trained network.
        make: constructor of such a network, a partial of its class.
        ways: classes of a training task.
        classes: number of outputs.
    """
    if not isinstance(make, partial) or "ways" not in make.keywords:
        raise ValueError(
            f"labels must be of {ways} classes for a network whose class has no argument ways, got {classes} classes"
        )
    with seeded(0, torch.device("cpu")):
        resized = make.func(*make.args, **{**make.keywords, "ways": classes})
    learned, made = network.state_dict(), resized.state_dict()
    resized.load_state_dict({name: _resize(name, learned[name], made[name], ways) for name in made})
    return resized.to(next(iter(learned.values())).dtype)


def _resize(name: str, learned: Tensor, made: Tensor, ways: int) -> Tensor:
    if learned.shape == made.shape:
        return learned
    if learned.shape[1:] != made.shape[1:] or len(learned) != ways:
        raise ValueError(
            f"labels must be of {ways} classes: {name} of the network is {list(learned.shape)}, and with another "
            f"number of classes {list(made.shape)}, which is not one row per class"
        )
    return learned[torch.arange(len(made)) % ways]
