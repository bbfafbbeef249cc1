"""Provenance and checkpoints of a run, verified before it is read or continued."""

import contextlib
import csv
import json
import os
import pickle  # its error alone
import re
import warnings
from fnmatch import fnmatch
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from platform import python_version
from typing import Any, NamedTuple

import torch

from obbo_lightning import __version__
from obbo_lightning.config.parse import Config, ConfigError, flatten
from obbo_lightning.runs.directory import RunDirectory, read_config, write_atomically
from obbo_lightning.runs.table import RoundTable, TableMark, require_rows, restore_last_row, restore_timings
from obbo_lightning.streams.fingerprints import describe_changes, sha256_of
from obbo_lightning.streams.stream import Stream

FORMAT = 2
# Keys that may change when a run is continued; all others decide its results.
MAY_CHANGE = (
    *("rounds", "experiment", "output", "logger", "wandb", "workers", "threads"),  # rounds upward only
    *("evaluation", "checkpoint"),
    *("trainer.accelerator", "trainer.devices", "trainer.strategy", "trainer.num_nodes", "trainer.profiler"),
    *("trainer.logger", "trainer.log_every_n_steps", "trainer.enable_*", "trainer.default_root_dir"),
    *("trainer.detect_anomaly", "trainer.model_registry"),
    *("trainer.limit_test_batches", "trainer.limit_predict_batches"),
    *("trainer.callbacks.dirpath", "trainer.callbacks.*.dirpath"),  # where a callback writes
)
MISSING = "nothing"


class ProvenanceError(ConfigError):
    """A run whose files are not those that it wrote."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used."""


class Provenance(NamedTuple):
    """Content of provenance.json; every checkpoint has a copy."""

    versions: dict[str, Any]  # of what decides the last digits, the number of threads among them
    rounds: int  # that were finished
    planned: int  # number of rounds that the run is to have
    config: dict[str, Any]  # keys that decide results, with their values
    replaced: dict[str, Any]  # values of such keys that a resume with other data replaced since the last checkpoint
    sources: dict[str, str]  # digests of the data that tasks are made from, by name
    tables: dict[str, TableMark]
    closing: dict[str, str]  # SHA-256 of the files that a run writes at its end
    format: int = FORMAT

    @classmethod
    def start(cls, run: RunDirectory, config: Config, sources: dict[str, str]) -> "Provenance":
        """Return and write the provenance of a run that starts or continues now, before config.yaml is written.

        Both the old and the new config.yaml agree with it, in case the process dies in between.
        """
        before, keys = read_provenance(run), decisive_keys(config)
        now = cls(current_versions(config), 0, config["rounds"], keys, {}, sources, tables={}, closing={})
        if before is not None:
            replaced = {key: old for key, (old, _) in _differences(before.config, keys).items()}
            planned = min(before.planned, now.planned)
            now = now._replace(rounds=before.rounds, planned=planned, tables=before.tables, replaced=replaced)
        return now.write(run)

    def write(self, run: RunDirectory) -> "Provenance":
        """Write provenance.json with a checksum of its own; returns it."""
        content = self._asdict()
        checksum = sha256_of(json.dumps(content, sort_keys=True))
        write_atomically(run.provenance, json.dumps({**content, "sha256": checksum}, indent=1) + "\n")
        return self

    def finish(self, run: RunDirectory, tables: list[RoundTable], summary: dict[str, Any]) -> None:
        """Write the hashes of the closing files, and then the summary: a run with a summary is finished."""
        files = [run.baselines, run.test_scores, run.events, run.lanes]
        closing = {file.name: sha256_of(file) for file in files if file.is_file()}
        text = json.dumps(summary, indent=2) + "\n"
        closing[run.summary.name] = sha256_of(text)
        self._replace(tables={t.path.name: t.mark() for t in tables}, closing=closing).write(run)
        write_atomically(run.summary, text)

    @classmethod
    def from_dict(cls, content: dict[str, Any], path: Path) -> "Provenance":
        """Return the provenance in plain values; refuse those of another format."""
        if content["format"] != FORMAT:
            found = f"{content['format']!r}, of obbo_lightning {content.get('versions', {}).get('obbo_lightning')}"
            raise ProvenanceError(
                f"{path} must have a provenance of format {FORMAT}, got {found}: this is {__version__}"
            )
        return cls(**{name: content[name] for name in cls._fields})


def current_versions(config: Config) -> dict[str, Any]:
    """Return what decides the last digits: versions, and the number of threads."""
    packages = {name: version(name) for name in ("torch", "lightning")}
    return {"obbo_lightning": __version__, "python": python_version(), **packages, "threads": config.get("threads")}


def decisive_keys(config: Config) -> dict[str, Any]:
    """Return the dotted keys that decide results, with their values.

    >>> decisive_keys({"seed": 0, "workers": 2, "data": {"drift": 1.0, "tags": []}, "trainer": {"devices": 2}})
    {'seed': 0, 'data.drift': 1.0, 'data.tags': []}
    """
    below = [pattern for may in MAY_CHANGE for pattern in (may, f"{may}.*")]
    decisive = {k: v for k, v in flatten(config, lists=True) if not any(fnmatch(k, pattern) for pattern in below)}
    plain = (bool, int, float, str, dict, list, type(None))
    return {key: value if isinstance(value, plain) else str(value) for key, value in decisive.items()}


def _differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return both values of every key that differs."""
    pairs = {key: (before.get(key, MISSING), now.get(key, MISSING)) for key in {**before, **now}}
    return {key: pair for key, pair in pairs.items() if not _same(*pair)}


def _same(one: Any, other: Any) -> bool:
    """Compare values as JSON; 1 and 1.0 are the same number."""
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (one, other))
    return (numbers and one == other) or json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def read_provenance(run: RunDirectory) -> Provenance | None:
    """Return what provenance.json holds; None where there is none."""
    if not run.provenance.exists():
        return None
    try:
        content = json.loads(run.provenance.read_text())
        if content.pop("sha256") != sha256_of(json.dumps(content, sort_keys=True)):
            raise ValueError("its checksum differs")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        hint = "; delete it: checkpoints have copies of it" if list_checkpoints(run.checkpoints) else ""
        raise ProvenanceError(f"{run.provenance} is damaged (its checksum differs){hint}") from None
    return Provenance.from_dict(content, run.provenance)


def open_checkpoint(run: RunDirectory, asked: Path | None = None) -> tuple[Path, dict[str, Any], Provenance]:
    """Return the checkpoint that is asked for, or the newest: its path, its content and its provenance."""
    path = verify_checkpoint(asked) if asked else newest_checkpoint(run.checkpoints)
    content = read_checkpoint(path)
    if "provenance" not in content:
        raise ProvenanceError(f"checkpoint {path} must be one of a run, got one without a provenance")
    return path, content, Provenance.from_dict(content["provenance"], path)


def require_config(run: RunDirectory, known: Provenance, may_differ: str | None = None) -> Config:
    """Return config.yaml; refuse an edited one, but for keys with the prefix ``may_differ``, which `resume` changes."""
    config = read_config(run)
    for key, (used, value) in _differences(known.config, decisive_keys(config)).items():
        if _same(value, known.replaced.get(key, used)) or (may_differ and key.startswith(may_differ)):
            continue
        hint = "; resume takes data that have grown as flags" if key.startswith("data.") else ""
        raise ProvenanceError(
            f"{key} must stay {used!r}, with which {run.path} was run, got {value!r} in {run.config.name}{hint}"
        )
    rounds = config.get("rounds")
    if not isinstance(rounds, int) or rounds < known.planned:
        raise ProvenanceError(f"rounds must be at least {known.planned}, as {run.path} was started, got {rounds!r}")
    return config


def require_intact(run: RunDirectory) -> Provenance | None:
    """Refuse to read a run whose files differ from what it wrote; returns its provenance, None before its first row."""
    known = read_provenance(run)
    if known is None and list_checkpoints(run.checkpoints):
        *_, known = open_checkpoint(run)
    if known is None:
        if run.metrics.exists():
            raise ProvenanceError(f"{run.path} must have a {run.provenance.name} to be read, got none")
        return None
    require_config(run, known)
    for name, mark in known.tables.items():
        require_rows(run.path / name, mark, complete=run.finished)
    for name, known_hash in known.closing.items() if run.finished else ():
        file = run.path / name
        if not file.is_file() or sha256_of(file) != known_hash:
            raise ProvenanceError(f"{file} is damaged: it is not what the run wrote at its end")
    return known


def usable_checkpoint(run: RunDirectory, asked: Path | None = None) -> Path:
    """Return the path of the checkpoint that is asked for, or the newest; refuse one that is not the run's own."""
    known = require_intact(run)
    chosen, content, saved = open_checkpoint(run, asked)
    rounds = content["global_step"]
    try:
        require_config(run, saved._replace(planned=0), may_differ="data.")
    except ProvenanceError as differs:
        raise ProvenanceError(f"checkpoint {chosen} is of another run: {differs}") from None
    named = re.fullmatch(r"round-(\d+)", chosen.stem)
    if named and int(named[1]) != rounds:
        raise ProvenanceError(f"checkpoint {chosen} must be of the round in its name, got one of round {rounds}")
    if known is not None and asked is None and run.finished and rounds != known.rounds:
        raise ProvenanceError(
            f"{run.checkpoints} must have the checkpoint of the last round, {known.rounds}, got one of round {rounds}: "
            f"--checkpoint {chosen} uses that"
        )
    return chosen


def require_resumable(run: RunDirectory, saved: Provenance | None) -> None:
    """Refuse to continue a run whose files differ from what it wrote; ``saved`` is the provenance of its checkpoint."""
    newest = read_provenance(run) or saved
    if newest is None:
        return
    config = require_config(run, newest)
    if saved is not None:
        require_config(run, saved._replace(planned=0), may_differ="data.")
        # A user's callback saves before the row of the round is written, which is in the newer mark only.
        early = "metrics.csv" in saved.tables and saved.tables["metrics.csv"]["rows"] < saved.rounds
        for name, mark in saved.tables.items():
            for one in (mark, newest.tables.get(name, mark)) if early else (mark,):
                require_rows(run.path / name, one)
    now = current_versions(config)
    others = [f"{name} {was} (now {now[name]})" for name, was in newest.versions.items() if now.get(name, was) != was]
    if others:
        warnings.warn(f"the run used {', '.join(others)}: its last digits may differ", stacklevel=3)


def restore_tables(run: RunDirectory, rounds: int, tables: dict[str, TableMark]) -> None:
    """Restore the tables of a checkpoint that passed `require_resumable`, and remove what a killed process left."""
    for left in (*run.path.glob(".*.part"), *run.checkpoints.glob(".*.part")):
        left.unlink()
    if rounds:
        restore_timings(run.timings, rounds)
    for name, mark in tables.items():
        restore_last_row(run.path / name, mark)


def require_same_data(
    run: RunDirectory, stream: Stream, rounds: int, tasks_per_round: int, known: dict[str, str], changed: bool
) -> None:
    """Refuse to continue with a stream whose first rounds are not those of the run.

    Tasks are made again and compared with their fingerprints where the configuration of the data has ``changed``, or
    the digests of their sources differ from the ``known`` ones of the checkpoint.
    """
    now = stream.source_digests()
    differences = describe_changes(known, now) if known else ""
    if not rounds or not run.fingerprints.is_file() or not (changed or differences or (now and not known)):
        return
    with run.fingerprints.open(newline="") as file:
        recorded = [row["tasks"].split() for row in islice(csv.DictReader(file), rounds)]
    tasks = iter(getattr(stream.train, "so_far", lambda: stream.train)())  # does not wait for tasks that arrive
    for t in range(rounds * tasks_per_round):
        task = next(tasks, None)
        if task is None:
            raise ValueError(f"data must have the {rounds} rounds of {run.path}, and end before {stream.describe(t)}")
        own = recorded[t // tasks_per_round][t % tasks_per_round :]  # rank 0 recorded its own tasks only
        if own and stream.fingerprint(t, task) != own[0]:
            where = f"{stream.describe(t)}, in round {t // tasks_per_round + 1}"
            # all columns of a table change when it grows, which does not tell which of them has another past
            all_changed = len(now) > 1 and all(known.get(name) != now[name] for name in now)
            raise ValueError(
                f"data must begin with those of {run.path}, but they differ from {where} on"
                + (f": {differences}" if differences and not all_changed else "")
            )


def read_checkpoint(path: str | os.PathLike[str], map_location: Any = None) -> dict[str, Any]:
    """Return the content of a checkpoint; verify it where there is a checksum beside it."""
    file = Path(path)
    if checksum_file(file).is_file() or not file.is_file():
        verify_checkpoint(file)
    try:
        # Tensors and plain values only, for every version of Lightning and every environment variable of torch.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickles that torch did not write; they are refused below
            checkpoint: dict[str, Any] = torch.load(file, map_location=map_location or "cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise CheckpointError(f"checkpoint {file} holds more than tensors and plain values: not read") from None
    except (RuntimeError, EOFError, OSError, ValueError, LookupError, TypeError, AttributeError) as damage:
        reason = " ".join(str(damage).split())[:200]
        raise CheckpointError(f"checkpoint {file} cannot be read: {type(damage).__name__} {reason}") from None
    if not isinstance(checkpoint, dict):
        raise CheckpointError(f"checkpoint {file} must hold a mapping, got {type(checkpoint).__name__}")
    return checkpoint


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints that the run itself wrote, oldest first."""
    return sorted(directory.glob("round-*.ckpt"))


def newest_checkpoint(directory: Path) -> Path:
    """Return the newest checkpoint; refuse a damaged one and name the one before it."""
    found = list_checkpoints(directory)
    if not found:
        raise CheckpointError(f"no checkpoint in {directory}: the run was stopped before its first one; start it again")
    try:
        return verify_checkpoint(found[-1])
    except CheckpointError as damage:
        hint = "there is no other one: start the run again"
        for path in found[:-1]:
            with contextlib.suppress(CheckpointError):
                hint = f"the one before it: --checkpoint {verify_checkpoint(path)}"
        raise CheckpointError(f"{damage}; {hint}") from None


def verify_checkpoint(path: Path) -> Path:
    """Return ``path`` if the file has its checksum."""
    if not path.is_file():
        raise CheckpointError(f"checkpoint {path} does not exist")
    checksum = checksum_file(path)
    if not checksum.is_file():
        raise CheckpointError(f"checkpoint {path} has no checksum file {checksum.name} beside it")
    if sha256_of(path) != checksum.read_text().strip():
        raise CheckpointError(f"checkpoint {path} is damaged (its checksum differs)")
    return path


def checksum_file(path: Path) -> Path:
    """Return the path of the checksum of a checkpoint."""
    return path.with_suffix(".sha256")
