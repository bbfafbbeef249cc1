"""One run, from its configuration to its summary and exit code."""

import contextlib
import ctypes
import logging
import os
import platform
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import polars as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from obbo_lightning.config.build import build_algorithm, build_problem, build_stream
from obbo_lightning.config.parse import Config, ConfigError, callback_entries
from obbo_lightning.config.registry import find_component
from obbo_lightning.core.problem import Task
from obbo_lightning.core.validation import at_least, require_memory
from obbo_lightning.escaping import escape_terminal
from obbo_lightning.runs.directory import RunDirectory, write_atomically
from obbo_lightning.runs.figures import draw_figures
from obbo_lightning.runs.status import RunStatus
from obbo_lightning.runs.summary import (
    PlainConsole,
    describe_skips,
    print_summary,
    replace_nonfinite,
    run_title,
    summarise,
    summarise_tuning,
)
from obbo_lightning.streams.arriving import DamagedTaskError
from obbo_lightning.streams.stream import Stream, has_random_access
from obbo_lightning.threads import take_threads
from obbo_lightning.training.checkpoints import ExactCheckpoints
from obbo_lightning.training.datamodule import StreamDataModule
from obbo_lightning.training.distributed import is_rank_zero, local_processes, lost_rank, require_strategy
from obbo_lightning.training.evaluation import center
from obbo_lightning.training.loggers import finish_logger, make_logger
from obbo_lightning.training.module import OnlineBilevelModule
from obbo_lightning.training.progress import RoundProgress
from obbo_lightning.training.run_writer import RunWriter
from obbo_lightning.training.signals import Stopped

LEAST_TASK = 1000  # bytes of a task, at least
MOST_WORKERS = 1000
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # names and numbers of malloc.h
IGNORED_WARNINGS = (
    ".*callbacks used to create the checkpoint.*",  # evaluating a run needs none of them
    ".*Checkpoint directory .* exists and is not empty.*",  # a continued run has checkpoints
    ".*`srun` command is available.*",  # a run on a login node, or one process of a grid
)


class RunFailedError(Exception):
    """A run that had started and could not continue: a full disk, an unreadable task, a defect."""

    exit_code = 1

    def __init__(self, error: Exception, hint: str) -> None:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        super().__init__(f"{type(error).__name__}: {text} (--debug shows where); {hint}")


class Components(NamedTuple):
    """What a configuration builds."""

    module: OnlineBilevelModule
    data: StreamDataModule
    stream: Stream
    validation: list[Task]  # that are evaluated during the run


def build(config: Config) -> Components:
    """Build the module and its data; refuse what is impossible. Sets the number of threads in ``config``."""
    keep_freed_memory()
    config["threads"] = take_threads(config["threads"], local_processes(config["trainer"]["devices"]))
    stream = build_stream(config)
    problem = build_problem(config, stream)
    start = stream.start(problem, config["seed"])
    split = config["evaluation"]["split"]  # a split that is not evaluated on is not even looked at
    test = stream.test if split in ("test", "both") else ()
    validation = stream.validation if split in ("validation", "both") else ()
    if split in ("validation", "both") and not len(validation):
        name = f"{type(stream).__name__}, which has no validation tasks"
        raise ValueError(f"evaluation.split must be test or none for {name}, got {split!r}")
    tasks = next((t for t in (test, validation, stream.train) if has_random_access(t) and len(t)), None)
    first = None if tasks is None else tasks[0]
    _require_sizes(config, start, first)
    for key, option in (("evaluation", "tasks"), ("evaluation", "every"), ("checkpoint", "every")):
        at_least(f"{key}.{option}", config[key][option], 1)
    count = config["evaluation"]["tasks"]
    if len(test) and count > len(test):
        raise ValueError(f"evaluation.tasks must be at most the {len(test)} test tasks, got {count}")
    options = ("seed", "regret_window", "on_nonfinite", "tasks_per_round", "several_tasks")
    settings = {key: config[key] for key in options} | {"folds": stream.folds_of(config["tasks_per_round"])}
    module = OnlineBilevelModule(problem, build_algorithm(config), start, **settings)
    if first is not None:
        module.algorithm.inner.require_start(problem, module.outer.detach(), first)
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


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory instead of returning it to the system and allocating it again.

    A round frees and allocates the same few hundred megabytes many times, and pays with page faults: on 2 CPU cores a
    product with the Hessian of an FC100 task took 112 ms without and 65 ms with this. Changes speed only.
    Returns whether there was a glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # From the heap up to glibc's largest threshold, in steps of 64 MB, and trimmed only above 1 GB of free memory.
    return all([mallopt(M_MMAP_THRESHOLD, 32 << 20), mallopt(M_TOP_PAD, 64 << 20), mallopt(M_TRIM_THRESHOLD, 1 << 30)])


def _require_sizes(config: Config, start: Tensor, first: Task | None) -> None:
    """Refuse windows, tasks and processes that this machine cannot hold, each by its key."""
    task = max(LEAST_TASK, sum(value.nbytes for value in (first or {}).values() if isinstance(value, Tensor)))
    entry, algorithm = start.nbytes + 100, config["algorithm"]
    sizes = {
        "tasks_per_round": (config["tasks_per_round"], task),
        "evaluation.tasks": (config["evaluation"]["tasks"], task),
        "regret_window": (config["regret_window"], entry),
        "algorithm.window": (algorithm.get("window"), entry + (task if algorithm["name"] == "oagd" else 0)),
    }
    for key, (count, each) in sizes.items():
        if isinstance(count, int) and count > 0:  # other values are refused where they are used
            require_memory(key, count, float(count) * each)
    if config["workers"] > MOST_WORKERS:
        raise ValueError(f"workers must be at most {MOST_WORKERS}, got {config['workers']}")


def make_trainer(
    config: Config, callbacks: Sequence[L.Callback] = (), root: Path | None = None, evaluating: bool = False
) -> L.Trainer:
    """Return a Trainer without loggers for a run, or for evaluating one: without the user's callbacks, on all tasks.

    ``callbacks`` are called after the user's; ``root`` is where those and profilers write.
    """
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    given = {k: v for k, v in config["trainer"].items() if v is not None}
    users = []
    for entry in [] if evaluating else callback_entries(config["trainer"]):
        options = {key: value for key, value in entry.items() if key != "name"}
        users.append(find_component("callback", entry["name"], "trainer.callbacks")(**options))
    plugins = given.get("plugins") or []
    # RunWriter evaluates rounds before they are saved; Lightning validates as well only where asked to.
    validation = {"val_check_interval", "limit_val_batches"} & set(given)
    fixed = {
        "max_epochs": 1,
        "use_distributed_sampler": False,  # processes divide the tasks of a round
        "enable_progress_bar": False,  # ours shows rounds
        "inference_mode": False,  # adapting needs gradients
        "logger": False,
        "callbacks": [*users, *callbacks],
        "plugins": [*(plugins if isinstance(plugins, list) else [plugins]), ExactCheckpoints()],
    }
    defaults = {
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in (*users, *callbacks)),
        "enable_model_summary": False,
        "limit_val_batches": 1.0 if evaluating or validation else 0,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "default_root_dir": root,
    }
    if evaluating:
        given = {k: v for k, v in given.items() if k not in validation}
    try:
        return L.Trainer(**{**defaults, **given, **fixed})
    except (MisconfigurationException, ValueError, RuntimeError, TypeError, ImportError) as refusal:
        named = str(refusal).startswith("trainer.")
        raise ConfigError(str(refusal) if named else f"trainer: {refusal}") from None


def require_trainer(trainer: L.Trainer, config: Config, components: Components) -> None:
    """Refuse a precision, a strategy or a number of processes with which this run cannot be computed."""
    module = components.module
    if str(trainer.precision) not in ("32-true", "64-true"):
        raise ConfigError(
            f"trainer.precision must be 32 or 64, got {trainer.precision}: a hypergradient needs full precision; inner "
            "steps alone can use algorithm.inner.precision bf16"
        )
    asked = config["trainer"].get("precision")
    # Lightning casts up, never down.
    if asked is not None and str(trainer.precision) == "32-true" and module.outer.dtype == torch.float64:
        raise ConfigError(f"trainer.precision must be 64 for a problem that is computed in float64, got {asked!r}")
    require_strategy(trainer, module.problem, len(module.outer), module.tasks_per_round)
    if trainer.world_size > 1 and not has_random_access(components.stream.train):
        raise ConfigError("trainer.devices must be 1 for a stream that arrives task by task, got more")


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

    ``components`` are those of the configuration, where they were built already; ``status`` is that of the run, where
    this process owns it already.
    """
    module, data, stream, validation = components = components or build(config)
    status = status or RunStatus()
    console = PlainConsole(quiet=quiet or not is_rank_zero())
    with status.own(run) if is_rank_zero() else contextlib.nullcontext():
        status.set("starting")
        writer = RunWriter(run, config, stream, data, validation, status)
        hidden = config["trainer"].get("enable_progress_bar") is False
        progress = [] if hidden else [RoundProgress(stream.metric.name, console)]
        trainer = make_trainer(config, [*callbacks, *progress, writer], root=run.path)
        require_trainer(trainer, config, components)
        logger = make_logger(config, run, console) if is_rank_zero() else None
        trainer.loggers = [] if logger is None else [logger]
        console.print(f"run directory {run.path}")
        trainer.fit(module, data, ckpt_path=checkpoint)
        if not is_rank_zero():
            return {}
        figures, summary = _conclude(config, writer, module)
        if logger is not None and "tuning" in summary:
            gains = {
                f"tuner/{key}/{name}": one[key]
                for name, one in summary["tuning"].items()
                for key in ("gain", "gain_se")
                if one[key] is not None
            }
            logger.log_metrics({"round": summary["rounds"], **gains}, step=summary["rounds"])
        finish_logger(logger, run, console)
    print_summary(console, config, summary, figures, run.path)
    return summary


def _conclude(config: Config, writer: RunWriter, module: OnlineBilevelModule) -> tuple[list[Path], dict[str, Any]]:
    """Write closing files, figures and then the summary."""
    run, rounds, finished = writer.run, writer.metrics.history, int(writer.last_row["round"])
    writer.write_closing_files(module.outer.detach())
    baselines: dict[str, list[float]] = {}
    if config["evaluation"]["baselines"] and config["tasks_per_round"] == 1:
        baselines = writer.stream.baselines(module.problem, module.algorithm, finished)
    if baselines:
        table = pl.DataFrame({"round": range(1, 1 + finished), **baselines})
        write_atomically(run.baselines, table.write_csv())
    before, _ = center(writer.initial[writer.metric], len(writer.data.test))
    figures = draw_figures(run.figures, rounds, writer.metric, before, run_title(config), baselines)
    scores = writer.initial, writer.latest
    stream, last = writer.stream, writer.last_row
    validation_tasks, lanes = len(writer.validation), len(module.outer)
    summary = summarise(config, stream, rounds, last, *scores, validation_tasks, baselines, lanes)
    groups, outer = module.algorithm.resolved_groups(module.problem.groups), module.outer.detach()
    tuning = summarise_tuning(writer.tuning, groups, rounds, last, writer.initial_outer, outer)
    notes = module.problem.notes()
    summary |= {"seconds": round(writer.elapsed(), 3), **({"notes": notes} if notes else {})}
    summary |= {"tuning": tuning} if tuning else {}
    summary = replace_nonfinite(summary)
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
    """Call `fit` and return the exit code of the process: 0, 1 after a failure, 128 + n after signal n.

    A run whose last rounds were all skipped as not finite has failed (`runs.summary.LAST_ROUNDS`).
    """
    hint = f"continue with: python -m obbo_lightning resume {run.path}"
    try:
        summary = fit(config, run, components, checkpoint, status=status)
        if summary.get("skipped"):  # other ranks have no summary
            words = f"{describe_skips(summary)}; a smaller algorithm.inner.lr or algorithm.lr, or a clip may help"
            print(f"obbo: warning: rounds skipped as not finite: {words}", file=sys.stderr)
        return int(summary.get("diverged", False))
    except Stopped as stop:
        # Another exit code than 0 would make Lightning kill rank 0.
        message, code = f"{stop}; {hint}", 128 + stop.signum if is_rank_zero() else 0
    except DamagedTaskError as damage:
        message, code = f"{damage}; when it is fixed, {hint}", 2
    except FloatingPointError as overflow:  # on all ranks in the same round
        message, code = str(overflow), 1
    except Exception as error:
        if isinstance(error, ConfigError) or not run.config.exists():  # refused before anything was written
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
    if is_rank_zero():
        print(f"obbo: {message}", file=sys.stderr)
    return code
