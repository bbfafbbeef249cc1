"""Compare numbers with recorded ones, with all digits.

The files in tests/fixtures/recorded hold whole runs and single tasks as commit d53a825 gave them, under its names.
``names.yaml`` there translates names that have changed since (flags, tables, columns, keys of a summary); numbers are
not translated. What depends on automatic steps or on folds of validation examples was recorded again, on one machine,
when those were introduced.

Last digits of exp, sin and matrix products depend on the processor and on torch, so there is one folder per
`arithmetic`. Where this machine has a folder, all digits must be equal. Elsewhere numbers are compared with the first
folder to five digits, and digests are not compared.
"""

import hashlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

FILES = Path(__file__).parent / "fixtures" / "recorded"
DIGEST = re.compile(r"[0-9a-f]{16}( [0-9a-f]{16})*")


@cache
def names() -> dict[str, dict[str, Any]]:
    """Return translations of flags, keys and prefixes of keys to the present names; None: removed."""
    return yaml.safe_load((FILES / "names.yaml").read_text())


def present_flags(recorded: str) -> str:
    """The flags of a recorded run, in the present words."""
    words = recorded.split(" ")
    return " ".join(word for word in (names()["flags"].get(w, w) for w in words) if word is not None)


def present_keys(recorded: Any) -> Any:
    """A recorded structure with the present keys, also inside of it."""
    if not isinstance(recorded, dict):
        return recorded
    present = {}
    for name, value in recorded.items():
        prefix = next((before for before in names()["prefixes"] if name.startswith(before)), None)
        renamed = name if prefix is None else names()["prefixes"][prefix] + name.removeprefix(prefix)
        present[names()["keys"].get(name, renamed)] = present_keys(value)
    return {key: value for key, value in present.items() if key is not None}


def digest(values: Any) -> Any:
    """Return a tensor as its shape, dtype, sum and weighted sum; everything else as JSON has it."""
    if isinstance(values, Tensor):
        flat = values.detach().double().flatten()
        weights = torch.sin(torch.arange(1, len(flat) + 1, dtype=torch.float64))
        return [list(values.shape), str(values.dtype), float(flat.sum()), float(flat @ weights)]
    if isinstance(values, dict):
        return {str(name): digest(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [digest(value) for value in values]
    return values if isinstance(values, int | float | str | bool | None) else str(values)


def number(text: str) -> float | str:
    """Return a field of a table as a number where it is one."""
    try:
        return float(text)
    except ValueError:
        return text


@cache
def arithmetic() -> str:
    """Digest of what this machine computes for fixed inputs: equal digests mean equal rounding."""
    found = hashlib.sha256(torch.__version__.encode())
    for dtype in (torch.float32, torch.float64):
        x = torch.arange(1, 4097, dtype=dtype).mul_(0.37)
        square = x.sin().reshape(64, 64)
        image = x.cos().reshape(1, 4, 32, 32)
        kernel = x[:144].sin().reshape(4, 4, 3, 3)
        convolved = torch.nn.functional.conv2d(image, kernel)
        for value in (x.exp2().log(), x.neg().exp(), square @ square, convolved, square.softmax(-1), x.sin().sum()):
            found.update(value.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def require_recorded(group: str, name: str, seen: Any) -> None:
    """Compare with what the group's file holds under ``name``."""
    recordings = {path.parent.name: json.loads(path.read_text()) for path in sorted(FILES.glob(f"*/{group}.json"))}
    folders = [folder for folder, recording in recordings.items() if name in recording]
    exact = arithmetic() in folders
    recording = recordings[arithmetic() if exact else folders[0]]
    require_equal(name, json.loads(json.dumps(seen)), present_keys(recording[name]), exact)


def require_equal(where: str, seen: Any, known: Any, exact: bool) -> None:
    """Compare two structures, number by number."""
    if isinstance(known, dict):
        assert set(seen) >= set(known), f"{where} lacks {set(known) - set(seen)}"  # further columns may be there
        for key, value in known.items():
            require_equal(f"{where}: {key}", seen[key], value, exact)
    elif isinstance(known, list):
        assert len(seen) == len(known), where
        for i, value in enumerate(known):
            require_equal(f"{where}[{i}]", seen[i], value, exact)
    elif isinstance(known, float) and not exact:
        assert seen == pytest.approx(known, rel=1e-5, abs=1e-7, nan_ok=True), where
    elif isinstance(known, str) and (not DIGEST.fullmatch(known) or not exact):
        assert isinstance(seen, str), where  # words may change
    else:
        assert seen == known or (seen != seen and known != known), where
