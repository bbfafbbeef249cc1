"""Classifier heads for another number of classes than in training."""

from functools import partial

import torch
from torch import nn

from obbo_lightning.networks.flat import Factory, seeded


def resize_classifier(network: nn.Module, make: Factory | None, ways: int, classes: int) -> nn.Module:
    """Return the same network with ``classes`` outputs.

    Everything but the last layer stays. Tensors that have a row for each class (weight and bias of a last layer) repeat
    the learned rows: fewer classes use the first of them, more classes share them. Which row a class starts from has no
    meaning, because tasks number their classes at random; but rows must differ, because a few steps from equal rows
    separate them too slowly (docs/predicting.md has the numbers).

    ``make``, a partial of the network's class, has constructed a network for the ``ways`` classes of a training task.
    """
    if not isinstance(make, partial) or "ways" not in make.keywords:
        raise ValueError(
            f"labels must be of {ways} classes for a network whose class has no argument ways, got {classes} classes"
        )
    with seeded(0, torch.device("cpu")):
        resized = make.func(*make.args, **{**make.keywords, "ways": classes})
    learned, made = network.state_dict(), resized.state_dict()
    for name, values in learned.items():
        before, after = values.shape, made[name].shape
        if before != after:
            if before[1:] != after[1:] or len(values) != ways:
                raise ValueError(
                    f"labels must be of {ways} classes: {name} of the network is {list(before)}, and with another "
                    f"number of classes {list(after)}, which is not one row per class"
                )
            learned[name] = values[torch.arange(len(made[name])) % ways]
    resized.load_state_dict(learned)
    return resized.to(next(iter(learned.values())).dtype)
