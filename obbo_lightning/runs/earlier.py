"""The settings of a run that was begun before."""

from typing import Any

import yaml

from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.settings.files import ConfigError, Settings, require_few_values

STEPPING = ("obbo", "sobbo", "sobow", "oagd", "adam", "sgdm")  # those that take `scale` and `blocks`


def read_settings(run: RunDirectory) -> Settings:
    """What config.yaml says, in the words of this version."""
    return migrated(read_config(run))


def read_config(run: RunDirectory) -> Settings:
    """What config.yaml says, in the words of the version that wrote it."""
    try:
        settings: Settings = yaml.safe_load(run.config.read_text())
        require_few_values(settings, str(run.config))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as damage:
        raise ConfigError(f"{run.config} cannot be read: {type(damage).__name__}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{run.config} must hold the settings of a run, got something else")
    return settings


def migrated(settings: Settings) -> Settings:
    """Settings of before: few-shot problems had one kind of network, and its filters; no algorithm knew of blocks.

    >>> migrated({"problem": {"filters": 32, "proximity": 0.5}})
    {'problem': {'network': {'name': 'cnn4', 'filters': 32}, 'proximity': 0.5}}
    >>> migrated({"algorithm": {"name": "obbo", "lr": 0.1}})
    {'algorithm': {'scale': 0.3, 'blocks': None, 'name': 'obbo', 'lr': 0.1}}
    """
    problem: dict[str, Any] | None = settings.get("problem")
    if isinstance(problem, dict) and "filters" in problem:
        rest = {key: value for key, value in problem.items() if key != "filters"}
        settings = {**settings, "problem": {"network": {"name": "cnn4", "filters": problem["filters"]}, **rest}}
    algorithm: dict[str, Any] | None = settings.get("algorithm")
    if isinstance(algorithm, dict) and algorithm.get("name") in STEPPING:
        settings = {**settings, "algorithm": {"scale": 0.3, "blocks": None, **algorithm}}
    return settings
