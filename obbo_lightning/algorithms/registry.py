"""Algorithms by name: for configuration files, for comparisons, and for the contract suite."""

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, TypeVar

from obbo_lightning.core.algorithm import Algorithm

ALGORITHMS: dict[str, type[Algorithm]] = {}

A = TypeVar("A", bound=type[Algorithm])


def register(name: str) -> Callable[[A], A]:
    """Class decorator: make an algorithm known under ``name``."""

    def add(cls: A) -> A:
        if name in ALGORITHMS:
            raise ValueError(f"algorithm name must be new, got {name!r}, which is {ALGORITHMS[name].__name__}")
        ALGORITHMS[name] = cls
        return cls

    return add


def make_algorithm(name: str, **settings: Any) -> Algorithm:
    """The registered algorithm ``name`` with these settings.

    >>> import obbo_lightning
    >>> type(make_algorithm("obbo", window=25)).__name__
    'OBBO'
    """
    if name not in ALGORITHMS:
        near = get_close_matches(name, ALGORITHMS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {name!r}{hint}")
    taken = list(inspect.signature(ALGORITHMS[name]).parameters)
    for key in settings:
        if key not in taken:
            near = get_close_matches(key, taken, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{name} takes {', '.join(taken)}, got {key!r}{hint}")
    return ALGORITHMS[name](**settings)
