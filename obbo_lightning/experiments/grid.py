"""Comparison files: from a grid of settings to runs with complete configurations."""

import itertools
import re
from collections.abc import Iterable, Iterator
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


class PlannedRun(NamedTuple):
    """One run of a grid: the name of its directory, and its complete configuration."""

    name: str
    config: Config


class Grid(NamedTuple):
    """A comparison: the name of its folder, its runs, and its section ``tune``, None where it has none."""

    name: str
    runs: list[PlannedRun]
    tune: Any = None


class _Option(NamedTuple):
    """One value of an axis of the grid: its word in the names of runs, and the settings that it stands for."""

    word: str
    settings: dict[str, Any]


def read_grid(path: Path, flags: Config | None = None) -> Grid:
    """Return the runs of a comparison file.

    It has ``compare`` (a name), ``base`` (a configuration file beside it, the name of a shipped one, or a list of
    them), ``settings`` (of all runs, above the base) and ``grid``: for each key the values to try; or, for settings
    that change together, a name, and for each of its values the settings. ``tune`` is described in `TuneConfig`. A key
    that an algorithm does not take is left out for it, and runs that become equal are one. ``flags`` go above
    everything. Your components in files (``file.py:Class``) are searched beside the file that names them, then from the
    working directory.
    """
    content = read_yaml(path)
    if not isinstance(content.get("grid"), dict) or not content["grid"]:
        raise ConfigError(f"{path} must have a grid: keys, and the values to try for each")
    for key in content:
        if key not in KEYS:
            raise ConfigError(f"{path} takes {', '.join(KEYS)}, got {key!r}")
    if not re.fullmatch(r"[\w.-]{1,100}", str(content.get("compare", ""))):
        raise ConfigError(f"{path}: compare must be a plain folder name, got {content.get('compare')!r}")
    layers = [*_base_layers(path, content.get("base") or []), content.get("settings") or {}]
    runs: dict[str, PlannedRun] = {}
    for options in itertools.product(*_axes(path, content["grid"])):
        algorithm = options[0].settings["algorithm"]
        kept = [_Option(o.word, {k: v for k, v in o.settings.items() if _is_taken(k, algorithm)}) for o in options]
        chosen = {key: value for option in kept for key, value in option.settings.items()}
        name = "-".join(option.word for option in kept if option.settings)
        if name not in runs:
            config = merge(layers, overlay(nested(chosen), flags or {}))
            config["trainer"] = {**config.get("trainer", {}), "enable_progress_bar": False}
            runs[name] = PlannedRun(name, complete_config({**config, "experiment": content["compare"]}))
    return Grid(content["compare"], list(runs.values()), content.get("tune"))


def _base_layers(path: Path, base: str | list[str]) -> list[Config]:
    """Return the configurations below the comparison's own settings."""
    names = [base] if isinstance(base, str) else base
    files = [path.parent / name if (path.parent / name).is_file() else find_config(name) for name in names]
    return [read_yaml(file) for file in files]


def _axes(path: Path, grid: dict[str, Any]) -> list[list[_Option]]:
    """Return the options of each axis, the algorithm's first."""
    for key, values in grid.items():
        if isinstance(values, (list, dict)) and not values:
            raise ConfigError(f"{path}: grid.{key} must have values to try, got none")
    axes = {key: list(_options(key, values)) for key, values in grid.items()}
    axes = {"algorithm": axes.pop("algorithm", [_Option("obbo", {"algorithm": "obbo"})]), **axes}
    algorithms = [option.settings["algorithm"] for option in axes["algorithm"]]
    for key in {key for options in axes.values() for option in options for key in option.settings}:
        if not any(_is_taken(key, algorithm) for algorithm in algorithms):
            raise ConfigError(f"{path}: grid.{key} must be taken by one of {', '.join(algorithms)}, got {key!r}")
    return list(axes.values())


def _options(key: str, values: Any) -> Iterator[_Option]:
    """Yield the options of an axis: values of a key, or names with the settings that change together."""
    if isinstance(values, dict):
        for name, settings in values.items():
            if not isinstance(settings, dict):
                raise ConfigError(f"grid.{key}.{name} must have settings, got {settings!r}")
            yield _Option(f"{key}_{_plain(name)}", dict(settings))
        return
    values = values if isinstance(values, list) else [values]
    last = key.rpartition(".")[2]
    short = distinct_names(value for value in values if isinstance(value, str)) if last in KINDS else {}
    taken: list[str] = []
    for i, value in enumerate(values):
        if value in values[:i]:
            continue
        word = _plain(short[value] if isinstance(value, str) and value in short else value)
        taken.append(unused_name(word, taken))  # values that look alike in the name of a folder are two runs
        yield _Option(taken[-1] if key == "algorithm" else f"{last}_{taken[-1]}", {key: value})


def _is_taken(key: str, algorithm: str) -> bool:
    """Return whether an algorithm takes a setting."""
    taken = accepted_arguments("algorithm", algorithm)
    return not key.startswith("algorithm.") or key.split(".")[1] in taken


def _plain(value: Any) -> str:
    return re.sub(r"[^\w.]+", "_", str(value))


def distinct_names(names: Iterable[str]) -> dict[str, str]:
    """Return the short name of each component; where two share one, with the module, file or folder of each.

    >>> distinct_names(["obbo", "mine.Sparse", "yours.py:Dense"])
    {'obbo': 'obbo', 'mine.Sparse': 'Sparse', 'yours.py:Dense': 'Dense'}
    >>> distinct_names(["lab.mine.Sparse", "a/yours.py:Sparse", "b/yours.py:Sparse"])
    {'lab.mine.Sparse': 'Sparse_mine', 'a/yours.py:Sparse': 'Sparse_yours_a', 'b/yours.py:Sparse': 'Sparse_yours_b'}
    """
    candidates = {}  # of each component, from short to long
    for name in names:
        file, short = source_file(name), short_name(name)
        module = file.stem if file else name.rpartition(".")[0].rpartition(".")[2]
        longer = f"{short}_{module}" if module else name
        candidates[name] = (short, longer, f"{longer}_{file.parent.name}" if file else name)
    found: dict[str, str] = {}
    for name, words in candidates.items():
        unique = [w for i, w in enumerate(words) if [other[i] for other in candidates.values()].count(w) == 1]
        found[name] = unused_name(unique[0] if unique else words[-1], found.values())
    return found


def unused_name(word: str, taken: Iterable[str]) -> str:
    """Return the word, with the first number from 2 on where it is taken.

    >>> unused_name("a", ["b"]), unused_name("a", ["a", "a_2"])
    ('a', 'a_3')
    """
    taken = set(taken)
    numbered = (f"{word}_{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain([word], numbered) if name not in taken)
