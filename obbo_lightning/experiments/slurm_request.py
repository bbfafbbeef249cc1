"""What the jobs of a comparison ask of Slurm, from a YAML file."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from obbo_lightning.config.parse import ConfigError

SHORTEST = 5  # minutes: the warning comes up to 150 seconds before the end, and finds Python still starting in less


def read_request(path: Path) -> dict[str, Any]:
    """What the jobs ask of Slurm, from a YAML file, in submitit's words."""
    try:
        # As written, all of it: to YAML 12:00:00 is a number, 43200.
        found = yaml.load(path.read_text(), Loader=yaml.BaseLoader)  # noqa: S506 it makes words only
    except OSError as error:
        raise ConfigError(f"--slurm file {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--slurm file {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must have keys and values, got {found!r}")
    for key in found:
        if key not in KEYS:
            raise ConfigError(f"{path} takes {', '.join(KEYS)}, got {key!r}")
    if "time" not in found:
        raise ConfigError(f"{path} must have time: {KEYS['time'][2]}, got none")
    request: dict[str, Any] = {"cpus_per_task": 1}
    for key, text in found.items():
        name, read, allowed = KEYS[key]
        value = read(text)
        if value is None:
            raise ConfigError(f"{path}: {key} must be {allowed}, got {text!r}")
        request[name] = value
    if not request.get("gpus_per_node"):
        request.pop("gpus_per_node", None)  # clusters without GPUs refuse a zero, too
    return request


def _name(text: Any) -> str | None:
    return text if isinstance(text, str) and re.fullmatch(r"[\w.,:@+/-]+", text) else None


def _whole(text: Any) -> int | None:
    return int(text) if isinstance(text, str) and re.fullmatch(r"[1-9]\d{0,5}", text) else None


def _gpus(text: Any) -> int | None:
    return {"0": 0, "1": 1}.get(text) if isinstance(text, str) else None


def _memory(text: Any) -> str | None:
    return text if isinstance(text, str) and re.fullmatch(r"[1-9]\d*[KMGT]B?", text) else None


def _minutes(text: Any) -> int | None:
    clock = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", text) if isinstance(text, str) else None
    if clock:
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        asked = (days * 24 + hours) * 60 + minutes + (seconds > 0)
    else:
        asked = _whole(text) or 0
    return asked if asked >= SHORTEST else None


def _lines(text: Any) -> list[str] | None:
    lines = [text] if isinstance(text, str) else text
    return lines if isinstance(lines, list) and all(isinstance(line, str) and line for line in lines) else None


# Our key: submitit's, how to read it, what is allowed.
KEYS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "partition": ("partition", _name, "a name"),
    "time": ("time", _minutes, f"minutes, or [days-]hours:minutes:seconds, of at least {SHORTEST} minutes"),
    "gpus": ("gpus_per_node", _gpus, "0 or 1, because a cell is one process"),
    "memory": ("mem", _memory, "a whole number with K, M, G or T, such as 16G"),
    "cpus": ("cpus_per_task", _whole, "an integer of at least 1"),
    "account": ("account", _name, "a name"),
    "qos": ("qos", _name, "a name"),
    "array_parallelism": ("array_parallelism", _whole, "an integer of at least 1"),
    "setup": ("setup", _lines, "lines of shell"),
}
