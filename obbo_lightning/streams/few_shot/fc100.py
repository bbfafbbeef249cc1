"""FC100: CIFAR-100 split by superclass (Oreshkin et al., 2018), read from a file or downloaded."""

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from obbo_lightning.streams.few_shot.stored import PixelScaler, StoredClasses, channels_first
from obbo_lightning.streams.few_shot.stream import FewShotStream
from obbo_lightning.streams.fingerprints import sha256_of
from obbo_lightning.streams.readers import read_npz

# The letter at index c is the superclass of class c: a is 0, b is 1, …
LETTERS = "eboiaghhsddojshldjhlglfkhgnpdpalbkmoqjlfftiipnorskqerecaresrkdcmmqmbjtckabqmjnpnqtcegtffitsbcpgarion"
SUPERCLASS = np.array([ord(letter) - ord("a") for letter in LETTERS])
SUPERCLASSES = {
    "train": (1, 2, 3, 4, 5, 6, 9, 10, 15, 17, 18, 19),
    "validation": (8, 11, 13, 16),
    "test": (0, 7, 12, 14),
}
# of all images with their labels, in any order; see `checksum`
CHECKSUM = "1769336da1e186c8ef48277a205756c8ed7d7b03116eae72376a3bd58f75338b"
ROOT_VARIABLE = "OBBO_DATA"
SCALER = PixelScaler((0.507, 0.487, 0.441), (0.267, 0.256, 0.276))


class Cifar100(NamedTuple):
    """All 60,000 images, the train and test files merged."""

    images: NDArray[np.uint8]
    fine_labels: NDArray[np.integer]
    is_test: NDArray[np.integer]
    fine_names: NDArray[np.str_]


@dataclass(eq=False, repr=False)
class FC100Stream(FewShotStream):
    """Few-shot tasks from CIFAR-100, 60/20/20 classes of 600 images in 12/4/4 superclasses; 20,000/600/600 tasks.

    The paper uses order ``iid``.

    Args:
        root: folder with ``cifar100.npz`` or ``cifar-100-python``; without both, CIFAR-100 is downloaded there. None:
            the environment variable OBBO_DATA, else ``data``.
    """

    root: str | None = None

    may_differ = ("root",)  # the checksum makes sure that the images are the same

    def __post_init__(self) -> None:
        data = load_cifar100(Path(self.root or os.environ.get(ROOT_VARIABLE) or "data").expanduser())
        splits = {split: np.flatnonzero(np.isin(SUPERCLASS, chosen)).tolist() for split, chosen in SUPERCLASSES.items()}
        self.names = data.fine_names.tolist()
        source = StoredClasses(channels_first(data.images), data.fine_labels, self.names, SCALER)
        self.make_tasks(source, splits, dict(enumerate(SUPERCLASS.tolist())))

    def inputs(self) -> dict[str, Any]:
        return SCALER.inputs((3, 32, 32), [self.names[c] for c in self.train.classes.tolist()])


@lru_cache(maxsize=2)
def load_cifar100(root: Path) -> Cifar100:
    """Read ``root/cifar100.npz``, else ``root/cifar-100-python``, else download; refuse what is not CIFAR-100."""
    file = root / "cifar100.npz"
    data = Cifar100(**read_npz(file, Cifar100._fields)) if file.exists() else _read_torchvision(root)
    try:
        found = checksum(data)
    except (IndexError, TypeError, ValueError):  # arrays of other kinds or lengths
        found = "none"
    if found != CHECKSUM or data.images.shape[1:] != (32, 32, 3):
        raise ValueError(
            f"{file} must be CIFAR-100 with the checksum {CHECKSUM[:12]}… and images [n, 32, 32, 3], "
            f"got {found[:12]}… and {list(data.images.shape)}"
        )
    return data


def _read_torchvision(root: Path) -> Cifar100:
    """Read the pickles with torchvision, which compares their MD5 first, and downloads them if they differ."""
    from torchvision.datasets import CIFAR100

    existed = root.exists()
    try:
        files = [CIFAR100(root, train=train, download=True) for train in (True, False)]
    except Exception as error:  # a download can fail in many ways
        if not existed:
            with suppress(OSError):  # it is not there, or not empty
                root.rmdir()
        raise ValueError(
            f"CIFAR-100 is not in {root}: put cifar100.npz there, or the folder {CIFAR100.base_folder}, or connect to "
            f"the network for the download ({type(error).__name__})"
        ) from None
    return Cifar100(
        np.ascontiguousarray(np.concatenate([file.data for file in files])),
        np.concatenate([file.targets for file in files]),
        np.repeat([0, 1], [len(file.targets) for file in files]),
        np.array(files[0].classes),
    )


def checksum(data: Cifar100) -> str:
    """Return a checksum that does not depend on the order of the images."""
    labels = np.stack([data.fine_labels, SUPERCLASS[data.fine_labels], data.is_test], axis=1).astype(np.uint8)
    digests = sorted(
        hashlib.blake2b(image.tobytes() + label.tobytes(), digest_size=16).digest()
        for image, label in zip(data.images, labels, strict=True)
    )
    return sha256_of(*digests)
