"""What settings may be: types and keys from the parts that they name; every mistake is one line, before any compute."""

import ast
import hashlib
import importlib.util
import inspect
import os
import re
import warnings
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from obbo_lightning.parts import names_of, part, source_file
from obbo_lightning.settings.files import ConfigError, Settings
from obbo_lightning.settings.layers import PARTS, part_class

HELP = """Play an online stream. Flags and YAML files (--config FILE, or the name of a shipped one) use the same keys;
flags win over files, later files over earlier ones.
Choose a part by name (--algorithm obbo, --algorithm.geometry burg, --data synthetic) or bring your own
(--data package.module.Class, --problem.network path/to/file.py:Class) and set what it takes; --print_config shows the
result."""
NOT_NULL = {
    *("experiment", "seed", "rounds", "tasks_per_round", "several_tasks", "output", "logger", "regret_window"),
    *("on_nonfinite", "workers", "evaluation.every", "evaluation.tasks", "checkpoint.every"),
    *("algorithm.name", "data.name"),
}
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


def complete(settings: Settings) -> Settings:
    """Checked settings with every default filled in, as plain values; files of parts are remembered by their hash."""
    recorded = settings.get("sources") or {}
    given = {key: value for key, value in settings.items() if key != "sources"}
    completed: Settings = _plain(check(given).as_dict())
    sources = {}
    for file in sorted({str(source_file(word)) for word in _words(completed) if source_file(word)}):
        found = hashlib.sha256(Path(file).read_bytes()).hexdigest()
        sources[file] = recorded.get(file, found)
        if sources[file] != found:
            warnings.warn(f"{file} has changed since this run began", stacklevel=2)
    return {**completed, "sources": sources} if sources else completed


def check(settings: Settings) -> Namespace:
    """Types and keys, before any compute; and before Lightning is imported, but for the Trainer's own."""
    parser = _run_parser(settings)
    known = {action.dest for action in parser._actions} | {f"trainer.{name}" for name in _trainer_keys()}
    for key, value in _leaves(settings):
        if key not in known and not any(key.startswith(f"{k}.") for k in known if k.startswith("trainer.")):
            raise ConfigError(f"unknown key {key!r} (value {value!r}); {_suggestion(key, known)}")
        if value is None and key in NOT_NULL:
            raise ConfigError(f"{key} must have a value, got null")
    if not re.fullmatch(r"[\w.-]{1,100}", str(settings.get("experiment", "default"))) or ".." in settings["experiment"]:
        raise ConfigError(f"experiment must be a plain folder name, got {settings['experiment']!r}")
    checked = _parsed(parser, {key: value for key, value in settings.items() if key != "trainer"})
    checked.update(_check_trainer(settings))
    return checked


def _check_trainer(settings: Settings) -> Namespace:
    from lightning import Trainer

    given = settings.get("trainer") or {}
    for key, instead in SET_BY_THE_RUN.items():
        value = given.get(key)
        if value is not None and value != inspect.signature(Trainer).parameters[key].default:
            raise ConfigError(f"trainer.{key} cannot be set for an online run, got {value!r}: {instead}")
    for entry in callback_entries(settings):
        _check_callback(entry)
    parser = ArgumentParser(exit_on_error=False, add_help=False)
    _add_trainer(parser)
    return _parsed(parser, {"trainer": given})


def _trainer_keys() -> list[str]:
    """The arguments of Lightning's Trainer, read from its file: importing it takes seconds, a wrong key deserves none."""
    spec = importlib.util.find_spec("lightning")
    if spec is None or spec.origin is None:
        raise ConfigError("fit needs Lightning, which is not installed")
    source = Path(spec.origin).parent / "pytorch" / "trainer" / "trainer.py"
    (trainer,) = [n for n in ast.parse(source.read_text()).body if isinstance(n, ast.ClassDef) and n.name == "Trainer"]
    (init,) = [n for n in trainer.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    return [argument.arg for argument in (*init.args.args[1:], *init.args.kwonlyargs)]


def callback_entries(settings: Settings) -> list[Settings]:
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


def _check_callback(entry: Settings) -> None:
    cls = part("callback", entry["name"], "trainer.callbacks")
    parser = ArgumentParser(exit_on_error=False, add_help=False)
    parser.add_class_arguments(cls, "callback", fail_untyped=False)
    given = {key: value for key, value in entry.items() if key != "name"}
    known = sorted(a.dest.removeprefix("callback.") for a in parser._actions if a.dest.startswith("callback."))
    for key in given:
        if key not in known:
            raise ConfigError(f"trainer.callbacks: {entry['name']} takes {', '.join(known) or 'no keys'}, got {key!r}")
    try:
        _parsed(parser, {"callback": given})
    except ConfigError as refusal:
        raise ConfigError(f"trainer.callbacks: {str(refusal).removeprefix('callback.')}") from None


def _parsed(parser: ArgumentParser, settings: Settings) -> Namespace:
    try:
        return parser.parse_object(settings)
    except (ArgumentError, TypeError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(re.sub(r'^Parser key "([^"]+)":', r"\1:", text)) from None


def _suggestion(key: str, known: set[str]) -> str:
    parent, _, word = key.rpartition(".")
    siblings = sorted(k for k in known if k.rpartition(".")[0] == parent and "." not in k[len(parent) + 1 :])
    near = get_close_matches(key, siblings, n=1, cutoff=0.75) or get_close_matches(key, known, n=1, cutoff=0.85)
    near = near or [k for k in sorted(known) if k.startswith(f"{parent}.") and k.endswith(f".{word}")]
    if near:
        return f"did you mean {near[0]!r}?"
    return f"{parent or 'the top level'} takes {', '.join(k.rpartition('.')[2] for k in siblings) or 'no keys'}"


def make_parser(settings: Settings) -> ArgumentParser:
    """A typed and documented parser for exactly the parts that ``settings`` names, and for the Trainer."""
    parser = _run_parser(settings)
    _add_trainer(parser)
    return parser


def _run_parser(settings: Settings) -> ArgumentParser:
    usage = "obbo fit [--config FILE] [--KEY VALUE ...] [--print_config] [--help]"
    parser = ArgumentParser(prog="obbo fit", usage=usage, description=HELP, exit_on_error=False, add_help=False)
    _add_run(parser)
    decided = set(getattr(part_class(settings, "data"), "decided", ()))
    for path in _used_parts(settings):
        cls: Any = part_class(settings, path)
        names = ", ".join(names_of(PARTS[path]))
        parser.add_argument(f"--{path}.name", type=str | None, help=f"one of {names}, or your own")
        nested = {p.rpartition(".")[2] for p in PARTS if p.startswith(f"{path}.")}
        fixed = {"seed"} if path == "data" else decided if path.startswith("problem") else set()
        parser.add_class_arguments(cls, path, skip=nested | fixed, fail_untyped=False)
    return parser


def _add_trainer(parser: ArgumentParser) -> None:
    from lightning import Trainer

    parser.add_class_arguments(
        Trainer, "trainer", fail_untyped=False, instantiate=False, sub_configs=True, skip={"callbacks"}
    )
    parser.add_argument("--trainer.callbacks", type=Any, default=None, help="names, each with what it is made with")


def _add_run(parser: ArgumentParser) -> None:
    """What every run has, whatever its parts are."""
    several, logger = Literal["auto", "loop", "vmap"], Literal["csv", "wandb", "tensorboard"]
    for key, kind, default, meaning in (
        ("experiment", str, "default", "first folder of the run directory"),
        ("seed", int, 0, "of all randomness"),
        ("rounds", int, 100, "T, rounds to play"),
        ("tasks_per_round", int, 1, "n, tasks in a round, over all processes"),
        ("several_tasks", several, "auto", "how one process solves several tasks of a round; auto: vmap on a GPU"),
        ("output", str, "runs", "where run directories are made"),
        ("logger", logger, "csv", "beside metrics.csv"),
        ("regret_window", int, 10, "w_R, window of the reported regrets"),
        ("on_nonfinite", Literal["raise", "skip"], "raise", "what a non-finite hypergradient does"),
        ("workers", int, 0, "loader processes"),
        ("evaluation.every", int, 50, "rounds between evaluations"),
        ("evaluation.tasks", int, 100, "test tasks of an evaluation"),
        ("checkpoint.every", int, 25, "rounds between checkpoints"),
        ("wandb.project", str | None, None, "project of the W&B run"),
        ("wandb.name", str | None, None, "name of the W&B run"),
        ("wandb.group", str | None, None, "group of the W&B run"),
        ("wandb.tags", list[str], [], "tags of the W&B run"),
    ):
        parser.add_argument(f"--{key}", type=kind, default=default, help=meaning)


def _used_parts(settings: Settings) -> Iterator[str]:
    """Paths of the parts that these settings have, outer ones first."""
    for top in ("algorithm", "data", "problem"):
        cls = part_class(settings, top)
        if cls is None:
            continue
        yield top
        taken = inspect.signature(cls).parameters
        yield from (path for path in PARTS if path.startswith(f"{top}.") and path.rpartition(".")[2] in taken)


def _leaves(settings: Settings, path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        where = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict) and value and not where.startswith("trainer."):
            yield from _leaves(value, where)
        elif not (isinstance(value, dict) or (value is None and where in PARTS)):
            yield where, value


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _words(one)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value
