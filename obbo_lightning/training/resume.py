"""Going on with a run: where it stopped, behind its end, with data that have grown."""

import warnings
from pathlib import Path
from typing import Any, NamedTuple

from obbo_lightning.parts import short_name
from obbo_lightning.runs.checkpoints import (
    list_checkpoints,
    newest_checkpoint,
    read_checkpoint,
    verify_checkpoint,
)
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.runs.earlier import read_settings
from obbo_lightning.runs.manifest import Manifest, in_checkpoint, mend_tables, require_continuable
from obbo_lightning.runs.state import RunState
from obbo_lightning.settings.files import Settings
from obbo_lightning.settings.layers import at, overlay
from obbo_lightning.settings.schema import complete
from obbo_lightning.training.played import require_same_past
from obbo_lightning.training.ranks import is_first
from obbo_lightning.training.run import build, play_to_exit_code, warn_in_lines


class Start(NamedTuple):
    """Where a run goes on.

    Attributes:
        checkpoint: its file; None where a run that was stopped before its first one begins again.
        rounds: that were played before.
        ended: whether a callback of the run or a limit ended it there, before its last round.
        saved: the manifest in the checkpoint.
    """

    checkpoint: Path | None
    rounds: int
    ended: bool
    saved: Manifest | None = None

    @classmethod
    def of(cls, run: RunDirectory, checkpoint: Path | None) -> "Start":
        """From the newest checkpoint, or the one that is asked for."""
        if checkpoint is None and not list_checkpoints(run.checkpoints):
            return cls(None, 0, False)
        chosen = verify_checkpoint(checkpoint) if checkpoint else newest_checkpoint(run.checkpoints)
        content = read_checkpoint(chosen)
        saved = in_checkpoint(content, chosen)
        return cls(chosen, content["global_step"], bool(content.get("ended", False)), saved)


def resume(
    directory: Path,
    checkpoint: Path | None = None,
    devices: int | None = None,
    rounds: int | None = None,
    data: Settings | None = None,
) -> int:
    """Go on with a run exactly where it stopped, and return the exit code of its process.

    Args:
        directory: of the run.
        checkpoint: from here instead of the newest one.
        devices: any number of processes goes on with a run.
        rounds: T from now on, also where all that were asked for are played: as if it had been asked for at first.
        data: settings of the data to change, where there are more of them now.
    """
    warn_in_lines()
    run, state = RunDirectory.existing(directory), RunState()
    read_settings(run)  # refuses what is no run before anything is written
    if is_first():
        state.open(run.state)  # from now on nobody else goes on with it
        state.say("beginning")
    try:
        return _go_on(run, state, checkpoint, devices, rounds, data)
    except ValueError:
        state.unsay()
        raise
    finally:
        state.close()


def _go_on(
    run: RunDirectory,
    state: RunState,
    checkpoint: Path | None,
    devices: int | None,
    rounds: int | None,
    data: Settings | None,
) -> int:
    start = Start.of(run, checkpoint)
    if is_first():
        require_continuable(run, start.rounds, start.saved)
    settings = _changed(complete(read_settings(run)), devices, data)
    if rounds is None:
        _require_unfinished(run, settings, start)
    elif run.finished and rounds == start.rounds:
        print(f"{run.path} has its {rounds} rounds already", flush=True)
        state.unsay()
        return 0
    else:
        _require_more(run, settings, start, rounds)
        settings["rounds"] = rounds
    parts = build(settings)  # refuses what is impossible before anything is changed
    if is_first() and start.saved is not None and start.saved.threads != settings["threads"]:
        warnings.warn(
            f"the run was played with {start.saved.threads} threads (now {settings['threads']}): its last digits may "
            "differ",
            stacklevel=2,
        )
    require_same_past(run, parts.stream, start.rounds, settings["tasks_per_round"], bool(data))
    if is_first():
        mend_tables(run, start.rounds, start.saved)
        # Before config.yaml says more rounds: killed in between, the run is one that has to be finished as it was.
        run.summary.unlink(missing_ok=True)
    return play_to_exit_code(settings, run, start.checkpoint, parts, state)


def _changed(settings: Settings, devices: int | None, data: Settings | None) -> Settings:
    if devices is not None:
        settings["trainer"]["devices"] = devices
    if not data:
        return settings
    name = at(settings, "data")["name"]
    asked = at({"data": data}, "data").get("name", name)
    if asked != name:
        raise ValueError(f"data must stay {short_name(name)} when a run goes on, got {asked!r}")
    return complete(overlay(settings, {"data": data}))


def _require_unfinished(run: RunDirectory, settings: Settings, start: Start) -> None:
    """A run whose tasks were over before its rounds is finished, and goes on where there are more of them now."""
    if run.finished and (start.ended or start.rounds >= _last_round(settings)):
        raise ValueError(f"{run.path} is finished: it has a {run.summary.name}; --rounds N plays more")


def _require_more(run: RunDirectory, settings: Settings, start: Start, rounds: int) -> None:
    if start.ended:
        raise ValueError(
            f"rounds cannot take {run.path} further, got {rounds}: a callback or a limit of its trainer ended it after "
            f"round {start.rounds}, and would have with any number of rounds"
        )
    limit, interval = (settings["trainer"].get(key) for key in ("max_steps", "val_check_interval"))
    if limit not in (None, -1) and rounds > limit:
        raise ValueError(f"rounds must be at most trainer.max_steps of the run, {limit}, got {rounds}")
    if isinstance(interval, float) and interval < 1 and rounds != settings["rounds"]:
        raise ValueError(f"rounds must stay {settings['rounds']}, of which trainer.val_check_interval is a share")
    if rounds < start.rounds:
        raise ValueError(f"rounds must be at least the {start.rounds} that were played, got {rounds}")
    if rounds == start.rounds != settings["rounds"]:
        # The last round of a run is judged, and this one may not have been.
        raise ValueError(
            f"rounds must be more than the {rounds} that were played, or {settings['rounds']}, got {rounds}"
        )


def _last_round(settings: Settings) -> int:
    limit: Any = settings["trainer"].get("max_steps")
    rounds: int = settings["rounds"]
    return rounds if limit in (None, -1) else min(rounds, limit)
