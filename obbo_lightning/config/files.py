"""Settings in YAML files: yours by their path, shipped ones by their name."""

import re
from pathlib import Path
from typing import Any

import yaml

from obbo_lightning.config.registry import absolute_name

Config = dict[str, Any]
LONGEST, MOST_VALUES = 10_000_000, 100_000  # bytes and values of a file with settings
FREE_TEXT = ("wandb", "experiment", "output", "compare")  # whatever looks like a part in these is none


class ConfigError(ValueError):
    """A mistake in a flag or a file: names the key, the value and what is allowed."""


def shipped() -> Path:
    """The folder of the configurations that come with the package."""
    packaged = Path(__file__).parents[1] / "configs"
    return packaged if packaged.exists() else Path(__file__).parents[2] / "configs"


def default_config() -> Path:
    """The configuration that every run starts from: the embedded default."""
    return shipped() / "default.yaml"


def find_config(name: str, group: str = "") -> Path:
    """A file by its path, or a shipped configuration by its name.

    Args:
        name: ``mine.yaml``, or ``quadratic`` for the shipped ``configs/quadratic.yaml``.
        group: the folder of the shipped ones: ``compare`` for comparisons.

    >>> find_config("quadratic").name
    'quadratic.yaml'
    """
    given = Path(name).expanduser()
    if given.is_file():
        return given
    folder = shipped() / group
    found = folder / f"{name}.yaml"
    if re.fullmatch(r"\w+", name) and found.is_file():
        return found
    if given.suffix or len(given.parts) > 1:
        reason = "it is a folder" if given.is_dir() else "no such file"
        raise ConfigError(f"config file {name} cannot be read: {reason}")
    names = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
    raise ConfigError(f"--config must be a file, or one of {names}; got {name!r}")


def read_yaml(path: Path) -> Config:
    """The settings in a file; files of parts that it names are found beside it."""
    try:
        if path.stat().st_size > LONGEST:
            raise ConfigError(f"config file {path} must have at most {LONGEST} bytes, got {path.stat().st_size}")
        found = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"config file {path} is not a text file") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict | None):
        raise ConfigError(f"config file {path} must hold keys and values, got {type(found).__name__}")
    try:
        require_few_values(found, f"config file {path}")
        settings: Config = as_written(found or {}, path.parent)
    except RecursionError:
        raise ConfigError(f"config file {path} contains itself") from None
    return settings


def require_few_values(found: Any, what: str) -> None:
    """Aliases of aliases make a short text into more values than any memory holds: they are counted before."""
    count = 0

    def walk(value: Any) -> None:
        nonlocal count
        count += 1
        if count > MOST_VALUES:
            raise ConfigError(f"{what} must hold at most {MOST_VALUES} values, aliases written out, got more")
        for below in (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ():
            walk(below)

    walk(found)


def as_written(value: Any, folder: Path | None = None) -> Any:
    """What was meant: 1e-4 is a number, which YAML 1.1 reads as a word; a class in a file has its absolute place."""
    if isinstance(value, dict):
        return {
            as_written(k, folder) if isinstance(k, str) else k: v if k in FREE_TEXT else as_written(v, folder)
            for k, v in value.items()
        }
    if isinstance(value, list):
        return [as_written(v, folder) for v in value]
    if not isinstance(value, str):
        return value
    if re.fullmatch(r"[+-]?(\d+(\.\d*)?[eE][+-]?\d+|inf|nan)", value):
        return float(value)
    return absolute_name(value, folder)
