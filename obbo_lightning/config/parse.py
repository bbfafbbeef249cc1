"""From files and flags to one checked configuration with every default filled in.

A configuration is a nested dictionary. A component is a section with a ``name`` and its constructor's arguments:
``algorithm: {name: sobow, discount: 0.9}``. jsonargparse reads types, defaults and help from the constructors; what it
does not have is here: flat files with short names, and components that are exchanged for others and keep the arguments
that both take.
"""

import hashlib
import inspect
import os
import re
import shutil
import types
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache, reduce
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace

from obbo_lightning.config.registry import (
    absolute_name,
    component_names,
    find_component,
    registered_name,
    short_name,
    source_file,
)
from obbo_lightning.core.configurable import Configurable

Config = dict[str, Any]
MAX_BYTES, MAX_VALUES = 10_000_000, 100_000  # of a configuration file
FREE_TEXT = ("wandb", "experiment", "output", "compare")  # sections in which no component is named
SWITCHES = ("--help", "-h", "--print_config", "--trainer.help")

# Configuration keys that name a component, and its kind.
COMPONENTS = {
    "algorithm": "algorithm",
    "algorithm.inner": "inner",
    "algorithm.hypergradient": "hypergradient",
    "algorithm.geometry": "geometry",
    "algorithm.regularizer": "regularizer",
    "algorithm.domain": "domain",
    "data": "data",
    "problem": "problem",
    "problem.network": "network",
}

# Trainer arguments that a run sets itself, and what to use instead.
FIXED_TRAINER_ARGUMENTS = {
    "max_epochs": "a stream is run once; rounds is its length",
    "min_epochs": "a stream is run once; rounds is its length",
    "overfit_batches": "it would run the same tasks again and again",
    "logger": "use logger",
    "gradient_clip_val": "use algorithm.clip",
    "gradient_clip_algorithm": "use algorithm.clip",
    "accumulate_grad_batches": "a round is a step; tasks_per_round is its number of tasks",
    "inference_mode": "adapting to a task needs gradients",
    "use_distributed_sampler": "processes share the tasks of a round",
    "barebones": "a run writes its tables",
}
T = TypeVar("T")


class ConfigError(ValueError):
    """Error in a flag or a file: names the key, the rule and the value."""


@dataclass
class RunOptions:
    """Options of every run.

    Args:
        experiment: first folder of the run directory.
        seed: seed of all randomness.
        rounds: T, number of rounds.
        tasks_per_round: n, tasks in a round, over all processes.
        several_tasks: how one process solves several tasks of a round; auto is vmap on a GPU, loop elsewhere.
        output: folder in which run directories are made.
        logger: logger beside metrics.csv.
        regret_window: w_R, window of the reported regrets.
        on_nonfinite: what a non-finite hypergradient does; skip counts it as zero.
        workers: data loader processes.
        threads: threads of a process; auto is its share of the cores it may use.
    """

    experiment: str = "default"
    seed: int = 0
    rounds: int = 100
    tasks_per_round: int = 1
    several_tasks: Literal["auto", "loop", "vmap"] = "auto"
    output: str = "runs"
    logger: Literal["csv", "wandb", "tensorboard"] = "csv"
    regret_window: int = 10
    on_nonfinite: Literal["raise", "skip"] = "raise"
    workers: int = 0
    threads: int | Literal["auto"] = "auto"


@dataclass
class EvaluationOptions:
    """Evaluations during a run.

    Args:
        every: rounds between evaluations.
        tasks: number of tasks.
        split: tasks to evaluate on; with validation no test task is looked at.
        baselines: run the stream's baselines as well.
    """

    every: int = 50
    tasks: int = 100
    split: Literal["test", "validation", "both", "none"] = "test"
    baselines: bool = True


@dataclass
class CheckpointOptions:
    """Checkpoints.

    Args:
        every: rounds between checkpoints.
    """

    every: int = 25


@dataclass
class WandbOptions:
    """The W&B run, with ``--logger wandb``.

    Args:
        project: project of the W&B run.
        name: name of the W&B run.
        group: group of the W&B run.
        tags: tags of the W&B run.
    """

    project: str | None = None
    name: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)


OPTIONS = {"evaluation": EvaluationOptions, "checkpoint": CheckpointOptions, "wandb": WandbOptions}
TOP_SECTIONS = ("algorithm", "data", "problem", "evaluation", "checkpoint", "wandb", "trainer")


# Files


def shipped_configs() -> Path:
    """Return the folder of the configurations that come with the package."""
    packaged = Path(__file__).parents[1] / "configs"
    return packaged if packaged.exists() else Path(__file__).parents[2] / "configs"


def find_config(name: str, group: str = "") -> Path:
    """Return a file by its path, or a shipped configuration of a group (``compare``, ``tune``) by its name.

    >>> find_config("quadratic").name
    'quadratic.yaml'
    """
    given = Path(name).expanduser()
    if given.is_file():
        return given
    folder = shipped_configs() / group
    found = folder / f"{name}.yaml"
    if re.fullmatch(r"\w+", name) and found.is_file():
        return found
    if given.suffix or len(given.parts) > 1:
        reason = "it is a folder" if given.is_dir() else "no such file"
        raise ConfigError(f"config file {name} cannot be read: {reason}")
    names = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
    raise ConfigError(f"--config must be a file, or one of {names}; got {name!r}")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 in which 1e-4 is a number, as in YAML 1.2."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[+-]?(\d+(\.\d*)?[eE][+-]?\d+|inf|nan)$"), list("+-0123456789in")
)


def read_yaml(path: Path) -> Config:
    """Return the configuration in a file; ``file.py:Class`` is looked for beside it."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"config file {path} must have at most {MAX_BYTES} bytes, got {path.stat().st_size}")
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise ConfigError(f"config file {path} cannot be read: {reason}") from None
    found = parse_yaml(text, f"config file {path}")
    if not isinstance(found, dict | None):
        raise ConfigError(f"config file {path} must hold keys and values, got {type(found).__name__}")
    config: Config = _absolute_names(found or {}, path.parent)
    return config


def parse_yaml(text: str, what: str) -> Any:
    """Return a YAML value; refuse one that aliases make larger than memory, or that contains itself."""
    try:
        value = yaml.load(text, _Loader)  # noqa: S506 a subclass of SafeLoader
        if sum(1 for _ in _walk(value)) > MAX_VALUES:
            raise ConfigError(f"{what} must hold at most {MAX_VALUES} values, aliases expanded, got more")
    except RecursionError:
        raise ConfigError(f"{what} contains itself") from None
    except (yaml.YAMLError, OverflowError) as error:
        raise ConfigError(f"{what} is not valid YAML: {' '.join(str(error).split())}") from None
    return value


def _walk(value: Any) -> Iterator[Any]:
    pending, count = [(value, 0)], 0
    while pending and count <= MAX_VALUES:
        one, depth = pending.pop()
        if depth > 200:
            raise RecursionError
        count += 1
        yield one
        below = (*one, *one.values()) if isinstance(one, dict) else one if isinstance(one, list) else ()
        pending += [(v, depth + 1) for v in below]


def _absolute_names(value: Any, folder: Path | None = None) -> Any:
    """Return ``value`` with the absolute path in every ``file.py:Class``."""
    if isinstance(value, dict):
        return {k: v if k in FREE_TEXT else _absolute_names(v, folder) for k, v in value.items()}
    if isinstance(value, list):
        return [_absolute_names(v, folder) for v in value]
    return absolute_name(value, folder) if isinstance(value, str) else value


# Flags


def read_flags(arguments: Sequence[str]) -> tuple[Config, list[str], set[str]]:
    """Parse ``--KEY VALUE`` and ``--KEY=VALUE``; a value is YAML.

    Returns the configuration, the files of ``--config`` in order, and the flags without a value.
    """
    config, files, switches, rest = dict[str, Any](), list[str](), set[str](), list(arguments)
    while rest:
        word = rest.pop(0)
        if word in SWITCHES:
            switches.add(word.lstrip("-"))
            continue
        if not word.startswith("--"):
            raise ConfigError(f"flags begin with --, got {word!r}")
        key, equals, text = word[2:].partition("=")
        if not equals and (not rest or rest[0].startswith("--")):
            raise ConfigError(f"--{key} needs a value, got none")
        text = text if equals else rest.pop(0)
        if not text:
            raise ConfigError(f"--{key} needs a value, got ''")
        if key == "config":
            files.append(text)
            continue
        value = "-" if text == "-" else parse_yaml(text, f"--{key} {text!r}")  # - is standard input
        config = _with(config, key, value if key.partition(".")[0] in FREE_TEXT else _absolute_names(value))
    return config, files, switches


def nested(flat: dict[str, Any]) -> Config:
    """Return a configuration from dotted keys.

    >>> nested({"algorithm": "sobow", "algorithm.window": 5, "seed": 1})
    {'algorithm': {'name': 'sobow', 'window': 5}, 'seed': 1}
    """
    config: Config = {}
    for key, value in flat.items():
        config = _with(config, key, value)
    return config


def flatten(value: Any, path: str = "", lists: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the values of a configuration with their dotted keys, as `nested` takes them; ``lists``: theirs as well."""
    inside = dict(enumerate(value)) if lists and isinstance(value, (list, tuple)) else value
    if isinstance(inside, dict) and inside:
        for key, below in inside.items():
            yield from flatten(below, f"{path}.{key}" if path else str(key), lists)
    else:
        yield path, value


def _with(config: Config, key: str, value: Any) -> Config:
    """Set one dotted key; the name of a component may come before or after its arguments."""
    head, _, tail = key.partition(".")
    below = config.get(head)
    if tail:
        below = {"name": below} if isinstance(below, str) else below or {}
        return {**config, head: _with(below, tail, value)}
    if isinstance(below, dict) and isinstance(value, str):
        return {**config, head: {**below, "name": value}}
    return {**config, head: value}


# Layers


def parse_arguments(arguments: Sequence[str]) -> tuple[Config, set[str]]:
    """Return the configuration of a command line (default, ``--config`` files in order, flags), and its switches."""
    flags, files, switches = read_flags(arguments)
    return merge([read_yaml(find_config(name)) for name in files], flags), switches


def merge(layers: Sequence[Config], flags: Config) -> Config:
    """Overlay the embedded default with layers, ``per_algorithm`` of the chosen algorithm, and flags."""
    nothing: Config = {}
    for layer in (*layers, flags):
        for key in (*TOP_SECTIONS, "per_algorithm"):
            if key in layer and not isinstance(layer[key], dict | str if key in COMPONENTS else dict):
                wanted = "a name, or keys and values" if key in COMPONENTS else "keys and values"
                raise ConfigError(f"{key} must be {wanted}, got {layer[key]!r}")
    merged = reduce(overlay, (_default_layer(reduce(overlay, (*layers, flags), nothing)), *layers), nothing)
    name = section(overlay(merged, flags), "algorithm").get("name", "obbo")
    per_algorithm = merged.pop("per_algorithm", None) or {}
    for other, settings in per_algorithm.items():
        taken = accepted_arguments("algorithm", other)
        for key in set(settings) - taken:
            raise ConfigError(f"per_algorithm.{other} must be of what {other} takes: {', '.join(taken)}; got {key!r}")
    return overlay(overlay(merged, {"algorithm": {"name": name, **per_algorithm.get(name, {})}}), flags)


def _default_layer(given: Config) -> Config:
    """Return default.yaml for few-shot problems, else {}; its algorithm settings only for algorithms that ship."""
    from obbo_lightning.problems.few_shot import FewShot

    default = read_yaml(shipped_configs() / "default.yaml")
    merged = overlay(default, given)
    problem, algorithm = component_class(merged, "problem"), component_class(merged, "algorithm")
    if problem is None or not issubclass(problem, FewShot):
        return {}
    if algorithm is not None and not algorithm.__module__.startswith("obbo_lightning."):
        default["algorithm"] = {"name": default["algorithm"]["name"]}
    network = getattr(component_class(merged, "data"), "network_type", None)
    if network not in (None, component_class(default, "problem.network")):
        del default["problem"]["network"]
    return default


def overlay(base: Config, layer: Config, path: str = "") -> Config:
    """Return ``layer`` over ``base``. A component with another name keeps those old arguments that it takes."""
    merged = dict(base)
    for key, value in layer.items():
        where = f"{path}.{key}" if path else key
        if where in COMPONENTS and isinstance(value, str):
            value = {"name": value}
        if isinstance(value, dict):
            below = merged.get(key)
            below = {"name": below} if where in COMPONENTS and isinstance(below, str) else below
            below = below if isinstance(below, dict) else {}
            if where in COMPONENTS and value.get("name") not in (None, below.get("name")):
                below = {k: v for k, v in below.items() if k in accepted_arguments(where, value["name"])}
            value = overlay(below, value, where)
        merged[key] = value
    return merged


def section(config: Config, path: str) -> Config:
    """Return a section, also where the name of a component stands for it."""
    for key in path.split(".") if path else ():
        found = config.get(key)
        config = {"name": found} if isinstance(found, str) else found or {}
    return config


def component_class(config: Config, path: str) -> Any:
    """Return the class of a component: the named one, else what its owner uses by default; None where it uses none."""
    name = section(config, path).get("name")
    if name is not None:
        return _named_class(path, name)
    if path == "algorithm":
        return _named_class(path, "obbo")
    if path == "data":
        return None
    if path in ("problem", "problem.network"):
        attribute = "problem_type" if path == "problem" else "network_type"
        own = getattr(component_class(config, "data"), attribute, None)
        if own is not None or path == "problem":
            return own
    owner, _, argument = path.rpartition(".")
    default = _parameters(component_class(config, owner)).get(argument)
    default = None if default is None else default.default
    if isinstance(default, type):
        return default if default is not inspect.Parameter.empty else None
    return type(default) if isinstance(default, Configurable) else None


def accepted_arguments(path: str, name: str) -> set[str]:
    """Return the constructor arguments of the component ``name``."""
    return set(_parameters(_named_class(path, name)))


@cache
def _parameters(cls: Any) -> dict[str, inspect.Parameter]:
    return {} if cls is None else dict(inspect.signature(cls).parameters)


def _named_class(path: str, name: Any) -> Any:
    if not isinstance(name, str):
        raise ConfigError(f"{path} must be a name, got {name!r}")
    return find_component(COMPONENTS[path], name, path)


# Types and defaults


class _Section(NamedTuple):
    """A section of a configuration and the class whose constructor defines its keys."""

    path: str  # dotted; empty for the options of every run
    cls: Any
    skip: frozenset[str]  # arguments that are not keys
    given: Config

    def key(self, name: str) -> str:
        """Return the dotted key of an argument."""
        return f"{self.path}.{name}" if self.path else name


def complete_config(config: Config) -> Config:
    """Check keys and types, and fill in every default; hash the files of own components."""
    completed: Config = {}
    sections = list(_sections(config))
    for one in sections:
        values = _complete_section(one, sections)
        *folders, last = one.path.split(".")
        target = reduce(lambda below, key: below.setdefault(key, {}), folders, completed)
        target.update(values if not one.path else {last: values} if values else {})
    if not re.fullmatch(r"[\w.-]{1,100}", completed["experiment"]) or ".." in completed["experiment"]:
        raise ConfigError(f"experiment must be a plain folder name, got {completed['experiment']!r}")
    completed["trainer"] = {"accelerator": "auto", "devices": 1, **check_trainer(config.get("trainer") or {})}
    files = _component_files(completed, config.get("component_files") or {})
    return {**completed, "component_files": files} if files else completed


def _sections(config: Config) -> Iterator[_Section]:
    own = {key: value for key, value in config.items() if key not in (*TOP_SECTIONS, "component_files")}
    yield _Section("", RunOptions, frozenset(), own)
    data = component_class(config, "data")
    if data is None:
        raise ConfigError("data.name must have a value, got null")
    derived = frozenset(getattr(data, "derived_arguments", ()))
    for path in COMPONENTS:
        owner, _, argument = path.rpartition(".")
        cls, given = component_class(config, path), dict(section(config, path))
        if cls is None or (owner and argument not in _parameters(component_class(config, owner))):
            for key, value in given.items():
                if key != "name":
                    raise ConfigError(f"unknown key '{path}.{key}' (value {value!r}); {path} has no name")
            continue
        if owner == "algorithm" and given.get("name") is None:
            default = _parameters(component_class(config, owner))[argument].default
            given = {**getattr(default, "init_args", {}), **given, "name": registered_name(COMPONENTS[path], cls)}
        below = {p.rpartition(".")[2] for p in COMPONENTS if p.startswith(f"{path}.")}
        skip = below | ({"seed"} if path == "data" else derived if path.startswith("problem") else set())
        yield _Section(path, cls, frozenset(skip), {k: v for k, v in given.items() if k not in below})
    for path, cls in OPTIONS.items():
        yield _Section(path, cls, frozenset(), section(config, path))


def _complete_section(one: _Section, sections: Sequence[_Section]) -> Config:
    """Return the values of a section with all defaults."""
    defaults = _defaults(one.path, one.cls, one.skip)
    given = {key: value for key, value in one.given.items() if key != "name" or one.path not in COMPONENTS}
    for key, value in given.items():
        if key not in defaults:
            raise ConfigError(_unknown_key(one, key, value, sections))
        if value is None and defaults[key] is not None:
            raise ConfigError(f"{one.key(key)} must have a value, got null")
    for key, parameter in _parameters(one.cls).items():
        required = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if required and key in defaults and given.get(key) is None:
            raise ConfigError(f"{one.key(key)} must be given, got none")
    values = {**defaults, **_parse(one._replace(given=given))}
    name = one.given.get("name") if one.path in COMPONENTS else None
    return {"name": name, **values} if name is not None else values


def read_dataclass(cls: type[T], content: Any, path: str) -> T:
    """Return a dataclass from the section ``path`` of a file; refuse unknown keys and wrong types."""
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must have keys and values, got {content!r}")
    one = _Section(path, cls, frozenset(), content)
    return cls(**_complete_section(one, [one]))


def _parse(one: _Section) -> Config:
    """Return the given values, converted to the types of the constructor's arguments."""
    parser = _parser(one.path, one.cls, one.skip)
    try:
        parsed = parser.parse_object(nested({one.key(k): v for k, v in one.given.items()}), defaults=False)
    except (ArgumentError, TypeError) as error:
        raise ConfigError(_explain(one) or " ".join(str(error).split())) from None
    return section(_plain(parsed.as_dict()), one.path)


def _explain(one: _Section) -> str | None:
    """Return what is wrong with the first argument that jsonargparse refuses by itself."""
    names = set(_defaults(one.path, one.cls, one.skip))
    for key, value in one.given.items():
        parser = _parser(one.path, one.cls, one.skip | (names - {key}))
        try:
            parser.parse_object(nested({one.key(key): value}), defaults=False)
        except (ArgumentError, TypeError):
            return f"{one.key(key)} must be {_in_words(_parameters(one.cls)[key].annotation)}, got {value!r}"
    return None


def _in_words(annotation: Any) -> str:
    """Return a type in words.

    >>> _in_words(int | None), _in_words(Literal["raise", "skip"]), _in_words(list[str])
    ('an integer or null', 'raise or skip', 'a list')
    """
    words = {int: "an integer", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    words |= {list: "a list", tuple: "a list", dict: "keys and values", Path: "a path"}
    origin = get_origin(annotation)
    if origin is Literal:
        return " or ".join(map(str, get_args(annotation)))
    if origin in (Union, types.UnionType):
        return " or ".join(map(_in_words, get_args(annotation)))
    return words.get(origin or annotation, str(getattr(annotation, "__name__", annotation)))


@cache
def _parser(path: str, cls: Any, skip: frozenset[str]) -> ArgumentParser:
    """Return a parser of one section; runs of a grid share it."""
    parser = ArgumentParser(usage="", exit_on_error=False, add_help=False)
    add = parser.add_class_arguments if inspect.isclass(cls) else parser.add_function_arguments
    options: dict[str, Any] = {"instantiate": False, "sub_configs": True} if path == "trainer" else {}
    add(cls, path or None, skip=set(skip), fail_untyped=False, **options)
    return parser


@cache
def _defaults(path: str, cls: Any, skip: frozenset[str]) -> Config:
    return section(_plain(_parser(path, cls, skip).get_defaults().as_dict()), path)


def _unknown_key(one: _Section, key: str, value: Any, sections: Sequence[_Section]) -> str:
    dotted = one.key(key)
    if key in one.skip and one.path.startswith("problem"):
        return f"{dotted} cannot be set, got {value!r}: it follows from the tasks"
    own = list(_defaults(one.path, one.cls, one.skip))
    known = [s.key(name) for s in sections for name in _defaults(s.path, s.cls, s.skip)]
    near = [k for k in known if k.startswith(f"{one.path}.") and k.endswith(f".{key}")]
    near += map(one.key, get_close_matches(key, own if one.path else [*own, *TOP_SECTIONS], n=1))
    near += get_close_matches(dotted, known, n=1, cutoff=0.85)
    all_keys = ", ".join(own if one.path else [*own, *TOP_SECTIONS]) or "no keys"
    hint = f"did you mean {near[0]!r}?" if near else f"{one.path or 'the top level'} takes {all_keys}"
    name = one.given.get("name") if one.path in COMPONENTS else None
    chosen = f" ({one.path} is {name}; --{one.path} NAME chooses another)" if name else ""
    return f"unknown key {dotted!r} (value {value!r}); {hint}{chosen}"


def _plain(value: Any) -> Any:
    """Return plain dictionaries, lists and values, as YAML has them."""
    if isinstance(value, Namespace):
        value = value.as_dict()
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _component_files(config: Config, recorded: dict[str, str]) -> dict[str, str]:
    """Return the SHA-256 of every file that a component comes from; warn where it differs from the recorded one."""
    names = [section(config, path).get("name") for path in COMPONENTS]
    names += [entry["name"] for entry in callback_entries(config["trainer"])]
    hashes = {}
    for file in sorted({str(source_file(name)) for name in names if name and source_file(name)}):
        found = hashlib.sha256(Path(file).read_bytes()).hexdigest()
        hashes[file] = recorded.get(file, found)
        if hashes[file] != found:
            warnings.warn(f"{file} has changed since this run began", stacklevel=3)
    return hashes


# The Trainer


def check_trainer(given: Config) -> Config:
    """Return the checked arguments of the Trainer; refuse those that a run sets itself."""
    from lightning import Trainer

    parameters = _parameters(Trainer)
    for key, instead in FIXED_TRAINER_ARGUMENTS.items():
        value = given.get(key)
        if value is not None and value != parameters[key].default:
            raise ConfigError(f"trainer.{key} cannot be set for an online run, got {value!r}: {instead}")
    callbacks = callback_entries(given)
    for entry in callbacks:
        cls = find_component("callback", entry["name"], "trainer.callbacks")
        arguments = {key: value for key, value in entry.items() if key != "name"}
        _complete_section(_Section("trainer.callbacks", cls, frozenset(), arguments), ())
    rest = {key: value for key, value in given.items() if key != "callbacks"}
    checked = _complete_section(_Section("trainer", Trainer, frozenset({"callbacks"}), rest), ())
    return {**{key: checked[key] for key in rest}, **({"callbacks": callbacks} if callbacks else {})}


def callback_entries(trainer: Config) -> list[Config]:
    """Return ``trainer.callbacks`` as names with arguments."""
    given = trainer.get("callbacks") or []
    entries = []
    for entry in given if isinstance(given, list) else [given]:
        entry = {"name": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise ConfigError(f"trainer.callbacks must be names, each with its arguments, got {entry!r}")
        entries.append(entry)
    return entries


# Help


def help_text(config: Config) -> str:
    """Return one line per flag: its value in this configuration and its meaning, from the docstrings."""
    width = shutil.get_terminal_size((120, 40)).columns
    lines = []
    for one in _sections(config):
        if one.path in COMPONENTS:
            kind = COMPONENTS[one.path]
            chosen = f"--{one.path} {short_name(one.given.get('name') or registered_name(kind, one.cls))}"
            lines += [] if "." in one.path else [""]
            lines.append(f"{chosen:<40} one of {', '.join(component_names(kind))}, or your own")
        elif one.path == next(iter(OPTIONS)):
            lines.append("")
        meanings = {action.dest: action.help or "" for action in _parser(one.path, one.cls, one.skip)._actions}
        for key, default in _defaults(one.path, one.cls, one.skip).items():
            value = one.given.get(key, default)
            flag = f"  --{one.key(key)} {'' if value is None else value}"
            meaning = " ".join(meanings.get(one.key(key), "").split()).partition(". ")[0]
            lines.append(f"{flag:<40} {meaning.rstrip('.').replace('``', '')}")
    return "\n".join(line if len(line) <= width else f"{line[: width - 1]}…" for line in lines)


def trainer_help() -> str:
    """Return the help of the Trainer's arguments."""
    from lightning import Trainer

    return str(_parser("trainer", Trainer, frozenset({"callbacks"})).format_help())
