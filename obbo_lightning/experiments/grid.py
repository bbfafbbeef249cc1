"""A grid of runs: from a comparison file to cells with complete settings."""

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from obbo_lightning.configuration import ConfigError, Settings, accepted_settings, read_layers
from obbo_lightning.training.run import complete

KEYS = ("compare", "base", "settings", "grid")


class Option(NamedTuple):
    """One value of an axis of the grid: its word in the names of cells, and the settings that it stands for."""

    word: str
    settings: dict[str, Any]


class Cell(NamedTuple):
    """One run of a grid."""

    name: str
    settings: Settings


class Grid(NamedTuple):
    """A named comparison."""

    name: str
    cells: list[Cell]


def read_grid(path: Path, flags: Sequence[str] = ()) -> Grid:
    """The cells of a comparison file.

    It has ``compare`` (a name), ``base`` (a configuration file beside it, or a list of them), ``settings`` (what all
    cells have above the base) and ``grid``: for each key the values to try; or, for settings that change together, a
    name and for each of its values the settings. A key that an algorithm does not take is left out for it, and cells
    that become the same are one. ``flags`` go above everything.
    """
    found = _read(path)
    base = found.get("base") or []
    files = [base] if isinstance(base, str) else base
    base_files = [word for file in files for word in ("--config", str(path.parent / file))]
    cells: dict[str, Cell] = {}
    for options in itertools.product(*found["grid"].values()):
        taken = _taken_keys(options)
        kept = [Option(o.word, {k: v for k, v in o.settings.items() if k in taken}) for o in options]
        chosen = {key: value for option in kept for key, value in option.settings.items()}
        name = "-".join(option.word for option in kept if option.settings)
        if name not in cells:
            settings, _ = read_layers([*base_files, *_as_flags(chosen), *flags], found.get("settings"))
            settings["trainer"] = {**settings.get("trainer", {}), "enable_progress_bar": False}
            cells[name] = Cell(name, complete({**settings, "experiment": found["compare"]}))
    return Grid(found["compare"], list(cells.values()))


def _read(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or not isinstance(found.get("grid"), dict) or not found["grid"]:
        raise ConfigError(f"{path} must have a grid: keys, and the values to try for each")
    for key in found:
        if key not in KEYS:
            raise ConfigError(f"{path} takes {', '.join(KEYS)}, got {key!r}")
    if not re.fullmatch(r"[\w.-]{1,100}", str(found.get("compare", ""))):
        raise ConfigError(f"{path}: compare must be a plain folder name, got {found.get('compare')!r}")
    for key, values in found["grid"].items():
        if isinstance(values, (list, dict)) and not values:
            raise ConfigError(f"{path}: grid.{key} must have values to try, got none")
    grid = {key: list(_options(key, values)) for key, values in found["grid"].items()}
    grid = {"algorithm": grid.pop("algorithm", [Option("obbo", {"algorithm": "obbo"})]), **grid}
    algorithms = [option.settings["algorithm"] for option in grid["algorithm"]]
    for options in grid.values():
        for key in {key for option in options for key in option.settings}:
            if not any(key in _taken_keys([Option("", {"algorithm": name, key: None})]) for name in algorithms):
                raise ConfigError(f"{path}: grid.{key} must be taken by one of {', '.join(algorithms)}, got {key!r}")
    return {**found, "grid": grid}


def _options(key: str, values: Any) -> Iterator[Option]:
    """A list has values of this key; a mapping has names, each with the settings that change together."""
    if isinstance(values, dict):
        for name, settings in values.items():
            if not isinstance(settings, dict):
                raise ConfigError(f"grid.{key}.{name} must have settings, got {settings!r}")
            yield Option(f"{key}_{_plain(name)}", dict(settings))
    else:
        for value in values if isinstance(values, list) else [values]:
            word = _plain(value)
            yield Option(word if key == "algorithm" else f"{key.rpartition('.')[2]}_{word}", {key: value})


def _taken_keys(options: Sequence[Option]) -> set[str]:
    """The keys that make sense for the chosen algorithm."""
    keys = {key for option in options for key in option.settings}
    (algorithm,) = [option.settings["algorithm"] for option in options if "algorithm" in option.settings]
    taken = accepted_settings("algorithm", algorithm)
    return {key for key in keys if not key.startswith("algorithm.") or key.split(".")[1] in taken}


def _plain(value: Any) -> str:
    return re.sub(r"[^\w.]+", "_", str(value))


def _as_flags(settings: dict[str, Any], path: str = "") -> Iterator[str]:
    for key, value in settings.items():
        where = f"{path}.{key}" if path else key
        if isinstance(value, dict):
            yield from _as_flags(value, where)
        else:
            # one line of YAML, without the end mark that a bare scalar gets
            yield f"--{where}={yaml.safe_dump(value, default_flow_style=True, width=10**6).splitlines()[0]}"
