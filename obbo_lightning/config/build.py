"""From settings to parts."""

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from obbo_lightning.config.files import Config
from obbo_lightning.config.layers import COMPONENT_PATHS, component_class, section
from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.problem import Problem
from obbo_lightning.streams.stream import Stream


def build_stream(settings: Config) -> Stream:
    """Where tasks come from; it gets the run's seed where it takes one."""
    cls = component_class(settings, "data")
    seeded = cls is not None and "seed" in inspect.signature(cls).parameters
    stream: Stream = _build(settings, "data", **({"seed": settings["seed"]} if seeded else {}))
    return stream


def build_algorithm(settings: Config) -> Algorithm:
    """What is done in a round."""
    algorithm: Algorithm = _build(settings, "algorithm")
    return algorithm


def build_problem(settings: Config, stream: Stream) -> Problem:
    """What is learned from the stream's tasks; its network is made when the seed is known."""
    given = dict(section(settings, "problem"))
    given.pop("name", None)
    cls = component_class(settings, "problem")
    if cls is not None and "network" in inspect.signature(cls).parameters:
        network = {key: value for key, value in section(settings, "problem.network").items() if key != "name"}
        given["network"] = partial(_existing(settings, "problem.network"), **network)
    problem: Problem = _refusing_with_prefix("problem", cls, lambda: stream.problem(cls, **given))
    return problem


def _build(settings: Config, path: str, **extra: Any) -> Any:
    """Construct a part, and the parts in it."""
    given = dict(section(settings, path))
    given.pop("name", None)
    cls = _existing(settings, path)
    for key, value in given.items():
        if f"{path}.{key}" in COMPONENT_PATHS:
            given[key] = None if value is None else _build(settings, f"{path}.{key}")
    return _refusing_with_prefix(path, cls, lambda: cls(**given, **extra))


def _existing(settings: Config, path: str) -> Any:
    cls = component_class(settings, path)
    if cls is None:
        raise ValueError(f"{path} must be given, got none")
    return cls


def _refusing_with_prefix(path: str, cls: Any, make: Callable[[], Any]) -> Any:
    """A part names its own key; a user wrote it with everything before. What else yours may raise is a refusal, too."""
    top = path.partition(".")[0]
    ours = str(getattr(cls, "__module__", "obbo_lightning")).startswith("obbo_lightning.")
    try:
        return make()
    except ValueError as refusal:
        said = str(refusal)
        if re.match(r"[a-z_][\w.]* must ", said) and not said.startswith((f"{top}.", f"{top} ")):
            said = f"{top}.{said}"
        elif not ours and not said.startswith(top):
            said = f"{path} {cls.__name__}: {said}"
        raise ValueError(said) from None
    except Exception as error:
        if ours:
            raise
        raise ValueError(f"{path} {cls.__name__} cannot be made: {type(error).__name__}: {error}") from error
