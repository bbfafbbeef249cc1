"""Checkpoints that are complete or not there: written aside, checksummed, renamed."""

import hashlib
import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

KEPT = 2
PLAIN = (bool, int, float, str, bytes, torch.Tensor, torch.dtype, torch.device, torch.Size)


class CheckpointError(ValueError):
    """A checkpoint that cannot be used."""


class ExactCheckpoints(TorchCheckpointIO):
    """Lightning's plugin for files that survive anything: ``Trainer(plugins=[ExactCheckpoints()])``.

    A checkpoint is written aside, synced to the disk, given a checksum beside it, and then renamed: whatever has its
    name is complete. What is read is checked against its checksum, and holds tensors and plain values only.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write ``path`` and its checksum."""
        _require_plain(checkpoint, "checkpoint")
        final = Path(path)
        aside = final.with_suffix(".part")
        final.parent.mkdir(parents=True, exist_ok=True)
        super().save_checkpoint(checkpoint, aside, storage_options)
        _sync(aside)
        # The checksum is there before the checkpoint has its name.
        checksum = _checksum_file(final)
        checksum.write_text(_digest(aside) + "\n")
        _sync(checksum)
        os.replace(aside, final)
        _sync(final.parent)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read what `save_checkpoint` wrote; tensors and plain values, whatever ``weights_only`` says."""
        return read_checkpoint(path, map_location)

    def remove_checkpoint(self, path: Any) -> None:
        """Both files."""
        super().remove_checkpoint(path)
        _checksum_file(Path(path)).unlink(missing_ok=True)


def read_checkpoint(path: str | os.PathLike[str], map_location: Any = None) -> dict[str, Any]:
    """A checkpoint's content; where there is a checksum beside it, the file must be what was written."""
    file = Path(path)
    if _checksum_file(file).is_file() or not file.is_file():
        verify_checkpoint(file)
    checkpoint: dict[str, Any] = torch.load(file, map_location=map_location or "cpu", weights_only=True)
    return checkpoint


def save_checkpoint(trainer: L.Trainer, directory: Path) -> None:
    """Save the trainer's state under the number of rounds played, and keep the last two of these."""
    trainer.save_checkpoint(directory / f"round-{trainer.global_step:08d}.ckpt")
    if trainer.is_global_zero:
        for old in list_checkpoints(directory)[:-KEPT]:
            trainer.strategy.remove_checkpoint(old)


def list_checkpoints(directory: Path) -> list[Path]:
    """All checkpoints of the run itself, oldest first."""
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


def _require_plain(value: Any, where: str) -> None:
    """Refuse to save what could not be loaded again."""
    if isinstance(value, dict):
        for key, one in value.items():
            _require_plain(one, f"{where}.{key}")
    elif isinstance(value, (list, tuple, set)):
        for one in value:
            _require_plain(one, where)
    elif not (value is None or isinstance(value, PLAIN)) or type(value).__module__ == "numpy":
        found = type(value).__name__
        raise CheckpointError(f"{where} must hold tensors and plain values to be loaded again, got {found}")


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
