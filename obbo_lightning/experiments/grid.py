"""A grid of runs: from a comparison file to cells with complete settings."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from obbo_lightning.config.parse import (
    Config,
    ConfigError,
    accepted_arguments,
    complete_config,
    default_config,
    find_config,
    merge,
    nested,
    overlay,
    read_yaml,
)
from obbo_lightning.config.registry import KINDS
from obbo_lightning.experiments.names import distinct_names, unused

KEYS = ("compare", "base", "settings", "grid", "tune")


class Option(NamedTuple):
    """One value of an axis of the grid: its word in the names of cells, and the settings that it stands for."""

    word: str
    settings: dict[str, Any]


class Cell(NamedTuple):
    """One run of a grid."""

    name: str
    settings: Config


class Grid(NamedTuple):
    """A named comparison.

    Attributes:
        name: its folder.
        cells: its runs.
        tune: what is searched before it is played, see `tune_request.read_tune`; None where nothing is.
    """

    name: str
    cells: list[Cell]
    tune: Any = None


def read_grid(path: Path, flags: Config | None = None) -> Grid:
    """The cells of a comparison file.

    It has ``compare`` (a name), ``base`` (a configuration file beside it, the name of one of ours, or a list of them),
    ``settings`` (what all cells have above the base) and ``grid``: for each key the values to try; or, for settings
    that change together, a name and for each of its values the settings; and ``tune``, where the methods are tuned
    before (see `tune_request`). A key that an algorithm does not take is left
    out for it, and cells that become the same are one. ``flags`` go above everything. Your parts in files
    (``file.py:Class``) are looked for beside the file that names them, then from the working directory.
    """
    found = read_yaml(path)
    _require_keys(path, found)
    axes = _axes(path, found["grid"])
    layers = [*_base(path, found.get("base") or []), found.get("settings") or {}]
    cells: dict[str, Cell] = {}
    for options in itertools.product(*axes):
        algorithm = options[0].settings["algorithm"]
        kept = [Option(o.word, {k: v for k, v in o.settings.items() if _is_taken(k, algorithm)}) for o in options]
        chosen = {key: value for option in kept for key, value in option.settings.items()}
        name = "-".join(option.word for option in kept if option.settings)
        if name not in cells:
            settings = merge(layers, overlay(nested(chosen), flags or {}))
            settings["trainer"] = {**settings.get("trainer", {}), "enable_progress_bar": False}
            cells[name] = Cell(name, complete_config({**settings, "experiment": found["compare"]}))
    return Grid(found["compare"], list(cells.values()), found.get("tune"))


def _base(path: Path, base: str | list[str]) -> list[Config]:
    """The layers below the comparison's own settings, the default first."""
    files = [default_config()]
    for name in [base] if isinstance(base, str) else base:
        beside = path.parent / name
        files.append(beside if beside.is_file() else find_config(name))
    return [read_yaml(file) for file in files]


def _require_keys(path: Path, found: Config) -> None:
    if not isinstance(found.get("grid"), dict) or not found["grid"]:
        raise ConfigError(f"{path} must have a grid: keys, and the values to try for each")
    for key in found:
        if key not in KEYS:
            raise ConfigError(f"{path} takes {', '.join(KEYS)}, got {key!r}")
    if not re.fullmatch(r"[\w.-]{1,100}", str(found.get("compare", ""))):
        raise ConfigError(f"{path}: compare must be a plain folder name, got {found.get('compare')!r}")


def _axes(path: Path, grid: dict[str, Any]) -> list[list[Option]]:
    """The options of each axis, the algorithm's first."""
    for key, values in grid.items():
        if isinstance(values, (list, dict)) and not values:
            raise ConfigError(f"{path}: grid.{key} must have values to try, got none")
    axes = {key: list(_options(key, values)) for key, values in grid.items()}
    axes = {"algorithm": axes.pop("algorithm", [Option("obbo", {"algorithm": "obbo"})]), **axes}
    algorithms = [option.settings["algorithm"] for option in axes["algorithm"]]
    for key in {key for options in axes.values() for option in options for key in option.settings}:
        if not any(_is_taken(key, algorithm) for algorithm in algorithms):
            raise ConfigError(f"{path}: grid.{key} must be taken by one of {', '.join(algorithms)}, got {key!r}")
    return list(axes.values())


def _options(key: str, values: Any) -> Iterator[Option]:
    """A list has values of this key; a mapping has names, each with the settings that change together."""
    if isinstance(values, dict):
        for name, settings in values.items():
            if not isinstance(settings, dict):
                raise ConfigError(f"grid.{key}.{name} must have settings, got {settings!r}")
            yield Option(f"{key}_{_plain(name)}", dict(settings))
        return
    values = values if isinstance(values, list) else [values]
    last = key.rpartition(".")[2]
    short = distinct_names(value for value in values if isinstance(value, str)) if last in KINDS else {}
    taken: list[str] = []
    for i, value in enumerate(values):
        if value in values[:i]:
            continue
        word = _plain(short[value] if isinstance(value, str) and value in short else value)
        taken.append(unused(word, taken))  # two values that look alike in a folder's name are two cells
        yield Option(taken[-1] if key == "algorithm" else f"{last}_{taken[-1]}", {key: value})


def _is_taken(key: str, algorithm: str) -> bool:
    """Whether a setting makes sense for an algorithm."""
    taken = accepted_arguments("algorithm", algorithm)
    return not key.startswith("algorithm.") or key.split(".")[1] in taken


def _plain(value: Any) -> str:
    return re.sub(r"[^\w.]+", "_", str(value))
