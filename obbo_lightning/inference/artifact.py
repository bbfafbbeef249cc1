"""The learned outer variable as tensors and plain values: read from checkpoints and exports, written as exports."""

import json
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from obbo_lightning import __version__
from obbo_lightning.config.serialization import from_config, to_config
from obbo_lightning.problems.few_shot import FewShot
from obbo_lightning.runs.directory import RunDirectory, sync
from obbo_lightning.runs.provenance import read_checkpoint, usable_checkpoint
from obbo_lightning.streams.fingerprints import sha256_of

FORMAT = 1
METADATA, WEIGHTS = "metadata.json", "weights.safetensors"


class Artifact(NamedTuple):
    """The learned outer variable λ, and what is needed to use it without the run.

    Attributes:
        metadata: plain values, as metadata.json of an export holds them. ``problem`` is the class name; few-shot
            problems add ``init_args`` (with the network's class and arguments), ``inner`` and ``inputs``.
        tensors: state_dict of the network with λ for few-shot problems; for others λ by coordinate, each ``[lanes]``,
            or ``outer`` ``[lanes, d]`` where the coordinates have no names.
    """

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def read_artifact(path: Path, checkpoint: Path | None = None) -> Artifact:
    """Read an export, a checkpoint file, or a checkpoint of a run directory: the newest one if none is named."""
    if (path / METADATA).is_file():
        artifact = _read_export(path)
    elif path.is_file():
        artifact = _read_checkpoint(path)
    elif path.exists():
        artifact = _read_checkpoint(usable_checkpoint(RunDirectory.newest(path), checkpoint))
    else:
        raise ValueError(f"{path} must be a run directory, an export or a checkpoint, and does not exist")
    for name, tensor in artifact.tensors.items():
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} of {path} must be finite to be used, got NaN or infinity")
    return artifact


def _read_export(path: Path) -> Artifact:
    try:
        metadata = json.loads((path / METADATA).read_text())
        tensors = load_file(path / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as damage:
        raise ValueError(f"export {path} cannot be read: {' '.join(str(damage).split())}") from None
    found = metadata.get("format") if isinstance(metadata, dict) else None
    if found != FORMAT:
        raise ValueError(f"{path / METADATA} must be of format {FORMAT}, got {found!r}")
    return Artifact(metadata, tensors)


def _read_checkpoint(file: Path) -> Artifact:
    checkpoint = read_checkpoint(file)
    if "module" not in checkpoint:
        raise ValueError(f"checkpoint {file} must be of a run of obbo_lightning, and is not")
    config, outer = checkpoint["module"], checkpoint["state_dict"]["outer"]
    metadata = {
        "format": FORMAT,
        "obbo_lightning": __version__,
        "round": int(checkpoint["global_step"]),
        "seed": config["seed"],
        "checkpoint": {"file": file.name, "sha256": sha256_of(file)},
    }
    if "problem" not in config:  # it could not be written as plain values, but λ can
        return Artifact({**metadata, "problem": None, "note": config["no_problem"]}, {"outer": outer})
    metadata["problem"] = config["problem"]["component"]
    problem = from_config(config["problem"])
    if not isinstance(problem, FewShot) or "network" not in config["problem"]["init_args"]:
        names = problem.coordinate_names
        named = {name: outer[:, i].clone() for i, name in enumerate(names)} if len(names) == outer.shape[1] else None
        return Artifact({**metadata, "lanes": checkpoint.get("lanes")}, named or {"outer": outer})
    if "algorithm" not in config:
        raise ValueError(f"the run's inner solver cannot be used elsewhere: {config['no_algorithm']}")
    # γ as it was learned; adaptation does not change it
    fixed = {"proximity": float(problem.proximity_at(outer)), "learn_proximity": False}
    metadata |= {
        "init_args": config["problem"]["init_args"] | fixed,
        "inner": to_config(from_config(config["algorithm"]).inner),
        "inputs": checkpoint.get("inputs"),
    }
    # copies, because safetensors refuses tensors that share memory
    state = {name: value.detach().clone() for name, value in problem.loaded_network(outer).state_dict().items()}
    return Artifact(metadata, state)


def write_artifact(artifact: Artifact, out: Path, network: nn.Module | None = None) -> None:
    """Write an export to a new folder, completely or not at all; with ``network``, also its logits as network.onnx."""
    try:
        metadata = json.dumps(artifact.metadata, indent=2, ensure_ascii=False) + "\n"
    except TypeError as error:
        raise ValueError(f"the run cannot be exported: its network needs more than plain values: {error}") from None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise ValueError(f"{out} must be a folder that can be made, and cannot: {error.strerror}") from None
    try:
        (aside / METADATA).write_text(metadata)
        tensors = {name: value.contiguous() for name, value in artifact.tensors.items()}
        save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
        (aside / WEIGHTS).chmod(0o644)  # safetensors makes files that only their owner can read
        if network is not None:
            _write_onnx(network, artifact.metadata["inputs"]["shape"], aside / "network.onnx")
        aside.chmod(0o755)
        for file in (*aside.iterdir(), aside):
            sync(file)
        if out.exists():
            out.rmdir()
        os.replace(aside, out)
        sync(out.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_onnx(network: nn.Module, shape: list[int], file: Path) -> None:
    examples = torch.randn(4, *shape, dtype=next(network.parameters()).dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations of its exporter
        torch.onnx.export(
            network,
            (examples,),
            file,
            input_names=["examples"],
            output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("batch", min=2)},),
            dynamo=True,
            external_data=False,
            verbose=False,
        )
