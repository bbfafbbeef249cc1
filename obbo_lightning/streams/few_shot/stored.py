"""Few-shot tasks from your own labelled images, vectors, sequences or tables, kept in memory."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from obbo_lightning.core.randomness import derive_seed
from obbo_lightning.core.validation import at_least, require_memory
from obbo_lightning.networks.mlp import MLP
from obbo_lightning.streams.few_shot.stream import FewShotStream
from obbo_lightning.streams.fingerprints import digest_arrays
from obbo_lightning.streams.readers import (
    Labels,
    read_class_folders,
    read_examples,
    read_images,
    require_file,
    resize_square,
)

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class PixelScaler:
    """Standardises the bytes of images by the mean and deviation of each channel, for pixels between 0 and 1."""

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
            "mean": list(self.mean),
            "deviation": list(self.deviation),
            "trained_on": list(trained_on),
        }


@dataclass(frozen=True)
class FeatureScaler:
    """Standardises the features of examples by the mean and deviation of each."""

    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]

    @classmethod
    def fit(cls, examples: NDArray[np.float64]) -> "FeatureScaler":
        """Return the scaler of examples ``[n, …]``."""
        mean, deviation = examples.mean(0), examples.std(0)
        deviation[deviation <= 1e-12 * np.abs(mean)] = 1.0  # the deviation of a constant is a rounding error
        return cls(mean, deviation)

    def __call__(self, examples: NDArray[np.float64]) -> Tensor:
        """Return examples ``[n, …]`` with mean 0 and deviation 1."""
        return torch.from_numpy((examples - self.mean) / self.deviation).float()


def channels_first(images: NDArray[np.uint8]) -> Tensor:
    """Return a view of images ``[n, size, size, channels]`` in torch's order."""
    return torch.from_numpy(images).permute(0, 3, 1, 2)


class StoredClasses:
    """Examples ``[n, …]`` in memory with the class number of each; ``scale`` turns them into what a network takes."""

    def __init__(
        self,
        examples: Tensor,
        labels: NDArray[np.integer],
        names: Sequence[str],
        scale: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.examples, self.names, self.shape = examples, names, tuple(examples.shape[1:])
        self.members = {int(c): torch.from_numpy(np.flatnonzero(labels == c)) for c in np.unique(labels)}
        self._scale = scale

    def require(self, classes: Sequence[int], count: int) -> None:
        smallest = min(classes, key=lambda c: len(self.members[c]))
        most = len(self.members[smallest])
        if count > most:
            raise ValueError(
                f"data.shots + data.queries must be at most {most}, all examples of class {self.names[smallest]!r}, "
                f"got {count}: add examples, leave the class out, or lower them"
            )

    def draw(self, classes: Tensor, generator: torch.Generator) -> Tensor:
        rows = []
        for c, count in zip(*(x.tolist() for x in classes.unique_consecutive(return_counts=True)), strict=True):
            members = self.members[c]
            rows.append(members[torch.randperm(len(members), generator=generator)[:count]])
        drawn = self.examples[torch.cat(rows)]
        return drawn if self._scale is None else self._scale(drawn)


@dataclass(eq=False, repr=False)
class StoredFewShotStream(FewShotStream):
    """Few-shot tasks from the labelled examples of a file, kept in memory.

    Classes are split, not examples: by the lists where they are given, and by ratio for the others; the split does not
    depend on ``seed``. With order ``drift`` the mix of classes, in the order of their names, moves with the rounds.

    Args:
        path: of the file.
        ratios: shares of train, validation and test among the classes that no list names.
        train_classes: classes to train on; None: a share of the classes that no list names. Quote names like '010',
            which YAML reads as numbers.
        validation_classes: classes of the validation tasks.
        test_classes: classes of the test tasks.
    """

    path: str
    ratios: Sequence[float] = (0.6, 0.2, 0.2)
    train_classes: Sequence[str | int] | None = None
    validation_classes: Sequence[str | int] | None = None
    test_classes: Sequence[str | int] | None = None

    def split_examples(self, examples: NDArray[Any], labels: Labels | None) -> NDArray[np.bool_]:
        """Name and split the classes; return which examples are of training classes."""
        assert labels is not None
        names, self.numbers = np.unique(labels.astype(str), return_inverse=True)
        self.names: list[str] = names.tolist()
        lists = (self.train_classes, self.validation_classes, self.test_classes)
        self.splits = split_classes(self.names, self.ratios, lists)
        self._digests = {name: digest_arrays(examples[self.numbers == c]) for c, name in enumerate(self.names)}
        return np.isin(self.numbers, self.splits["train"])

    def source_digests(self) -> dict[str, str]:
        """Return a digest of each class's examples, as they are in the file."""
        return self._digests

    @property
    def trained_on(self) -> list[str]:
        """Names of the training classes."""
        return [self.names[c] for c in self.splits["train"]]


def split_classes(
    names: Sequence[str], ratios: Sequence[float], lists: Sequence[Sequence[str | int] | None]
) -> dict[str, list[int]]:
    """Return class numbers of each split: those that its list names, or its share of the classes that no list names.

    >>> split_classes(["ant", "bee", "cat", "dog"], [0.5, 0.25, 0.25], [None, None, ["ant"]])["test"]
    [0]
    """
    if len(ratios) != 3 or min(ratios) < 0 or sum(ratios) <= 0:
        raise ValueError(f"data.ratios must be three shares, none negative, got {list(ratios)!r}")
    chosen: dict[str, list[int]] = {}
    taken: set[str] = set()
    for split, wanted in zip(SPLITS, lists, strict=True):
        for name in map(str, wanted or ()):
            if name not in names or name in taken:
                raise ValueError(
                    f"data.{split}_classes must be of the {len(names)} classes, and in no other list, got {name!r}"
                )
            taken.add(name)
        chosen[split] = sorted(names.index(str(name)) for name in wanted or ())
    free = np.array([i for i, name in enumerate(names) if name not in taken], dtype=int)
    generator = torch.Generator().manual_seed(derive_seed("classes"))
    free = free[torch.randperm(len(free), generator=generator).numpy()]
    shares = {split: share for split, share, wanted in zip(SPLITS, ratios, lists, strict=True) if wanted is None}
    total = sum(shares.values()) or 1.0
    ends = [round(len(free) * share / total) for share in itertools.accumulate(shares.values())]
    for split, members in zip(shares, np.split(free, ends), strict=False):
        chosen[split] = sorted(members.tolist())
    if not chosen["train"]:
        raise ValueError("data.ratios and data.train_classes must leave classes to train on, got none")
    return chosen


@dataclass(eq=False, repr=False)
class ImageFolderStream(StoredFewShotStream):
    """Few-shot tasks from a folder with one folder of images per class, or from an npz file; kept in memory.

    Pixels are standardised with the mean and deviation of the training classes.

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
        labels: Labels | None
        if path.is_dir():
            images, labels = read_class_folders(path, self.image_size)
        else:
            require_file("data.path", path, "a folder or an npz file")
            images, labels = read_images(path, require_labels=True)
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


@dataclass(eq=False, repr=False)
class ExampleStream(StoredFewShotStream):
    """Few-shot tasks from labelled examples of any shape; kept in memory.

    Every number of an example is a feature, standardised with its mean and deviation in the training classes.

    Args:
        path: an npz file that holds ``examples`` (numbers [n, ...]) and ``labels`` (integers or text), or a table (csv
            or parquet) with one row per example: a column of labels, and columns of numbers.
        label: column of a table that holds the labels.
    """

    label: str = "label"

    network_type = MLP

    def __post_init__(self) -> None:
        values, labels, self.columns = read_examples(Path(self.path).expanduser(), self.label, require_labels=True)
        self.scaler = FeatureScaler.fit(values[self.split_examples(values, labels)])
        self.make_tasks(StoredClasses(self.scaler(values), self.numbers, self.names), self.splits)

    def inputs(self) -> dict[str, Any]:
        return {
            "kind": "examples",
            "shape": list(self.train.source.shape),
            "label": self.label,
            "columns": self.columns,
            "mean": self.scaler.mean.flatten().tolist(),
            "deviation": self.scaler.deviation.flatten().tolist(),
            "trained_on": self.trained_on,
        }
