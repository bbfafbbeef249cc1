"""Components by name, and the rule for which names may be imported.

A name is registered (``obbo``), dotted (``package.module.Class``) or a class in a file (``path/to/file.py:Class``).
What is typed (command line, Python, a configuration file named there) may be any of these. What is read from a run
directory, a checkpoint or an export resolves to registered components and installed entry points only; everything else
needs ``--trust``. Nothing is imported before that is decided.
"""

import importlib
import importlib.util
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

C = TypeVar("C", bound=type[Any])
_FILE = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)")
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


class UntrustedError(ValueError):
    """Code that a run, a checkpoint or an export names, which is neither registered nor an entry point."""


class Kind(NamedTuple):
    """One kind of component."""

    base: str  # dotted name of the class that components extend
    names: dict[str, type[Any] | str]  # registered components: a class, or the dotted name of one
    unnamed: tuple[str, ...] = ()  # dotted names of components that others construct, so that checkpoints name them


def _kind(base: str, names: dict[str, str], unnamed: tuple[str, ...] = ()) -> Kind:
    package = __name__.partition(".")[0]
    dotted: dict[str, type[Any] | str] = {name: f"{package}.{path}" for name, path in names.items()}
    return Kind(f"{package}.{base}", dotted, tuple(f"{package}.{path}" for path in unnamed))


KINDS = {
    "algorithm": _kind(
        "core.algorithm.Algorithm",
        {
            "obbo": "algorithms.obbo.OBBO",
            "sobbo": "algorithms.sobbo.SOBBO",
            "sobow": "algorithms.sobow.SOBOW",
            "oagd": "algorithms.oagd.OAGD",
            "adam": "algorithms.adam.Adam",
            "sgdm": "algorithms.sgdm.SGDM",
            "maml": "algorithms.maml.MAML",
            "anil": "algorithms.maml.ANIL",
        },
    ),
    "inner": _kind(
        "core.inner_solvers.InnerSolver",
        {
            "gradient_descent": "core.inner_solvers.GradientDescent",
            "sgd": "core.inner_solvers.InnerSGD",
            "adam": "core.inner_solvers.InnerAdam",
            "exact": "core.inner_solvers.ExactSolution",
        },
        unnamed=("algorithms.maml.Adaptation", "problems.module.CurrentWeights"),
    ),
    "hypergradient": _kind(
        "core.hypergradients.Estimator",
        {
            "fixed_point": "core.hypergradients.FixedPoint",
            "unrolled": "core.hypergradients.Unrolled",
            "conjugate_gradient": "core.hypergradients.ConjugateGradient",
            "stochastic_neumann": "core.hypergradients.StochasticNeumann",
            "closed_form": "core.hypergradients.ClosedForm",
        },
        unnamed=("algorithms.maml.MetaGradient",),
    ),
    "geometry": _kind(
        "core.geometry.Geometry",
        {
            "adaptive_diagonal": "core.geometry.AdaptiveDiagonal",
            "euclidean": "core.geometry.Euclidean",
            "negative_entropy": "core.geometry.NegativeEntropy",
            "burg": "core.geometry.Burg",
        },
    ),
    "regularizer": _kind(
        "core.regularizers.ElasticNet",
        {
            "none": "core.regularizers.NoRegularizer",
            "l1": "core.regularizers.L1",
            "squared_l2": "core.regularizers.SquaredL2",
            "elastic_net": "core.regularizers.ElasticNet",
        },
    ),
    "domain": _kind(
        "core.domains.Domain",
        {
            "real": "core.domains.RealSpace",
            "box": "core.domains.Box",
            "nonnegative": "core.domains.Nonnegative",
            "ball": "core.domains.L2Ball",
            "simplex": "core.domains.Simplex",
        },
    ),
    "group": _kind(
        "core.parameter_groups.ParameterGroup",
        {
            "real": "core.parameter_groups.Real",
            "positive": "core.parameter_groups.Positive",
            "interval": "core.parameter_groups.Interval",
            "simplex": "core.parameter_groups.OnSimplex",
            "weights": "networks.flat.Weights",
        },
        unnamed=("core.parameter_groups.ParameterGroup", "core.parameter_groups.ParameterGroups"),
    ),
    "data": _kind(
        "streams.stream.Stream",
        {
            "synthetic": "streams.few_shot.synthetic.SyntheticStream",
            "fc100": "streams.few_shot.fc100.FC100Stream",
            "images": "streams.few_shot.stored.ImageFolderStream",
            "examples": "streams.few_shot.stored.ExampleStream",
            "market": "streams.market.MarketStream",
            "quadratic": "streams.quadratic.QuadraticStream",
            "follow": "streams.arriving.FollowStream",
            "sources": "streams.labelled.sources.SourcesStream",
            "forgetting": "streams.tabular.ForgettingStream",
            "imbalance": "streams.labelled.imbalance.ImbalanceStream",
            "regularization": "streams.labelled.regularization.RegularizationStream",
        },
        unnamed=("streams.few_shot.learn2learn.LearnToLearnStream",),
    ),
    "problem": _kind(
        "core.problem.Problem",
        {
            "few_shot": "problems.few_shot.FewShot",
            "spline": "problems.spline.SmoothingSpline",
            "quadratic": "problems.quadratic.Quadratic",
            "sources": "problems.sources.SourceWeights",
            "forgetting": "problems.forgetting.Forgetting",
            "imbalance": "problems.imbalance.VectorScaling",
            "regularization": "problems.regularization.Regularized",
        },
        unnamed=("problems.module.ModuleProblem", "problems.module.TrainedModuleProblem"),
    ),
    "network": Kind(
        "torch.nn.modules.module.Module",
        {
            "cnn4": "obbo_lightning.networks.cnn4.CNN4",
            "mlp": "obbo_lightning.networks.mlp.MLP",
            "resnet12": "obbo_lightning.networks.resnet12.ResNet12",
        },
    ),
    "callback": Kind(
        "lightning.pytorch.callbacks.callback.Callback",
        {
            name: f"lightning.pytorch.callbacks.{name}"
            for name in (
                *("DeviceStatsMonitor", "EarlyStopping", "ModelCheckpoint", "ModelSummary", "OnExceptionCheckpoint"),
                *("RichModelSummary", "RichProgressBar", "ThroughputMonitor", "Timer", "TQDMProgressBar"),
            )
        },
    ),
}


def component_names(kind: str) -> list[str]:
    """Return the registered names of a kind, those of installed entry points included."""
    return list(dict.fromkeys([*KINDS[kind].names, *(point.name for point in _entry_points(kind))]))


def find_component(kind: str, name: str, key: str | None = None) -> type[Any]:
    """Return the class that ``name`` stands for; ``key`` is the configuration key that an error message names.

    >>> find_component("algorithm", "obbo") is find_component("algorithm", "obbo_lightning.algorithms.obbo.OBBO")
    True
    """
    key = key or kind
    found = _find(kind, name, key)
    base = import_class(KINDS[kind].base, key)
    makes_network = kind == "network" and callable(found)
    if not makes_network and not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{key} must extend {base.__name__}, got {name!r}, which does not")
    lacking = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
    if lacking:
        raise ValueError(f"{key} must have the methods {lacking}, got {name!r}, which does not")
    return found


def _find(kind: str, name: str, key: str) -> Any:
    known = KINDS[kind].names.get(name)
    if known is not None:
        return import_class(known, key) if isinstance(known, str) else known
    for point in _entry_points(kind):
        if point.name == name:
            return _load(point.load, name, key)
    if name.endswith(".py"):
        raise ValueError(f"{key} must name a class in the file, {name}:Class, got {name!r}")
    if source_file(name) or _DOTTED.fullmatch(name):
        require_trusted(name, key, kind)
        return import_class(name, key)
    names = component_names(kind)
    near = get_close_matches(name.lower(), names, n=1) or get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"{key} must be one of {', '.join(names)}, or yours as package.module.Class or file.py:Class, "
        f"got {name!r}{hint}"
    )


def register_component(name: str) -> Callable[[C], C]:
    """Class decorator: register a component; its kind follows from what it extends."""

    def add(cls: C) -> C:
        ancestors = {f"{ancestor.__module__}.{ancestor.__qualname__}" for ancestor in cls.__mro__}
        kinds = [kind for kind, known in KINDS.items() if known.base in ancestors]
        if not kinds:
            wanted = ", ".join(kind.base.rpartition(".")[2] for kind in KINDS.values())
            raise ValueError(f"a component must extend one of {wanted}, got {cls.__name__}")
        names = KINDS[kinds[0]].names
        taken = _qualified(names.get(name, cls))
        if taken != qualified_name(cls):
            raise ValueError(f"{kinds[0]} name must be new, got {name!r}, which is {taken}")
        names[name] = cls
        return cls

    return add


def short_name(name: str) -> str:
    """Return what a component is called in folders, tables and legends.

    >>> short_name("obbo"), short_name("package.module.Sparse"), short_name("/somewhere/mine.py:Sparse")
    ('obbo', 'Sparse', 'Sparse')
    """
    return re.split(r"[.:]", name)[-1]


def registered_name(kind: str, cls: type[Any]) -> str:
    """Return the name by which `find_component` finds a class."""
    dotted = qualified_name(cls)
    return next((name for name, known in KINDS[kind].names.items() if _qualified(known) == dotted), dotted)


def qualified_name(cls: Any) -> str:
    """Return the dotted name of a class, or ``file.py:Class`` for one that was loaded from a file."""
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    if file and (hasattr(module, "__obbo_content__") or cls.__module__ == "__main__"):
        return absolute_name(f"{file}:{cls.__qualname__}")
    return f"{cls.__module__}.{cls.__qualname__}"


def _qualified(cls: type[Any] | str) -> str:
    return cls if isinstance(cls, str) else qualified_name(cls)


# Trust


_trust_hint: str | None = None  # of this process, not of a thread: data loaders have threads of their own


@contextmanager
def untrusted_source(hint: str | None) -> Iterator[None]:
    """Import registered components and entry points only; ``hint`` tells how to allow the rest, None allows it."""
    global _trust_hint
    before, _trust_hint = _trust_hint, hint
    try:
        yield
    finally:
        _trust_hint = before


def is_trusted() -> bool:
    """Return whether names may be imported that are neither registered nor entry points."""
    return _trust_hint is None


def require_trusted(name: str, key: str, *kinds: str) -> None:
    """Refuse a dotted name or a class in a file, unless it is trusted or a registered component of one of ``kinds``."""
    if is_trusted():
        return
    for kind in kinds:
        known = [*KINDS[kind].names.values(), *KINDS[kind].unnamed]
        if name in map(_qualified, known) or name in (point.value.replace(":", ".") for point in _entry_points(kind)):
            return
    raise UntrustedError(
        f"{key} {name!r} is neither a registered component nor an entry point: to run it, {_trust_hint}"
    )


def require_trusted_values(value: Any, key: str, folder: Path) -> None:
    """Refuse untrusted class names and paths outside of ``folder`` anywhere in the ``trainer`` section of a run."""
    if is_trusted():
        return
    if isinstance(value, dict):
        for name, below in value.items():
            require_trusted_values(below, f"{key}.{name}", folder)
    elif isinstance(value, list):
        for below in value:
            require_trusted_values(below, key, folder)
    elif isinstance(value, str) and _DOTTED.fullmatch(value):
        require_trusted(value, key, "callback")
    elif isinstance(value, str):
        path = Path(value).expanduser()
        names_folder = re.search(r"dir|(?<!class_)path", key.rpartition(".")[2])
        leaves = names_folder or path.is_absolute() or ".." in path.parts
        if leaves and not path.resolve().is_relative_to(folder.resolve()):
            raise UntrustedError(f"{key} must be inside {folder}, got {value!r}: otherwise {_trust_hint}")


@cache
def _all_entry_points(search_path: tuple[str, ...]) -> Any:
    """Return the entry points of all packages on a search path; reading them takes longer than finding a component."""
    return entry_points()


def _entry_points(kind: str) -> list[EntryPoint]:
    """Return the entry points of a kind; where names are not trusted, only those of packages that pip installed."""
    points = _all_entry_points(tuple(sys.path)).select(group=f"obbo_lightning.{kind}")
    return [point for point in points if is_trusted() or _is_installed(point)]


def _is_installed(point: EntryPoint) -> bool:
    schemes = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages())
    folders = [Path(folder).resolve() for folder in (*schemes, *site.getsitepackages())]
    return point.dist is not None and Path(str(point.dist.locate_file(""))).resolve() in folders


# Modules


def source_file(name: str) -> Path | None:
    """Return the file of ``file.py:Class``; None for other names."""
    found = _FILE.fullmatch(name)
    return Path(found["file"]) if found else None


def absolute_name(name: str, folder: Path | None = None) -> str:
    """Return ``file.py:Class`` with an absolute path, looked for in ``folder`` first; other names as they are."""
    file = source_file(name)
    if file is None:
        return name
    beside = (folder or Path()) / file.expanduser()
    absolute = (beside if beside.exists() else file.expanduser()).absolute().resolve()
    return f"{absolute}:{name.rpartition(':')[2]}"


def import_class(name: str, key: str) -> Any:
    """Return what ``package.module.Class`` or ``file.py:Class`` stands for; whether it may run was decided before."""
    file = source_file(name)
    module_name, _, member = name.rpartition("." if file is None else ":")
    if file is not None:
        module = _import_file(file.expanduser().absolute().resolve(), name, key)
    else:
        if is_trusted() and str(Path.cwd()) not in sys.path and "" not in sys.path:
            sys.path.append(str(Path.cwd()))  # as `python -m` does
        module = _load(lambda: importlib.import_module(module_name), name, key)
    found = getattr(module, member, None)
    if found is None:
        near = get_close_matches(member, [m for m in vars(module) if not m.startswith("_")], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{key} must name a class, got {name!r}, and there is no {member} in it{hint}")
    return found


def _import_file(file: Path, name: str, key: str) -> ModuleType:
    """Return the module of a file, which is loaded once, unless it has changed since; it may import its neighbours."""
    if not file.is_file():
        raise ValueError(f"{key} must be a class in a file that exists, got {name!r}")
    content = file.read_bytes()
    for module in list(sys.modules.copy().values()):
        if getattr(module, "__file__", None) == str(file) and getattr(module, "__obbo_content__", content) == content:
            module.__obbo_content__ = content  # type: ignore[attr-defined]
            return module  # also a script that names its own classes
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    found = importlib.util.find_spec(file.stem)  # of what ``import stem`` imports
    taken = found is not None and found.origin != str(file)
    title = f"{file.stem}_{abs(hash(str(file))):x}" if taken else file.stem
    spec = importlib.util.spec_from_file_location(title, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{key} must be a class in a Python file, got {name!r}")
    module = importlib.util.module_from_spec(spec)
    module.__obbo_content__ = content  # type: ignore[attr-defined]
    sys.modules[title] = module
    try:
        _load(lambda: spec.loader.exec_module(module), name, key)  # type: ignore[union-attr]
    except ValueError:
        del sys.modules[title]
        raise
    return module


def _load(load: Callable[[], Any], name: str, key: str) -> Any:
    """Run a user's module; whatever it raises becomes a one-line error."""
    try:
        return load()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{key} {name!r} cannot be loaded: {reason}") from error
