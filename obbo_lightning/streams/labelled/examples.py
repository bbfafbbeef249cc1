"""Labelled examples in three pools: to train on, trusted ones to validate on, and ones to be judged on."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import avg_pool2d

from obbo_lightning.core.randomness import derive_seed
from obbo_lightning.streams.few_shot.synthetic import CLASSES, DrawnClasses
from obbo_lightning.streams.fingerprints import digest_of
from obbo_lightning.streams.readers.npz import read_arrays

POOLS = ("train", "validation", "test")
FRACTION = 10  # one example in so many validates; where the file names no test examples, as many test


@dataclass(frozen=True)
class Labelled:
    """Examples with the class of each, and the rows of each pool.

    Attributes:
        examples: ``[n, …]``, bytes of pixels or numbers.
        labels: class numbers ``[n]``.
        pools: row numbers by the pool's name.
        mean: of the training examples, of each channel of an image ``[channels, 1, 1]`` or of each feature.
        deviation: the same.
    """

    examples: Tensor
    labels: Tensor
    pools: dict[str, Tensor]
    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, examples: Tensor, labels: Tensor, is_test: Tensor | None = None) -> "Labelled":
        """With pools that depend on nothing but the number of examples."""
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(derive_seed("pools")))
        if is_test is None:
            tested, kept = order[: len(order) // FRACTION], order[len(order) // FRACTION :]
        else:
            tested, kept = order[is_test[order]], order[~is_test[order]]
        validation, train = kept[: len(kept) // FRACTION], kept[len(kept) // FRACTION :]
        pools = dict(zip(POOLS, (train, validation, tested), strict=True))
        for name, rows in pools.items():
            if not len(rows):
                raise ValueError(f"data.path must have examples to {name} with, got {len(labels)} in all")
        some = _numbers(examples[train[:10_000]])
        axes = (0, 2, 3) if examples.ndim == 4 else 0
        mean, deviation = some.mean(axes), some.std(axes)
        deviation = deviation.where(deviation > 1e-12, 1.0)  # a constant has none
        shape = (-1, 1, 1) if examples.ndim == 4 else (-1,)
        return cls(examples, labels, pools, mean.reshape(shape), deviation.reshape(shape))

    @classmethod
    def read(cls, path: str, label: str) -> "Labelled":
        """From an npz file; grey images get one channel, and channels come first."""
        file = Path(path).expanduser()
        if file.suffix.lower() != ".npz" or not file.is_file():
            raise ValueError(f"data.path must be an npz file that exists, got {path!r}")
        arrays, known = read_arrays(file, ("images", "examples", label, "is_test"))
        names = ", ".join(known)
        if label not in arrays:
            raise ValueError(f"data.label must be an array of {path}, which are {names}, got {label!r}")
        if "images" not in arrays and "examples" not in arrays:
            raise ValueError(f"{path} must hold images or examples, got {names}")
        labels, is_test = arrays[label], arrays.get("is_test")
        examples = _pixels(path, arrays["images"]) if "images" in arrays else _vectors(path, arrays["examples"])
        if labels.shape != (len(examples),) or labels.dtype.kind not in "iu" or labels.min() < 0:
            raise ValueError(
                f"{path}: {label} must be whole numbers from 0 [{len(examples)}], got {labels.dtype} {labels.shape}"
            )
        if is_test is not None and is_test.shape != labels.shape:
            raise ValueError(f"{path}: is_test must have the shape {labels.shape}, got {is_test.shape}")
        tested = None if is_test is None else torch.from_numpy(is_test.astype(bool))
        return cls.of(examples, torch.from_numpy(labels.astype(np.int64)), tested)

    @classmethod
    def drawn(cls, classes: int = 10, features: int = 20, count: int = 20_000, spread: float = 1.0) -> "Labelled":
        """Normal clouds, one a class, that overlap a little, the more the larger their spread: no file needed."""
        generator = torch.Generator().manual_seed(derive_seed("clouds", classes, features))
        centres = torch.randn(classes, features, generator=generator)
        labels = torch.randint(classes, (count,), generator=generator)
        return cls.of(centres[labels] + spread * torch.randn(count, features, generator=generator), labels)

    @classmethod
    def drawn_images(cls, count: int = 6_000, image_size: int = 16) -> "Labelled":
        """Textured shapes in 20 classes, those of the embedded default: no file needed."""
        generator = torch.Generator().manual_seed(derive_seed("images", image_size))
        members = torch.randint(CLASSES, (count,), generator=generator)
        return cls.of(DrawnClasses(image_size).draw(members, generator), members // 5)

    def shrunk(self, factor: int) -> "Labelled":
        """Images a side of which has ``factor`` times fewer pixels, each the mean of those that it was."""
        if factor == 1:
            return self
        if self.examples.ndim != 4 or min(self.shape[1:]) < factor:
            raise ValueError(f"data.shrink must be 1 for examples of the shape {list(self.shape)}, got {factor}")
        means = avg_pool2d(self.examples.float(), factor)
        if self.examples.dtype == torch.uint8:
            means = means.round().byte()
        return replace(self, examples=means)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example."""
        return tuple(self.examples.shape[1:])

    @property
    def classes(self) -> int:
        """How many there are."""
        return int(self.labels.max()) + 1

    def digest(self) -> str:
        """Of everything."""
        return digest_of(self.examples.numpy(), self.labels.numpy(), *(rows.numpy() for rows in self.pools.values()))

    def draw(self, pool: str, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """So many examples, standardised, and their labels; with replacement."""
        rows = self.pools[pool]
        return self.take(rows[torch.randint(len(rows), (count,), generator=generator)])

    def draw_of(self, pool: str, classes: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """One example of each of these classes, standardised, and the classes again; with replacement."""
        return self.take(self.rows_of(pool, classes, generator))

    def rows_of(self, pool: str, classes: Tensor, generator: torch.Generator) -> Tensor:
        """Where they are, without a look at them."""
        rows, first, count = self._by_class[pool]
        chosen = (torch.rand(len(classes), generator=generator, dtype=torch.float64) * count[classes]).long()
        return rows[first[classes] + chosen]

    @cached_property
    def _by_class(self) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """The rows of each pool in the order of their classes, where each class begins, and how many it has."""
        found = {}
        for pool, rows in self.pools.items():
            count = self.labels[rows].bincount(minlength=self.classes)
            if not count.all():
                missing = int(count.argmin())
                raise ValueError(f"data.path must have every class to {pool} with, got none of class {missing}")
            ordered = rows[self.labels[rows].argsort(stable=True)]
            found[pool] = (ordered, count.cumsum(0) - count, count)
        return found

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Those in these rows."""
        return (_numbers(self.examples[rows]) - self.mean) / self.deviation, self.labels[rows]


def _numbers(examples: Tensor) -> Tensor:
    return examples.float() / 255 if examples.dtype == torch.uint8 else examples.float()


def _pixels(path: str, images: NDArray[np.generic]) -> Tensor:
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[-1] not in (1, 3)):
        raise ValueError(
            f"{path}: images must be bytes [n, height, width] or [n, height, width, 1 or 3], got {images.dtype} "
            f"{list(images.shape)}"
        )
    pixels = torch.from_numpy(images)
    return pixels.unsqueeze(1) if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2).contiguous()


def _vectors(path: str, examples: NDArray[np.generic]) -> Tensor:
    if examples.dtype.kind not in "biuf" or examples.ndim != 2 or not np.isfinite(examples).all():
        raise ValueError(
            f"{path}: examples must be finite numbers [n, features], got {examples.dtype} {examples.shape}"
        )
    return torch.from_numpy(examples.astype(np.float32))
