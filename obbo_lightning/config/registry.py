"""Parts by name: ours, those of plug-ins, and yours from any module or file, all found by one function.

A part is what a setting can name: an algorithm, a geometry, a stream, a network. Its name is a word that was registered
(``obbo``), a dotted name (``package.module.Class``) or a class in a file (``path/to/file.py:Class``).
"""

import re
import sys
from collections.abc import Callable
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar

from obbo_lightning.config.class_lookup import absolute_name, import_class, loaded, qualified_name, source_file
from obbo_lightning.config.components import KINDS
from obbo_lightning.config.trust import UntrustedError, require_trust, require_trusted_names, untrusted_source

__all__ = [
    "KINDS",
    "UntrustedError",
    "absolute_name",
    "component_names",
    "find_component",
    "import_class",
    "qualified_name",
    "register_component",
    "require_trusted_names",
    "short_name",
    "source_file",
    "untrusted_source",
]

C = TypeVar("C", bound=type[Any])


def component_names(kind: str) -> list[str]:
    """The words by which parts of a kind are known: registered here, or by an installed plug-in."""
    return list(dict.fromkeys([*KINDS[kind].names, *(point.name for point in _plug_ins(kind))]))


def find_component(kind: str, name: str, key: str | None = None) -> type[Any]:
    """The class that ``name`` stands for.

    Args:
        kind: one of `KINDS`.
        name: a registered word, ``package.module.Class``, or ``path/to/file.py:Class``.
        key: the setting that the name was given for, to be named in a refusal.

    >>> find_component("algorithm", "obbo") is find_component("algorithm", "obbo_lightning.algorithms.obbo.OBBO")
    True
    """
    found = _find(kind, name, key or kind)
    base = KINDS[kind].base
    made_by_function = kind == "network" and callable(found)
    if not made_by_function and base not in _ancestors(found):
        raise ValueError(f"{key or kind} must extend {base.rpartition('.')[2]}, got {name!r}, which does not")
    lacking = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
    if lacking:
        raise ValueError(f"{key or kind} must have the methods {lacking}, got {name!r}, which does not")
    return found


def register_component(name: str) -> Callable[[C], C]:
    """Class decorator: make a part known under ``name``; what kind of part it is follows from what it extends."""

    def add(cls: C) -> C:
        kinds = [kind for kind, (base, _) in KINDS.items() if base in _ancestors(cls)]
        if not kinds:
            wanted = ", ".join(base.rpartition(".")[2] for base, _ in KINDS.values())
            raise ValueError(f"a part must extend one of {wanted}, got {cls.__name__}")
        known = KINDS[kinds[0]].names
        taken = known.get(name)
        if taken is not None and (taken if isinstance(taken, str) else qualified_name(taken)) != qualified_name(cls):
            raise ValueError(f"{kinds[0]} name must be new, got {name!r}, which is {_qualified(taken)}")
        known[name] = cls
        return cls

    return add


def short_name(name: str) -> str:
    """What a part is called in folders, tables and legends.

    >>> short_name("obbo"), short_name("package.module.Sparse"), short_name("/somewhere/mine.py:Sparse")
    ('obbo', 'Sparse', 'Sparse')
    """
    return re.split(r"[.:]", name)[-1]


def _find(kind: str, name: str, key: str) -> Any:
    known = KINDS[kind].names.get(name)
    if known is not None:
        return import_class(known, key) if isinstance(known, str) else known
    for point in _plug_ins(kind):
        if point.name == name:
            require_trust(name, key, point.module)  # the working directory, too, may have entry points
            return loaded(point.load, name, key)
    if name.endswith(".py"):
        raise ValueError(f"{key} must name a class in the file, {name}:Class, got {name!r}")
    if source_file(name) or re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", name):
        return import_class(name, key)
    if kind == "callback":
        return import_class(f"lightning.pytorch.callbacks.{name}", key)
    words = component_names(kind)
    near = get_close_matches(name.lower(), words, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"{key} must be one of {', '.join(words)}, or yours as package.module.Class or file.py:Class, "
        f"got {name!r}{hint}"
    )


def _plug_ins(kind: str) -> Any:
    return _installed(tuple(sys.path)).select(group=f"obbo_lightning.{kind}")


@cache
def _installed(path: tuple[str, ...]) -> Any:
    """Every entry point that is installed in these folders: reading them all takes longer than finding a part."""
    return entry_points()


def _ancestors(cls: Any) -> set[str]:
    return {_qualified(ancestor) for ancestor in getattr(cls, "__mro__", ())}


def _qualified(cls: type[Any] | str) -> str:
    return cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"
