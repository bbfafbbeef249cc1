"""From a complete configuration to components."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from obbo_lightning.config.parse import COMPONENTS, Config, component_class, section
from obbo_lightning.config.registry import find_component
from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.parameter_groups import COMPONENTS as GROUP_COMPONENTS
from obbo_lightning.core.problem import Problem
from obbo_lightning.streams.stream import Stream


def build_stream(config: Config) -> Stream:
    """Return the stream; it gets the run's seed where it takes one."""
    cls = component_class(config, "data")
    takes_seed = cls is not None and "seed" in inspect.signature(cls).parameters
    stream: Stream = _build(config, "data", **({"seed": config["seed"]} if takes_seed else {}))
    return stream


def build_algorithm(config: Config) -> Algorithm:
    """Return the algorithm."""
    algorithm: Algorithm = _build(config, "algorithm")
    return algorithm


def build_problem(config: Config, stream: Stream) -> Problem:
    """Return the problem that the stream's tasks pose; its network is constructed when the seed is known."""
    arguments = {key: value for key, value in section(config, "problem").items() if key != "name"}
    cls = component_class(config, "problem")
    network = component_class(config, "problem.network")
    if cls is not None and "network" in inspect.signature(cls).parameters and network is not None:
        given = {key: value for key, value in section(config, "problem.network").items() if key != "name"}
        arguments["network"] = partial(network, **given)
    problem: Problem = _construct("problem", cls, lambda: stream.problem(cls, **arguments))
    return problem


def _build(config: Config, path: str, **extra: Any) -> Any:
    """Construct a component, and the components that are its arguments."""
    arguments = {key: value for key, value in section(config, path).items() if key != "name"}
    cls = component_class(config, path)
    if cls is None:
        raise ValueError(f"{path} must be given, got none")
    for key, value in arguments.items():
        if f"{path}.{key}" in COMPONENTS:
            arguments[key] = None if value is None else _build(config, f"{path}.{key}")
    if isinstance(arguments.get("groups"), dict):
        arguments["groups"] = {name: _build_group(name, given) for name, given in arguments["groups"].items()}
    return _construct(path, cls, lambda: cls(**arguments, **extra))


def _build_group(group: str, settings: Any) -> Any:
    """Return the settings of a parameter group with its geometry, regularizer and domain constructed."""
    if not isinstance(settings, dict):
        return settings  # the algorithm refuses them
    built = dict(settings)
    for key in GROUP_COMPONENTS.keys() & settings.keys():
        given = {"name": settings[key]} if isinstance(settings[key], str) else settings[key]
        if isinstance(given, dict) and isinstance(given.get("name"), str):
            path = f"algorithm.groups.{group}.{key}"
            cls: Callable[..., Any] = find_component(key, given["name"], path)
            arguments = {name: value for name, value in given.items() if name != "name"}
            built[key] = _construct(path, cls, partial(cls, **arguments))
    return built


def _construct(path: str, cls: Any, make: Callable[[], Any]) -> Any:
    """Call ``make``; errors name the configuration key with its path, and errors of own components name the class."""
    ours = getattr(cls, "__module__", "").startswith("obbo_lightning.")
    try:
        return make()
    except ValueError as error:
        message, top = str(error), path.partition(".")[0]
        key = message.partition(" ")[0].partition(".")[0]
        taken = {} if cls is None else inspect.signature(cls).parameters
        if key in taken or f"{top}.{key}" in COMPONENTS:
            message = f"{top}.{message}"
        elif not ours and cls is not None and not message.startswith(top):
            message = f"{path} {cls.__name__}: {message}"
        raise ValueError(message) from None
    except Exception as error:
        if ours or cls is None:
            raise
        raise ValueError(f"{path} {cls.__name__} cannot be constructed: {type(error).__name__}: {error}") from error
