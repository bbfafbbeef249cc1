"""Arrays of npz files, and nothing else that is in them."""

from collections.abc import Collection
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]


def arrays_in(opened: IO[bytes], names: Collection[str] | None = None) -> tuple[Arrays, list[str]]:
    """Those of ``names`` that there are, or all; and what all are called. Whatever is damaged raises a ValueError."""
    try:
        with np.load(opened, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files if names is None or name in names}
            known = list(file.files)
        for name, value in found.items():
            if not isinstance(value, np.ndarray):  # NumPy hands out the bytes of what does not begin like an array
                raise ValueError(f"{name} is no array")
    except Exception as error:  # zip, zlib and NumPy each have their own
        raise ValueError(f"cannot be read as an npz file: {error}") from None
    return found, known


def read_arrays(path: Path, names: Collection[str]) -> tuple[Arrays, list[str]]:
    """The same of a file, which the message names."""
    try:
        with path.open("rb") as opened:
            return arrays_in(opened, names)
    except OSError as error:
        raise ValueError(f"{path} cannot be read as an npz file: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None
