"""Digests that identify data: of arrays, tasks and files; and which of several sources have changed."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from obbo_lightning.core.problem import Task

DIGITS = 16  # of a fingerprint; enough to tell the tasks of a run apart


def sha256_of(*contents: bytes | memoryview | str | Path) -> str:
    """Return the SHA-256 of bytes, texts and files, one after the other, in hexadecimal digits.

    >>> sha256_of("ab") == sha256_of(b"a", "b")
    True
    """
    found = hashlib.sha256()
    for content in contents:
        if isinstance(content, Path):
            content = content.read_bytes()
        found.update(content.encode() if isinstance(content, str) else content)
    return found.hexdigest()


def digest_arrays(*arrays: NDArray[Any], names: Sequence[str] = ()) -> str:
    """Return a digest of names, dtypes, shapes and values.

    >>> digest_arrays(np.arange(3)) == digest_arrays(np.arange(3)) != digest_arrays(np.arange(3.0))
    True
    """
    parts = [part for a in arrays for part in (f"{a.dtype.str}{a.shape}", np.ascontiguousarray(a).data)]
    return sha256_of("\n".join(names), *parts)[:DIGITS]


def fingerprint_of(task: Task) -> str:
    """Return a digest of a task's tensors and their names."""
    names = sorted(task)
    return digest_arrays(*(task[name].detach().cpu().numpy() for name in names), names=names)


def describe_changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return which sources have changed between two collections of digests; empty where none has.

    >>> describe_changes({"ant": "1", "bee": "2"}, {"bee": "3", "cat": "4"})
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
