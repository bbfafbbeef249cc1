"""Continuing a run: where it stopped, beyond its end, or with data that have grown."""

import contextlib
from pathlib import Path
from typing import Any

from obbo_lightning.config.parse import Config, complete_config, overlay, section
from obbo_lightning.config.registry import short_name
from obbo_lightning.runs.directory import RunDirectory, read_config
from obbo_lightning.runs.provenance import list_checkpoints, open_checkpoint, require_resumable, require_same_data
from obbo_lightning.runs.status import RunStatus
from obbo_lightning.training.distributed import is_rank_zero
from obbo_lightning.training.run import build, fit_to_exit_code, format_warnings


def resume(
    directory: Path,
    checkpoint: Path | None = None,
    devices: int | None = None,
    rounds: int | None = None,
    data: Config | None = None,
) -> int:
    """Continue a run exactly where it stopped, and return the exit code of its process.

    ``rounds`` may lie beyond the end of a finished run, as if they had been asked for at first; any number of
    ``devices`` continues a run; ``data`` are keys of the data to change, where there are more data now.
    """
    format_warnings()
    run, status = RunDirectory.existing(directory), RunStatus()
    read_config(run)  # refuses what is no run before anything is written
    with status.own(run) if is_rank_zero() else contextlib.nullcontext():
        content: dict[str, Any] = {"global_step": 0, "ended": False}
        saved = None
        if checkpoint or list_checkpoints(run.checkpoints):  # otherwise the run starts again
            checkpoint, content, saved = open_checkpoint(run, checkpoint)
        done = content["global_step"]
        if is_rank_zero():
            require_resumable(run, saved)
        config = complete_config(read_config(run))
        if devices is not None:
            config["trainer"]["devices"] = devices
        if data:
            name = section(config, "data")["name"]
            asked = section({"data": data}, "data").get("name", name)
            if asked != name:
                raise ValueError(f"data must stay {short_name(name)} when a run is continued, got {asked!r}")
            config = complete_config(overlay(config, {"data": data}))
        if run.finished and rounds == done:
            print(f"{run.path} has its {rounds} rounds already", flush=True)
            return 0
        config["rounds"] = require_rounds(run, config, done, content["ended"], rounds)
        components = build(config)  # refuses what is impossible before anything is changed
        sources = {} if saved is None else saved.sources
        require_same_data(run, components.stream, done, config["tasks_per_round"], sources, bool(data))
        return fit_to_exit_code(config, run, components, checkpoint, status)


def require_rounds(run: RunDirectory, config: Config, done: int, ended: bool, rounds: int | None) -> int:
    """Return the number of rounds that a run with ``done`` ones continues to; refuse those it would never have had.

    ``ended`` tells that a callback or a limit ended the run, ``rounds`` are those that are asked for.
    """
    planned, limit, interval = config["rounds"], *map(config["trainer"].get, ("max_steps", "val_check_interval"))
    limit = float("inf") if limit in (None, -1) else limit
    if rounds is None:
        # A run whose tasks ended before its rounds continues where there are more of them now.
        if run.finished and (ended or done >= min(planned, limit)):
            raise ValueError(f"{run.path} is finished: it has a {run.summary.name}; --rounds N runs more rounds")
        return int(planned)
    if ended:
        raise ValueError(
            f"rounds cannot extend {run.path}, got {rounds}: a callback or a limit of its trainer ended it after "
            f"round {done}, and would have with any number of rounds"
        )
    if rounds > limit:
        raise ValueError(f"rounds must be at most trainer.max_steps of the run, {limit}, got {rounds}")
    if isinstance(interval, float) and interval < 1 and rounds != planned:
        raise ValueError(f"rounds must stay {planned}, of which trainer.val_check_interval is a fraction, got {rounds}")
    # The last round of a run is evaluated, and that of a checkpoint may not have been.
    if rounds < done or rounds == done != planned:
        raise ValueError(f"rounds must be more than the {done} finished ones, got {rounds}")
    return rounds
