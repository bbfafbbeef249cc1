"""Readers of data files: npz arrays, tables, images, labelled examples; one line names a file that cannot be read."""

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from PIL import Image

Arrays = dict[str, NDArray[Any]]
Labels = NDArray[np.generic]
TEXT = (pl.String, pl.Categorical, pl.Enum)
IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


def require_file(key: str, path: Path, what: str, suffixes: Collection[str] = ()) -> None:
    """Refuse a path that is no regular file: opening a pipe would wait forever."""
    if (suffixes and path.suffix.lower() not in suffixes) or not path.is_file():
        raise ValueError(f"{key} must be {what} that exists, got {str(path)!r}")


def read_npz(file: Path | IO[bytes], required: Collection[str] = (), optional: Collection[str] | None = ()) -> Arrays:
    """Return the required arrays of an npz file, and those optional ones (None: all others) that it has."""
    where = f"{file} " if isinstance(file, Path) else ""
    try:
        opened = file.open("rb") if isinstance(file, Path) else file
        with opened as source, np.load(source, allow_pickle=False) as content:
            there = list(content.files)
            wanted = there if optional is None else [*required, *optional]
            arrays = {name: content[name] for name in there if name in wanted}
        for name, value in arrays.items():
            if not isinstance(value, np.ndarray):  # NumPy returns the bytes of an entry that is no array
                raise ValueError(f"{name} is no array")
    except Exception as error:  # zip, zlib and NumPy each raise their own
        raise ValueError(f"{where}cannot be read as an npz file: {error}") from None
    if not set(required) <= set(arrays):
        raise ValueError(f"{where}must hold {', '.join(required)}, got {', '.join(there)}")
    return arrays


def read_table(path: Path, is_csv: bool, **csv_options: Any) -> pl.DataFrame:
    """Return a table of a CSV file, read with options of `polars.read_csv`, or of a parquet file."""
    try:
        with _silent_stderr():
            return pl.read_csv(path, **csv_options) if is_csv else pl.read_parquet(path)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        kind = "CSV" if is_csv else "parquet"
        raise ValueError(f"{path} cannot be read as {kind}: {str(error).splitlines()[0]}") from None


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Discard what the process writes to stderr: a panic of polars prints a Rust backtrace, bypassing Python."""
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


def require_rows(where: str, good: pl.Series, column: pl.Series, rule: str) -> None:
    """Refuse a column by its first row that is not good."""
    if not good.all():
        row = int(good.arg_min() or 0)
        got = "nothing" if column[row] is None else repr(column[row])
        raise ValueError(f"{where}, row {row + 1}: {column.name!r} must {rule}, got {got}")


def parse_numbers(column: pl.Series) -> pl.Series:
    """Return a column of numbers, booleans or text as float64; null where it has no number."""
    if column.dtype.is_numeric() or column.dtype == pl.Boolean:
        return column.cast(pl.Float64)
    if column.dtype not in TEXT:
        return pl.Series(column.name, [None] * len(column), dtype=pl.Float64)
    return column.cast(pl.String).str.strip_chars().cast(pl.Float64, strict=False)


def finite_columns(where: str, table: pl.DataFrame) -> NDArray[np.float64]:
    """Return columns as finite numbers ``[rows, columns]``."""
    numbers = [parse_numbers(column) for column in table]
    for column, parsed in zip(table, numbers, strict=True):
        require_rows(where, parsed.is_finite().fill_null(False), column, "be a finite number")
    return pl.DataFrame(numbers).to_numpy()


def read_examples(
    path: Path, label: str, key: str = "data.path", columns: Sequence[str] | None = None, require_labels: bool = False
) -> tuple[NDArray[np.float64], Labels | None, list[str] | None]:
    """Return the examples ``[n, …]`` and labels of an npz file or a table, and the names of the table's features.

    ``key`` is the option that named the file; without ``columns`` all columns of a table but ``label`` are features.
    """
    require_file(key, path, "an npz, csv or parquet file", (".npz", ".csv", ".parquet"))
    if path.suffix.lower() == ".npz":
        arrays = _read_labelled_npz(path, "examples", require_labels)
        return require_numbers(path, arrays["examples"]), arrays.get("labels"), None
    # A label like 010 is text, and a column of numbers may begin with integers.
    is_csv = path.suffix.lower() == ".csv"
    table = read_table(path, is_csv, schema_overrides={label: pl.String}, infer_schema_length=None)
    if require_labels and label not in table.columns:
        raise ValueError(f"data.label must be a column of {path}, which are {listed(table.columns)}, got {label!r}")
    names = [name for name in table.columns if name != label] if columns is None else list(columns)
    missing = [name for name in names if name not in table.columns]
    if missing:
        raise ValueError(f"{path} must have the column {missing[0]!r}, which the run was trained with, and has not")
    if table.is_empty() or not names:
        raise ValueError(f"{path} must have rows, and columns besides {label!r}, got {list(table.shape)}")
    values = finite_columns(str(path), table.select(names))
    if label not in table.columns:
        return values, None, names
    if not (table.schema[label].is_integer() or table.schema[label] in TEXT):
        raise ValueError(f"{path}: {label!r} must be integers or text, got {table.schema[label]}")
    require_rows(str(path), table[label].is_not_null(), table[label], "have a value")
    return values, table[label].cast(pl.String).to_numpy().astype(str), names


def _read_labelled_npz(path: Path, kind: str, require_labels: bool) -> Arrays:
    """Return ``images`` or ``examples`` of an npz file, and its ``labels``."""
    arrays = read_npz(path, (kind, "labels") if require_labels else (kind,), ("labels",))
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
    found = images[..., None] if images.ndim == 3 else images
    if images.dtype != np.uint8 or found.ndim != 4 or found.shape[3] not in (1, 3) or not len(images):
        raise ValueError(
            f"{path}: images must be uint8 [n, height, width] or [n, height, width, 1 or 3], at least one, "
            f"got {images.dtype} {list(images.shape)}"
        )
    return found


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
