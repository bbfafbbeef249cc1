"""Checkpoints that are complete or not there: written aside, checksummed, renamed; the last two are kept."""

import hashlib
import os
from pathlib import Path

import lightning as L

KEPT = 2


class CheckpointError(ValueError):
    """A checkpoint that cannot be used."""


def save_checkpoint(trainer: L.Trainer, directory: Path) -> None:
    """Save the trainer's state under the number of rounds played. Every rank calls this, rank 0 writes."""
    final = directory / f"round-{trainer.global_step:08d}.ckpt"
    aside = final.with_suffix(".part")
    if trainer.is_global_zero:
        directory.mkdir(parents=True, exist_ok=True)
    trainer.save_checkpoint(aside)
    if not trainer.is_global_zero:
        return
    _sync(aside)
    # The checksum is there before the checkpoint has its name: whatever is named is complete.
    checksum = _checksum_file(final)
    checksum.write_text(_digest(aside) + "\n")
    _sync(checksum)
    os.replace(aside, final)
    _sync(directory)
    for old in list_checkpoints(directory)[:-KEPT]:
        old.unlink()
        _checksum_file(old).unlink(missing_ok=True)


def list_checkpoints(directory: Path) -> list[Path]:
    """All named checkpoints, oldest first."""
    return sorted(directory.glob("round-*.ckpt"))


def newest_checkpoint(directory: Path) -> Path:
    """The newest checkpoint; refuses a damaged one and names the one before it."""
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
    """Return ``path`` if the file is what was written."""
    if not path.is_file():
        raise CheckpointError(f"checkpoint {path} does not exist")
    checksum = _checksum_file(path)
    if not checksum.is_file():
        raise CheckpointError(f"checkpoint {path} has no checksum file {checksum.name} beside it")
    if _digest(path) != checksum.read_text().strip():
        raise CheckpointError(f"checkpoint {path} is damaged (its checksum differs)")
    return path


def _checksum_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
