"""One run, from settings to summary."""

import importlib
import logging
import math
import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import polars as pl
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from rich.console import Console
from rich.table import Table

from obbo_lightning.configuration import Settings, build_part, check
from obbo_lightning.core.allocator import keep_freed_memory
from obbo_lightning.core.validation import at_least
from obbo_lightning.experiments.figures import draw_figures
from obbo_lightning.training.dashboards import finish_logger, make_logger
from obbo_lightning.training.datamodule import StreamDataModule
from obbo_lightning.training.lanes import LaneRecorder
from obbo_lightning.training.module import OnlineBilevelModule
from obbo_lightning.training.progress import RoundProgress
from obbo_lightning.training.ranks import is_first, require_ranks
from obbo_lightning.training.recorder import Recorder, mean_and_error
from obbo_lightning.training.run_directory import RunDirectory, write_atomically
from obbo_lightning.training.table import read_table

NOISE = (
    ".*does not have many workers.*",
    ".*your dataloader is not resumable.*",  # RoundSampler is
    ".*callbacks used to create the checkpoint.*",  # judging a run needs none of them
    ".*treespec, LeafSpec.*",
    ".*`srun` command is available.*",  # a run on a login node, or a cell that is one process, does not want it
)


class Parts(NamedTuple):
    """What settings build."""

    module: OnlineBilevelModule
    data: StreamDataModule
    metric: str
    lanes: pl.DataFrame | None = None
    skipped: Sequence[Any] = ()


def build(settings: Settings) -> Parts:
    """The module and its data; refuses whatever is impossible."""
    keep_freed_memory()
    seed = settings["seed"]
    stream = build_part(settings, "data", seed=seed)
    problem = stream.problem(**settings.get("problem", {}))
    module = OnlineBilevelModule(
        problem,
        build_part(settings, "algorithm"),
        stream.initial_outer(problem, seed),
        seed,
        settings["regret_window"],
        settings["on_nonfinite"],
        settings["tasks_per_round"],
        {"loop": False, "vmap": True, "auto": None}[settings["several_tasks"]],
    )
    at_least("evaluation.every", settings["evaluation"]["every"], 1)
    at_least("checkpoint.every", settings["checkpoint"]["every"], 1)
    _require_trainer(settings, module)
    tasks = at_least("evaluation.tasks", settings["evaluation"]["tasks"], 1)
    if tasks > len(stream.test):
        raise ValueError(f"evaluation.tasks must be at most the {len(stream.test)} test tasks, got {tasks}")
    data = StreamDataModule(
        stream.train,
        settings["rounds"],
        stream.validation,
        stream.test[:tasks],
        tasks,
        settings["workers"],
        settings["tasks_per_round"],
    )
    return Parts(module, data, stream.metric, getattr(stream, "lanes", None), getattr(stream, "skipped", ()))


def _require_trainer(settings: Settings, module: OnlineBilevelModule) -> None:
    """Let Lightning refuse what it cannot do here, before anything is written."""
    try:
        trainer = make_trainer(settings, [], logger=False)
    except (MisconfigurationException, ValueError, RuntimeError, TypeError, ImportError) as refusal:
        known = str(refusal).startswith("trainer.")
        raise ValueError(str(refusal) if known else f"trainer: {refusal}") from None
    if str(trainer.precision) not in ("32-true", "64-true"):
        raise ValueError(
            f"trainer.precision must be 32 or 64, got {trainer.precision}: a hypergradient needs all of it; inner "
            "steps alone can take algorithm.inner.precision bf16"
        )
    require_ranks(trainer, module.problem, len(module.outer), settings["tasks_per_round"])


def complete(settings: Settings) -> Settings:
    """Checked settings with every default filled in, as plain values."""
    return _plain(check(settings).as_dict())


def fit(
    settings: Settings,
    run: RunDirectory,
    checkpoint: Path | None = None,
    callbacks: Sequence[L.Callback] = (),
    quiet: bool = False,
    parts: Parts | None = None,
) -> dict[str, Any]:
    """Play the stream, or what is left of it after ``checkpoint``; writes everything that a run directory holds.

    Args:
        settings: complete ones, see `complete`.
        run: where to write.
        checkpoint: where to go on from.
        callbacks: more of Lightning's callbacks.
        quiet: print nothing.
        parts: what the settings build, where that was done already.
    """
    began = time.perf_counter()
    first = is_first()
    console = Console(quiet=quiet or not first)
    module, data, metric, lanes, skipped = parts or build(settings)
    recorder = Recorder(run, data.test, metric, settings["evaluation"]["every"], settings["checkpoint"]["every"])
    if first:
        write_atomically(run.config, yaml.safe_dump(settings, sort_keys=False))
        if skipped:
            pl.DataFrame(skipped).write_csv(run.path / "skipped.csv")
    logger = make_logger(settings, run, console) if first else None
    shown = [] if settings["trainer"].get("enable_progress_bar") is False else [RoundProgress(recorder, console)]
    many = [] if lanes is None else [LaneRecorder(run, lanes)]
    trainer = make_trainer(settings, [*many, recorder, *shown, *callbacks], logger or False)
    console.print(f"run directory {run.path}")
    trainer.fit(module, data, ckpt_path=checkpoint)
    if not first:
        return {}
    for lane_recorder in many:
        lane_recorder.write(module, {f"test_{metric}": recorder.tested})
    untrained, _ = recorder.centre_and_error(recorder.untrained)
    figures = draw_figures(run.metrics, run.figures, metric, untrained, _title(settings))
    summary = summarise_run(settings, run, recorder, recorder.seconds_before + time.perf_counter() - began)
    if lanes is not None:
        summary |= {"events": len(lanes), "events_skipped": len(skipped)}
    run.write_summary(summary)
    finish_logger(logger, run, console)
    print_summary(console, settings, summary, figures)
    return summary


def make_trainer(
    settings: Settings, callbacks: list[L.Callback], logger: Any, limit_val_batches: float = 0
) -> L.Trainer:
    """Lightning's Trainer with what an online run needs; the rest is the user's."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in NOISE:
        warnings.filterwarnings("ignore", message=message)
    options = {k: v for k, v in settings["trainer"].items() if v is not None}
    chosen = options.get("callbacks") or []
    chosen = [_callback(c) for c in (chosen if isinstance(chosen, list) else [chosen])]
    options |= {
        "max_epochs": 1,
        "use_distributed_sampler": False,  # it would halve the stream
        "enable_checkpointing": False,  # ours are exact
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": limit_val_batches,  # rounds are evaluated by the recorder, before they are saved
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "inference_mode": False,  # adapting needs gradients
        "logger": logger,
        "callbacks": [*chosen, *callbacks],
    }
    return L.Trainer(**options)


def _callback(entry: Any) -> L.Callback:
    """A callback by its name or class path, with what it is to be made with."""
    entry = {"class_path": entry} if isinstance(entry, str) else entry
    module, _, name = entry["class_path"].rpartition(".")
    try:
        found = getattr(importlib.import_module(module or "lightning.pytorch.callbacks"), name)
    except (ImportError, AttributeError):
        raise ValueError(f"trainer.callbacks must name a callback, got {entry['class_path']!r}") from None
    made: L.Callback = found(**(entry.get("init_args") or {}))
    return made


def summarise_run(settings: Settings, run: RunDirectory, recorder: Recorder, seconds: float) -> dict[str, Any]:
    """The numbers of a run that people compare."""
    table, metric = read_table(run.metrics), recorder.metric
    untrained, final = mean_and_error(recorder.untrained), mean_and_error(recorder.tested)
    better = 1 if metric == "accuracy" else -1
    gain = mean_and_error([better * (b - a) for a, b in zip(recorder.untrained, recorder.tested, strict=True)])
    last = {name: values[-1] for name, values in table.items()}
    recent = table[metric][-100:]
    return {
        "experiment": settings["experiment"],
        "algorithm": settings["algorithm"]["name"],
        "seed": settings["seed"],
        "rounds": int(last["round"]),
        "metric": metric,
        "test_tasks": len(recorder.tested),
        f"untrained_test_{metric}": _known(untrained[0]),
        f"untrained_test_{metric}_se": untrained[1],
        f"test_{metric}": _known(final[0]),
        f"test_{metric}_se": final[1],
        **_middle(f"test_{metric}", recorder.tested),
        "gain": _known(gain[0]),
        "gain_se": gain[1],
        f"stream_{metric}": _known(sum(table[metric]) / len(table[metric])),
        f"stream_{metric}_last_100": _known(sum(recent) / len(recent)),
        **{f"regret_{name}": _known(last[f"regret/{name}"]) for name in ("euclidean", "generalized", "exact")},
        "skipped": int(sum(table["skipped"])),
        "seconds": round(seconds, 3),
    }


def _middle(name: str, values: Sequence[float]) -> dict[str, float]:
    """Median and median absolute deviation, which outliers do not move."""
    numbers = torch.tensor(values, dtype=torch.float64)
    median = numbers.quantile(0.5)
    return {f"{name}_median": float(median), f"{name}_mad": float((numbers - median).abs().quantile(0.5))}


def print_summary(console: Console, settings: Settings, summary: dict[str, Any], figures: list[Path]) -> None:
    """A small table, and where the figures are."""
    metric = summary["metric"]
    table = Table(title=_title(settings), show_header=False)
    table.add_row(f"untrained test {metric}", _with_error(summary, f"untrained_test_{metric}"))
    table.add_row(f"test {metric} after {summary['rounds']} rounds", _with_error(summary, f"test_{metric}"))
    if metric != "accuracy":  # errors have long tails
        table.add_row(
            "its median ± median absolute deviation",
            f"{summary[f'test_{metric}_median']:.3f} ± {summary[f'test_{metric}_mad']:.3f}",
        )
    table.add_row(f"gain, paired on {summary['test_tasks']} test tasks", _with_error(summary, "gain"))
    recent = min(100, summary["rounds"])
    table.add_row(f"stream {metric}, last {recent} rounds", _shown(summary[f"stream_{metric}_last_100"]))
    for name in ("euclidean", "generalized", "exact"):
        if summary[f"regret_{name}"] is not None:
            table.add_row(f"{name} regret", f"{summary[f'regret_{name}']:.4g}")
    if summary["skipped"]:
        table.add_row("rounds skipped as not finite", str(summary["skipped"]))
    table.add_row("seconds", f"{summary['seconds']:.0f}")
    console.print(table)
    for path in figures:
        console.print(f"figure {path}", soft_wrap=True)


def _title(settings: Settings) -> str:
    algorithm = settings["algorithm"]
    window = f", w = {algorithm['window']}" if "window" in algorithm else ""
    return f"{algorithm['name']}{window}, {settings['data']['name']} stream, seed {settings['seed']}"


def _with_error(summary: dict[str, Any], key: str) -> str:
    error = summary[f"{key}_se"]
    return _shown(summary[key]) + ("" if error is None else f" ± {error:.3f}")


def _shown(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3f}"


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value
