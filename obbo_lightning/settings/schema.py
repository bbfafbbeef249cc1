"""From configuration files and flags to checked settings: later layers win, and every mistake is one line."""

import inspect
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace
from lightning import Trainer

from obbo_lightning.registries import PARTS

Settings = dict[str, Any]
FROM_DATA = {"ways", "channels", "image_size"}  # a problem takes these from its tasks


class ConfigError(ValueError):
    """A mistake in a flag or a file: names the key, the value and what is allowed."""


def default_config() -> Path:
    """The configuration that every run starts from: the embedded default."""
    packaged = Path(__file__).parent / "configs" / "default.yaml"
    return packaged if packaged.exists() else Path(__file__).parents[1] / "configs" / "default.yaml"


def read_layers(arguments: Sequence[str], above: Settings | None = None) -> tuple[Settings, set[str]]:
    """Merge the default, every ``--config`` file in order, and the flags; also return the bare switches given.

    ``above`` is one more layer, above the files and below the flags.
    """
    flags, files, switches = _read_flags(arguments)
    merged = _read_file(default_config())
    for layer in (*(_read_file(Path(file)) for file in files), above or {}, flags):
        _require_sections(layer)
        if layer is not flags:
            merged = overlay(merged, layer)
    name = overlay(merged, flags)["algorithm"].get("name")
    per_algorithm = merged.pop("per_algorithm", None) or {}
    _require_per_algorithm(per_algorithm)
    # What one algorithm needs and the others do not: above the files, below the flags.
    merged = overlay(merged, {"algorithm": {"name": name, **per_algorithm.get(name, {})}})
    return overlay(merged, flags), switches


def _require_sections(layer: Settings) -> None:
    for key in SECTIONS:
        if key in layer and not isinstance(layer[key], dict) and not (key in PARTS and isinstance(layer[key], str)):
            wanted = "a name, or keys and values" if key in PARTS else "keys and values"
            raise ConfigError(f"{key} must be {wanted}, got {layer[key]!r}")


def _require_per_algorithm(entries: Any) -> None:
    for name, settings in entries.items():
        taken = accepted_settings("algorithm", name)
        for key in settings:
            if key not in taken:
                raise ConfigError(f"per_algorithm.{name} must be of what {name} takes: {', '.join(taken)}; got {key!r}")


def overlay(base: Settings, layer: Settings, path: str = "") -> Settings:
    """``layer`` above ``base``. A part that gets another name keeps of its old settings those that it takes."""
    merged = dict(base)
    if not path and _problem_type(_data_of(base, layer)) is not _problem_type(base):
        merged.pop("problem", None)  # it was another problem's
    for key, value in layer.items():
        where = f"{path}.{key}" if path else key
        if where in PARTS and isinstance(value, str):
            value = {"name": value}
        if isinstance(value, dict):
            below = merged.get(key)
            below = {"name": below} if where in PARTS and isinstance(below, str) else below
            below = below if isinstance(below, dict) else {}
            if where in PARTS and "name" in value and value["name"] != below.get("name"):
                below = {k: v for k, v in below.items() if k in accepted_settings(where, value["name"])}
            value = overlay(below, value, where)
        merged[key] = value
    return merged


def _data_of(base: Settings, layer: Settings) -> Settings:
    return {"data": {"name": _at(layer, "data").get("name") or _at(base, "data").get("name")}}


def _problem_type(settings: Settings) -> Any:
    return getattr(part_class("data", _at(settings, "data").get("name")), "problem_type", None)


def check(settings: Settings) -> Namespace:
    """Types and keys, before any compute."""
    parser = make_parser(settings)
    known = {action.dest for action in parser._actions}
    for key, value in _leaves(settings):
        if key not in known and not any(key.startswith(f"{k}.") for k in known if k.startswith("trainer.")):
            raise ConfigError(f"unknown key {key!r} (value {value!r}); {_suggestion(key, known)}")
        if value is None and key in NOT_NULL:
            raise ConfigError(f"{key} must have a value, got null")
    for key, instead in SET_BY_THE_RUN.items():
        given = settings.get("trainer", {}).get(key)
        if given is not None and given != inspect.signature(Trainer).parameters[key].default:
            raise ConfigError(f"trainer.{key} cannot be set for an online run, got {given!r}: {instead}")
    if not re.fullmatch(r"[\w.-]{1,100}", str(settings.get("experiment", "default"))) or ".." in settings["experiment"]:
        raise ConfigError(f"experiment must be a plain folder name, got {settings['experiment']!r}")
    try:
        return parser.parse_object(settings)
    except (ArgumentError, TypeError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(re.sub(r'^Parser key "([^"]+)":', r"\1:", text)) from None


def _suggestion(key: str, known: set[str]) -> str:
    parent = key.rpartition(".")[0]
    siblings = sorted(k for k in known if k.rpartition(".")[0] == parent and "." not in k[len(parent) + 1 :])
    near = get_close_matches(key, siblings, n=1, cutoff=0.75) or get_close_matches(key, known, n=1, cutoff=0.85)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"{parent or 'the top level'} takes {', '.join(k.rpartition('.')[2] for k in siblings) or 'no keys'}"


def make_parser(settings: Settings) -> ArgumentParser:
    """A typed and documented parser for exactly the parts that ``settings`` names."""
    usage = "obbo fit [--config FILE] [--KEY VALUE ...] [--print_config] [--help]"
    parser = ArgumentParser(prog="obbo fit", usage=usage, description=HELP, exit_on_error=False, add_help=False)
    parser.add_argument("--experiment", type=str, default="default", help="first folder of the run directory")
    parser.add_argument("--seed", type=int, default=0, help="of all randomness")
    parser.add_argument("--rounds", type=int, default=100, help="T, rounds to play")
    parser.add_argument("--tasks_per_round", type=int, default=1, help="n, tasks in a round, over all processes")
    parser.add_argument(
        "--several_tasks",
        type=Literal["auto", "loop", "vmap"],
        default="auto",
        help="how one process solves several tasks of a round; auto: vmap on a GPU",
    )
    parser.add_argument("--output", type=str, default="runs", help="where run directories are made")
    parser.add_argument(
        "--logger", type=Literal["csv", "wandb", "tensorboard"], default="csv", help="beside metrics.csv"
    )
    parser.add_argument("--regret_window", type=int, default=10, help="w_R, window of the reported regrets")
    parser.add_argument(
        "--on_nonfinite", type=Literal["raise", "skip"], default="raise", help="what a non-finite hypergradient does"
    )
    parser.add_argument("--workers", type=int, default=0, help="loader processes")
    parser.add_argument("--evaluation.every", type=int, default=50, help="rounds between evaluations")
    parser.add_argument("--evaluation.tasks", type=int, default=100, help="test tasks of an evaluation")
    parser.add_argument("--checkpoint.every", type=int, default=25, help="rounds between checkpoints")
    for name in ("project", "name", "group"):
        parser.add_argument(f"--wandb.{name}", type=str | None, default=None, help=f"{name} of the W&B run")
    parser.add_argument("--wandb.tags", type=list[str], default=[], help="tags of the W&B run")
    for path in _used_parts(settings):
        cls = part_class(path, _at(settings, path).get("name"))
        parser.add_argument(f"--{path}.name", type=str, help=f"one of {', '.join(PARTS[path])}")
        nested = {p.rpartition(".")[2] for p in PARTS if p.startswith(f"{path}.")}
        parser.add_class_arguments(cls, path, skip=nested | {"seed"})
    problem = _problem_type(settings)
    if problem is not None:
        parser.add_class_arguments(problem, "problem", skip=FROM_DATA)
    parser.add_class_arguments(Trainer, "trainer", fail_untyped=False, instantiate=False, sub_configs=True)
    return parser


SECTIONS = ("algorithm", "data", "problem", "evaluation", "checkpoint", "trainer", "wandb", "per_algorithm")
NOT_NULL = {
    "experiment",
    "seed",
    "rounds",
    "tasks_per_round",
    "several_tasks",
    "output",
    "logger",
    "regret_window",
    "on_nonfinite",
    "workers",
    "evaluation.every",
    "evaluation.tasks",
    "checkpoint.every",
    "algorithm.name",
    "data.name",
}
_LENGTH = "rounds says how long it is"
_ROW = "every round is a row, and evaluation.every says when test tasks are tried"
SET_BY_THE_RUN = {
    **dict.fromkeys(("max_epochs", "min_epochs", "max_steps", "min_steps", "max_time", "fast_dev_run"), _LENGTH),
    **dict.fromkeys(("limit_train_batches", "overfit_batches", "reload_dataloaders_every_n_epochs"), _LENGTH),
    **dict.fromkeys(("limit_val_batches", "val_check_interval", "check_val_every_n_epoch"), _ROW),
    **dict.fromkeys(("num_sanity_val_steps", "log_every_n_steps"), _ROW),
    "enable_checkpointing": "checkpoint.every says when it is saved",
    "logger": "use logger",
    "gradient_clip_val": "use algorithm.clip",
    "gradient_clip_algorithm": "use algorithm.clip",
    "accumulate_grad_batches": "a round is a step",
    "inference_mode": "adapting to a task needs gradients",
    "use_distributed_sampler": "it would halve the stream",
    "barebones": "a run leaves its records",
}

HELP = """Play an online stream. Flags and YAML files (--config FILE) use the same keys; flags win over files, later
files over earlier ones.
Choose a part by name (--algorithm obbo, --algorithm.geometry burg, --data synthetic) and set what it takes;
--print_config shows the result."""


def part_class(path: str, name: str | None) -> type[Any]:
    """The class of a part; without a name, the first of its kind."""
    registry = PARTS[path]
    if name is None:
        return next(iter(registry.values()))
    if name not in registry:
        near = get_close_matches(str(name).lower(), registry, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{path} must be one of {', '.join(registry)}, got {name!r}{hint}")
    return registry[name]


def build_part(settings: Settings, path: str, **extra: Any) -> Any:
    """Construct a part, and the parts in it."""
    given = dict(_at(settings, path))
    cls = part_class(path, given.pop("name", None))
    for key, value in given.items():
        if f"{path}.{key}" in PARTS:
            given[key] = None if value is None else build_part(settings, f"{path}.{key}")
    try:
        return cls(**given, **extra)
    except ValueError as refusal:
        # A part names its own key; a user wrote it with everything before.
        top = path.partition(".")[0]
        named = re.match(r"[a-z_][\w.]* must ", str(refusal)) and not str(refusal).startswith(f"{top}.")
        raise ValueError(f"{top}.{refusal}" if named else str(refusal)) from None


def _used_parts(settings: Settings) -> Iterator[str]:
    yield "algorithm"
    parameters = inspect.signature(part_class("algorithm", _at(settings, "algorithm").get("name"))).parameters
    yield from (path for path in PARTS if path.startswith("algorithm.") and path.rpartition(".")[2] in parameters)
    yield "data"


def _at(settings: Settings, path: str) -> Settings:
    for key in path.split("."):
        found = settings.get(key)
        settings = {"name": found} if isinstance(found, str) else found or {}
    return settings


def accepted_settings(path: str, name: str) -> set[str]:
    """What the part ``name`` can be given."""
    return set(inspect.signature(part_class(path, name)).parameters)


def _leaves(settings: Settings, path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        where = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict) and value and not where.startswith("trainer."):
            yield from _leaves(value, where)
        elif not (isinstance(value, dict) or (value is None and where in PARTS)):
            yield where, value


def _read_file(path: Path) -> Settings:
    try:
        found = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"config file {path} is not a text file") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict | None):
        raise ConfigError(f"config file {path} must hold keys and values, got {type(found).__name__}")
    try:
        return _numbers(found or {})
    except RecursionError:
        raise ConfigError(f"config file {path} contains itself") from None


def _read_flags(arguments: Sequence[str]) -> tuple[Settings, list[str], set[str]]:
    flags: Settings = {}
    files: list[str] = []
    switches: set[str] = set()
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word in ("--help", "-h", "--print_config"):
            switches.add(word.strip("-"))
            continue
        if not word.startswith("--"):
            raise ConfigError(f"flags begin with --, got {word!r}")
        key, equals, text = word[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"--{key} needs a value, got none")
            text = rest.pop(0)
        if key == "config":
            files.append(text)
        else:
            flags = overlay_flag(flags, key, _flag_value(key, text))
    return flags, files, switches


def _flag_value(key: str, text: str) -> Any:
    if not text:
        raise ConfigError(f"--{key} needs a value, got ''")
    try:
        return _numbers(yaml.safe_load(text))
    except yaml.YAMLError:
        raise ConfigError(f"--{key} must be a YAML value, got {text!r}") from None


def overlay_flag(flags: Settings, key: str, value: Any) -> Settings:
    """Set one dotted key."""
    head, _, tail = key.partition(".")
    below = flags.get(head)
    if isinstance(below, str):
        below = {"name": below}
    if tail:
        return {**flags, head: overlay_flag(below or {}, tail, value)}
    if isinstance(below, dict) and isinstance(value, str):
        return {**flags, head: {**below, "name": value}}
    return {**flags, head: value}


def _numbers(value: Any) -> Any:
    """YAML 1.1 reads 1e-4 as a word; nobody means that."""
    if isinstance(value, dict):
        return {k: _numbers(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_numbers(v) for v in value]
    if isinstance(value, str) and re.fullmatch(r"[+-]?(\d+(\.\d*)?[eE][+-]?\d+|inf|nan)", value):
        return float(value)
    return value
