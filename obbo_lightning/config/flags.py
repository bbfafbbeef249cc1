"""The command line of a run: ``--KEY VALUE`` with the keys of the files."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import yaml

from obbo_lightning.config.files import FREE_TEXT, Config, ConfigError, as_written, require_few_values

SWITCHES = ("--help", "-h", "--print_config")


class Flags(NamedTuple):
    """What a command line says.

    Attributes:
        settings: what its flags set.
        files: of ``--config``, in order.
        switches: those without a value.
    """

    settings: Config
    files: list[str]
    switches: set[str]


def read_flags(arguments: Sequence[str]) -> Flags:
    """Words to settings; a value is YAML."""
    found = Flags({}, [], set())
    settings: Config = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word in SWITCHES:
            found.switches.add(word.strip("-"))
            continue
        if not word.startswith("--"):
            raise ConfigError(f"flags begin with --, got {word!r}")
        key, equals, text = word[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"--{key} needs a value, got none")
            text = rest.pop(0)
        if key == "config":
            found.files.append(text)
        else:
            settings = _with(settings, key, _value(key, text))
    return found._replace(settings=settings)


def nested(flat: dict[str, Any]) -> Config:
    """Settings from dotted keys.

    >>> nested({"algorithm": "sobow", "algorithm.window": 5, "seed": 1})
    {'algorithm': {'name': 'sobow', 'window': 5}, 'seed': 1}
    """
    settings: Config = {}
    for key, value in flat.items():
        settings = _with(settings, key, value)
    return settings


def _with(settings: Config, key: str, value: Any) -> Config:
    """Set one dotted key; a part's name may come before or after its settings."""
    head, _, tail = key.partition(".")
    below = settings.get(head)
    if isinstance(below, str):
        below = {"name": below}
    if tail:
        return {**settings, head: _with(below or {}, tail, value)}
    if isinstance(below, dict) and isinstance(value, str):
        return {**settings, head: {**below, "name": value}}
    return {**settings, head: value}


def _value(key: str, text: str) -> Any:
    if not text:
        raise ConfigError(f"--{key} needs a value, got ''")
    if text == "-":  # standard input; YAML would see a list
        return text
    try:
        value = yaml.safe_load(text)
        require_few_values(value, f"--{key}")
        return value if key.partition(".")[0] in FREE_TEXT else as_written(value)
    except RecursionError:
        raise ConfigError(f"--{key} contains itself, got {text!r}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"--{key} must be a YAML value, got {text!r}") from None
