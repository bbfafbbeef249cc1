"""Few-shot tasks from anybody's labelled images: arrays, an npz file, or a folder for each class."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from obbo_lightning.core.validation import at_least, require_memory
from obbo_lightning.streams.few_shot.classes import Division, StoredClasses
from obbo_lightning.streams.few_shot.stream import Drawing, FewShotStream, image_inputs
from obbo_lightning.streams.readers.npz import read_arrays

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


@dataclass(frozen=True)
class Pixels:
    """Bytes of images made into numbers with mean 0 and deviation 1.

    Args:
        mean: of each channel, of pixels between 0 and 1; subtracted.
        deviation: of each channel; divided by.
    """

    mean: Sequence[float]
    deviation: Sequence[float]

    def __call__(self, images: Tensor) -> Tensor:
        """Images ``[n, channels, size, size]``."""
        mean, deviation = (torch.tensor(x).reshape(-1, 1, 1) for x in (self.mean, self.deviation))
        # The view keeps channels last; products with second derivatives are half as fast in that layout.
        pixels = images.float().contiguous(memory_format=torch.contiguous_format)
        return (pixels / 255 - mean) / deviation


def channels_first(images: NDArray[np.uint8]) -> Tensor:
    """Images ``[n, size, size, channels]`` as torch has them; a view."""
    return torch.from_numpy(images).permute(0, 3, 1, 2)


class ImageFolderStream(FewShotStream):
    """Few-shot tasks from a folder that has a folder of images for each class, or from an npz file; kept in memory.

    Classes are divided, not images: by the lists where they are given, and by ratio for the others. Pixels are
    standardised with the mean and deviation of the training classes. The division does not depend on ``seed``.

    Args:
        path: the folder, or an npz file that holds ``images`` (uint8 [n, height, width], or with 1 or 3 channels
            behind) and ``labels`` (numbers or words).
        ratios: shares of train, validation and test among the classes that no list names.
        train_classes: classes to train on; None for a share of the unnamed ones. Quote names like '010', which YAML
            takes for numbers.
        validation_classes: the same for validation.
        test_classes: the same for test.
        image_size: side that images are cropped to a square and scaled to; None leaves them, if they are squares.
        ways: classes of a task.
        shots: images of each class to adapt on.
        queries: images of each class to be judged on.
        order: ``iid``, or ``drift``: the mix of classes, in the order of their names, moves with the rounds.
        period: rounds of one turn of the drift.
        seed: of the training tasks.
    """

    def __init__(
        self,
        path: str,
        ratios: list[float] = [0.6, 0.2, 0.2],  # noqa: B006 never changed
        train_classes: list[str | int] | None = None,
        validation_classes: list[str | int] | None = None,
        test_classes: list[str | int] | None = None,
        image_size: int | None = None,
        ways: int = 5,
        shots: int = 5,
        queries: int = 5,
        order: str = "iid",
        period: int = 1000,
        seed: int = 0,
    ) -> None:
        if image_size is not None:
            require_memory("data.image_size", image_size, 12.0 * image_size**2)
        images, labels = read_folder(Path(path), image_size) if Path(path).is_dir() else read_npz(Path(path))
        images = _squares(images, image_size)
        division = Division.of(labels, ratios, (train_classes, validation_classes, test_classes))
        self.pixels = Pixels(*_statistics(images[division.trained]))
        super().__init__(
            StoredClasses(channels_first(images), division.numbers, self.pixels, division.names),
            division.splits,
            Drawing(ways, shots, queries, order, period),
            seed,
        )
        self.names = division.names
        self._division = division

    def source_digests(self) -> dict[str, str]:
        """Of each class's pixels."""
        source: Any = self.train.source
        return self._division.digests(source.examples.numpy())

    def inputs(self) -> dict[str, Any]:
        trained_on = [self.names[c] for c in self.train.classes.tolist()]
        return image_inputs(self.train.source.shape, self.pixels.mean, self.pixels.deviation, trained_on)


def read_npz(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.generic]]:
    """``images`` and ``labels`` of an npz file."""
    if not path.is_file():
        reason = "is no file" if path.exists() else "does not exist"
        raise ValueError(f"data.path must be a folder or an npz file, got {str(path)!r}, which {reason}")
    images, labels = read_images(path)
    if labels is None:
        raise ValueError(f"{path} must hold images and labels, and has no labels")
    return images, labels


def read_images(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.generic] | None]:
    """``images`` of an npz file, and ``labels`` where it has some."""
    found, _ = read_arrays(path, ("images", "labels"))
    if "images" not in found:
        raise ValueError(f"{path} must hold images and labels, and has no images")
    images, labels = found["images"], found.get("labels")
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] not in (1, 3)):
        raise ValueError(
            f"{path}: images must be uint8 [n, height, width] or [n, height, width, 1 or 3], "
            f"got {images.dtype} {list(images.shape)}"
        )
    if labels is not None and (labels.shape != (len(images),) or labels.dtype.kind not in "iuUS"):
        raise ValueError(
            f"{path}: labels must be numbers or words [{len(images)}], got {labels.dtype} {list(labels.shape)}"
        )
    if not len(images):
        raise ValueError(f"{path}: images must not be empty")
    return images if images.ndim == 4 else images[..., None], labels


def read_folder(path: Path, image_size: int | None) -> tuple[NDArray[np.uint8], NDArray[np.generic]]:
    """Every image of every folder in ``path``; grey where all of them are."""
    files = {
        folder.name: sorted(f for f in folder.rglob("*") if f.suffix.lower() in SUFFIXES)
        for folder in sorted(path.iterdir())
        if folder.is_dir() and not folder.name.startswith(".")
    }
    if not files:
        raise ValueError(f"data.path must hold a folder for each class, got {str(path)!r} without any")
    for name, found in files.items():
        if not found:
            raise ValueError(f"{path / name} must hold images ({', '.join(sorted(SUFFIXES))}), and has none")
    images = [read_image(file, image_size) for found in files.values() for file in found]
    labels = np.repeat(list(files), [len(found) for found in files.values()])
    if any(image.shape[2] == 3 for image in images):
        images = [np.broadcast_to(image, (*image.shape[:2], 3)) for image in images]
    shapes = {image.shape for image in images}
    if len(shapes) > 1:
        sizes = sorted({f"{width}x{height}" for height, width, _ in shapes})
        raise ValueError(f"data.image_size must be given for images of several sizes, got {', '.join(sizes[:5])}")
    return np.stack(images), labels


def read_image(file: Path, size: int | None = None) -> NDArray[np.uint8]:
    """Bytes ``[height, width, channels]`` of a file; with ``size``, the square in the middle scaled to it."""
    if not file.is_file():  # a pipe or a device would be waited for
        raise ValueError(f"{file} must be an image, and is no file")
    try:
        with Image.open(file) as image:
            image.load()
            pixels = image_bytes(image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # Pillow has all of them
        raise ValueError(f"{file} cannot be read as an image: {error}") from None
    return pixels if size is None else scaled(pixels, size)


def image_bytes(image: Image.Image) -> NDArray[np.uint8]:
    """``[height, width, channels]``: one channel where an image is grey, else three."""
    if image.mode.startswith("I;16"):
        return (np.asarray(image) >> 8).astype(np.uint8)[:, :, None]
    if image.mode in ("I", "F"):
        raise ValueError(f"its pixels are of mode {image.mode}, whose range is not known; save them with 8 or 16 bits")
    grey = image.mode in ("1", "L", "LA")
    pixels = np.asarray(image.convert("L" if grey else "RGB"))
    return pixels[:, :, None] if grey else pixels


def _squares(images: NDArray[np.uint8], size: int | None) -> NDArray[np.uint8]:
    height, width = images.shape[1:3]
    if size is None and height != width:
        raise ValueError(f"data.image_size must be given for images that are no squares, got {width}x{height}")
    if size is None or height == width == size:
        at_least("data.image_size", height, 16)
        return images
    at_least("data.image_size", size, 16)
    return np.stack([scaled(image, size) for image in images])


def scaled(pixels: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """The square in the middle, scaled."""
    height, width, channels = pixels.shape
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    image = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
    box = (left, top, left + side, top + side)
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box)).reshape(size, size, channels)


def _statistics(images: NDArray[np.uint8]) -> tuple[list[float], list[float]]:
    # Sums of each value's count are exact and need no copy of the images in floating point.
    mean, deviation = [], []
    for channel in range(images.shape[3]):
        counts = np.bincount(images[..., channel].ravel(), minlength=256)
        values = np.arange(256) / 255
        centre = float((counts * values).sum() / counts.sum())
        spread = float((counts * (values - centre) ** 2).sum() / counts.sum()) ** 0.5
        mean.append(centre)
        deviation.append(spread or 1.0)
    return mean, deviation
