"""One run, from settings to summary."""

import os
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import polars as pl
import yaml

from obbo_lightning.core.validation import at_least
from obbo_lightning.foreign_text import cells, visible
from obbo_lightning.runs.baselines import write_baselines
from obbo_lightning.runs.console import PlainConsole
from obbo_lightning.runs.directory import RunDirectory, write_atomically
from obbo_lightning.runs.figures import draw_figures
from obbo_lightning.runs.state import RunState
from obbo_lightning.runs.summary import (
    Judgement,
    last_value,
    print_summary,
    summarise,
    title_of,
    validated,
    without_nonfinite,
)
from obbo_lightning.runs.table import read_rounds
from obbo_lightning.runs.tested import write_tested
from obbo_lightning.settings.build import build_algorithm, build_problem, build_stream
from obbo_lightning.settings.files import Settings
from obbo_lightning.settings.trainer import with_chosen_trainer
from obbo_lightning.streams.stream import Stream
from obbo_lightning.streams.task_files import DamagedTaskError
from obbo_lightning.streams.tasks import has_random_access
from obbo_lightning.threads import take_threads
from obbo_lightning.training.allocator import keep_freed_memory
from obbo_lightning.training.datamodule import StreamDataModule
from obbo_lightning.training.judging import centre_and_error, judged_splits
from obbo_lightning.training.keeping import Keeper
from obbo_lightning.training.lanes import LaneRecorder
from obbo_lightning.training.loggers import finish_logger, make_logger
from obbo_lightning.training.module import OnlineBilevelModule
from obbo_lightning.training.played import Played
from obbo_lightning.training.progress import RoundProgress
from obbo_lightning.training.ranks import is_first, local_processes, lost_a_rank
from obbo_lightning.training.recorder import Recorder
from obbo_lightning.training.signals import Stopped
from obbo_lightning.training.sizes import require_sizes
from obbo_lightning.training.trainer import make_trainer, require_trainer


class RunFailedError(Exception):
    """A run that had begun and could not go on: a full disk, a task that cannot be read, a defect."""

    exit_code = 1

    def __init__(self, error: Exception, go_on: str) -> None:
        said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        super().__init__(f"{type(error).__name__}: {said} (--debug shows where); {go_on}")


class Parts(NamedTuple):
    """What settings build."""

    module: OnlineBilevelModule
    data: StreamDataModule
    stream: Stream


def build(settings: Settings) -> Parts:
    """The module and its data; refuses whatever is impossible. Settings get the number of threads that is used."""
    keep_freed_memory()
    settings["threads"] = take_threads(settings["threads"], local_processes(settings["trainer"]["devices"]))
    stream = build_stream(settings)
    problem = build_problem(settings, stream)
    start = stream.start(problem, settings["seed"])
    test, validation = judged_splits(settings, stream)
    seen = (test, validation, stream.train)
    first = next((tasks[0] for tasks in seen if has_random_access(tasks) and len(tasks)), None)
    require_sizes(settings, start, first)
    module = OnlineBilevelModule(
        problem,
        build_algorithm(settings),
        start,
        settings["seed"],
        settings["regret_window"],
        settings["on_nonfinite"],
        settings["tasks_per_round"],
        settings["several_tasks"],
    )
    at_least("evaluation.every", settings["evaluation"]["every"], 1)
    at_least("checkpoint.every", settings["checkpoint"]["every"], 1)
    if require_trainer(settings, module) > 1 and hasattr(stream.train, "on_wait"):
        raise ValueError("trainer.devices must be 1 for a stream that is waited for, got more")
    tasks = at_least("evaluation.tasks", settings["evaluation"]["tasks"], 1)
    if len(test) and tasks > len(test):
        raise ValueError(f"evaluation.tasks must be at most the {len(test)} test tasks, got {tasks}")
    if first is not None:
        module.algorithm.inner.require_start(problem, module.outer.detach(), first)
    data = StreamDataModule(
        stream,
        settings["rounds"],
        test=[test[i] for i in range(len(test))[:tasks]],
        judged=tasks,
        workers=settings["workers"],
        tasks_per_round=settings["tasks_per_round"],
    )
    return Parts(module, data, stream)


def fit(
    settings: Settings,
    run: RunDirectory,
    checkpoint: Path | None = None,
    callbacks: Sequence[L.Callback] = (),
    quiet: bool = False,
    parts: Parts | None = None,
    state: RunState | None = None,
) -> dict[str, Any]:
    """Play the stream, or what is left of it after ``checkpoint``; writes everything that a run directory holds.

    Args:
        settings: complete ones, see `complete`.
        run: where to write.
        checkpoint: where to go on from.
        callbacks: more of Lightning's callbacks.
        quiet: print nothing.
        parts: what the settings build, where that was done already.
        state: of the run, where this process is its owner already.
    """
    state = state or RunState()
    if is_first():
        state.open(run.state)
        state.say("beginning")
    try:
        return _fit(settings, run, checkpoint, callbacks, quiet, parts or build(settings), state)
    finally:
        state.close()


def _fit(
    settings: Settings,
    run: RunDirectory,
    checkpoint: Path | None,
    callbacks: Sequence[L.Callback],
    quiet: bool,
    parts: Parts,
    state: RunState,
) -> dict[str, Any]:
    began, first = time.perf_counter(), is_first()
    console = PlainConsole(quiet=quiet or not first)
    module, data, stream = parts
    every = settings["evaluation"]["every"], settings["checkpoint"]["every"]
    metric, (_, tasks) = stream.metric.name, judged_splits(settings, stream)
    validation = [tasks[i] for i in range(len(tasks))[: settings["evaluation"]["tasks"]]]
    judged = [f"validation/{metric}", f"validation/{metric}_se"] if validation else []
    more = [*judged, *stream.also, *module.more_columns]
    recorder = Recorder(run, data.test, metric, *every, more, module.problem.blocks, state, validation)
    silent = settings["trainer"].get("enable_progress_bar") is False
    shown: list[Any] = [] if silent else [RoundProgress(recorder, console)]
    many = [] if stream.lanes is None else [LaneRecorder(run, stream.lanes)]
    played = Played(run, stream, settings["tasks_per_round"])
    data.show = played.see
    keeper = Keeper(run, lambda: [*recorder.kept, *played.tables])
    if first:
        written = with_chosen_trainer(settings)
        keeper.begin(written)
        _write_settings(written, run, stream)
    logger = make_logger(settings, run, console) if first else None
    if hasattr(stream.train, "on_wait"):  # whoever waits for tasks says so, and can be stopped there
        stream.train.on_wait = lambda what: [listener.on_wait(what) for listener in (*shown, recorder)]
    trainer = make_trainer(
        settings, [played, *many, recorder, keeper, *shown, *callbacks], logger or False, root=run.path
    )
    console.print(f"run directory {run.path}")
    trainer.fit(module, data, ckpt_path=checkpoint)
    if not first:
        return {}
    for lane_recorder in many:
        lane_recorder.write(module, {f"test_{stream.metric.name}": recorder.tested})
    seconds = time.perf_counter() - began
    figures, summary = _conclude(settings, run, recorder, keeper, Parts(module, data, stream), seconds)
    finish_logger(logger, run, console)
    print_summary(console, settings, summary, figures, run.path)
    return summary


def _write_settings(settings: Settings, run: RunDirectory, stream: Stream) -> None:
    write_atomically(run.config, yaml.safe_dump(settings, sort_keys=False))
    if stream.skipped:
        cells(pl.DataFrame(stream.skipped)).write_csv(run.skipped)


def _conclude(
    settings: Settings, run: RunDirectory, recorder: Recorder, keeper: Keeper, parts: Parts, seconds: float
) -> tuple[list[Path], dict[str, Any]]:
    """Figures, then the summary: a run that has one is finished."""
    stream, rounds = parts.stream, read_rounds(run.metrics)
    untrained, _ = centre_and_error(recorder.untrained, len(recorder.test))
    before, after = recorder.untrained, recorder.tested
    judged = Judgement(stream.metric, before, after, before.further, after.further)
    summary = summarise(settings, rounds, judged, recorder.seconds_before + seconds)
    summary |= validated(rounds, stream.metric.name, len(recorder.validation))
    if stream.lanes is None and len(after) == len(recorder.test) > 0:  # what became of many lanes is in events.csv
        write_tested(run.tests, *({stream.metric.name: s, **s.further} for s in (before, after)))
    if settings["evaluation"]["baselines"] and settings["tasks_per_round"] == 1:
        found = stream.baselines(parts.module.problem, parts.module.algorithm, len(rounds))
        summary |= write_baselines(run.baselines, found)
    figures = draw_figures(run.metrics, run.figures, stream.metric.name, untrained, title_of(settings), run.baselines)
    if stream.lanes is not None:
        summary |= {"events": len(stream.lanes), "events_skipped": len(stream.skipped)}
        summary |= last_value(stream.lanes, stream.metric.name)
    notes = parts.module.problem.notes()
    summary = without_nonfinite(summary)
    written = {**summary, "notes": notes} if notes else summary
    keeper.conclude(written)
    run.write_summary(written)
    return figures, {**summary, "notes": notes}


def warn_in_lines() -> None:
    """A warning is one line without a place in the code; Lightning has its own format, and must be there before."""
    warnings.formatwarning = lambda message, *_, **__: f"obbo: warning: {visible(str(message))}\n"


def play_to_exit_code(
    settings: Settings, run: RunDirectory, checkpoint: Path | None, parts: Parts, state: RunState | None = None
) -> int:
    """`fit`, and what its process says and returns: 0, 1 after a failure, 128 + n after signal n."""
    go_on = f"go on with: python -m obbo_lightning resume {run.path}"
    try:
        fit(settings, run, checkpoint, parts=parts, state=state)
    except Stopped as stop:
        if not is_first():  # rank 0 speaks for all; a code of ours would make Lightning kill it
            return 0
        print(f"obbo: {stop}; {go_on}", file=sys.stderr)
        return 128 + stop.signum
    except DamagedTaskError as damage:
        print(f"obbo: {damage}; when it is mended {go_on}", file=sys.stderr)
        return 2
    except FloatingPointError as blow_up:  # of all ranks in the same round
        if is_first():
            print(f"obbo: {blow_up}", file=sys.stderr)
        return 1
    except Exception as error:
        lost = lost_a_rank(error)
        if is_first() and not lost:
            raise RunFailedError(error, go_on) from error
        if is_first():
            print(f"obbo: another process of this run is gone; {go_on}", file=sys.stderr)
        elif not lost:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # torch would wait for the others
    return 0
