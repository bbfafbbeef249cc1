"""An export: a folder with the weights as safetensors, a small JSON, and other formats of the network beside them."""

import json
import os
import shutil
import tempfile
from pathlib import Path

from obbo_lightning.runs.directory import sync
from obbo_lightning.serving.formats import require_format, write_network
from obbo_lightning.serving.learned import LearnedNetwork, learned
from obbo_lightning.serving.parcel import ABOUT, WEIGHTS, Parcel, read_parcel, shape_of


def export(run: str | Path, out: str | Path, checkpoint: str | Path | None = None, kind: str = "safetensors") -> Parcel:
    """Write what a run has learned to a new folder: at once, or not at all.

    Args:
        run: a run directory, or a checkpoint.
        out: the folder; it must not be there, or be empty.
        checkpoint: of the run; its newest one where this is None.
        kind: ``safetensors``, which is always written, or ``onnx`` or ``torchscript`` beside it.
    """
    require_format(kind)
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} must be a new or empty folder to export to, and is not")
    parcel = read_parcel(Path(run), None if checkpoint is None else Path(checkpoint))
    found = learned(parcel)  # refuses what could not be loaded again
    if kind != "safetensors" and not isinstance(found, LearnedNetwork):
        raise ValueError(f"--format must be safetensors for a run without a network, got {kind!r}")
    try:
        text = json.dumps(parcel.about, indent=2, ensure_ascii=False) + "\n"
    except TypeError as error:
        raise ValueError(
            f"{run} cannot be exported, because its network is not made with plain values: {error}"
        ) from None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise ValueError(f"{out} must be a folder that can be made, and cannot: {error.strerror}") from None
    try:
        _fill(aside, parcel, text)
        if isinstance(found, LearnedNetwork) and kind != "safetensors":
            write_network(found, shape_of(parcel.about), aside, kind)
        aside.chmod(0o755)
        for file in (*aside.iterdir(), aside):
            sync(file)
        if out.exists():
            out.rmdir()
        os.replace(aside, out)
        sync(out.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return parcel


def _fill(folder: Path, parcel: Parcel, about: str) -> None:
    from safetensors.torch import save_file

    tensors = {name: value.contiguous() for name, value in parcel.tensors.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)  # safetensors lets nobody else read what it writes
    (folder / ABOUT).write_text(about)
