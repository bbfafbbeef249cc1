"""What settings may be: types and keys from the parts that they name; every mistake is one line, before any compute."""

import copy
import hashlib
import inspect
import os
import re
import warnings
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from jsonargparse import ArgumentParser, Namespace

from obbo_lightning.config.files import Config, ConfigError
from obbo_lightning.config.layers import COMPONENT_PATHS, GROUP_SETTINGS, component_class, has_groups, section
from obbo_lightning.config.registry import component_names, source_file
from obbo_lightning.config.trainer import add_trainer, callback_entries, check_trainer, parsed, trainer_keys

HELP = """Play an online stream. Flags and YAML files (--config FILE, or the name of a shipped one) use the same keys;
flags win over files, later files over earlier ones.
Choose a part by name (--algorithm obbo, --algorithm.geometry burg, --data synthetic) or bring your own
(--data package.module.Class, --problem.network path/to/file.py:Class) and set what it takes; --print_config shows the
result."""
EXAMPLE = "example: obbo fit --config quadratic --algorithm sobow --algorithm.window 25 --seed 3"
NOT_NULL = {
    *("experiment", "seed", "rounds", "tasks_per_round", "several_tasks", "output", "logger", "regret_window"),
    *(
        "on_nonfinite",
        "workers",
        "threads",
        "evaluation.every",
        "evaluation.tasks",
        "evaluation.split",
        "evaluation.baselines",
        "checkpoint.every",
    ),
    *("algorithm.name", "data.name"),
}


def complete_config(settings: Config) -> Config:
    """Checked settings with every default filled in, as plain values; files of parts are remembered by their hash."""
    recorded = settings.get("sources") or {}
    given = {key: value for key, value in settings.items() if key != "sources"}
    completed: Config = _plain(check(given).as_dict())
    sources = {}
    names = [section(completed, path).get("name") for path in COMPONENT_PATHS] + [
        e["name"] for e in callback_entries(completed)
    ]
    for file in sorted({str(source_file(name)) for name in names if name and source_file(name)}):
        found = hashlib.sha256(Path(file).read_bytes()).hexdigest()
        sources[file] = recorded.get(file, found)
        if sources[file] != found:
            warnings.warn(f"{file} has changed since this run began", stacklevel=2)
    return {**completed, "sources": sources} if sources else completed


def check(settings: Config) -> Namespace:
    """Types and keys, before any compute; and before Lightning is imported, but for the Trainer's own."""
    parser = _run_parser(settings)
    known = {action.dest for action in parser._actions} | {f"trainer.{name}" for name in trainer_keys()}
    mappings = tuple(f"{k}." for k in known if k.startswith("trainer.")) + _taking_mappings(parser)
    for key, value in _leaves(settings):
        if key not in known and not key.startswith(mappings):
            decided = key.rpartition(".")[2] in getattr(component_class(settings, "data"), "derived_arguments", ())
            hint = "the tasks decide it" if decided else _suggestion(key, known) + _chosen(settings, key)
            raise ConfigError(f"unknown key {key!r} (value {value!r}); {hint}")
        if value is None and key in NOT_NULL:
            raise ConfigError(f"{key} must have a value, got null")
    experiment = settings.get("experiment", "default")
    if not re.fullmatch(r"[\w.-]{1,100}", str(experiment)) or ".." in str(experiment):
        raise ConfigError(f"experiment must be a plain folder name, got {experiment!r}")
    given = {key: value for key, value in settings.items() if key != "trainer"}
    checked = _defaults_of(parser).clone()
    checked.update(parsed(parser, given, defaults=False))
    _require_all(settings, checked)
    checked.update(check_trainer(settings))
    return checked


def _taking_mappings(parser: ArgumentParser) -> tuple[str, ...]:
    """What begins with these is not a key of ours: it is in a mapping that a part takes as one argument."""
    types = {action.dest: getattr(action, "_typehint", None) for action in parser._actions}
    return tuple(f"{k}." for k, t in types.items() if dict in {get_origin(one) or one for one in (t, *get_args(t))})


def _require_all(settings: Config, checked: Namespace) -> None:
    """An argument without a type and without a default would silently be None."""
    for key in _needed(settings):
        path, _, name = key.rpartition(".")
        cls: Any = component_class(settings, path)
        typed = inspect.signature(cls).parameters[name].annotation is not inspect.Parameter.empty
        if not typed and checked.get(key) is None:
            raise ConfigError(f"{key} must be given, got none")


def _suggestion(key: str, known: set[str]) -> str:
    parent, _, word = key.rpartition(".")
    siblings = sorted(k for k in known if k.rpartition(".")[0] == parent and "." not in k[len(parent) + 1 :])
    near = get_close_matches(key, siblings, n=1, cutoff=0.75) or get_close_matches(key, known, n=1, cutoff=0.85)
    near = near or [k for k in sorted(known) if k.startswith(f"{parent}.") and k.endswith(f".{word}")]
    if near:
        return f"did you mean {near[0]!r}?"
    return f"{parent or 'the top level'} takes {', '.join(k.rpartition('.')[2] for k in siblings) or 'no keys'}"


def _chosen(settings: Config, key: str) -> str:
    """Which part does not have the key: often it is not the one that was meant."""
    parent = key.rpartition(".")[0]
    name = settings[parent].get("name") if isinstance(settings.get(parent), dict) else None
    return f" ({parent} is {name}; --{parent} NAME chooses another)" if name else ""


def make_parser(settings: Config) -> ArgumentParser:
    """A typed and documented parser for exactly the parts that ``settings`` names, and for the Trainer."""
    parser = copy.deepcopy(_run_parser(settings))
    add_trainer(parser)
    return parser


def help_parser(settings: Config) -> ArgumentParser:
    """The parser whose help shows what these very settings would use; what must still be given has no value."""
    parser = make_parser(settings)
    given = dict(_leaves(settings))
    if all(given.get(key) is not None for key in _needed(settings)):
        parser.set_defaults(check(settings).as_flat().__dict__)
        return parser
    known = {action.dest for action in parser._actions}
    parser.set_defaults({key: value for key, value in given.items() if key in known})
    return parser


def _needed(settings: Config) -> Iterator[str]:
    """Keys of arguments without a default that neither the tasks decide nor parts are."""
    given = {
        "seed",
        *getattr(component_class(settings, "data"), "derived_arguments", ()),
        *(path.rpartition(".")[2] for path in COMPONENT_PATHS),
    }
    for path in _used_parts(settings):
        cls: Any = component_class(settings, path)
        for name, parameter in inspect.signature(cls).parameters.items():
            needed = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            if needed and name not in given:
                yield f"{path}.{name}"


def _run_parser(settings: Config) -> ArgumentParser:
    """For the parts that settings name; the cells of a grid share their parsers, which take long to make."""
    decided = frozenset(getattr(component_class(settings, "data"), "derived_arguments", ()))
    return _parser_of(tuple((path, component_class(settings, path)) for path in _used_parts(settings)), decided)


@cache
def _parser_of(parts: tuple[tuple[str, Any], ...], decided: frozenset[str]) -> ArgumentParser:
    usage = "obbo fit [--config FILE] [--KEY VALUE ...] [--print_config] [--help]"
    parser = ArgumentParser(
        prog="obbo fit", usage=usage, description=HELP, epilog=EXAMPLE, exit_on_error=False, add_help=False
    )
    add_run(parser)
    for path, cls in parts:
        names = ", ".join(component_names(COMPONENT_PATHS[path]))
        parser.add_argument(f"--{path}.name", type=str | None, help=f"one of {names}, or your own")
        skipped: set[str | int] = {p.rpartition(".")[2] for p in COMPONENT_PATHS if p.startswith(f"{path}.")}
        skipped |= {"seed"} if path == "data" else decided if path.startswith("problem") else set()
        add = parser.add_class_arguments if inspect.isclass(cls) else parser.add_function_arguments
        add(cls, path, skip=skipped, fail_untyped=False)
    return parser


@cache
def _defaults_of(parser: ArgumentParser) -> Namespace:
    return parser.get_defaults()


def add_run(parser: ArgumentParser) -> None:
    """What every run has, whatever its parts are."""
    several, logger = Literal["auto", "loop", "vmap"], Literal["csv", "wandb", "tensorboard"]
    split = Literal["test", "validation", "both", "none"]
    for key, kind, default, meaning in (
        ("experiment", str, "default", "first folder of the run directory"),
        ("seed", int, 0, "of all randomness"),
        ("rounds", int, 100, "T, rounds to play"),
        ("tasks_per_round", int, 1, "n, tasks in a round, over all processes"),
        ("several_tasks", several, "auto", "how one process solves several tasks of a round; auto: vmap on a GPU"),
        ("output", str, "runs", "where run directories are made"),
        ("logger", logger, "csv", "beside metrics.csv"),
        ("regret_window", int, 10, "w_R, window of the reported regrets"),
        ("on_nonfinite", Literal["raise", "skip"], "raise", "what a non-finite hypergradient does"),
        ("workers", int, 0, "loader processes"),
        ("threads", int | Literal["auto"], "auto", "threads of a process; auto: its share of the cores it may use"),
        ("evaluation.every", int, 50, "rounds between evaluations"),
        ("evaluation.tasks", int, 100, "tasks of an evaluation"),
        ("evaluation.split", split, "test", "which tasks a run is judged on; validation: no test task is seen"),
        ("evaluation.baselines", bool, True, "play what λ must beat, too, where the stream knows it"),
        ("checkpoint.every", int, 25, "rounds between checkpoints"),
        ("wandb.project", str | None, None, "project of the W&B run"),
        ("wandb.name", str | None, None, "name of the W&B run"),
        ("wandb.group", str | None, None, "group of the W&B run"),
        ("wandb.tags", list[str], [], "tags of the W&B run"),
    ):
        parser.add_argument(f"--{key}", type=kind, default=default, help=meaning)


def _used_parts(settings: Config) -> Iterator[str]:
    """Paths of the parts that these settings have, outer ones first."""
    for top in ("algorithm", "data", "problem"):
        cls = component_class(settings, top)
        if cls is None:
            continue
        yield top
        taken = set(inspect.signature(cls).parameters)
        if top == "algorithm" and has_groups(settings):  # what is not named is for each block to know
            known = [kind for kind in GROUP_SETTINGS if f"algorithm.{kind}" in COMPONENT_PATHS]
            taken -= {kind for kind in known if not section(settings, f"algorithm.{kind}").get("name")}
        yield from (path for path in COMPONENT_PATHS if path.startswith(f"{top}.") and path.rpartition(".")[2] in taken)


def _leaves(settings: Config, path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        where = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict) and value and not where.startswith("trainer."):
            yield from _leaves(value, where)
        elif not (isinstance(value, dict) or (value is None and where in COMPONENT_PATHS)):
            yield where, value


def _plain(value: Any) -> Any:
    if isinstance(value, Namespace):  # older versions of jsonargparse leave them in lists
        value = value.as_dict()
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value
