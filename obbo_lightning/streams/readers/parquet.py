"""Parquet files, of which polars panics at some that are damaged: a refusal like any other, without Rust's words."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import polars as pl


def read_parquet(source: Path | IO[bytes]) -> pl.DataFrame:
    """The table; whatever is wrong with the file is a PolarsError or an OSError."""
    try:
        with _without_words():
            return pl.read_parquet(source)
    except pl.exceptions.PanicException:  # no Exception: it would pass every other handler
        raise pl.exceptions.ComputeError("its pages are damaged") from None


@contextmanager
def _without_words() -> Iterator[None]:
    """A panic writes its own backtrace to the error stream of the process, past Python."""
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # there is none
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
