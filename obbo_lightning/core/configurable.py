"""Base class of components: they remember the arguments they were constructed with."""

import inspect
from typing import Any


class _ConstructorSignature:
    """Signature of a class's ``__init__``, which `Configurable.__new__` would hide."""

    def __get__(self, instance: Any, cls: Any) -> inspect.Signature:
        if cls.__init__ is object.__init__:
            return inspect.Signature()
        bound = inspect.signature(cls.__init__)
        return bound.replace(parameters=list(bound.parameters.values())[1:])


class Configurable:
    """Component that a configuration can name; ``init_args`` holds its constructor's arguments.

    `obbo_lightning.config.serialization` turns it into plain values and back, so that a checkpoint needs no pickled
    code.
    """

    __signature__ = _ConstructorSignature()
    init_args: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> "Configurable":
        instance = super().__new__(cls)
        try:
            bound = inspect.signature(cls).bind(*args, **kwargs)
        except TypeError:  # __init__ will refuse a wrong call; copy.copy calls without arguments and sets attributes
            return instance
        arguments = dict(bound.arguments)
        for name, parameter in bound.signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                arguments |= arguments.pop(name, {})
        object.__setattr__(instance, "init_args", arguments)  # the component may be a frozen dataclass
        return instance
