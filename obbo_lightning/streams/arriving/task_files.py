"""One task in a file or in a line of text: arrays by name."""

import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from obbo_lightning.streams.readers.npz import arrays_in
from obbo_lightning.streams.readers.parquet import read_parquet as read_parquet_file

Arrays = dict[str, NDArray[Any]]


class DamagedTaskError(ValueError):
    """A task that cannot be played: where it stands, and which rule it breaks."""


class UnreadableError(ValueError):
    """Bytes that are no whole task, or not yet."""


def read_npz(content: bytes) -> Arrays:
    """Arrays of an npz file."""
    try:
        return arrays_in(io.BytesIO(content))[0]
    except ValueError as error:
        raise UnreadableError(str(error)) from None


def read_json(content: bytes) -> Arrays:
    """Arrays of an object whose values are numbers and nested lists of them."""
    try:
        found = json.loads(content)
    except ValueError as error:
        raise UnreadableError(f"cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise DamagedTaskError(f"must be an object of arrays by name, got {type(found).__name__}")
    return {name: _array(name, value) for name, value in found.items()}


def read_parquet(content: bytes) -> Arrays:
    """A column an array; a table of one row has its arrays as lists in it."""
    try:
        table = read_parquet_file(io.BytesIO(content))
    except (pl.exceptions.PolarsError, OSError) as error:
        raise UnreadableError(f"cannot be read as parquet: {str(error).splitlines()[0]}") from None
    columns = {column.name: column.to_list() for column in table}
    lists = len(table) == 1 and all(isinstance(value[0], list) for value in columns.values())
    return {name: _array(name, value[0] if lists else value) for name, value in columns.items()}


def _array(name: str, value: Any) -> NDArray[Any]:
    try:
        return np.array(value)
    except ValueError:
        raise DamagedTaskError(f"{name!r} must be an array, and its lists have different lengths") from None


READERS: dict[str, Callable[[bytes], Arrays]] = {".npz": read_npz, ".parquet": read_parquet, ".json": read_json}
