"""What leaves with you: tensors and plain values, from a checkpoint or from the files of an export."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from obbo_lightning import __version__
from obbo_lightning.core.problem import Problem
from obbo_lightning.core.recipes import make_again, recipe_of
from obbo_lightning.parts import class_named, short_name
from obbo_lightning.problems.few_shot import FewShot
from obbo_lightning.runs.checkpoints import digest, read_checkpoint
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.runs.manifest import checkpoint_to_use

FORMAT = 1
ABOUT, WEIGHTS = "export.json", "weights.safetensors"


class Parcel(NamedTuple):
    """λ with names, and what one must know to use it.

    Attributes:
        about: plain values, as in an export's JSON.
        tensors: a network's state_dict, or λ by names.
    """

    about: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def few_shot(self) -> bool:
        """Whether there is a network to adapt."""
        return "network" in self.about


def read_parcel(path: Path, checkpoint: Path | None = None) -> Parcel:
    """Of an export, of a run directory (its newest checkpoint, or the one that is named), or of a checkpoint."""
    if (path / ABOUT).is_file():
        return _read_export(path)
    if path.is_file():
        return _read_run(path)
    if not path.exists():
        raise ValueError(f"{path} must be a run directory, an export or a checkpoint, and does not exist")
    return _read_run(checkpoint_to_use(RunDirectory.newest(path), checkpoint))


def _read_export(path: Path) -> Parcel:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        about = json.loads((path / ABOUT).read_text())
        version = about["format"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path / ABOUT} is damaged: it must be JSON with a format") from None
    if version != FORMAT:
        raise ValueError(
            f"{path / ABOUT} must be of format {FORMAT}, got {version!r}, of obbo_lightning "
            f"{about.get('obbo_lightning')!r}: this is {__version__}"
        )
    try:
        return Parcel(about, load_file(path / WEIGHTS))
    except (OSError, SafetensorError) as damage:
        raise ValueError(f"{path / WEIGHTS} cannot be read: {' '.join(str(damage).split())}") from None


def _read_run(file: Path) -> Parcel:
    checkpoint = read_checkpoint(file)
    recipe = checkpoint.get("recipe")
    if recipe is None:
        raise ValueError(f"checkpoint {file} is of an older version, and does not say how it is made")
    about: dict[str, Any] = {
        "format": FORMAT,
        "obbo_lightning": __version__,
        "round": int(checkpoint["global_step"]),
        "seed": recipe["seed"],
        "checkpoint": {"file": file.name, "sha256": digest(file)},
    }
    outer = checkpoint["state_dict"]["outer"]
    if "problem" not in recipe:  # λ is there all the same
        return Parcel({**about, "problem": None, "note": recipe["no_problem"]}, {"outer": outer})
    named = recipe["problem"]["part"]
    cls = class_named(named, "a checkpoint's problem")
    if isinstance(cls, type) and issubclass(cls, FewShot):
        return _few_shot(about, checkpoint, outer)
    return Parcel({**about, "problem": named, "lanes": checkpoint.get("lanes")}, _by_name(cls, outer))


def _by_name(cls: type[Problem], outer: Tensor) -> dict[str, Tensor]:
    if len(cls.names) != outer.shape[1]:
        return {"outer": outer}
    return {name: outer[:, i].clone() for i, name in enumerate(cls.names)}


def _few_shot(about: dict[str, Any], checkpoint: dict[str, Any], outer: Tensor) -> Parcel:
    recipe = checkpoint["recipe"]
    if "algorithm" not in recipe:
        raise ValueError(f"the run's inner solver cannot be used elsewhere: {recipe['no_algorithm']}")
    problem: FewShot = make_again(recipe["problem"])
    settings = dict(recipe["problem"]["with"])
    network = settings.pop("network")
    # γ as it was learned, a constant from now on
    settings |= {"proximity": float(problem.proximity_at(outer)), "learn_proximity": False}
    about |= {
        "problem": recipe["problem"]["part"],
        "with": settings,
        "network": network,
        "inner": recipe_of(make_again(recipe["algorithm"]).inner),
        "ways": network["with"].get("ways"),
        "inputs": checkpoint.get("inputs"),
        "notes": problem.notes(),
    }
    # copies: safetensors refuses tensors that share their memory
    state = {name: value.detach().clone() for name, value in problem.loaded_network(outer).state_dict().items()}
    return Parcel(about, state)


def title_of(parcel: Parcel) -> str:
    """What it is, in a few words."""
    about = parcel.about
    what = short_name(about["network"]["network"]) if parcel.few_shot else short_name(about["problem"] or "λ")
    return f"{what} after {about['round']} rounds"


def shape_of(about: dict[str, Any]) -> list[int] | None:
    """Of one example that the network takes, where that is known."""
    given = about["network"]["with"]
    if about["inputs"] is not None:
        return list(about["inputs"]["shape"])
    if given.get("shape") is not None:
        return list(given["shape"])
    if {"channels", "image_size"} <= set(given):
        return [given["channels"], given["image_size"], given["image_size"]]
    return None


def require_finite(parcel: Parcel) -> None:
    """What is not finite is of no use to anyone."""
    for name, value in parcel.tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise ValueError(f"{name} of {title_of(parcel)} is not finite, so it cannot be used")
