"""The network in the formats of other programs: ONNX and TorchScript, for any number of examples at once."""

import importlib.util
import warnings
from pathlib import Path

import torch
from torch import nn

from obbo_lightning.core.validation import one_of
from obbo_lightning.networks.flat import forgetful, without_noise
from obbo_lightning.serving.learned import LearnedNetwork

FORMATS = ("safetensors", "onnx", "torchscript")


def require_format(kind: str) -> None:
    """Refuse what cannot be written here."""
    if one_of("--format", kind, FORMATS) != "onnx":
        return
    for needed in ("onnx", "onnxscript"):
        if importlib.util.find_spec(needed) is None:
            raise ValueError(f"--format onnx needs {needed}, which is not installed: pip install '.[onnx]'")


def write_network(learned: LearnedNetwork, shape: list[int] | None, folder: Path, kind: str) -> Path:
    """``network.onnx`` or ``network.pt``: logits from examples as the network takes them, as the run evaluated it.

    Norms that use the statistics of the batch do so there, too.
    """
    if shape is None:
        raise ValueError(f"--format {kind} needs the shape of an example, which this run does not say")
    network = without_noise(forgetful(learned.network()))
    examples = torch.randn(4, *shape, dtype=next(network.parameters()).dtype)
    return _write_onnx(network, examples, folder) if kind == "onnx" else _write_script(network, examples, folder)


def _write_onnx(network: nn.Module, examples: torch.Tensor, folder: Path) -> Path:
    path, batch = folder / "network.onnx", torch.export.Dim("batch", min=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about itself
        torch.onnx.export(
            network,
            (examples,),
            path,
            input_names=["examples"],
            output_names=["logits"],
            dynamic_shapes=({0: batch},),
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    return path


def _write_script(network: nn.Module, examples: torch.Tensor, folder: Path) -> Path:
    path = folder / "network.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather have torch.export
        torch.jit.save(torch.jit.trace(network, examples, check_trace=False), path)
    return path
