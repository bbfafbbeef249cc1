"""Provenance of a run: versions, configuration, data and tables, checked before the run is read or continued."""

import csv
import json
import re
import warnings
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from platform import python_version
from typing import Any, NamedTuple

from obbo_lightning import __version__
from obbo_lightning.config.parse import Config, ConfigError
from obbo_lightning.core.problem import Task
from obbo_lightning.runs.checkpoints import list_checkpoints, newest_checkpoint, read_checkpoint, verify_checkpoint
from obbo_lightning.runs.directory import RunDirectory, read_config, summary_text, write_atomically
from obbo_lightning.runs.table import RoundTable, TableMark, require_rows, restore_rows, restore_timings
from obbo_lightning.streams.fingerprints import describe_changes, sha256_of
from obbo_lightning.streams.stream import Stream, has_random_access

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


class Provenance(NamedTuple):
    """Content of provenance.json; every checkpoint has a copy.

    Attributes:
        versions: of what decides the last digits.
        threads: of the process.
        rounds: that were finished.
        planned: number of rounds that the run is to have.
        config: keys that decide results, with their values.
        replaced: of these, what a change of data has replaced since the last checkpoint.
        sources: digests of the data that tasks are made from, by name.
        tables: marks of the tables.
        closing: SHA-256 of the files that a run writes at its end.
    """

    versions: dict[str, str]
    threads: int
    rounds: int
    planned: int
    config: dict[str, Any]
    replaced: dict[str, Any]
    sources: dict[str, str]
    tables: dict[str, TableMark]
    closing: dict[str, str]

    @classmethod
    def start(cls, run: RunDirectory, config: Config, sources: dict[str, str]) -> "Provenance":
        """Return and write the provenance of a run that starts or continues now, before config.yaml is written.

        Both the old and the new config.yaml agree with it, in case the process dies in between.
        """
        before = read_provenance(run)
        now = cls(
            versions=current_versions(),
            threads=config["threads"],
            rounds=0,
            planned=config["rounds"],
            config=decisive_keys(config),
            replaced={},
            sources=sources,
            tables={},
            closing={},
        )
        if before is not None:
            keys = {**before.config, **now.config}
            old = {key: before.config.get(key, MISSING) for key in keys}
            replaced = {key: value for key, value in old.items() if not _same(value, now.config.get(key, MISSING))}
            planned = min(before.planned, now.planned)
            now = now._replace(rounds=before.rounds, planned=planned, tables=before.tables, replaced=replaced)
        return now.write(run)

    def write(self, run: RunDirectory) -> "Provenance":
        """Write provenance.json with a checksum of its own; returns it."""
        content = self.as_dict()
        write_atomically(run.provenance, json.dumps({**content, "sha256": _checksum(content)}, indent=1) + "\n")
        return self

    def finish(self, run: RunDirectory, tables: list[RoundTable], summary: dict[str, Any]) -> "Provenance":
        """Write the hashes of the closing files, before the summary itself is written."""
        files = [run.baselines, run.test_scores, run.events, run.lanes]
        contents = {file.name: file.read_bytes() for file in files if file.is_file()}
        contents[run.summary.name] = summary_text(summary).encode()
        closing = {name: sha256_of(content) for name, content in contents.items()}
        return self._replace(tables={t.path.name: t.mark() for t in tables}, closing=closing).write(run)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON and for checkpoints."""
        return {"format": FORMAT, **self._asdict()}

    @classmethod
    def from_dict(cls, content: dict[str, Any], path: Path) -> "Provenance":
        """Return the provenance in plain values; refuse those of another format."""
        if content["format"] != FORMAT:
            by = content.get("versions", {}).get("obbo_lightning")
            raise ProvenanceError(
                f"{path} must have a provenance of format {FORMAT}, got {content['format']!r}, of obbo_lightning {by}: "
                f"this is {__version__}"
            )
        return cls(**{name: content[name] for name in cls._fields})


def current_versions() -> dict[str, str]:
    """Return the versions of what decides the last digits."""
    versions = {"obbo_lightning": __version__, "python": python_version()}
    return versions | {name: version(name) for name in ("torch", "lightning")}


def decisive_keys(config: Config) -> dict[str, Any]:
    """Return the dotted keys that decide results, with their values.

    >>> decisive_keys({"seed": 0, "workers": 2, "data": {"drift": 1.0, "tags": []}, "trainer": {"devices": 2}})
    {'seed': 0, 'data.drift': 1.0, 'data.tags': []}
    """
    return {key: value for key, value in _flatten(config) if not any(_is_below(key, may) for may in MAY_CHANGE)}


def _is_below(key: str, pattern: str) -> bool:
    return fnmatch(key, pattern) or key.startswith(f"{pattern}.")


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    inside = dict(enumerate(value)) if isinstance(value, (list, tuple)) else value
    if not (isinstance(inside, dict) and inside):
        plain = value is None or isinstance(value, (bool, int, float, str, dict, list))
        yield path, value if plain else str(value)
        return
    for key, one in inside.items():
        yield from _flatten(one, f"{path}.{key}" if path else str(key))


def read_provenance(run: RunDirectory) -> Provenance | None:
    """Return what provenance.json holds; None where there is none."""
    if not run.provenance.exists():
        return None
    try:
        content = json.loads(run.provenance.read_text())
        if content.pop("sha256") != _checksum(content):
            raise ValueError("its checksum differs")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        hint = "; delete it: checkpoints have copies of it" if list_checkpoints(run.checkpoints) else ""
        raise ProvenanceError(f"{run.provenance} is damaged (its checksum differs){hint}") from None
    return Provenance.from_dict(content, run.provenance)


def saved_provenance(checkpoint: dict[str, Any], path: Path) -> Provenance:
    """Return the provenance in a checkpoint."""
    if "provenance" not in checkpoint:
        raise ProvenanceError(f"checkpoint {path} must be one of a run, got one without a provenance")
    return Provenance.from_dict(checkpoint["provenance"], path)


def require_intact(run: RunDirectory) -> Provenance | None:
    """Refuse, before a run is read, a configuration or tables that differ from what the run wrote.

    Returns its provenance; None for a run without a finished round.
    """
    known = read_provenance(run)
    if known is None and list_checkpoints(run.checkpoints):
        file = newest_checkpoint(run.checkpoints)
        known = saved_provenance(read_checkpoint(file), file)
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
    """Return the checkpoint that is asked for, or the newest; refuse one that is not the run's own."""
    known = require_intact(run)
    chosen = verify_checkpoint(asked) if asked else newest_checkpoint(run.checkpoints)
    content = read_checkpoint(chosen)
    saved, rounds = saved_provenance(content, chosen), content["global_step"]
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


def require_resumable(run: RunDirectory, rounds: int, saved: Provenance | None) -> None:
    """Refuse to continue a run after ``rounds`` rounds where its files differ from what it wrote.

    Args:
        run: the run.
        rounds: of the checkpoint.
        saved: the checkpoint's provenance; None where the run starts again without one.
    """
    known = read_provenance(run)
    newest = known or saved
    if newest is None:
        return
    require_config(run, newest)
    if saved is None:
        tables = newest.tables if newest.rounds == rounds else {}
    else:
        require_config(run, saved._replace(planned=0), may_differ="data.")
        tables = saved.tables
    for name, mark in tables.items():
        require_rows(run.path / name, mark)
        later = newest.tables.get(name)
        if _saved_before_row(tables, rounds) and later and later["rows"] > mark["rows"]:
            require_rows(run.path / name, later)
    now = current_versions()
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
        restore_rows(run.path / name, mark, mark["rows"] + _saved_before_row(tables, rounds))


def _saved_before_row(tables: dict[str, TableMark], rounds: int) -> bool:
    """Return whether a user's callback saved the checkpoint, before the row of its round was written."""
    return "metrics.csv" in tables and tables["metrics.csv"]["rows"] < rounds


def require_config(run: RunDirectory, known: Provenance, may_differ: str | None = None) -> None:
    """Refuse an edited config.yaml; keys with the prefix ``may_differ`` may have been changed by `resume`."""
    config = read_config(run)
    present = decisive_keys(config)
    for key in [*known.config, *(key for key in present if key not in known.config)]:
        value, used = present.get(key, MISSING), known.config.get(key, MISSING)
        allowed = [used, *([known.replaced[key]] if key in known.replaced else [])]
        if any(_same(value, one) for one in allowed) or (may_differ and key.startswith(may_differ)):
            continue
        hint = "; resume takes data that have grown as flags" if key.startswith("data.") else ""
        raise ProvenanceError(
            f"{key} must stay {used!r}, with which {run.path} was run, got {value!r} in {run.config.name}{hint}"
        )
    rounds = config.get("rounds")
    if not isinstance(rounds, int) or rounds < known.planned:
        raise ProvenanceError(f"rounds must be at least {known.planned}, as {run.path} was started, got {rounds!r}")


def require_same_data(
    run: RunDirectory, stream: Stream, rounds: int, tasks_per_round: int, known: dict[str, str], changed: bool
) -> None:
    """Refuse to continue with a stream whose first rounds are not those of the run.

    Args:
        run: which has the fingerprints of its tasks.
        stream: as it is now.
        rounds: that are finished.
        tasks_per_round: n.
        known: digests of the data when the run was saved.
        changed: whether the configuration of the data differs. Where it does not, and all digests are the same, tasks
            are not made again.
    """
    if not rounds or not run.fingerprints.is_file():
        return
    now = stream.source_digests()
    differences = describe_changes(known, now) if known else ""
    if not (changed or differences or (now and not known)):
        return
    tasks = _past_tasks(stream)
    if tasks is None:
        return
    for t, fingerprint in _recorded_fingerprints(run.fingerprints, rounds, tasks_per_round):
        task = next(tasks, None)
        if task is None:
            raise ValueError(f"data must have the {rounds} rounds of {run.path}, and end before {stream.describe(t)}")
        if fingerprint and stream.fingerprint(t, task) != fingerprint:
            where = f"{stream.describe(t)}, in round {t // tasks_per_round + 1}"
            # all columns of a table change when it grows, which does not tell which of them has another past
            all_changed = len(now) > 1 and all(known.get(name) != now[name] for name in now)
            raise ValueError(
                f"data must begin with those of {run.path}, but they differ from {where} on"
                + (f": {differences}" if differences and not all_changed else "")
            )


def _recorded_fingerprints(path: Path, rounds: int, tasks_per_round: int) -> Iterator[tuple[int, str]]:
    """Yield the number and the fingerprint of each task; an empty one where there is none."""
    with path.open(newline="") as file:
        for row in islice(csv.DictReader(file), rounds):
            known = (row["tasks"] or "").split(" ")
            for i in range(tasks_per_round):
                yield (int(row["round"]) - 1) * tasks_per_round + i, known[i] if i < len(known) else ""


def _past_tasks(stream: Stream) -> Iterator[Task] | None:
    """Return all tasks that there are, from the first one on; None where they cannot be made again."""
    train = stream.train
    if has_random_access(train):
        return (train[t] for t in range(len(train)))
    if hasattr(train, "so_far"):  # a stream that waits for more tasks must not wait here
        so_far: Iterator[Task] | None = train.so_far()
        return so_far
    return iter(train)


def _same(one: Any, other: Any) -> bool:
    """Compare values as JSON; 1 and 1.0 are the same number."""
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (one, other))
    return (numbers and one == other) or json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _checksum(content: dict[str, Any]) -> str:
    return sha256_of(json.dumps(content, sort_keys=True))
