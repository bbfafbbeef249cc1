"""Four-block convolutional network of the few-shot literature."""

from itertools import pairwise

from torch import Tensor, nn

from obbo_lightning.core.validation import at_least
from obbo_lightning.networks.norms import make_norm


class CNN4(nn.Module):
    """Four blocks of 3x3 convolution, norm, ReLU, 2x2 max-pool; one linear layer.

    With 64 filters, 3x32x32 images and 5 ways it has 114,373 parameters.

    Args:
        ways: number of classes.
        filters: number of filters in each convolution.
        channels: of the images.
        image_size: side of the images, at least 16.
        norm: ``batch`` (statistics of the batch, none kept: predictions are transductive), ``group``, ``layer`` or
            ``none``.

    >>> import torch
    >>> CNN4(ways=3, filters=8, image_size=16)(torch.zeros(2, 3, 16, 16)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self, ways: int = 5, filters: int = 64, channels: int = 3, image_size: int = 32, norm: str = "batch"
    ) -> None:
        super().__init__()
        at_least("problem.network.ways", ways, 2)
        at_least("problem.network.filters", filters, 1)
        at_least("problem.network.channels", channels, 1)
        at_least("problem.network.image_size", image_size, 16)
        widths = [channels, filters, filters, filters, filters]
        self.blocks = nn.Sequential()
        for before, after in pairwise(widths):
            convolution, pool = nn.Conv2d(before, after, kernel_size=3, padding=1), nn.MaxPool2d(2)
            # ReLU commutes with the maximum, derivatives too, and sees a quarter of the numbers after it
            self.blocks.append(nn.Sequential(convolution, make_norm(norm, after, images=True), pool, nn.ReLU()))
        self.linear = nn.Linear(filters * (image_size // 16) ** 2, ways)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``[images, ways]``."""
        return self.linear(self.blocks(images).flatten(1))
