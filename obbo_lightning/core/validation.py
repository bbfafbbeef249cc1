"""Refusals that name the key, the value and what is allowed."""

import math
from collections.abc import Collection
from typing import Any


def positive(name: str, value: float) -> float:
    """Return ``value`` if it is a positive finite number.

    >>> positive("lr", 0.1)
    0.1
    """
    if not _is_number(value) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be a positive finite number, got {value!r}")
    return value


def nonnegative(name: str, value: float) -> float:
    """Return ``value`` if it is zero or a positive finite number."""
    if not _is_number(value) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be zero or a positive finite number, got {value!r}")
    return value


def fraction(name: str, value: float) -> float:
    """Return ``value`` if it lies in (0, 1]."""
    if not _is_number(value) or not 0 < value <= 1:
        raise ValueError(f"{name} must lie in (0, 1], got {value!r}")
    return value


def at_least(name: str, value: int, least: int) -> int:
    """Return ``value`` if it is an integer of at least ``least``.

    >>> at_least("window", 0, 1)
    Traceback (most recent call last):
    ValueError: window must be an integer of at least 1, got 0
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return value


def one_of(name: str, value: Any, allowed: Collection[Any]) -> Any:
    """Return ``value`` if it is among ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
