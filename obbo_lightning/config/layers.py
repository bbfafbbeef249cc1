"""Layers of settings: later ones win, and a part that is exchanged for another keeps what the other takes."""

import inspect
from collections.abc import Sequence
from functools import cache, reduce
from typing import Any

from obbo_lightning.config.files import Config, ConfigError, default_config, find_config, read_yaml
from obbo_lightning.config.flags import read_flags
from obbo_lightning.config.registry import KINDS, find_component

# Which settings name a find_component, and of what kind it is.
COMPONENT_PATHS = {
    "algorithm": "algorithm",
    **{f"algorithm.{kind}": kind for kind in ("inner", "hypergradient", "geometry", "regularizer", "domain")},
    "data": "data",
    "problem": "problem",
    "problem.network": "network",
}
# What the blocks of an outer variable know by themselves, unless it is said for all of them.
GROUP_SETTINGS = ("lr", "geometry", "regularizer", "domain")
SECTIONS = ("algorithm", "data", "problem", "evaluation", "checkpoint", "trainer", "wandb", "per_algorithm")


def parse_arguments(arguments: Sequence[str]) -> tuple[Config, set[str]]:
    """The default, every ``--config`` file in order, and the flags, in layers; and the bare switches given."""
    flags = read_flags(arguments)
    files = (default_config(), *map(find_config, flags.files))
    return merge([read_yaml(path) for path in files], flags.settings), flags.switches


def merge(layers: Sequence[Config], flags: Config) -> Config:
    """The first layer is the default; what ``per_algorithm`` has for the chosen one goes above layers, below flags."""
    for layer in (*layers, flags):
        _require_sections(layer)
    nothing: Config = {}
    default = _for_what_is_played(layers[0], reduce(overlay, (*layers, flags), nothing))
    merged = reduce(overlay, (default, *layers[1:]), nothing)
    name = overlay(merged, flags)["algorithm"].get("name")
    per_algorithm = merged.pop("per_algorithm", None) or {}
    _require_per_algorithm(per_algorithm)
    merged = overlay(merged, {"algorithm": {"name": name, **per_algorithm.get(name, {})}})
    return overlay(merged, flags)


def _for_what_is_played(default: Config, asked: Config) -> Config:
    """The default without what it says for few-shot adaptation alone, and for our own algorithms alone."""
    from obbo_lightning.problems.few_shot import FewShot  # as late as the parts themselves

    algorithm, problem = component_class(asked, "algorithm"), component_class(asked, "problem")
    own = algorithm is not None and not algorithm.__module__.startswith("obbo_lightning.")
    few_shot = problem is not None and issubclass(problem, FewShot)
    dropped = set(default.get("algorithm", {})) - {"name"} if own else set() if few_shot else {"inner", "hypergradient"}
    kept = {key: value for key, value in default.get("algorithm", {}).items() if key not in dropped}
    return {**default, "algorithm": kept} if dropped else default


def overlay(base: Config, layer: Config, path: str = "") -> Config:
    """``layer`` above ``base``. A part that gets another name keeps of its old settings those that it takes."""
    merged = dict(base)
    if not path and _problem_after(base, layer) != _problem_after(base, {}):
        merged.pop("problem", None)  # it was another problem's
    if not path and has_groups(_named_after(merged, layer)) and not has_groups(base):  # this was for a λ without any
        kept = {k: v for k, v in section(merged, "algorithm").items() if k not in GROUP_SETTINGS}
        merged["algorithm"] = kept
    for key, value in layer.items():
        where = f"{path}.{key}" if path else key
        if where in COMPONENT_PATHS and isinstance(value, str):
            value = {"name": value}
        if isinstance(value, dict):
            below = merged.get(key)
            below = {"name": below} if where in COMPONENT_PATHS and isinstance(below, str) else below
            below = below if isinstance(below, dict) else {}
            if where in COMPONENT_PATHS and "name" in value and value["name"] != below.get("name"):
                below = {k: v for k, v in below.items() if k in accepted_arguments(where, value["name"])}
            value = overlay(below, value, where)
        merged[key] = value
    return merged


def section(settings: Config, path: str) -> Config:
    """The settings of a find_component, also where its name stands for them."""
    for key in path.split("."):
        found = settings.get(key)
        settings = {"name": found} if isinstance(found, str) else found or {}
    return settings


def component_class(settings: Config, path: str) -> type[Any] | None:
    """Return the class of a component."""
    name = section(settings, path).get("name")
    if name is not None:
        return _named(path, name)
    if path == "problem":
        found: type[Any] | None = getattr(component_class(settings, "data"), "problem_type", None)
        return found
    usual = getattr(component_class(settings, "data"), "network_type", None) if path == "problem.network" else None
    return usual or find_component(COMPONENT_PATHS[path], next(iter(KINDS[COMPONENT_PATHS[path]].names)), path)


def has_groups(settings: Config) -> bool:
    """Whether the outer variable of the problem that settings name has blocks."""
    from obbo_lightning.core.problem import Problem  # as late as the parts themselves

    cls = component_class(settings, "problem") if section(settings, "data").get("name") else None
    return cls is not None and cls.groups is not Problem.groups


def accepted_arguments(path: str, name: str) -> set[str]:
    """What the part ``name`` can be given."""
    named: Any = _named(path, name)
    return _parameters(named)


@cache
def _parameters(cls: Any) -> set[str]:
    return set(inspect.signature(cls).parameters)


def _named(path: str, name: Any) -> type[Any]:
    if not isinstance(name, str):
        raise ConfigError(f"{path} must be a name, got {name!r}")
    return find_component(COMPONENT_PATHS[path], name, path)


def _problem_after(base: Config, layer: Config) -> Any:
    """The problem and the network that data of this layer over that base ask for, whatever is named."""
    name = section(layer, "data").get("name") or section(base, "data").get("name")
    if name is None:
        return None
    return [component_class({"data": {"name": name}}, path) for path in ("problem", "problem.network")]


def _named_after(base: Config, layer: Config) -> Config:
    """Which data and problem a layer over a base has."""
    return {
        key: {"name": section(layer, key).get("name") or section(base, key).get("name")} for key in ("data", "problem")
    }


def _require_sections(layer: Config) -> None:
    for key in SECTIONS:
        if (
            key in layer
            and not isinstance(layer[key], dict)
            and not (key in COMPONENT_PATHS and isinstance(layer[key], str))
        ):
            wanted = "a name, or keys and values" if key in COMPONENT_PATHS else "keys and values"
            raise ConfigError(f"{key} must be {wanted}, got {layer[key]!r}")


def _require_per_algorithm(entries: Any) -> None:
    for name, settings in entries.items():
        taken = accepted_arguments("algorithm", name)
        for key in settings:
            if key not in taken:
                raise ConfigError(f"per_algorithm.{name} must be of what {name} takes: {', '.join(taken)}; got {key!r}")
