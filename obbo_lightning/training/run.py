"""One run, from its configuration to its summary and exit code."""

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import polars as pl
from torch import Tensor

from obbo_lightning.config.build import build_algorithm, build_problem, build_stream
from obbo_lightning.config.parse import Config
from obbo_lightning.core.problem import Task
from obbo_lightning.core.validation import at_least, require_memory
from obbo_lightning.escaping import escape_terminal
from obbo_lightning.runs.console import PlainConsole
from obbo_lightning.runs.directory import RunDirectory, write_atomically
from obbo_lightning.runs.figures import draw_figures
from obbo_lightning.runs.status import RunStatus
from obbo_lightning.runs.summary import (
    print_summary,
    replace_nonfinite,
    run_title,
    summarise,
    summarise_baselines,
    summarise_lanes,
    summarise_validation,
)
from obbo_lightning.streams.arriving import DamagedTaskError
from obbo_lightning.streams.stream import Stream, has_random_access
from obbo_lightning.threads import take_threads
from obbo_lightning.training.allocator import keep_freed_memory
from obbo_lightning.training.datamodule import StreamDataModule
from obbo_lightning.training.distributed import is_rank_zero, local_processes, lost_rank
from obbo_lightning.training.loggers import finish_logger, make_logger
from obbo_lightning.training.module import OnlineBilevelModule
from obbo_lightning.training.progress import RoundProgress
from obbo_lightning.training.run_writer import RunWriter
from obbo_lightning.training.signals import Stopped
from obbo_lightning.training.trainer import make_trainer, require_trainer

LEAST_TASK = 1000  # bytes of a task, at least
MOST_WORKERS = 1000


class RunFailedError(Exception):
    """A run that had started and could not continue: a full disk, an unreadable task, a defect."""

    exit_code = 1

    def __init__(self, error: Exception, hint: str) -> None:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        super().__init__(f"{type(error).__name__}: {text} (--debug shows where); {hint}")


class Components(NamedTuple):
    """What a configuration builds; ``validation`` are the tasks of evaluations during the run."""

    module: OnlineBilevelModule
    data: StreamDataModule
    stream: Stream
    validation: list[Task]


def build(config: Config) -> Components:
    """Build the module and its data; refuse what is impossible. Sets the number of threads in ``config``."""
    keep_freed_memory()
    config["threads"] = take_threads(config["threads"], local_processes(config["trainer"]["devices"]))
    stream = build_stream(config)
    problem = build_problem(config, stream)
    start = stream.start(problem, config["seed"])
    test, validation = _evaluation_tasks(config, stream)
    tasks = next((t for t in (test, validation, stream.train) if has_random_access(t) and len(t)), None)
    first = None if tasks is None else tasks[0]
    _require_sizes(config, start, first)
    count = at_least("evaluation.tasks", config["evaluation"]["tasks"], 1)
    if len(test) and count > len(test):
        raise ValueError(f"evaluation.tasks must be at most the {len(test)} test tasks, got {count}")
    module = OnlineBilevelModule(
        problem,
        build_algorithm(config),
        outer=start,
        seed=config["seed"],
        regret_window=config["regret_window"],
        on_nonfinite=config["on_nonfinite"],
        tasks_per_round=config["tasks_per_round"],
        several_tasks=config["several_tasks"],
    )
    if first is not None:
        module.algorithm.inner.require_start(problem, module.outer.detach(), first)
    at_least("evaluation.every", config["evaluation"]["every"], 1)
    at_least("checkpoint.every", config["checkpoint"]["every"], 1)
    data = StreamDataModule(
        stream,
        rounds=config["rounds"],
        test=[test[i] for i in range(len(test))[:count]],
        evaluation_tasks=count,
        workers=config["workers"],
        tasks_per_round=config["tasks_per_round"],
        record_fingerprints=True,
    )
    return Components(module, data, stream, [validation[i] for i in range(len(validation))[:count]])


def _evaluation_tasks(config: Config, stream: Stream) -> tuple[Sequence[Task], Sequence[Task]]:
    """Return the test and the validation tasks of a run; a split that is not evaluated on is not even looked at."""
    split = config["evaluation"]["split"]
    test = stream.test if split in ("test", "both") else ()
    validation = stream.validation if split in ("validation", "both") else ()
    if split in ("validation", "both") and not len(validation):
        raise ValueError(
            f"evaluation.split must be test or none for {type(stream).__name__}, which has no validation tasks, "
            f"got {split!r}"
        )
    return test, validation


def _require_sizes(config: Config, start: Tensor, first: Task | None) -> None:
    """Refuse windows, tasks and processes that this machine cannot hold, each by its key."""
    task = max(LEAST_TASK, sum(value.nbytes for value in (first or {}).values() if isinstance(value, Tensor)))
    for key, size in {
        "tasks_per_round": config["tasks_per_round"],
        "evaluation.tasks": config["evaluation"]["tasks"],
    }.items():
        require_memory(key, at_least(key, size, 1), float(size) * task)
    algorithm: dict[str, Any] = config["algorithm"]
    for key, window in {"regret_window": config["regret_window"], "algorithm.window": algorithm.get("window")}.items():
        if isinstance(window, int) and window > 0:  # the component refuses other values
            stored = task if algorithm["name"] == "oagd" and key != "regret_window" else 0
            require_memory(key, window, float(window) * (start.nbytes + stored + 100))
    if config["workers"] > MOST_WORKERS:
        raise ValueError(f"workers must be at most {MOST_WORKERS}, got {config['workers']}")


def fit(
    config: Config,
    run: RunDirectory,
    components: Components | None = None,
    checkpoint: Path | None = None,
    callbacks: Sequence[L.Callback] = (),
    quiet: bool = False,
    status: RunStatus | None = None,
) -> dict[str, Any]:
    """Run the stream, or what is left of it after ``checkpoint``; writes the run directory and returns the summary.

    Args:
        config: complete configuration, see `complete_config`.
        run: where to write.
        components: what the configuration builds, where that was done already.
        checkpoint: where to continue from.
        callbacks: further callbacks of Lightning.
        quiet: print nothing.
        status: of the run, where this process owns it already.
    """
    components = components or build(config)
    if not is_rank_zero():
        _train(config, run, components, checkpoint, callbacks, RunStatus(), PlainConsole(quiet=True))
        return {}
    status = status or RunStatus()
    with status.own(run):
        status.set("starting")
        console = PlainConsole(quiet=quiet)
        writer, logger = _train(config, run, components, checkpoint, callbacks, status, console)
        figures, summary = _conclude(config, writer, components.module)
        finish_logger(logger, run, console)
        status.set("finished")
    print_summary(console, config, summary, figures, run.path)
    return summary


def _train(
    config: Config,
    run: RunDirectory,
    components: Components,
    checkpoint: Path | None,
    callbacks: Sequence[L.Callback],
    status: RunStatus,
    console: PlainConsole,
) -> tuple[RunWriter, Any]:
    module, data, stream, validation = components
    writer = RunWriter(run, config, stream, data, validation, status)
    silent = config["trainer"].get("enable_progress_bar") is False
    progress = [] if silent else [RoundProgress(stream.metric.name, console)]
    trainer = make_trainer(config, [*callbacks, *progress, writer], root=run.path)
    require_trainer(trainer, config, module)
    if trainer.world_size > 1 and not has_random_access(stream.train):
        raise ValueError("trainer.devices must be 1 for a stream that arrives task by task, got more")
    logger = make_logger(config, run, console) if is_rank_zero() else None
    trainer.loggers = [] if logger is None else [logger]
    console.print(f"run directory {run.path}")
    trainer.fit(module, data, ckpt_path=checkpoint)
    return writer, logger


def _conclude(config: Config, writer: RunWriter, module: OnlineBilevelModule) -> tuple[list[Path], dict[str, Any]]:
    """Write closing files, figures and then the summary."""
    run, stream, metric, rounds = writer.run, writer.stream, writer.metric, writer.metrics.history
    writer.write_closing_files(module.outer.detach())
    initial, final = ({metric: scores, **scores.others} for scores in (writer.initial, writer.latest))
    summary = summarise(config, stream.metric, rounds, writer.last_row, initial, final)
    summary |= summarise_validation(metric, writer.last_row, len(writer.validation))
    baselines: dict[str, list[float]] = {}
    if config["evaluation"]["baselines"] and config["tasks_per_round"] == 1:
        baselines = stream.baselines(module.problem, module.algorithm, summary["rounds"])
    if baselines:
        numbers = range(1, 1 + summary["rounds"])
        write_atomically(run.baselines, pl.DataFrame({"round": numbers, **baselines}).write_csv())
    summary |= summarise_baselines(baselines)
    if stream.lanes is not None:
        summary |= {"events": len(stream.lanes), "events_skipped": len(stream.skipped)}
        summary |= summarise_lanes(stream.lanes, metric)
    before, _ = writer.initial.center(len(writer.data.test))
    figures = draw_figures(run.figures, rounds, metric, before, run_title(config), baselines)
    summary |= {"seconds": round(writer.elapsed(), 3)}
    notes = module.problem.notes()
    summary = replace_nonfinite(summary | ({"notes": notes} if notes else {}))
    writer.finish(summary)
    return figures, summary


def format_warnings() -> None:
    """Print a warning as one line without a place in the code; after Lightning, which sets its own format."""
    warnings.formatwarning = lambda message, *_, **__: f"obbo: warning: {escape_terminal(str(message))}\n"


def fit_to_exit_code(
    config: Config,
    run: RunDirectory,
    components: Components,
    checkpoint: Path | None = None,
    status: RunStatus | None = None,
) -> int:
    """Call `fit` and return the exit code of the process: 0, 1 after a failure, 128 + n after signal n."""
    hint = f"continue with: python -m obbo_lightning resume {run.path}"
    try:
        fit(config, run, components, checkpoint, status=status)
    except Stopped as stop:
        if not is_rank_zero():  # another exit code would make Lightning kill rank 0
            return 0
        print(f"obbo: {stop}; {hint}", file=sys.stderr)
        return 128 + stop.signum
    except DamagedTaskError as damage:
        print(f"obbo: {damage}; when it is fixed, {hint}", file=sys.stderr)
        return 2
    except FloatingPointError as overflow:  # on all ranks in the same round
        if is_rank_zero():
            print(f"obbo: {overflow}", file=sys.stderr)
        return 1
    except Exception as error:
        if not run.config.exists():  # refused before anything was written
            raise
        lost = lost_rank(error)
        if is_rank_zero() and not lost:
            raise RunFailedError(error, hint) from error
        if is_rank_zero():
            print(f"obbo: another process of this run is gone; {hint}", file=sys.stderr)
        elif not lost:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # torch would wait for the others
    return 0
