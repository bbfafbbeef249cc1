"""Multilayer perceptron for vectors, tables and flattened images."""

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from obbo_lightning.core.validation import at_least
from obbo_lightning.networks.norms import make_norm


class MLP(nn.Module):
    """Blocks of linear layer, norm and ReLU on the flattened example; one linear layer.

    Args:
        ways: number of classes.
        shape: of one example.
        widths: of the hidden layers; an empty list makes a linear classifier.
        norm: ``none``, ``layer``, ``group`` or ``batch`` (statistics of the batch, none kept: predictions are
            transductive).

    >>> import torch
    >>> MLP(ways=3, shape=[4], widths=[8])(torch.zeros(2, 4)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        ways: int = 5,
        shape: Sequence[int] = (3, 32, 32),
        widths: list[int] = [64, 64],  # noqa: B006 never changed
        norm: str = "none",
    ) -> None:
        super().__init__()
        at_least("problem.network.ways", ways, 2)
        if not shape:
            raise ValueError(f"problem.network.shape must have an axis or more, got {shape!r}")
        for size in shape:
            at_least("problem.network.shape", size, 1)
        for width in widths:
            at_least("problem.network.widths", width, 1)
        sizes = [math.prod(shape), *widths]
        self.blocks = nn.Sequential(
            nn.Flatten(),
            *(nn.Sequential(nn.Linear(a, b), make_norm(norm, b, images=False), nn.ReLU()) for a, b in pairwise(sizes)),
        )
        self.linear = nn.Linear(sizes[-1], ways)

    def forward(self, examples: Tensor) -> Tensor:
        """Return logits ``[examples, ways]``."""
        return self.linear(self.blocks(examples))
