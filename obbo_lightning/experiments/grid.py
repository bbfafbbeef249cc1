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
    cells have above the base) and ``grid``: for each key the values to try. A key that an algorithm does not take is
    left out for it, and cells that become the same are one. ``flags`` go above everything.
    """
    found = _read(path)
    base = found.get("base") or []
    files = [base] if isinstance(base, str) else base
    above = [word for file in files for word in ("--config", str(path.parent / file))]
    above += list(_as_flags(found.get("settings") or {}))
    cells: dict[str, Cell] = {}
    for values in itertools.product(*found["grid"].values()):
        chosen = _applicable(dict(zip(found["grid"], values, strict=True)))
        name = "-".join(_word(key, value) for key, value in chosen.items())
        if name not in cells:
            settings, _ = read_layers([*above, *_as_flags(chosen), *flags])
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
    grid = {key: values if isinstance(values, list) else [values] for key, values in found["grid"].items()}
    for key, values in grid.items():
        if not values:
            raise ConfigError(f"{path}: grid.{key} must have values to try, got none")
    grid = {"algorithm": grid.pop("algorithm", ["obbo"]), **grid}
    for key in grid:
        if not any(key in _applicable({"algorithm": name, key: None}) for name in grid["algorithm"]):
            raise ConfigError(f"{path}: grid.{key} must be taken by one of {', '.join(grid['algorithm'])}, got {key!r}")
    return {**found, "grid": grid}


def _applicable(chosen: dict[str, Any]) -> dict[str, Any]:
    taken = accepted_settings("algorithm", chosen["algorithm"])
    return {
        key: value for key, value in chosen.items() if not key.startswith("algorithm.") or key.split(".")[1] in taken
    }


def _as_flags(settings: dict[str, Any], path: str = "") -> Iterator[str]:
    for key, value in settings.items():
        where = f"{path}.{key}" if path else key
        if isinstance(value, dict):
            yield from _as_flags(value, where)
        else:
            # one line of YAML, without the end mark that a bare scalar gets
            yield f"--{where}={yaml.safe_dump(value, default_flow_style=True, width=10**6).splitlines()[0]}"


def _word(key: str, value: Any) -> str:
    text = re.sub(r"[^\w.]+", "_", str(value))
    return text if key == "algorithm" else f"{key.rpartition('.')[2]}_{text}"
