"""Find, verify and read checkpoints, without Lightning, which predictions do not need."""

import os
import pickle  # its error alone
import warnings
from pathlib import Path
from typing import Any

import torch

from obbo_lightning.streams.fingerprints import sha256_of


class CheckpointError(ValueError):
    """A checkpoint that cannot be used."""


def read_checkpoint(path: str | os.PathLike[str], map_location: Any = None) -> dict[str, Any]:
    """Return the content of a checkpoint; verify it where there is a checksum beside it."""
    file = Path(path)
    if checksum_file(file).is_file() or not file.is_file():
        verify_checkpoint(file)
    try:
        # Tensors and plain values only, for every version of Lightning and every environment variable of torch.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickles that torch did not write; they are refused below
            checkpoint: dict[str, Any] = torch.load(file, map_location=map_location or "cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise CheckpointError(f"checkpoint {file} holds more than tensors and plain values: not read") from None
    except (RuntimeError, EOFError, OSError, ValueError, LookupError, TypeError, AttributeError) as damage:
        reason = " ".join(str(damage).split())[:200]
        raise CheckpointError(f"checkpoint {file} cannot be read: {type(damage).__name__} {reason}") from None
    if not isinstance(checkpoint, dict):
        raise CheckpointError(f"checkpoint {file} must hold a mapping, got {type(checkpoint).__name__}")
    return checkpoint


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints that the run itself wrote, oldest first."""
    return sorted(directory.glob("round-*.ckpt"))


def newest_checkpoint(directory: Path) -> Path:
    """Return the newest checkpoint; refuse a damaged one and name the one before it."""
    found = list_checkpoints(directory)
    if not found:
        raise CheckpointError(f"no checkpoint in {directory}: the run was stopped before its first one; start it again")
    try:
        verify_checkpoint(found[-1])
    except CheckpointError as damage:
        raise CheckpointError(f"{damage}; {_other(found[:-1])}") from None
    return found[-1]


def _other(older: list[Path]) -> str:
    for path in reversed(older):
        try:
            return f"the one before it: --checkpoint {verify_checkpoint(path)}"
        except CheckpointError:
            continue
    return "there is no other one: start the run again"


def verify_checkpoint(path: Path) -> Path:
    """Return ``path`` if the file has its checksum."""
    if not path.is_file():
        raise CheckpointError(f"checkpoint {path} does not exist")
    checksum = checksum_file(path)
    if not checksum.is_file():
        raise CheckpointError(f"checkpoint {path} has no checksum file {checksum.name} beside it")
    if sha256_of(path) != checksum.read_text().strip():
        raise CheckpointError(f"checkpoint {path} is damaged (its checksum differs)")
    return path


def checksum_file(path: Path) -> Path:
    """Return the path of the checksum of a checkpoint."""
    return path.with_suffix(".sha256")
