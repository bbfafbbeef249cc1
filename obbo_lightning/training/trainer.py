"""Lightning's Trainer with what an online run needs; the rest is the user's."""

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Checkpoint

from obbo_lightning.config.parse import Config, callback_entries
from obbo_lightning.config.registry import find_component
from obbo_lightning.training.checkpoints import ExactCheckpoints
from obbo_lightning.training.distributed import require_strategy
from obbo_lightning.training.module import OnlineBilevelModule

IGNORED_WARNINGS = (
    ".*callbacks used to create the checkpoint.*",  # evaluating a run needs none of them
    ".*Checkpoint directory .* exists and is not empty.*",  # a continued run has checkpoints
    ".*`srun` command is available.*",  # a run on a login node, or one process of a grid
)


def make_trainer(
    config: Config,
    callbacks: Sequence[L.Callback] = (),
    logger: Any = False,
    root: Path | None = None,
    evaluating: bool = False,
) -> L.Trainer:
    """Return a Trainer for a run, or for evaluating one.

    Args:
        config: complete configuration of the run.
        callbacks: ours, which are called after the user's.
        logger: of Lightning.
        root: where callbacks and profilers write unless they are given another place.
        evaluating: leave the user's callbacks out, and evaluate all tasks.
    """
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    given = {k: v for k, v in config["trainer"].items() if v is not None}
    users = [] if evaluating else [_make_callback(entry) for entry in callback_entries(config["trainer"])]
    plugins = given.get("plugins") or []
    # RunWriter evaluates rounds before they are saved; Lightning validates as well only where asked to.
    validation = {"val_check_interval", "limit_val_batches"} & set(given)
    fixed = {
        "max_epochs": 1,
        "use_distributed_sampler": False,  # processes divide the tasks of a round
        "enable_progress_bar": False,  # ours shows rounds
        "inference_mode": False,  # adapting needs gradients
        "logger": logger,
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
        raise ValueError(str(refusal) if named else f"trainer: {refusal}") from None


def require_trainer(trainer: L.Trainer, config: Config, module: OnlineBilevelModule) -> None:
    """Refuse a precision or a strategy with which this run cannot be computed."""
    if str(trainer.precision) not in ("32-true", "64-true"):
        raise ValueError(
            f"trainer.precision must be 32 or 64, got {trainer.precision}: a hypergradient needs full precision; inner "
            "steps alone can use algorithm.inner.precision bf16"
        )
    asked = config["trainer"].get("precision")
    # Lightning casts up, never down.
    if asked is not None and str(trainer.precision) == "32-true" and module.outer.dtype == torch.float64:
        raise ValueError(f"trainer.precision must be 64 for a problem that is computed in float64, got {asked!r}")
    require_strategy(trainer, module.problem, len(module.outer), module.tasks_per_round)


def _make_callback(entry: Config) -> L.Callback:
    callback: L.Callback = find_component("callback", entry["name"], "trainer.callbacks")(
        **{key: value for key, value in entry.items() if key != "name"}
    )
    return callback
