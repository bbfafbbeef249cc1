"""Support and query examples from folders of images or from files."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from obbo_lightning.serving.inputs import ExampleInputs, ImageInputs, Inputs
from obbo_lightning.streams.examples import read_features
from obbo_lightning.streams.images import SUFFIXES, read_image, read_images


class Examples(NamedTuple):
    """Some examples.

    Attributes:
        names: of each: its file in the folder, or its row in the file, counted from 1.
        given: what each is, as `LearnedNetwork.adapt` takes it: a list of images, or an array.
        labels: of each; None where they are not known.
    """

    names: list[str]
    given: Any
    labels: list[str] | None


def read_support(path: Path, inputs: Inputs) -> Examples:
    """A folder for each class, or a file with labels."""
    if path.is_dir() and isinstance(inputs, ImageInputs):
        found = _read_classes(path, inputs)
    else:
        found = _read_file("--support", path, inputs)
    if found.labels is None:
        raise ValueError(f"{path} must have labels to adapt to, and has none")
    classes = list(dict.fromkeys(found.labels))
    if len(classes) < 2:
        raise ValueError(f"{path} must hold 2 classes or more, and has {', '.join(map(repr, classes)) or 'none'}")
    return found


def read_query(path: Path, inputs: Inputs, classes: set[str]) -> Examples:
    """A folder of images, or a file; labelled where the images are in folders that are called like classes."""
    if not (path.is_dir() and isinstance(inputs, ImageInputs)):
        found = _read_file("--query", path, inputs)
        _require_known(path, found.labels or [], classes)
        return found
    files = _images_in(path)
    if not files:
        raise ValueError(f"{path} must hold images ({', '.join(sorted(SUFFIXES))}), and has none")
    names = [str(file.relative_to(path)) for file in files]
    folders = [file.relative_to(path).parts[0] if file.parent != path else "" for file in files]
    labelled = bool(set(folders) & classes)
    if labelled and "" in folders:
        raise ValueError(f"{path} must have all images in class folders or none, and has {names[folders.index('')]}")
    if labelled:
        _require_known(path, folders, classes)
    return Examples(names, [inputs.fitted(read_image(file)) for file in files], folders if labelled else None)


def _read_classes(path: Path, inputs: ImageInputs) -> Examples:
    folders = [f for f in sorted(path.iterdir()) if f.is_dir() and not f.name.startswith(".")]
    files = {folder: _images_in(folder) for folder in folders}
    for folder, found in files.items():
        if not found:
            raise ValueError(f"{folder} must hold images ({', '.join(sorted(SUFFIXES))}), and has none")
    every = [file for found in files.values() for file in found]
    labels = [folder.name for folder, found in files.items() for _ in found]
    given = [inputs.fitted(read_image(file)) for file in every]
    return Examples([str(file.relative_to(path)) for file in every], given, labels)


def _images_in(folder: Path) -> list[Path]:
    found = (f for f in folder.rglob("*") if f.suffix.lower() in SUFFIXES and f.is_file())
    return sorted(f for f in found if not any(part.startswith(".") for part in f.relative_to(folder).parts))


def _read_file(key: str, path: Path, inputs: Inputs) -> Examples:
    given: NDArray[np.generic]
    labels: NDArray[np.generic] | None
    if isinstance(inputs, ImageInputs):
        if path.suffix.lower() != ".npz" or not path.is_file():
            raise ValueError(f"{key} must be a folder of images or an npz file that exists, got {str(path)!r}")
        given, labels = read_images(path)
    elif isinstance(inputs, ExampleInputs):
        given, labels = read_features(path, inputs.label, key, inputs.columns)
        if list(given.shape[1:]) != list(inputs.shape):
            raise ValueError(f"{path} must hold examples of shape {list(inputs.shape)}, got {list(given.shape[1:])}")
    else:
        raise ValueError(
            f"{key} cannot be read for this run, which does not say how {str(path)!r} becomes what its network takes: "
            f"it is of an older version, or its stream has no inputs"
        )
    names = [str(row) for row in range(1, len(given) + 1)]
    return Examples(names, given, None if labels is None else labels.astype(str).tolist())


def _require_known(path: Path, labels: list[str], classes: set[str]) -> None:
    unknown = [label for label in dict.fromkeys(labels) if label not in classes]
    if unknown:
        raise ValueError(
            f"{path} must have examples of the support's classes {', '.join(sorted(classes))}, got {unknown[0]!r}"
        )
