"""Export a learned model: a folder with weights, metadata, and the network as ONNX or TorchScript where asked for."""

import importlib.util
import json
import os
import shutil
import tempfile
import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file

from obbo_lightning.core.validation import one_of
from obbo_lightning.inference.artifact import METADATA, WEIGHTS, read_artifact
from obbo_lightning.inference.model import LearnedClassifier, LearnedModel, model_from
from obbo_lightning.networks.flat import without_noise, without_running_statistics
from obbo_lightning.runs.directory import sync

FORMATS = ("safetensors", "onnx", "torchscript")


def export_model(
    run: str | Path, out: str | Path, checkpoint: str | Path | None = None, file_format: str = "safetensors"
) -> LearnedModel:
    """Write what a run has learned to a new folder, completely or not at all.

    Args:
        run: a run directory, or a checkpoint.
        out: the folder; it must not exist, or be empty.
        checkpoint: of the run; None for its newest.
        file_format: ``safetensors``, which is always written, or ``onnx`` or ``torchscript`` in addition.
    """
    _require_format(file_format)
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} must be a new or empty folder to export to, and is not")
    # the model is made, so that what could not be loaded again is refused
    model = model_from(read_artifact(Path(run), None if checkpoint is None else Path(checkpoint)))
    if file_format != "safetensors" and not isinstance(model, LearnedClassifier):
        raise ValueError(f"--format must be safetensors for a run without a network, got {file_format!r}")
    try:
        metadata = json.dumps(model.metadata, indent=2, ensure_ascii=False) + "\n"
    except TypeError as error:
        raise ValueError(f"{run} cannot be exported: its network needs more than plain values: {error}") from None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise ValueError(f"{out} must be a folder that can be made, and cannot: {error.strerror}") from None
    try:
        (aside / METADATA).write_text(metadata)
        _write_weights(model, aside / WEIGHTS)
        if isinstance(model, LearnedClassifier) and file_format != "safetensors":
            write_network(model, aside, file_format)
        aside.chmod(0o755)
        for file in (*aside.iterdir(), aside):
            sync(file)
        if out.exists():
            out.rmdir()
        os.replace(aside, out)
        sync(out.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return model


def write_network(model: LearnedClassifier, folder: Path, file_format: str) -> None:
    """Write network.onnx or network.pt: logits from standardised examples, any number of them, before adaptation.

    Norms that use the statistics of the batch do so in the file, too.
    """
    if model.metadata["inputs"] is None:
        raise ValueError(f"--format {file_format} needs a run whose stream describes its inputs, and this one does not")
    network = without_noise(without_running_statistics(model.network()))
    examples = torch.randn(4, *model.metadata["inputs"]["shape"], dtype=next(network.parameters()).dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations of both exporters
        if file_format == "torchscript":
            torch.jit.save(torch.jit.trace(network, examples, check_trace=False), folder / "network.pt")
        else:
            torch.onnx.export(
                network,
                (examples,),
                folder / "network.onnx",
                input_names=["examples"],
                output_names=["logits"],
                dynamic_shapes=({0: torch.export.Dim("batch", min=2)},),
                dynamo=True,
                external_data=False,
                verbose=False,
            )


def _require_format(file_format: str) -> None:
    """Refuse unknown formats, and ONNX where its packages are not installed."""
    if one_of("--format", file_format, FORMATS) == "onnx":
        for package in ("onnx", "onnxscript"):
            if importlib.util.find_spec(package) is None:
                raise ValueError(f"--format onnx needs {package}, which is not installed: pip install '.[onnx]'")


def _write_weights(model: LearnedModel, file: Path) -> None:
    tensors = {name: value.contiguous() for name, value in model.outer.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors makes files that only their owner can read
