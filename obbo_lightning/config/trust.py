"""Whose code may be run: what a command line names, always; what a file names, only where that is installed or loaded.

A run directory, a checkpoint or an export may come from anyone, and it names the classes that it needs. Whoever opens
one does so inside of `only_installed`: modules that lie about, such as a file in the working directory, are then
refused before anything in them is run.
"""

import importlib.util
import re
import site
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

_how: str | None = None  # of this process, and not of a thread: loaders have threads of their own


class UntrustedError(ValueError):
    """A file names code that is not installed, and nobody said that it may run."""


@contextmanager
def untrusted_source(how: str | None) -> Iterator[None]:
    """Inside of this only installed modules are run; ``how`` says what to do to run others, None allows them."""
    global _how
    before, _how = _how, how
    try:
        yield
    finally:
        _how = before


def anything_goes() -> bool:
    """Whether the working directory may be searched for modules."""
    return _how is None


def require_trust(name: str, key: str, module: str | None = None) -> None:
    """Refuse ``name`` if running its module would run a file that lies about; ``module`` is None for one in a file."""
    if _how is None or (module is not None and (module in sys.modules or _is_installed(module.partition(".")[0]))):
        return
    raise UntrustedError(f"{key} {name!r} is code that no installed package has: if you trust it, {_how}")


def require_trusted_names(value: Any, key: str) -> None:
    """The same for all that looks like the name of a class anywhere in ``value``: whoever parses it would import it."""
    if isinstance(value, dict):
        for name, below in value.items():
            require_trusted_names(below, f"{key}.{name}")
    elif isinstance(value, (list, tuple)):
        for below in value:
            require_trusted_names(below, key)
    elif isinstance(value, str) and re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", value):
        require_trust(value, key, value.rpartition(".")[0])


def _is_installed(top: str) -> bool:
    if top == "obbo_lightning" or top in sys.builtin_module_names:
        return True
    try:
        found = importlib.util.find_spec(top)  # runs nothing, where there is no dot
    except (ImportError, ValueError):
        return False
    if found is None:
        return False
    places = [*(found.submodule_search_locations or []), *([str(found.origin)] if found.has_location else [])]
    resolved = [Path(place).resolve() for place in places]
    inside = [any(map(place.is_relative_to, _folders())) for place in resolved]
    return found.origin == "frozen" or (bool(inside) and all(inside))


@cache
def _folders() -> tuple[Path, ...]:
    """Where packages are installed."""
    ours = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple(Path(folder).resolve() for folder in (*ours, *site.getsitepackages(), site.getusersitepackages()))
