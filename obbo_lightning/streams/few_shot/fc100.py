"""FC100: CIFAR-100 split by superclass (Oreshkin et al., 2018), read from a file or downloaded."""

import hashlib
import os
import pickle
import tempfile
import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from obbo_lightning.streams.few_shot.images import PixelScaler, channels_first
from obbo_lightning.streams.few_shot.stream import FewShotStream, StoredClasses
from obbo_lightning.streams.fingerprints import sha256_of
from obbo_lightning.streams.readers import read_npz

SUPERCLASSES = {
    "train": (1, 2, 3, 4, 5, 6, 9, 10, 15, 17, 18, 19),
    "validation": (8, 11, 13, 16),
    "test": (0, 7, 12, 14),
}
# of all images with their labels, in any order; see `checksum`
CHECKSUM = "1769336da1e186c8ef48277a205756c8ed7d7b03116eae72376a3bd58f75338b"
ROOT_VARIABLE = "OBBO_DATA"
SCALER = PixelScaler((0.507, 0.487, 0.441), (0.267, 0.256, 0.276))
# all that pickled NumPy arrays need
ARRAYS = {("numpy.core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}


class Cifar100(NamedTuple):
    """All 60,000 images, the train and test files merged."""

    images: NDArray[np.uint8]
    fine_labels: NDArray[np.uint8]
    coarse_labels: NDArray[np.uint8]
    is_test: NDArray[np.uint8]
    fine_names: NDArray[np.str_]
    coarse_names: NDArray[np.str_]


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
        superclass = dict(zip(data.fine_labels.tolist(), data.coarse_labels.tolist(), strict=True))
        splits = {
            split: [c for c in sorted(superclass) if superclass[c] in chosen] for split, chosen in SUPERCLASSES.items()
        }
        self.names = data.fine_names.tolist()
        source = StoredClasses(channels_first(data.images), data.fine_labels, self.names, SCALER)
        self.make_tasks(source, splits, superclass)

    def inputs(self) -> dict[str, Any]:
        return SCALER.inputs((3, 32, 32), [self.names[c] for c in self.train.classes.tolist()])


@lru_cache(maxsize=2)
def load_cifar100(root: Path) -> Cifar100:
    """Read ``root/cifar100.npz``, else ``root/cifar-100-python``, else download; the last two write the npz file."""
    cache = root / "cifar100.npz"
    if cache.exists():
        return _require_cifar100(Cifar100(**read_npz(cache, Cifar100._fields)), cache)
    data = _read_pickles(root)
    try:
        _write_npz(cache, data)
    except OSError as error:  # a read-only folder or a full disk; the data have been read
        warnings.warn(f"{cache} cannot be written ({error.strerror}): the pickles will be read again", stacklevel=2)
    return data


def _require_cifar100(data: Cifar100, path: Path) -> Cifar100:
    try:
        found = checksum(data)
    except (TypeError, ValueError):  # arrays of other kinds or lengths
        found = "none"
    if found != CHECKSUM or data.images.shape[1:] != (32, 32, 3):
        raise ValueError(
            f"{path} must be CIFAR-100 with the checksum {CHECKSUM[:12]}… and images [n, 32, 32, 3], "
            f"got {found[:12]}… and {list(data.images.shape)}"
        )
    return data


def checksum(data: Cifar100) -> str:
    """Return a checksum that does not depend on the order of the images."""
    columns = (data.fine_labels, data.coarse_labels, data.is_test)
    labels = np.stack([column.astype(np.int64, casting="safe") for column in columns], axis=1).astype(np.uint8)
    digests = sorted(
        hashlib.blake2b(image.tobytes() + label.tobytes(), digest_size=16).digest()
        for image, label in zip(data.images, labels, strict=True)
    )
    return sha256_of(*digests)


def _read_pickles(root: Path) -> Cifar100:
    from torchvision.datasets import CIFAR100
    from torchvision.datasets.utils import check_integrity, download_and_extract_archive

    folder = root / CIFAR100.base_folder
    if not folder.exists():
        was_there = root.exists()
        try:
            download_and_extract_archive(CIFAR100.url, root, filename=CIFAR100.filename, md5=CIFAR100.tgz_md5)
        except Exception as error:  # a download can fail in many ways
            if not was_there and root.exists() and not any(root.iterdir()):
                root.rmdir()
            raise ValueError(
                f"CIFAR-100 is not in {root}: put cifar100.npz there, or the folder {CIFAR100.base_folder}, or "
                f"connect to the network for the download ({type(error).__name__})"
            ) from None
    meta = CIFAR100.meta
    for name, md5 in (*CIFAR100.train_list, *CIFAR100.test_list, (meta["filename"], meta["md5"])):
        if not check_integrity(folder / name, md5):
            raise ValueError(f"{folder / name} is missing or damaged (its MD5 is not {md5}); delete the folder")
    files = [_unpickle(folder / name) for name in ("train", "test")]
    names = _unpickle(folder / "meta")
    counts = [len(file["fine_labels"]) for file in files]
    return _require_cifar100(
        Cifar100(
            np.concatenate([file["data"] for file in files]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).copy(),
            np.concatenate([file["fine_labels"] for file in files]).astype(np.uint8),
            np.concatenate([file["coarse_labels"] for file in files]).astype(np.uint8),
            np.repeat(np.array([0, 1], dtype=np.uint8), counts),
            np.array(names["fine_label_names"]),
            np.array(names["coarse_label_names"]),
        ),
        folder,
    )


def _unpickle(path: Path) -> dict[str, NDArray[np.uint8]]:
    with path.open("rb") as file:
        found: dict[str, NDArray[np.uint8]] = _Arrays(file, encoding="latin1").load()
        return found


class _Arrays(pickle.Unpickler):
    """Unpickler of NumPy arrays and plain values that refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module.replace("numpy._core", "numpy.core"), name) not in ARRAYS:
            raise pickle.UnpicklingError(f"{module}.{name} is no array")
        return super().find_class(module, name)


def _write_npz(path: Path, data: Cifar100) -> None:
    # Other processes may write it too, and a predictable name could be a link by then: mkstemp makes a new file.
    descriptor, name = tempfile.mkstemp(prefix=".cifar100-", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            np.savez_compressed(file, **data._asdict())
            os.fchmod(file.fileno(), 0o644)  # mkstemp allows the owner only
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
