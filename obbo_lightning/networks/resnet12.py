"""Twelve-layer residual network of the few-shot literature."""

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional

from obbo_lightning.core.validation import at_least
from obbo_lightning.networks.norms import make_norm


class ResNet12(nn.Module):
    """Four residual blocks of three 3x3 convolutions, each halving the image; global average; one linear layer.

    With the width 64 the blocks have 64, 160, 320 and 640 filters, and 3-channel images and 5 ways make 12,427,525
    parameters. They start as torch starts them.

    Reference: Lee, Maji, Ravichandran, Soatto, "Meta-Learning with Differentiable Convex Optimization", 2019; without
    its DropBlock.

    Args:
        ways: number of classes.
        width: filters of the first block; the others have 2.5, 5 and 10 times as many.
        channels: of the images.
        image_size: side of the images, at least 16.
        norm: ``batch`` (statistics of the batch, none kept: predictions are transductive), ``group``, ``layer`` or
            ``none``.

    >>> import torch
    >>> ResNet12(ways=3, width=2)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self, ways: int = 5, width: int = 64, channels: int = 3, image_size: int = 32, norm: str = "batch"
    ) -> None:
        super().__init__()
        at_least("problem.network.ways", ways, 2)
        at_least("problem.network.width", width, 1)
        at_least("problem.network.channels", channels, 1)
        at_least("problem.network.image_size", image_size, 16)
        widths = [channels, width, 5 * width // 2, 5 * width, 10 * width]
        self.blocks = nn.Sequential(*(ResidualBlock(a, b, norm) for a, b in pairwise(widths)))
        self.linear = nn.Linear(widths[-1], ways)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``[images, ways]``."""
        return self.linear(self.blocks(images).mean((-2, -1)))


class ResidualBlock(nn.Module):
    """σ(c(σ(c(σ(c(x))))) + s(x)), c a 3x3 convolution and s a 1x1 one, each with its norm, then a 2x2 max-pool."""

    def __init__(self, channels: int, filters: int, norm: str) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for size in (channels, filters, filters):
            layers += [_convolution(size, filters, 3, norm), make_norm(norm, filters, images=True), nn.LeakyReLU(0.1)]
        self.residual = nn.Sequential(*layers[:-1])  # the last activation comes after the sum
        self.shortcut = nn.Sequential(_convolution(channels, filters, 1, norm), make_norm(norm, filters, images=True))

    def forward(self, images: Tensor) -> Tensor:
        """Return feature maps of half the side."""
        # The activation is increasing, so it commutes with the maximum, and sees a quarter of the numbers behind it.
        pooled = functional.max_pool2d(self.residual(images) + self.shortcut(images), 2)
        return functional.leaky_relu(pooled, 0.1)


def _convolution(channels: int, filters: int, size: int, norm: str) -> nn.Conv2d:
    # A norm has a bias of its own.
    return nn.Conv2d(channels, filters, size, padding=size // 2, bias=norm == "none")
