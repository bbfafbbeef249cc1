"""What a run knows of itself: with what it was played, and what its tables were when it was saved."""

import hashlib
import json
import re
import warnings
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any, NamedTuple

from obbo_lightning import __version__
from obbo_lightning.runs.checkpoints import list_checkpoints, newest_checkpoint, read_checkpoint, verify_checkpoint
from obbo_lightning.runs.directory import RunDirectory, write_atomically
from obbo_lightning.runs.earlier import read_config
from obbo_lightning.runs.table import Mark, mend_rows, mend_timings, require_rows
from obbo_lightning.settings.files import ConfigError, Settings

FORMAT = 1
# What may change when a run goes on; everything else decides its results.
MAY_CHANGE = (
    *("rounds", "experiment", "output", "logger", "wandb", "workers", "threads"),  # rounds upward only
    *("evaluation", "checkpoint"),
    *("trainer.accelerator", "trainer.devices", "trainer.strategy", "trainer.num_nodes", "trainer.profiler"),
    *("trainer.logger", "trainer.log_every_n_steps", "trainer.enable_*", "trainer.default_root_dir"),
    *(
        "trainer.detect_anomaly",
        "trainer.model_registry",
        "trainer.limit_test_batches",
        "trainer.limit_predict_batches",
    ),
    *("trainer.callbacks.dirpath", "trainer.callbacks.*.dirpath"),  # where a callback writes
)
NOTHING = "nothing"


class ManifestError(ConfigError):
    """A run that is not what it says it is."""


class Manifest(NamedTuple):
    """What is known of a run when it begins, and with every checkpoint.

    Attributes:
        versions: of what it is played with.
        threads: of its process.
        rounds: that were played.
        planned: how many there are to be.
        settings: those that decide results, by their dotted keys.
        before: of these, what a change of data has replaced since the last checkpoint.
        tables: what each has held so far.
        closing: SHA-256 of the files that a run writes at its end.
    """

    versions: dict[str, str]
    threads: int
    rounds: int
    planned: int
    settings: dict[str, Any]
    before: dict[str, Any]
    tables: dict[str, Mark]
    closing: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for checkpoints."""
        return {"format": FORMAT, **self._asdict()}


def first_manifest(settings: Settings) -> Manifest:
    """Of a run that begins now, with settings as config.yaml has them."""
    return Manifest(versions_now(), settings["threads"], 0, settings["rounds"], decisive(settings), {}, {}, {})


def versions_now() -> dict[str, str]:
    """Of what decides the last digits."""
    versions = {"obbo_lightning": __version__, "python": python_version()}
    return versions | {name: version(name) for name in ("torch", "lightning")}


def decisive(settings: Settings) -> dict[str, Any]:
    """The settings that decide results, by their dotted keys.

    >>> decisive({"seed": 0, "workers": 2, "data": {"drift": 1.0, "tags": []}, "trainer": {"devices": 2}})
    {'seed': 0, 'data.drift': 1.0, 'data.tags': []}
    """
    return {key: value for key, value in _leaves(settings) if not any(_below(key, may) for may in MAY_CHANGE)}


def _below(key: str, pattern: str) -> bool:
    return fnmatch(key, pattern) or key.startswith(f"{pattern}.")


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    inside = dict(enumerate(value)) if isinstance(value, (list, tuple)) else value
    if not (isinstance(inside, dict) and inside):
        plain = value is None or isinstance(value, (bool, int, float, str, dict, list))
        yield path, value if plain else str(value)
        return
    for key, one in inside.items():
        yield from _leaves(one, f"{path}.{key}" if path else str(key))


def write_manifest(run: RunDirectory, manifest: Manifest) -> None:
    """At once or not at all, with a checksum of its own."""
    content = manifest.as_dict()
    write_atomically(run.manifest, json.dumps({**content, "sha256": _digest(content)}, indent=1) + "\n")


def read_manifest(run: RunDirectory) -> Manifest | None:
    """What manifest.json says; None where there is none."""
    if not run.manifest.exists():
        return None
    try:
        content = json.loads(run.manifest.read_text())
        if content.pop("sha256") != _digest(content):
            raise ValueError("its checksum differs")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        hint = "; delete it: checkpoints have copies of it" if list_checkpoints(run.checkpoints) else ""
        raise ManifestError(f"{run.manifest} is damaged (its checksum differs){hint}") from None
    return manifest_of(content, run.manifest)


def manifest_of(content: dict[str, Any], path: Path) -> Manifest:
    """From plain values; refuses those of a version that this one does not know."""
    if content["format"] != FORMAT:
        by = content.get("versions", {}).get("obbo_lightning")
        raise ManifestError(
            f"{path} must have a manifest of format {FORMAT}, got {content['format']!r}, of obbo_lightning {by}: "
            f"this is {__version__}"
        )
    return Manifest(**{name: content[name] for name in Manifest._fields})


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def require_intact(run: RunDirectory) -> Manifest | None:
    """Before a run is read: its settings and tables are those it was played with; None where nobody can know."""
    known = read_manifest(run)
    if known is None and list_checkpoints(run.checkpoints):
        file = newest_checkpoint(run.checkpoints)
        known = in_checkpoint(read_checkpoint(file), file)
    if known is None:
        warn_of_unknown(run)
        return None
    require_settings(run, known)
    for name, mark in known.tables.items():
        require_rows(run.path / name, mark, whole=run.finished)
    for name, found in known.closing.items() if run.finished else ():
        if not (run.path / name).is_file() or _hash_of(run.path / name) != found:
            raise ManifestError(f"{run.path / name} is damaged: it is not what the run wrote at its end")
    return known


def checkpoint_to_use(run: RunDirectory, asked: Path | None = None) -> Path:
    """Before what was learned is used: the checkpoint that is asked for, or the newest, which must be the run's own."""
    known = require_intact(run)
    chosen = verify_checkpoint(asked) if asked else newest_checkpoint(run.checkpoints)
    content = read_checkpoint(chosen)
    saved, rounds = in_checkpoint(content, chosen), content["global_step"]
    if saved is not None:
        try:
            require_settings(run, saved._replace(planned=0), changed="data.")
        except ManifestError as differs:
            raise ManifestError(f"checkpoint {chosen} is of another run: {differs}") from None
    named = re.fullmatch(r"round-(\d+)", chosen.stem)
    if named and int(named[1]) != rounds:
        raise ManifestError(f"checkpoint {chosen} must be of the round in its name, and is of round {rounds}")
    if known is not None and asked is None and run.finished and rounds != known.rounds:
        raise ManifestError(
            f"{run.checkpoints} must have the checkpoint of the last round, {known.rounds}, and its newest one is of "
            f"round {rounds}: --checkpoint {chosen} uses that"
        )
    return chosen


def in_checkpoint(content: dict[str, Any], path: Path) -> Manifest | None:
    """The manifest in a checkpoint; None in one of an older version."""
    return manifest_of(content["manifest"], path) if "manifest" in content else None


def warn_of_unknown(run: RunDirectory) -> None:
    """A run of a version that wrote no manifest is read all the same; one that was not begun has nothing to check."""
    if run.metrics.exists():
        warnings.warn(
            f"{run.path} has no {run.manifest.name}, being of an older version: whether it is as it was played cannot "
            "be checked",
            stacklevel=3,
        )


def require_continuable(run: RunDirectory, rounds: int, saved: Manifest | None) -> None:
    """Before a run goes on behind ``rounds``, from a checkpoint with the manifest ``saved``."""
    known = read_manifest(run)
    newest = known or saved
    if newest is None:
        warn_of_unknown(run)
        return
    require_settings(run, newest)
    if saved is None:
        tables = newest.tables if newest.rounds == rounds else {}
    else:
        require_settings(run, saved._replace(planned=0), changed="data.")
        tables = saved.tables
    for name, mark in tables.items():
        require_rows(run.path / name, mark)
        later = newest.tables.get(name)
        if _behind(tables, rounds) and later and later["rows"] > mark["rows"]:
            require_rows(run.path / name, later)
    _warn_of_others(newest)


def mend_tables(run: RunDirectory, rounds: int, saved: Manifest | None) -> None:
    """Tables as they were at a checkpoint, which `require_continuable` let pass; what a killed process left goes."""
    for left in (*run.path.glob(".*.part"), *run.checkpoints.glob(".*.part")):
        left.unlink()
    if rounds:
        mend_timings(run.timings, rounds)
    for name, mark in (saved.tables if saved else {}).items():
        mend_rows(run.path / name, mark, mark["rows"] + _behind(saved.tables if saved else {}, rounds))


def _behind(tables: dict[str, Mark], rounds: int) -> bool:
    """Whether a callback of the user saved the checkpoint: it does so before the recorder writes the round's row."""
    return "metrics.csv" in tables and tables["metrics.csv"]["rows"] < rounds


def _warn_of_others(known: Manifest) -> None:
    now = versions_now()
    others = [f"{name} {was} (now {now[name]})" for name, was in known.versions.items() if now.get(name, was) != was]
    if others:
        warnings.warn(f"the run was played with {', '.join(others)}: its last digits may differ", stacklevel=4)


def require_settings(run: RunDirectory, known: Manifest, changed: str | None = None) -> None:
    """Refuse a config.yaml that was edited; `resume` itself may have changed what begins with ``changed`` since."""
    config = read_config(run)
    found = decisive(config)
    for key in [*known.settings, *(key for key in found if key not in known.settings)]:
        value, played = found.get(key, NOTHING), known.settings.get(key, NOTHING)
        allowed = [played, *([known.before[key]] if key in known.before else [])]
        if any(_same(value, one) for one in allowed) or (changed and key.startswith(changed)):
            continue
        hint = "; resume takes data that have grown as flags" if key.startswith("data.") else ""
        raise ManifestError(
            f"{key} must stay {played!r}, with which {run.path} was played, got {value!r} in {run.config.name}{hint}"
        )
    rounds = config.get("rounds")
    if not isinstance(rounds, int) or rounds < known.planned:
        raise ManifestError(f"rounds must be at least {known.planned}, as {run.path} was begun, got {rounds!r}")


def _same(one: Any, other: Any) -> bool:
    """As JSON writes them; 1 and 1.0 are the same number."""
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (one, other))
    return (numbers and one == other) or json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
