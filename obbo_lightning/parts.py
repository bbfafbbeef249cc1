"""Parts by name: ours, those of plug-ins, and yours from any module or file, all found by one function.

A part is what a setting can name: an algorithm, a geometry, a stream, a network. Its name is a word that was registered
(``obbo``), a dotted name (``package.module.Class``) or a class in a file (``path/to/file.py:Class``).
"""

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

C = TypeVar("C", bound=type[Any])


class Kind(NamedTuple):
    """What parts of one kind have in common.

    Attributes:
        base: the class that they extend, by name: looking for a part imports nothing else.
        names: the registered ones: a class, or the dotted name of one of ours.
    """

    base: str
    names: dict[str, type[Any] | str]


def _ours(room: str, **classes: str) -> dict[str, type[Any] | str]:
    return {name: f"obbo_lightning.{room}.{place}" for name, place in classes.items()}


KINDS = {
    "algorithm": Kind(
        "obbo_lightning.core.algorithm.Algorithm",
        _ours(
            "algorithms",
            obbo="obbo.OBBO",
            sobbo="sobbo.SOBBO",
            sobow="sobow.SOBOW",
            oagd="oagd.OAGD",
            adam="adam.Adam",
            sgdm="sgdm.SGDM",
            maml="maml.MAML",
            anil="anil.ANIL",
        ),
    ),
    "inner": Kind(
        "obbo_lightning.core.inner.InnerSolver",
        _ours("core.inner", gradient_descent="GradientDescent", exact="ExactSolution"),
    ),
    "hypergradient": Kind(
        "obbo_lightning.core.hypergradients.base.Estimator",
        _ours(
            "core.hypergradients",
            fixed_point="fixed_point.FixedPoint",
            unrolled="unrolled.Unrolled",
            conjugate_gradient="conjugate_gradient.ConjugateGradient",
            stochastic_neumann="stochastic_neumann.StochasticNeumann",
            closed_form="closed_form.ClosedForm",
        ),
    ),
    "geometry": Kind(
        "obbo_lightning.core.geometry.Geometry",
        _ours(
            "core.geometry",
            adaptive_diagonal="AdaptiveDiagonal",
            euclidean="Euclidean",
            negative_entropy="NegativeEntropy",
            burg="Burg",
        ),
    ),
    "regularizer": Kind(
        "obbo_lightning.core.regularizers.ElasticNet",
        _ours("core.regularizers", none="NoRegularizer", l1="L1", squared_l2="SquaredL2", elastic_net="ElasticNet"),
    ),
    "domain": Kind(
        "obbo_lightning.core.domains.Domain",
        _ours("core.domains", real="RealSpace", box="Box", nonnegative="Nonnegative", ball="L2Ball", simplex="Simplex"),
    ),
    "data": Kind(
        "obbo_lightning.streams.stream.Stream",
        _ours(
            "streams",
            synthetic="synthetic.SyntheticStream",
            fc100="fc100.FC100Stream",
            images="images.ImageFolderStream",
            examples="examples.ExampleStream",
            market="market.MarketStream",
            quadratic="quadratic.QuadraticData",
        ),
    ),
    "problem": Kind(
        "obbo_lightning.core.problem.Problem",
        _ours(
            "problems", few_shot="few_shot.FewShot", spline="spline.SmoothingSpline", quadratic="quadratic.Quadratic"
        ),
    ),
    "network": Kind(
        "torch.nn.modules.module.Module",
        _ours("networks", cnn4="cnn4.CNN4", mlp="mlp.MLP", resnet12="resnet12.ResNet12"),
    ),
    "callback": Kind("lightning.pytorch.callbacks.callback.Callback", {}),
}
FILE = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)")


def names_of(kind: str) -> list[str]:
    """The words by which parts of a kind are known: registered here, or by an installed plug-in."""
    return list(dict.fromkeys([*KINDS[kind].names, *(point.name for point in _plug_ins(kind))]))


def part(kind: str, name: str, key: str | None = None) -> type[Any]:
    """The class that ``name`` stands for.

    Args:
        kind: one of `KINDS`.
        name: a registered word, ``package.module.Class``, or ``path/to/file.py:Class``.
        key: the setting that the name was given for, to be named in a refusal.

    >>> part("algorithm", "obbo") is part("algorithm", "obbo_lightning.algorithms.obbo.OBBO")
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


def register(name: str) -> Callable[[C], C]:
    """Class decorator: make a part known under ``name``; what kind of part it is follows from what it extends."""

    def add(cls: C) -> C:
        kinds = [kind for kind, (base, _) in KINDS.items() if base in _ancestors(cls)]
        if not kinds:
            wanted = ", ".join(base.rpartition(".")[2] for base, _ in KINDS.values())
            raise ValueError(f"a part must extend one of {wanted}, got {cls.__name__}")
        known = KINDS[kinds[0]].names
        taken = known.get(name)
        if taken is not None and (taken if isinstance(taken, str) else name_of(taken)) != name_of(cls):
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


def source_file(name: str) -> Path | None:
    """The file that a name points into; None for words and dotted names."""
    found = FILE.fullmatch(name)
    return Path(found["file"]) if found else None


def placed(name: str, folder: Path | None = None) -> str:
    """The same name with the absolute place of its file: found from ``folder`` (a settings file's), or from here."""
    file = source_file(name)
    if file is None:
        return name
    beside = (folder or Path()) / file.expanduser()
    absolute = (beside if beside.exists() else file.expanduser()).absolute().resolve()
    return f"{absolute}:{name.rpartition(':')[2]}"


def name_of(cls: Any) -> str:
    """The name by which `part` finds a class (or a function that makes a network) again."""
    owners = [module for module in _titled() if getattr(module, cls.__qualname__, None) is cls]
    owners += [sys.modules["__main__"]] if cls.__module__ == "__main__" else []
    for module in owners:
        if module.__name__ == cls.__module__ and getattr(module, "__file__", None):
            return placed(f"{module.__file__}:{cls.__qualname__}")
    return f"{cls.__module__}.{cls.__qualname__}"


def class_named(name: str, key: str) -> Any:
    """What a dotted name or a file's class stands for, whatever kind of part it is."""
    file = source_file(name)
    if file is None:
        return _by_dotted_name(name, key)
    return _member(_module_of(file, name, key), name.rpartition(":")[2], name, key)


_PREFIX = "obbo_part_"


def _find(kind: str, name: str, key: str) -> Any:
    known = KINDS[kind].names.get(name)
    if known is not None:
        return _by_dotted_name(known, key) if isinstance(known, str) else known
    for point in _plug_ins(kind):
        if point.name == name:
            return _loaded(point.load, name, key)
    if name.endswith(".py"):
        raise ValueError(f"{key} must name a class in the file, {name}:Class, got {name!r}")
    if source_file(name) or re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", name):
        return class_named(name, key)
    if kind == "callback":
        return _by_dotted_name(f"lightning.pytorch.callbacks.{name}", key)
    words = names_of(kind)
    near = get_close_matches(name.lower(), words, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"{key} must be one of {', '.join(words)}, or yours as package.module.Class or file.py:Class, "
        f"got {name!r}{hint}"
    )


def _plug_ins(kind: str) -> Any:
    return entry_points(group=f"obbo_lightning.{kind}")


def _by_dotted_name(name: str, key: str) -> Any:
    module, _, member = name.rpartition(".")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # as `python -m` does
    return _member(_loaded(lambda: importlib.import_module(module), name, key), member, name, key)


def _module_of(file: Path, name: str, key: str) -> ModuleType:
    """The module of a file: loaded once, unless the file has changed since."""
    file = file.expanduser().absolute().resolve()
    if not file.is_file():
        raise ValueError(f"{key} must be a class in a file that exists, got {name!r}")
    content = file.read_bytes()
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(file) and getattr(module, "__obbo_content__", content) == content:
            return module  # also a script that names its own classes
    spec = importlib.util.spec_from_file_location(_title(file), file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{key} must be a class in a Python file, got {name!r}")
    module = importlib.util.module_from_spec(spec)
    module.__obbo_content__ = content  # type: ignore[attr-defined]
    with _among_siblings(file):
        sys.modules[_title(file)] = module
        try:
            _loaded(lambda: spec.loader.exec_module(module), name, key)  # type: ignore[union-attr]
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
        for name in [name for name in sys.modules if name not in before or name in plain]:
            place = getattr(sys.modules[name], "__file__", None)
            if place and Path(place).parent == folder and not name.startswith(_PREFIX):
                sys.modules[_title(Path(place).resolve())] = sys.modules.pop(name)
        sys.modules.update(hidden)


def _titled() -> list[ModuleType]:
    return [module for title, module in list(sys.modules.items()) if title.startswith(_PREFIX)]


def _loaded(load: Callable[[], Any], name: str, key: str) -> Any:
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


def _ancestors(cls: Any) -> set[str]:
    return {_qualified(ancestor) for ancestor in getattr(cls, "__mro__", ())}


def _qualified(cls: type[Any] | str) -> str:
    return cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"
