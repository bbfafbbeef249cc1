"""Checks of arguments, and of the memory that they need; errors name the key, the rule and the value."""

import math
import os
from collections.abc import Collection
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # cgroup v2 and v1


def positive(name: str, value: float) -> float:
    """Return ``value`` if it is a positive finite number."""
    if not number(name, value) > 0 or math.isinf(value):
        raise ValueError(f"{name} must be a positive finite number, got {value!r}")
    return value


def nonnegative(name: str, value: float) -> float:
    """Return ``value`` if it is zero or a positive finite number."""
    if not number(name, value) >= 0 or math.isinf(value):
        raise ValueError(f"{name} must be zero or a positive finite number, got {value!r}")
    return value


def fraction(name: str, value: float) -> float:
    """Return ``value`` if it lies in (0, 1]."""
    if not 0 < number(name, value) <= 1:
        raise ValueError(f"{name} must lie in (0, 1], got {value!r}")
    return value


def decay(name: str, value: float) -> float:
    """Return ``value`` if it lies in [0, 1)."""
    if not 0 <= number(name, value) < 1:
        raise ValueError(f"{name} must lie in [0, 1), got {value!r}")
    return value


def number(name: str, value: float) -> float:
    """Return ``value`` as a float, which may be infinite or NaN."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be a finite number, got one beyond the largest float") from None


def at_least(name: str, value: int, least: int) -> int:
    """Return ``value`` if it is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return int(value)


def one_of(name: str, value: Any, allowed: Collection[Any]) -> Any:
    """Return ``value`` if it is among ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")
    return value


def instance_of(name: str, value: Any, kind: type[T]) -> T:
    """Return ``value`` if it is a ``kind``."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be an instance of {kind.__name__}, got {value!r}")
    return value


def require_memory(name: str, value: object, needed: float) -> None:
    """Refuse a value whose ``needed`` bytes exceed half of the memory: the rest of a run needs the other half."""
    available = available_memory()
    if needed > available / 2:
        rule = f"fit into the memory of this machine ({available / 1e9:.3g} GB)"
        raise ValueError(f"{name} must {rule}, got {value!r}, which needs about {needed / 1e9:.3g} GB")


@cache
def available_memory() -> int:
    """Return the bytes of memory that this machine has, or that its container may use."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in CONTAINER_LIMITS:
        try:
            limits.append(int(Path(file).read_text()))
        except (OSError, ValueError):  # another version of control groups, or no limit
            continue
    return min(limits)
