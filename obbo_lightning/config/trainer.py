"""What the Trainer may be told; names without importing Lightning, types with it."""

import ast
import importlib.util
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace

from obbo_lightning.config.files import Config, ConfigError
from obbo_lightning.config.registry import find_component, require_trusted_names

# What a run decides by itself, or cannot be served: with what to say instead.
SET_BY_THE_RUN = {
    "max_epochs": "a stream is played once; rounds says how long it is",
    "min_epochs": "a stream is played once; rounds says how long it is",
    "overfit_batches": "it would play the same tasks again and again",
    "logger": "use logger",
    "gradient_clip_val": "use algorithm.clip",
    "gradient_clip_algorithm": "use algorithm.clip",
    "accumulate_grad_batches": "a round is a step; tasks_per_round says how many tasks it has",
    "inference_mode": "adapting to a task needs gradients",
    "use_distributed_sampler": "processes share the tasks of a round",
    "barebones": "a run leaves its records",
}


@cache
def trainer_keys() -> list[str]:
    """The arguments of Lightning's Trainer, read from its file: to import it takes seconds, and a wrong key none."""
    spec = importlib.util.find_spec("lightning")
    if spec is None or spec.origin is None:
        raise ConfigError("fit needs Lightning, which is not installed")
    source = Path(spec.origin).parent / "pytorch" / "trainer" / "trainer.py"
    (trainer,) = [n for n in ast.parse(source.read_text()).body if isinstance(n, ast.ClassDef) and n.name == "Trainer"]
    (init,) = [n for n in trainer.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    return [argument.arg for argument in (*init.args.args[1:], *init.args.kwonlyargs)]


def check_trainer(settings: Config) -> Namespace:
    """Keys that a run decides by itself are refused; callbacks and types are those of their classes."""
    from lightning import Trainer

    given = settings.get("trainer") or {}
    require_trusted_names(given, "trainer")
    for key, instead in SET_BY_THE_RUN.items():
        value = given.get(key)
        if value is not None and value != inspect.signature(Trainer).parameters[key].default:
            raise ConfigError(f"trainer.{key} cannot be set for an online run, got {value!r}: {instead}")
    for entry in callback_entries(settings):
        _check_callback(entry)
    return _typed(yaml.safe_dump(given))


@cache
def _typed(given: str) -> Namespace:
    """The cells of a grid ask for the same Trainer, which has more arguments than all the rest of a run."""
    parser = ArgumentParser(exit_on_error=False, add_help=False)
    add_trainer(parser)
    return parsed(parser, {"trainer": yaml.safe_load(given)})


def with_chosen_trainer(settings: Config) -> Config:
    """Of the Trainer's arguments those that are not Lightning's defaults: another version of it may have others."""
    from lightning import Trainer

    usual = inspect.signature(Trainer).parameters
    chosen = {k: v for k, v in settings["trainer"].items() if k not in usual or v != usual[k].default}
    return {**settings, "trainer": chosen}


def add_trainer(parser: ArgumentParser) -> None:
    """Its arguments as flags, with their help."""
    from lightning import Trainer

    parser.add_class_arguments(
        Trainer, "trainer", fail_untyped=False, instantiate=False, sub_configs=True, skip={"callbacks"}
    )
    parser.add_argument("--trainer.callbacks", type=Any, default=None, help="names, each with what it is made with")


def callback_entries(settings: Config) -> list[Config]:
    """Of ``trainer.callbacks``: a name and what to make it with, each; Lightning's own way of writing it does too."""
    given = settings.get("trainer", {}).get("callbacks") or []
    entries = []
    for entry in given if isinstance(given, list) else [given]:
        if isinstance(entry, str):
            entry = {"name": entry}
        elif isinstance(entry, dict) and "class_path" in entry:
            entry = {"name": entry["class_path"], **(entry.get("init_args") or {})}
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise ConfigError(f"trainer.callbacks must be names, each with its settings, got {entry!r}")
        entries.append(entry)
    return entries


def _check_callback(entry: Config) -> None:
    cls = find_component("callback", entry["name"], "trainer.callbacks")
    parser = ArgumentParser(exit_on_error=False, add_help=False)
    parser.add_class_arguments(cls, "callback", fail_untyped=False)
    given = {key: value for key, value in entry.items() if key != "name"}
    known = sorted(a.dest.removeprefix("callback.") for a in parser._actions if a.dest.startswith("callback."))
    for key in given:
        if key not in known:
            raise ConfigError(f"trainer.callbacks: {entry['name']} takes {', '.join(known) or 'no keys'}, got {key!r}")
    try:
        parsed(parser, {"callback": given})
    except ConfigError as refusal:
        raise ConfigError(f"trainer.callbacks: {str(refusal).removeprefix('callback.')}") from None


def parsed(parser: ArgumentParser, settings: Config, defaults: bool = True) -> Namespace:
    """Checked by a parser, with or without its defaults; a mistake is one line that names its key."""
    try:
        return parser.parse_object(settings, defaults=defaults)
    except (ArgumentError, TypeError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(re.sub(r'^Parser key "([^"]+)":', r"\1:", text)) from None
