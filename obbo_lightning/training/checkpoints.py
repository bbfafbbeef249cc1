"""Checkpoints that are either complete or absent: written aside, checksummed, renamed."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from obbo_lightning.runs.directory import replacing, write_atomically
from obbo_lightning.runs.provenance import CheckpointError, checksum_file, list_checkpoints, read_checkpoint
from obbo_lightning.streams.fingerprints import sha256_of

KEPT = 2
PLAIN = (bool, int, float, str, bytes, torch.Tensor, torch.dtype, torch.device, torch.Size)


class ExactCheckpoints(TorchCheckpointIO):
    """Lightning plugin for crash-safe checkpoints: ``Trainer(plugins=[ExactCheckpoints()])``.

    A checkpoint is written aside, synced to the disk, given a checksum beside it, and then renamed: a file with its
    final name is complete. A checkpoint is verified before it is read, and holds tensors and plain values only.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write ``path`` and its checksum."""
        _require_plain(checkpoint, "checkpoint")
        final = Path(path)
        final.parent.mkdir(parents=True, exist_ok=True)
        with replacing(final) as aside:
            super().save_checkpoint(checkpoint, aside, storage_options)
            write_atomically(checksum_file(final), sha256_of(aside) + "\n")  # before the checkpoint has its name

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read tensors and plain values, for every value of ``weights_only``."""
        return read_checkpoint(path, map_location)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove the checkpoint and its checksum."""
        super().remove_checkpoint(path)
        checksum_file(Path(path)).unlink(missing_ok=True)


def save_checkpoint(trainer: L.Trainer, directory: Path) -> None:
    """Save the trainer's state under the number of finished rounds, and keep the last two checkpoints."""
    trainer.save_checkpoint(directory / f"round-{trainer.global_step:08d}.ckpt")
    if trainer.is_global_zero:
        for old in list_checkpoints(directory)[:-KEPT]:
            trainer.strategy.remove_checkpoint(old)


def _require_plain(value: Any, where: str) -> None:
    """Refuse to save what could not be loaded."""
    if isinstance(value, dict):
        for key, one in value.items():
            _require_plain(one, f"{where}.{key}")
    elif isinstance(value, (list, tuple, set)):
        for one in value:
            _require_plain(one, where)
    elif not (value is None or isinstance(value, PLAIN)) or type(value).__module__ == "numpy":
        raise CheckpointError(f"{where} must hold tensors and plain values, got {type(value).__name__}")
