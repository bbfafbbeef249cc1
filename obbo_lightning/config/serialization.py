"""Components as plain values and back, so that a checkpoint holds no pickled code."""

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor

from obbo_lightning.config.registry import KINDS, import_class, qualified_name, require_trusted
from obbo_lightning.core.configurable import Configurable

Config = Any  # numbers, words, tensors, lists and mappings of them: what torch.load(weights_only=True) reads


def to_config(value: Any) -> Config:
    """Return ``value`` as plain values, from which `from_config` makes it again.

    >>> from obbo_lightning import OBBO
    >>> from obbo_lightning.domains import Nonnegative
    >>> from obbo_lightning.geometry import NegativeEntropy
    >>> to_config(OBBO(lr=0.5, geometry=NegativeEntropy(), domain=Nonnegative()))["init_args"]["lr"]
    0.5
    """
    if value is None or isinstance(value, (bool, int, float, str, Tensor)):
        return value
    if isinstance(value, (list, tuple)):
        return [to_config(one) for one in value]
    if isinstance(value, dict):
        return {key: to_config(one) for key, one in value.items()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Configurable):
        # with the defaults, which another version may have changed
        parameters = inspect.signature(type(value)).parameters
        defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
        return {"component": qualified_name(type(value)), "init_args": to_config({**defaults, **value.init_args})}
    if isinstance(value, partial) and isinstance(value.func, type) and issubclass(value.func, torch.nn.Module):
        given = inspect.signature(value.func).bind_partial(*value.args, **value.keywords).arguments
        return {"network": qualified_name(value.func), "init_args": to_config(dict(given))}
    if isinstance(value, type):
        return to_config(partial(value))
    if callable(value) and not isinstance(value, torch.nn.Module):
        called = getattr(getattr(value, "func", value), "__name__", type(value).__name__)
        raise ValueError(f"what the function {called} makes cannot be written as plain values; a class can be")
    raise ValueError(f"{type(value).__name__} cannot be written as plain values")


def from_config(config: Config) -> Any:
    """Return what `to_config` was given; refuse classes that are neither components nor networks."""
    if isinstance(config, list):
        return [from_config(one) for one in config]
    if not isinstance(config, dict):
        return config
    for key, base in (("component", Configurable), ("network", torch.nn.Module)):
        if set(config) == {key, "init_args"}:
            require_trusted(config[key], "a checkpoint's component", *KINDS)
            cls = import_class(config[key], "a checkpoint's component")
            if not (isinstance(cls, type) and issubclass(cls, base)):  # a file must not be able to call anything else
                raise ValueError(f"a checkpoint may name components and networks, got {config[key]!r}")
            arguments = from_config(config["init_args"])
            return cls(**arguments) if key == "component" else partial(cls, **arguments)
    if set(config) == {"dtype"}:
        return getattr(torch, config["dtype"])
    return {key: from_config(one) for key, one in config.items()}
