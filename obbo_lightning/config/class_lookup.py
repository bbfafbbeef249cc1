"""Classes by a dotted name, or from a file: how the modules of parts are found, loaded and named."""

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from obbo_lightning.config.trust import anything_goes, require_trust

_PREFIX = "obbo_part_"
FILE = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)")


def source_file(name: str) -> Path | None:
    """The file that a name points into; None for words and dotted names."""
    found = FILE.fullmatch(name)
    return Path(found["file"]) if found else None


def absolute_name(name: str, folder: Path | None = None) -> str:
    """The same name with the absolute place of its file: found from ``folder`` (a settings file's), or from here."""
    file = source_file(name)
    if file is None:
        return name
    beside = (folder or Path()) / file.expanduser()
    absolute = (beside if beside.exists() else file.expanduser()).absolute().resolve()
    return f"{absolute}:{name.rpartition(':')[2]}"


def qualified_name(cls: Any) -> str:
    """The name by which `part` finds a class (or a function that makes a network) again."""
    owners = [module for module in _titled() if getattr(module, cls.__qualname__, None) is cls]
    owners += [sys.modules["__main__"]] if cls.__module__ == "__main__" else []
    for module in owners:
        if module.__name__ == cls.__module__ and getattr(module, "__file__", None):
            return absolute_name(f"{module.__file__}:{cls.__qualname__}")
    return f"{cls.__module__}.{cls.__qualname__}"


def import_class(name: str, key: str) -> Any:
    """What a dotted name or a file's class stands for, whatever kind of part it is."""
    file = source_file(name)
    if file is None:
        return _by_dotted_name(name, key)
    return _member(_module_of(file, name, key), name.rpartition(":")[2], name, key)


def _by_dotted_name(name: str, key: str) -> Any:
    module, _, member = name.rpartition(".")
    require_trust(name, key, module)
    here = str(Path.cwd())
    if anything_goes() and here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # as `python -m` does
    return _member(loaded(lambda: importlib.import_module(module), name, key), member, name, key)


def _module_of(file: Path, name: str, key: str) -> ModuleType:
    """The module of a file: loaded once, unless the file has changed since."""
    file = file.expanduser().absolute().resolve()
    if not file.is_file():
        raise ValueError(f"{key} must be a class in a file that exists, got {name!r}")
    content = file.read_bytes()
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(file) and getattr(module, "__obbo_content__", content) == content:
            return module  # also a script that names its own classes
    require_trust(name, key)
    spec = importlib.util.spec_from_file_location(_title(file), file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{key} must be a class in a Python file, got {name!r}")
    module = importlib.util.module_from_spec(spec)
    module.__obbo_content__ = content  # type: ignore[attr-defined]
    with _among_siblings(file):
        sys.modules[_title(file)] = module
        try:
            loaded(lambda: spec.loader.exec_module(module), name, key)  # type: ignore[union-attr]
        except ValueError:
            del sys.modules[_title(file)]
            raise
    return module


def _title(file: Path) -> str:
    return f"{_PREFIX}{hashlib.blake2b(str(file).encode(), digest_size=6).hexdigest()}_{file.stem}"


@contextmanager
def _among_siblings(file: Path) -> Iterator[None]:
    """What lies beside a file can be imported while it is loaded, and does not stay in the way of other folders' files.

    A module ``rates`` of one project must not become the ``rates`` of another: outside of here it has the title of its
    file, under which a part in it would be found, too.
    """
    folder, before = file.parent, set(sys.modules)
    siblings = {module.__name__: module for module in _titled() if Path(str(module.__file__)).parent == folder}
    plain = {name: module for name, module in siblings.items() if not name.startswith(_PREFIX)}
    hidden = {name: sys.modules.pop(name) for name in plain if name in sys.modules}
    sys.modules.update(plain)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        if str(folder) not in sys.path:
            sys.path.append(str(folder))  # for what a part imports only when it is called
        for name in [name for name in sys.modules if name not in before or name in plain]:
            place = getattr(sys.modules[name], "__file__", None)
            if place and Path(place).parent == folder and not name.startswith(_PREFIX):
                sys.modules[_title(Path(place).resolve())] = sys.modules.pop(name)
        sys.modules.update(hidden)


def _titled() -> list[ModuleType]:
    return [module for title, module in list(sys.modules.items()) if title.startswith(_PREFIX)]


def loaded(load: Callable[[], Any], name: str, key: str) -> Any:
    """Run somebody's module; whatever it raises becomes a refusal."""
    try:
        return load()
    except Exception as error:  # it is the user's module that is run here: anything can happen
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{key} {name!r} cannot be loaded: {said}") from error


def _member(module: ModuleType, member: str, name: str, key: str) -> Any:
    found = getattr(module, member, None)
    if found is None:
        near = get_close_matches(member, [m for m in vars(module) if not m.startswith("_")], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{key} must name a class, got {name!r}, and there is no {member} in it{hint}")
    return found
