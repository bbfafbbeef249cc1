"""Readers of data files: npz arrays, tables, images, labelled examples; one line names a file that cannot be read."""

import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray
from PIL import Image

Arrays = dict[str, NDArray[Any]]
Labels = NDArray[np.generic]
IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


class Examples(NamedTuple):
    """Labelled examples of a file.

    Attributes:
        values: finite numbers ``[n, …]``.
        labels: ``[n]``; None where the file has none.
        columns: names of the features of a table; None for an npz file.
    """

    values: NDArray[np.float64]
    labels: Labels | None
    columns: list[str] | None


def require_file(key: str, path: Path, what: str, suffixes: Collection[str] = ()) -> None:
    """Refuse a path that is no regular file: opening a pipe would wait forever."""
    if (suffixes and path.suffix.lower() not in suffixes) or not path.is_file():
        raise ValueError(f"{key} must be {what} that exists, got {str(path)!r}")


def load_npz(file: IO[bytes], names: Collection[str] | None = None) -> tuple[Arrays, list[str]]:
    """Return those of ``names`` that an npz file has, or all arrays; and the names of all arrays."""
    try:
        with np.load(file, allow_pickle=False) as content:
            arrays = {name: content[name] for name in content.files if names is None or name in names}
            known = list(content.files)
        for name, value in arrays.items():
            if not isinstance(value, np.ndarray):  # NumPy returns the bytes of an entry that is no array
                raise ValueError(f"{name} is no array")
    except Exception as error:  # zip, zlib and NumPy each raise their own
        raise ValueError(f"cannot be read as an npz file: {error}") from None
    return arrays, known


def read_npz(path: Path, names: Collection[str]) -> tuple[Arrays, list[str]]:
    """Return what `load_npz` does, from a path, which errors name."""
    try:
        with path.open("rb") as file:
            return load_npz(file, names)
    except OSError as error:
        raise ValueError(f"{path} cannot be read as an npz file: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None


def read_table(path: Path, is_csv: bool, **csv_options: Any) -> pl.DataFrame:
    """Return a table of a CSV file, read with options of `polars.read_csv`, or of a parquet file."""
    try:
        return pl.read_csv(path, **csv_options) if is_csv else read_parquet(path)
    except (pl.exceptions.PolarsError, OSError) as error:
        kind = "CSV" if is_csv else "parquet"
        raise ValueError(f"{path} cannot be read as {kind}: {str(error).splitlines()[0]}") from None


def read_parquet(source: Path | IO[bytes]) -> pl.DataFrame:
    """Return a parquet table; raise a PolarsError or an OSError for any damage."""
    try:
        with _silent_stderr():
            return pl.read_parquet(source)
    except pl.exceptions.PanicException:  # not an Exception: no other handler would catch it
        raise pl.exceptions.ComputeError("its pages are damaged") from None


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Discard what the process writes to stderr: a panic of polars prints a Rust backtrace, bypassing Python."""
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    try:
        stderr = os.dup(2)
    except OSError:  # the process has no stderr
        yield
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)


def read_examples(
    path: Path,
    label: str,
    key: str = "data.path",
    columns: Sequence[str] | None = None,
    require_labels: bool = False,
) -> Examples:
    """Return the examples of an npz file (``examples``, ``labels``), or the rows of a table.

    Args:
        path: of an npz, CSV or parquet file.
        label: column of a table that holds the labels.
        key: option that named the file.
        columns: features of a table, in this order; None: all columns but the label.
        require_labels: refuse a file without labels.
    """
    require_file(key, path, "an npz, csv or parquet file", (".npz", ".csv", ".parquet"))
    if path.suffix.lower() == ".npz":
        arrays = _read_labelled_npz(path, "examples", require_labels)
        return Examples(require_numbers(path, arrays["examples"]), arrays.get("labels"), None)
    # A label like 010 is text, and a column of numbers may begin with integers.
    is_csv = path.suffix.lower() == ".csv"
    table = read_table(path, is_csv, schema_overrides={label: pl.String}, infer_schema_length=None)
    if require_labels and label not in table.columns:
        raise ValueError(f"data.label must be a column of {path}, which are {listed(table.columns)}, got {label!r}")
    return _table_examples(path, table, label, columns)


def _table_examples(path: Path, table: pl.DataFrame, label: str, columns: Sequence[str] | None) -> Examples:
    labelled = label in table.columns
    missing = [name for name in columns or () if name not in table.columns]
    if missing:
        raise ValueError(f"{path} must have the column {missing[0]!r}, which the run was trained with, and has not")
    if columns is not None:
        table = table.select(*columns, *([label] if labelled else []))
    features = table.drop(label) if labelled else table
    if table.is_empty() or not features.columns:
        raise ValueError(f"{path} must have rows, and columns besides {label!r}, got {list(table.shape)}")
    text = [c for c in features.columns if not (features.schema[c].is_numeric() or features.schema[c] == pl.Boolean)]
    if text:
        raise ValueError(f"{path}: columns besides {label!r} must be numbers, got {listed(text)}")
    if labelled and not (
        table.schema[label].is_integer() or table.schema[label] in (pl.String, pl.Categorical, pl.Enum)
    ):
        raise ValueError(f"{path}: {label!r} must be integers or text, got {table.schema[label]}")
    for column in table.columns:
        if table[column].null_count():
            row = int(table[column].is_null().arg_true()[0]) + 1
            raise ValueError(f"{path}, row {row}: {column!r} must have a value, got none")
    labels = table[label].cast(pl.String).to_numpy().astype(str) if labelled else None
    return Examples(require_numbers(path, features.cast(pl.Float64).to_numpy()), labels, features.columns)


def _read_labelled_npz(path: Path, kind: str, require_labels: bool) -> Arrays:
    """Return ``images`` or ``examples`` of an npz file, and its ``labels``."""
    arrays, _ = read_npz(path, (kind, "labels"))
    for name in (kind, *(["labels"] if require_labels else [])):
        if name not in arrays:
            raise ValueError(f"{path} must hold {kind} and labels, and has no {name}")
    labels, count = arrays.get("labels"), len(np.atleast_1d(arrays[kind]))
    if labels is not None and (labels.shape != (count,) or labels.dtype.kind not in "iuUS"):
        raise ValueError(f"{path}: labels must be integers or text [{count}], got {labels.dtype} {list(labels.shape)}")
    return arrays


def require_numbers(path: Path, examples: NDArray[Any]) -> NDArray[np.float64]:
    """Return examples ``[n, …]`` as float64; refuse what is empty or not finite."""
    if examples.dtype.kind not in "biuf" or examples.ndim < 2 or not examples.size:
        raise ValueError(
            f"{path}: examples must be numbers [n, …], at least one, got {examples.dtype} {list(examples.shape)}"
        )
    bad = np.flatnonzero(~np.isfinite(examples).reshape(len(examples), -1).all(1))
    if len(bad):
        raise ValueError(f"{path}: examples must be finite numbers, got NaN or infinity in example {bad[0] + 1}")
    return examples.astype(np.float64)


def require_images(path: Path, images: NDArray[Any]) -> NDArray[np.uint8]:
    """Return images as bytes ``[n, height, width, channels]``, with 1 or 3 channels."""
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] not in (1, 3)):
        raise ValueError(
            f"{path}: images must be uint8 [n, height, width] or [n, height, width, 1 or 3], "
            f"got {images.dtype} {list(images.shape)}"
        )
    if not len(images):
        raise ValueError(f"{path}: images must not be empty")
    return images if images.ndim == 4 else images[..., None]


def read_images(path: Path, require_labels: bool = False) -> tuple[NDArray[np.uint8], Labels | None]:
    """Return ``images`` ``[n, height, width, channels]`` of an npz file, and its ``labels`` if it has some."""
    arrays = _read_labelled_npz(path, "images", require_labels)
    return require_images(path, arrays["images"]), arrays.get("labels")


def read_class_folders(path: Path, image_size: int | None) -> tuple[NDArray[np.uint8], Labels]:
    """Return the images of a folder with one folder per class, and the class of each; grey if all of them are."""
    files = {folder.name: find_images(folder) for folder in class_folders(path)}
    if not files:
        raise ValueError(f"data.path must hold one folder per class, got {str(path)!r} without any")
    images = [read_image(file, image_size) for found in files.values() for file in found]
    labels = np.repeat(list(files), [len(found) for found in files.values()])
    if any(image.shape[2] == 3 for image in images):
        images = [np.broadcast_to(image, (*image.shape[:2], 3)) for image in images]
    shapes = {image.shape for image in images}
    if len(shapes) > 1:
        sizes = sorted({f"{width}x{height}" for height, width, _ in shapes})
        raise ValueError(f"data.image_size must be given for images of several sizes, got {', '.join(sizes[:5])}")
    return np.stack(images), labels


def class_folders(path: Path) -> list[Path]:
    """Return the folders in a folder, hidden ones left out."""
    return [folder for folder in sorted(path.iterdir()) if folder.is_dir() and not folder.name.startswith(".")]


def find_images(folder: Path) -> list[Path]:
    """Return the images below a folder, hidden files and folders left out."""
    files = [file for file in sorted(folder.rglob("*")) if file.suffix.lower() in IMAGE_SUFFIXES]
    found = [file for file in files if not any(name.startswith(".") for name in file.relative_to(folder).parts)]
    if not found:
        raise ValueError(f"{folder} must hold images ({', '.join(IMAGE_SUFFIXES)}), and has none")
    return found


def read_image(file: Path, size: int | None = None) -> NDArray[np.uint8]:
    """Return the bytes ``[height, width, channels]`` of an image; with ``size``, of its central square, resized."""
    if not file.is_file():  # a pipe or a device would be waited for
        raise ValueError(f"{file} must be an image, and is no file")
    try:
        with Image.open(file) as image:
            image.load()
            pixels = image_bytes(image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # Pillow raises all of them
        raise ValueError(f"{file} cannot be read as an image: {error}") from None
    return pixels if size is None else resize_square(pixels, size)


def image_bytes(image: Image.Image) -> NDArray[np.uint8]:
    """Return the bytes ``[height, width, channels]`` of an image: one channel if it is grey, else three."""
    if image.mode.startswith("I;16"):
        return (np.asarray(image) >> 8).astype(np.uint8)[:, :, None]
    if image.mode in ("I", "F"):
        raise ValueError(f"its pixels are of mode {image.mode}, whose range is not known; save them with 8 or 16 bits")
    grey = image.mode in ("1", "L", "LA")
    pixels = np.asarray(image.convert("L" if grey else "RGB"))
    return pixels[:, :, None] if grey else pixels


def resize_square(pixels: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Return the central square of an image, resized."""
    height, width, channels = pixels.shape
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    image = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
    box = (left, top, left + side, top + side)
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box)).reshape(size, size, channels)


def listed(names: Sequence[str]) -> str:
    """Return the first names of a list for a message."""
    return ", ".join(map(repr, names[:5])) + (", …" if len(names) > 5 else "")
