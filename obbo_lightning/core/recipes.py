"""Parts that remember what they were made with, so that a checkpoint can say how to make them again."""

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor

from obbo_lightning.parts import class_named, name_of

Recipe = Any  # numbers, words, tensors, lists and mappings of them: what torch.load(weights_only=True) reads


class _Signature:
    """What a class is called with: what its ``__init__`` takes, and not what `Part.__new__` does, which is anything."""

    def __get__(self, made: Any, cls: Any) -> inspect.Signature:
        if cls.__init__ is object.__init__:
            return inspect.Signature()
        of_instance = inspect.signature(cls.__init__)
        return of_instance.replace(parameters=list(of_instance.parameters.values())[1:])


class Part:
    """Base of everything that settings can name: an ordinary class that remembers its constructor's arguments."""

    __signature__ = _Signature()
    made_with: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> "Part":
        made = super().__new__(cls)
        try:
            bound = inspect.signature(cls).bind(*args, **kwargs)
        except TypeError:  # a wrong call, which __init__ refuses in a moment; or a copy, which brings its attributes
            return made
        arguments = dict(bound.arguments)
        for name, parameter in bound.signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                arguments |= arguments.pop(name, {})
        object.__setattr__(made, "made_with", arguments)  # parts may be frozen dataclasses
        return made


def recipe_of(value: Any) -> Recipe:
    """How to make ``value`` again, in plain values.

    >>> from obbo_lightning import OBBO, NegativeEntropy, Nonnegative
    >>> recipe_of(OBBO(lr=0.5, geometry=NegativeEntropy(), domain=Nonnegative()))["with"]["lr"]
    0.5
    """
    if value is None or isinstance(value, (bool, int, float, str, Tensor)):
        return value
    if isinstance(value, (list, tuple)):
        return [recipe_of(one) for one in value]
    if isinstance(value, dict):
        return {key: recipe_of(one) for key, one in value.items()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Part):
        # with the defaults, which another version may have changed
        parameters = inspect.signature(type(value)).parameters
        defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
        return {"part": name_of(type(value)), "with": recipe_of({**defaults, **value.made_with})}
    if isinstance(value, partial) and _is_network(value.func):
        given = inspect.signature(value.func).bind_partial(*value.args, **value.keywords).arguments
        return {"network": name_of(value.func), "with": recipe_of(dict(given))}
    if isinstance(value, type):
        return recipe_of(partial(value))
    if callable(value) and not isinstance(value, torch.nn.Module):
        called = getattr(getattr(value, "func", value), "__name__", type(value).__name__)
        raise ValueError(f"what the function {called} makes cannot be written down; a class could be")
    raise ValueError(f"{type(value).__name__} cannot be written down as plain values")


def make_again(recipe: Recipe) -> Any:
    """What a recipe describes."""
    if isinstance(recipe, list):
        return [make_again(one) for one in recipe]
    if not isinstance(recipe, dict):
        return recipe
    for kind, allowed in (("part", _is_part), ("network", _is_network)):
        if set(recipe) == {kind, "with"}:
            made = class_named(recipe[kind], "a checkpoint's part")
            if not allowed(made):  # a file must not be able to call anything else
                raise ValueError(f"a checkpoint may name parts and networks, got {recipe[kind]!r}")
            settings = make_again(recipe["with"])
            return made(**settings) if kind == "part" else partial(made, **settings)
    if set(recipe) == {"dtype"}:
        return getattr(torch, recipe["dtype"])
    return {key: make_again(one) for key, one in recipe.items()}


def _is_part(made: Any) -> bool:
    return isinstance(made, type) and issubclass(made, Part)


def _is_network(made: Any) -> bool:
    return isinstance(made, type) and issubclass(made, torch.nn.Module)
