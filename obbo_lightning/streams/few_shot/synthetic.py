"""Few-shot tasks from generated images: 100 classes in 20 superclasses, no files, a pure function of seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from obbo_lightning.core.validation import at_least, nonnegative, one_of, require_memory
from obbo_lightning.streams.few_shot.stored import PixelScaler
from obbo_lightning.streams.few_shot.stream import FewShotStream

CLASSES = 100

LOBES = (0, 3, 4, 5, 6)  # of the outline, by superclass
FREQUENCIES = (4.0, 6.0, 8.5, 11.5, 15.0)  # of the texture, by class


class GeneratedImages:
    """Textured shapes on a shaded background, generated on demand.

    A superclass is an outline (disk, three- to six-lobed) and a kind of texture (stripes, checks, rings, strokes); its
    five classes differ in the texture's frequency and direction, the depth of the lobes, the hole and the hue. Every
    image has its own position, size, rotation, colours and noise. The arguments are those of `SyntheticStream`.
    """

    def __init__(self, image_size: int = 32, channels: int = 3, noise: float = 0.8) -> None:
        require_memory("data.image_size", image_size, 16.0 * channels * image_size**2)
        self.image_size, self.channels, self.noise = image_size, channels, noise
        self.shape: tuple[int, ...] = (channels, image_size, image_size)
        axis = torch.linspace(-1, 1, image_size)
        self._y, self._x = torch.meshgrid(axis, axis, indexing="ij")
        classes = torch.arange(CLASSES)
        superclass, member = classes // 5, classes % 5
        kind = superclass // 5
        self._lobes = torch.tensor(LOBES)[superclass % 5].float()
        self._depth = 0.2 + 0.08 * member
        self._hole = (member % 2).float()
        self._frequency = torch.tensor(FREQUENCIES)[member]
        self._direction = member * (math.pi / 5) + superclass * 0.3
        self._texture = torch.nn.functional.one_hot(kind, 4).float()  # stripes, checks, rings, strokes
        hue = 2 * math.pi * ((7 * classes) % CLASSES) / CLASSES
        self._colour = 0.5 + 0.3 * torch.stack([hue.cos(), (hue - 2.1).cos(), (hue + 2.1).cos()], dim=-1)

    def require(self, classes: Sequence[int], count: int) -> None:
        pass  # there is no limit

    def draw(self, classes: Tensor, generator: torch.Generator) -> Tensor:
        """Return one image for each entry of ``classes`` ``[n, channels, size, size]``, of mean 0 and deviation 1."""
        n = classes.shape[0]
        place = torch.rand(n, 12, generator=generator)

        def column(values: Tensor) -> Tensor:  # a property of the class
            return values[classes].reshape(n, 1, 1)

        def between(i: int, low: float, high: float) -> Tensor:  # a property of the image
            return (low + (high - low) * place[:, i]).reshape(n, 1, 1)

        # coordinates of the shape: shifted, rotated, scaled
        x, y = self._x - between(0, -0.3, 0.3), self._y - between(1, -0.3, 0.3)
        turn, size = between(2, -0.6, 0.6), between(3, 0.45, 0.8)
        cos, sin = turn.cos() / size, turn.sin() / size
        u, v = x * cos + y * sin, y * cos - x * sin
        radius = (u.square() + v.square()).sqrt()

        outline = 1 + column(self._depth) * (column(self._lobes) * torch.atan2(v, u)).cos()
        mask = (10 * (outline - radius)).sigmoid() * (1 - column(self._hole) * (14 * (0.4 - radius)).sigmoid())

        frequency, direction = column(self._frequency), column(self._direction)
        along = u * direction.cos() + v * direction.sin()
        across = v * direction.cos() - u * direction.sin()
        stripes = (frequency * along).sin()
        stripe, check, ring, stroke = self._texture[classes].reshape(n, 4, 1, 1).unbind(1)
        texture = stripe * stripes + check * stripes * (frequency * across).sin() + ring * (frequency * radius).cos()
        texture = texture + stroke * (2 * torch.exp(-30 * (along.abs() - 3 / frequency).square()) - 1)

        front = self._colour[classes] + 0.5 * (place[:, 4:7] - 0.5)
        back = 0.5 + 0.8 * (place[:, 7:10] - 0.5)
        shade = between(10, -0.4, 0.4) * self._x + between(11, -0.4, 0.4) * self._y
        grain = self.noise * (torch.rand(n, self.image_size, self.image_size, generator=generator) - 0.5)
        light = mask * (0.35 * texture) + (1 - mask) * shade + grain
        colour = front[:, :, None, None] * mask[:, None] + back[:, :, None, None] * (1 - mask[:, None])
        images = (colour + light[:, None] - 0.5) * 3
        return images if self.channels == 3 else images.mean(1, keepdim=True)


@dataclass(eq=False, repr=False)
class SyntheticStream(FewShotStream):
    """The default stream: few-shot tasks from generated images, 60/20/20 classes in 12/4/4 superclasses.

    Args:
        image_size: side of the images.
        channels: 3, or 1 for grey.
        noise: amplitude of the noise of pixels; more is harder.
    """

    image_size: int = 32
    channels: int = 3
    noise: float = 0.8

    def __post_init__(self) -> None:
        at_least("data.image_size", self.image_size, 16)
        one_of("data.channels", self.channels, (1, 3))
        nonnegative("data.noise", self.noise)
        # Three- and five-lobed outlines are never trained on: outline number 1 tests, number 3 validates.
        splits: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
        for c in range(CLASSES):
            splits[{1: "test", 3: "validation"}.get(c // 5 % 5, "train")].append(c)
        source = GeneratedImages(self.image_size, self.channels, self.noise)
        self.make_tasks(source, splits, {c: c // 5 for c in range(CLASSES)})

    def inputs(self) -> dict[str, Any]:
        # generated images are (pixel − 1/2) · 3
        scaler = PixelScaler([0.5] * self.channels, [1 / 3] * self.channels)
        return scaler.inputs(self.train.source.shape)
