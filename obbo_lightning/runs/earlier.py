"""The settings of a run that was begun before."""

from typing import Any

import yaml

from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.settings.files import ConfigError, Settings


def read_settings(run: RunDirectory) -> Settings:
    """What config.yaml says, in the words of this version."""
    try:
        settings = yaml.safe_load(run.config.read_text())
    except (OSError, ValueError, yaml.YAMLError) as damage:
        raise ConfigError(f"{run.config} cannot be read: {type(damage).__name__}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{run.config} must hold the settings of a run, got something else")
    return migrated(settings)


def migrated(settings: Settings) -> Settings:
    """Settings of version 0.1.0, where a few-shot problem had one kind of network, and its filters.

    >>> migrated({"problem": {"filters": 32, "proximity": 0.5}})
    {'problem': {'network': {'name': 'cnn4', 'filters': 32}, 'proximity': 0.5}}
    """
    problem: dict[str, Any] | None = settings.get("problem")
    if not isinstance(problem, dict) or "filters" not in problem:
        return settings
    rest = {key: value for key, value in problem.items() if key != "filters"}
    return {**settings, "problem": {"network": {"name": "cnn4", "filters": problem["filters"]}, **rest}}
