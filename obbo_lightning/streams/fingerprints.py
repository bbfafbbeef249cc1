"""What tells tasks apart: short digests of the numbers in them."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from obbo_lightning.core.problem import Task

DIGITS = 16


def digest_of(*arrays: NDArray[Any], names: Sequence[str] = ()) -> str:
    """Of names, kinds, shapes and bytes.

    >>> digest_of(np.arange(3)) == digest_of(np.arange(3)) != digest_of(np.arange(3.0))
    True
    """
    found = hashlib.sha256("\n".join(names).encode())
    for array in arrays:
        found.update(f"{array.dtype.str}{array.shape}".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()[:DIGITS]


def fingerprint_of(task: Task) -> str:
    """A digest of a task's tensors and their names."""
    names = sorted(task)
    return digest_of(*(task[name].detach().cpu().numpy() for name in names), names=names)


def compare(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Which named sources changed between two times, in words; nothing where none did.

    >>> compare({"ant": "1", "bee": "2"}, {"bee": "3", "cat": "4"})
    "'bee' has changed; 'ant' is gone; 'cat' is new"
    """
    kinds = {
        "changed": [name for name in before if name in now and now[name] != before[name]],
        "gone": [name for name in before if name not in now],
        "new": [name for name in now if name not in before],
    }
    found = []
    for word, names in kinds.items():
        if names:
            shown = ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            verbs = ("has", "have") if word == "changed" else ("is", "are")
            found.append(f"{shown} {verbs[len(names) > 1]} {word}")
    return "; ".join(found)
