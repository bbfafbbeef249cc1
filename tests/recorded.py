"""What was seen once, compared with what is seen now.

Tests by hand say what is right for the cases that somebody thought of. These say for many more that nothing has
changed: numbers of a run, of a task, as they were when all tests by hand passed. Where a change is meant,

    RECORD=1 python -m pytest -n 0 tests/streams/test_recorded_tasks.py tests/training/test_recorded_runs.py

writes them again, and the difference of the JSON files in tests/fixtures/recorded is a part of the change.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

FILES = Path(__file__).parent / "fixtures" / "recorded"


def digest(values: Any) -> Any:
    """A tensor as its shape, its sum and a sum with weights of their own; everything else as JSON has it."""
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
    """A field of a table."""
    try:
        return float(text)
    except ValueError:
        return text


def require_recorded(group: str, name: str, seen: Any, rel: float = 1e-5) -> None:
    """Compare with the file of the group, or write into it."""
    file = FILES / f"{group}.json"
    seen = json.loads(json.dumps(seen))
    known = json.loads(file.read_text()) if file.exists() else {}
    if os.environ.get("RECORD"):
        known[name] = _rounded(seen)
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = (f" {json.dumps(one)}: {json.dumps(known[one])}" for one in sorted(known))
        file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return
    assert name in known, f"{name} was never recorded"
    _require_equal(name, seen, known[name], rel)


def _require_equal(where: str, seen: Any, known: Any, rel: float) -> None:
    if isinstance(known, dict):
        assert list(seen) == list(known), where
        for key, value in known.items():
            _require_equal(f"{where}: {key}", seen[key], value, rel)
    elif isinstance(known, list):
        assert len(seen) == len(known), where
        for i, value in enumerate(known):
            _require_equal(f"{where}[{i}]", seen[i], value, rel)
    elif isinstance(known, float):
        assert seen == pytest.approx(known, rel=rel, abs=1e-7, nan_ok=True), where
    else:
        assert seen == known, where


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.8g}") if isinstance(value, float) and math.isfinite(value) else value
