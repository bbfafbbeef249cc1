"""Few-shot tasks from your own labelled images: one folder per class, or an npz file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from obbo_lightning.core.validation import at_least, require_memory
from obbo_lightning.streams.few_shot.stream import StoredClasses, StoredFewShotStream
from obbo_lightning.streams.readers import read_class_folders, read_images, require_file, resize_square


@dataclass(frozen=True)
class PixelScaler:
    """Standardises the bytes of images.

    Args:
        mean: of each channel, for pixels between 0 and 1; subtracted.
        deviation: of each channel; divided by.
    """

    mean: Sequence[float]
    deviation: Sequence[float]

    @classmethod
    def fit(cls, images: NDArray[np.uint8]) -> "PixelScaler":
        """Return the scaler of images ``[n, height, width, channels]``."""
        # Sums over the counts of each value are exact, and need no copy of the images in floating point.
        mean, deviation = [], []
        for channel in range(images.shape[3]):
            counts = np.bincount(images[..., channel].ravel(), minlength=256)
            values = np.arange(256) / 255
            centre = float((counts * values).sum() / counts.sum())
            spread = float((counts * (values - centre) ** 2).sum() / counts.sum()) ** 0.5
            mean.append(centre)
            deviation.append(spread or 1.0)
        return cls(mean, deviation)

    def __call__(self, images: Tensor) -> Tensor:
        """Return images ``[n, channels, size, size]`` with mean 0 and deviation 1."""
        mean, deviation = (torch.tensor(x).reshape(-1, 1, 1) for x in (self.mean, self.deviation))
        # The view is channels-last, in which products with second derivatives are half as fast.
        pixels = images.float().contiguous(memory_format=torch.contiguous_format)
        return (pixels / 255 - mean) / deviation

    def inputs(self, shape: Sequence[int], trained_on: Sequence[str] = ()) -> dict[str, Any]:
        """Return what `Stream.inputs` returns for images of this shape; ``trained_on`` names the training classes."""
        return {
            "kind": "images",
            "shape": list(shape),
            "square": "the largest one in the middle",
            "scaled": "bilinear",
            "mean": list(self.mean),
            "deviation": list(self.deviation),
            "trained_on": list(trained_on),
        }


def channels_first(images: NDArray[np.uint8]) -> Tensor:
    """Return a view of images ``[n, size, size, channels]`` in torch's order."""
    return torch.from_numpy(images).permute(0, 3, 1, 2)


@dataclass(eq=False, repr=False)
class ImageFolderStream(StoredFewShotStream):
    """Few-shot tasks from a folder with one folder of images per class, or from an npz file; kept in memory.

    Classes are split, not images: by the lists where they are given, and by ratio for the others; the split does not
    depend on ``seed``. Pixels are standardised with the mean and deviation of the training classes. With order
    ``drift`` the mix of classes, in the order of their names, moves with the rounds.

    Args:
        path: the folder, or an npz file that holds ``images`` (uint8 [n, height, width], or with 1 or 3 channels
            last) and ``labels`` (integers or text).
        image_size: side to which the central square of each image is resized; None: images are squares, and stay.
    """

    image_size: int | None = None

    def __post_init__(self) -> None:
        if self.image_size is not None:
            require_memory("data.image_size", self.image_size, 12.0 * self.image_size**2)
        path = Path(self.path).expanduser()
        if path.is_dir():
            images, labels = read_class_folders(path, self.image_size)
        else:
            require_file("data.path", path, "a folder or an npz file")
            images, found = read_images(path, require_labels=True)
            assert found is not None
            labels = found
        height, width = images.shape[1:3]
        if self.image_size is None and height != width:
            raise ValueError(f"data.image_size must be given for images that are no squares, got {width}x{height}")
        size = at_least("data.image_size", height if self.image_size is None else self.image_size, 16)
        if not height == width == size:
            images = np.stack([resize_square(image, size) for image in images])
        self.scaler = PixelScaler.fit(images[self.split_examples(images, labels)])
        self.make_tasks(StoredClasses(channels_first(images), self.numbers, self.names, self.scaler), self.splits)

    def inputs(self) -> dict[str, Any]:
        return self.scaler.inputs(self.train.source.shape, self.trained_on)
