"""Comparison files: from a grid of settings to runs with complete configurations."""

import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from obbo_lightning.config.parse import (
    Config,
    ConfigError,
    accepted_arguments,
    complete_config,
    find_config,
    merge,
    nested,
    overlay,
    read_yaml,
)
from obbo_lightning.config.registry import KINDS, short_name, source_file

KEYS = ("compare", "base", "settings", "grid", "tune")
Option = tuple[str, dict[str, Any]]  # a value of an axis: its word in the names of runs, and what it sets


class PlannedRun(NamedTuple):
    """One run of a grid: the name of its directory, and its complete configuration."""

    name: str
    config: Config


class Grid(NamedTuple):
    """A comparison: the name of its folder, its runs, and its section ``tune``, None where it has none."""

    name: str
    runs: list[PlannedRun]
    tune: Any = None


def read_grid(path: Path, flags: Config | None = None) -> Grid:
    """Return the runs of a comparison file.

    Its keys are described in docs/howto/comparison.md; ``tune`` is a `TuneConfig`. A key that an algorithm does not
    take is left out for it, and runs that become equal are one. ``flags`` go above everything.
    """
    content = read_yaml(path)
    if not isinstance(content.get("grid"), dict) or not content["grid"]:
        raise ConfigError(f"{path} must have a grid: keys, and the values to try for each")
    for key in content:
        if key not in KEYS:
            raise ConfigError(f"{path} takes {', '.join(KEYS)}, got {key!r}")
    if not re.fullmatch(r"[\w.-]{1,100}", str(content.get("compare", ""))):
        raise ConfigError(f"{path}: compare must be a plain folder name, got {content.get('compare')!r}")
    base = content.get("base") or []
    names = [base] if isinstance(base, str) else base
    files = [path.parent / name if (path.parent / name).is_file() else find_config(name) for name in names]
    layers = [*map(read_yaml, files), content.get("settings") or {}]
    runs: dict[str, PlannedRun] = {}
    for options in itertools.product(*_axes(path, content["grid"])):
        algorithm = options[0][1]["algorithm"]
        words, chosen = [], dict[str, Any]()
        for word, settings in options:
            taken = {key: value for key, value in settings.items() if _is_taken(key, algorithm)}
            words += [word] if taken else []
            chosen |= taken
        name = "-".join(words)
        if name not in runs:
            config = merge(layers, overlay(nested(chosen), flags or {}))
            config["trainer"] = {**config.get("trainer", {}), "enable_progress_bar": False}
            runs[name] = PlannedRun(name, complete_config({**config, "experiment": content["compare"]}))
    return Grid(content["compare"], list(runs.values()), content.get("tune"))


def _axes(path: Path, grid: dict[str, Any]) -> list[list[Option]]:
    """Return the options of each axis, the algorithm's first."""
    axes = {key: _options(f"{path}: grid.{key}", key, values) for key, values in grid.items()}
    axes = {"algorithm": axes.pop("algorithm", [("obbo", {"algorithm": "obbo"})]), **axes}
    algorithms = [settings["algorithm"] for _, settings in axes["algorithm"]]
    for key in {key for options in axes.values() for _, settings in options for key in settings}:
        if not any(_is_taken(key, algorithm) for algorithm in algorithms):
            raise ConfigError(f"{path}: grid.{key} must be taken by one of {', '.join(algorithms)}, got {key!r}")
    return list(axes.values())


def _options(where: str, key: str, values: Any) -> list[Option]:
    """Return the options of an axis: values of a key, or names with the settings that change together."""
    if isinstance(values, (list, dict)) and not values:
        raise ConfigError(f"{where} must have values to try, got none")
    if isinstance(values, dict):
        for name, settings in values.items():
            if not isinstance(settings, dict):
                raise ConfigError(f"{where}.{name} must have settings, got {settings!r}")
        return [(f"{key}_{_plain(name)}", settings) for name, settings in values.items()]
    values = values if isinstance(values, list) else [values]
    last = key.rpartition(".")[2]
    short = distinct_names(value for value in values if isinstance(value, str)) if last in KINDS else {}
    options: dict[str, Any] = {}
    for value in values:
        if value not in options.values():
            word = _plain(short.get(value, value) if isinstance(value, str) else value)
            options[unused_name(word, options)] = value  # values that look alike in a folder's name are two runs
    return [(word if key == "algorithm" else f"{last}_{word}", {key: value}) for word, value in options.items()]


def _is_taken(key: str, algorithm: str) -> bool:
    """Return whether an algorithm takes a setting."""
    return not key.startswith("algorithm.") or key.split(".")[1] in accepted_arguments("algorithm", algorithm)


def _plain(value: Any) -> str:
    return re.sub(r"[^\w.]+", "_", str(value))


def distinct_names(names: Iterable[str]) -> dict[str, str]:
    """Return the short name of each component; where two share one, with the module or file of each.

    >>> distinct_names(["obbo", "lab.mine.Sparse", "a/yours.py:Sparse", "b/yours.py:Sparse"])
    {'obbo': 'obbo', 'lab.mine.Sparse': 'Sparse_mine', 'a/yours.py:Sparse': 'Sparse_yours', 'b/yours.py:Sparse': ...2'}
    """
    short = {name: short_name(name) for name in names}
    found: dict[str, str] = {}
    for name, word in short.items():
        file = source_file(name)
        module = file.stem if file else name.rpartition(".")[0].rpartition(".")[2]
        shared = module and list(short.values()).count(word) > 1
        found[name] = unused_name(f"{word}_{module}" if shared else word, found.values())
    return found


def unused_name(word: str, taken: Iterable[str]) -> str:
    """Return the word, with the first number from 2 on where it is taken."""
    taken = set(taken)
    numbered = (f"{word}_{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain([word], numbered) if name not in taken)
