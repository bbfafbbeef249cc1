"""Continuing a run: where it stopped, beyond its end, or with data that have grown."""

import contextlib
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from obbo_lightning.config.parse import Config, complete_config, overlay, section
from obbo_lightning.config.registry import short_name
from obbo_lightning.runs.checkpoints import list_checkpoints, newest_checkpoint, read_checkpoint, verify_checkpoint
from obbo_lightning.runs.directory import RunDirectory, read_config
from obbo_lightning.runs.provenance import (
    Provenance,
    require_resumable,
    require_same_data,
    saved_provenance,
)
from obbo_lightning.runs.status import RunStatus
from obbo_lightning.training.distributed import is_rank_zero
from obbo_lightning.training.run import build, fit_to_exit_code, format_warnings


class ResumePoint(NamedTuple):
    """Where a run continues.

    Attributes:
        checkpoint: its file; None where a run that was stopped before its first checkpoint starts again.
        rounds: that are finished.
        ended: whether a callback or a limit ended the run there, before its last round.
        saved: the provenance in the checkpoint.
    """

    checkpoint: Path | None
    rounds: int
    ended: bool
    saved: Provenance | None = None

    @classmethod
    def find(cls, run: RunDirectory, checkpoint: Path | None) -> "ResumePoint":
        """Return the newest checkpoint, or the one that is asked for."""
        if checkpoint is None and not list_checkpoints(run.checkpoints):
            return cls(None, 0, False)
        chosen = verify_checkpoint(checkpoint) if checkpoint else newest_checkpoint(run.checkpoints)
        content = read_checkpoint(chosen)
        saved = saved_provenance(content, chosen)
        return cls(chosen, content["global_step"], content["ended"], saved)


def resume(
    directory: Path,
    checkpoint: Path | None = None,
    devices: int | None = None,
    rounds: int | None = None,
    data: Config | None = None,
) -> int:
    """Continue a run exactly where it stopped, and return the exit code of its process.

    Args:
        directory: of the run.
        checkpoint: from here instead of the newest one.
        devices: number of processes; any number continues a run.
        rounds: T from now on, also beyond the end of a finished run: as if it had been asked for at first.
        data: keys of the data to change, where there are more data now.
    """
    format_warnings()
    run, status = RunDirectory.existing(directory), RunStatus()
    read_config(run)  # refuses what is no run before anything is written
    with status.own(run) if is_rank_zero() else contextlib.nullcontext():
        return _resume(run, status, checkpoint, devices, rounds, data)


def _resume(
    run: RunDirectory,
    status: RunStatus,
    checkpoint: Path | None,
    devices: int | None,
    rounds: int | None,
    data: Config | None,
) -> int:
    point = ResumePoint.find(run, checkpoint)
    if is_rank_zero():
        require_resumable(run, point.rounds, point.saved)
    config = _change(complete_config(read_config(run)), devices, data)
    if rounds is None:
        _require_unfinished(run, config, point)
    elif run.finished and rounds == point.rounds:
        print(f"{run.path} has its {rounds} rounds already", flush=True)
        return 0
    else:
        _require_more_rounds(run, config, point, rounds)
        config["rounds"] = rounds
    components = build(config)  # refuses what is impossible before anything is changed
    if is_rank_zero() and point.saved is not None and point.saved.threads != config["threads"]:
        warnings.warn(
            f"the run used {point.saved.threads} threads (now {config['threads']}): its last digits may differ",
            stacklevel=2,
        )
    sources = {} if point.saved is None else point.saved.sources
    require_same_data(run, components.stream, point.rounds, config["tasks_per_round"], sources, bool(data))
    return fit_to_exit_code(config, run, components, point.checkpoint, status)


def _change(config: Config, devices: int | None, data: Config | None) -> Config:
    if devices is not None:
        config["trainer"]["devices"] = devices
    if not data:
        return config
    name = section(config, "data")["name"]
    asked = section({"data": data}, "data").get("name", name)
    if asked != name:
        raise ValueError(f"data must stay {short_name(name)} when a run is continued, got {asked!r}")
    return complete_config(overlay(config, {"data": data}))


def _require_unfinished(run: RunDirectory, config: Config, point: ResumePoint) -> None:
    """Refuse a finished run; one whose tasks ended before its rounds continues where there are more of them now."""
    if run.finished and (point.ended or point.rounds >= _last_round(config)):
        raise ValueError(f"{run.path} is finished: it has a {run.summary.name}; --rounds N runs more rounds")


def _require_more_rounds(run: RunDirectory, config: Config, point: ResumePoint, rounds: int) -> None:
    if point.ended:
        raise ValueError(
            f"rounds cannot extend {run.path}, got {rounds}: a callback or a limit of its trainer ended it after "
            f"round {point.rounds}, and would have with any number of rounds"
        )
    limit, interval = (config["trainer"].get(key) for key in ("max_steps", "val_check_interval"))
    if limit not in (None, -1) and rounds > limit:
        raise ValueError(f"rounds must be at most trainer.max_steps of the run, {limit}, got {rounds}")
    if isinstance(interval, float) and interval < 1 and rounds != config["rounds"]:
        raise ValueError(f"rounds must stay {config['rounds']}, of which trainer.val_check_interval is a fraction")
    if rounds < point.rounds:
        raise ValueError(f"rounds must be at least the {point.rounds} finished ones, got {rounds}")
    if rounds == point.rounds != config["rounds"]:
        # The last round of a run is evaluated, and this one may not have been.
        raise ValueError(f"rounds must be more than the {rounds} finished ones, or {config['rounds']}, got {rounds}")


def _last_round(config: Config) -> int:
    limit: Any = config["trainer"].get("max_steps")
    rounds: int = config["rounds"]
    return rounds if limit in (None, -1) else min(rounds, limit)
