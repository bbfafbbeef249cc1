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

from obbo_lightning.parts import part
from obbo_lightning.settings.files import Settings
from obbo_lightning.settings.trainer import callback_entries
from obbo_lightning.training.checkpoints import ExactCheckpoints
from obbo_lightning.training.module import OnlineBilevelModule
from obbo_lightning.training.ranks import require_ranks

NOISE = (
    ".*callbacks used to create the checkpoint.*",  # judging a run needs none of them
    ".*Checkpoint directory .* exists and is not empty.*",  # a run that goes on has checkpoints
    ".*`srun` command is available.*",  # a run on a login node, or a cell that is one process, does not want it
)


def make_trainer(
    settings: Settings,
    callbacks: Sequence[L.Callback] = (),
    logger: Any = False,
    judging: bool = False,
    root: Path | None = None,
) -> L.Trainer:
    """For a run, or for judging one; what callbacks and profilers write without being told where goes to ``root``."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in NOISE:
        warnings.filterwarnings("ignore", message=message)
    given = {k: v for k, v in settings["trainer"].items() if v is not None}
    # The user's callbacks first: the recorder's row and its checkpoint have what they did.
    chosen = [] if judging else [_make_callback(entry) for entry in callback_entries(settings)]
    plugins = given.get("plugins") or []
    # Rounds are evaluated by the recorder, before they are saved; Lightning validates as well where it is asked to.
    asked = {"val_check_interval", "limit_val_batches"} & set(given)
    own = {
        "max_epochs": 1,
        "use_distributed_sampler": False,  # processes share the tasks of a round
        "enable_progress_bar": False,  # ours shows rounds
        "inference_mode": False,  # adapting needs gradients
        "logger": logger,
        "callbacks": [*chosen, *callbacks],
        "plugins": [*(plugins if isinstance(plugins, list) else [plugins]), ExactCheckpoints()],
    }
    usual = {
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in (*chosen, *callbacks)),
        "enable_model_summary": False,
        "limit_val_batches": 1.0 if judging or asked else 0,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "default_root_dir": root,
    }
    if judging:
        usual, given = {**usual, "limit_val_batches": 1.0}, {k: v for k, v in given.items() if k not in asked}
    return L.Trainer(**{**usual, **given, **own})


def require_trainer(settings: Settings, module: OnlineBilevelModule) -> int:
    """Let Lightning refuse what it cannot do here, before anything is written; returns the number of processes."""
    try:
        trainer = make_trainer(settings)
    except (MisconfigurationException, ValueError, RuntimeError, TypeError, ImportError) as refusal:
        known = str(refusal).startswith("trainer.")
        raise ValueError(str(refusal) if known else f"trainer: {refusal}") from None
    if str(trainer.precision) not in ("32-true", "64-true"):
        raise ValueError(
            f"trainer.precision must be 32 or 64, got {trainer.precision}: a hypergradient needs all of it; inner "
            "steps alone can take algorithm.inner.precision bf16"
        )
    asked = settings["trainer"].get("precision")
    # Lightning casts up, never down.
    if asked is not None and str(trainer.precision) == "32-true" and module.outer.dtype == torch.float64:
        raise ValueError(f"trainer.precision must be 64 for a problem that is computed in float64, got {asked!r}")
    require_ranks(trainer, module.problem, len(module.outer), settings["tasks_per_round"])
    return int(trainer.world_size)


def _make_callback(entry: Settings) -> L.Callback:
    made: L.Callback = part("callback", entry["name"], "trainer.callbacks")(
        **{key: value for key, value in entry.items() if key != "name"}
    )
    return made


def validates_now(trainer: L.Trainer, rounds: int) -> bool:
    """Whether Lightning validates after this round."""
    every, batches = trainer.val_check_batch, trainer.num_val_batches
    tasks = sum(batches) if isinstance(batches, list) else batches
    by_epoch = trainer.check_val_every_n_epoch not in (None, 1)
    return trainer.enable_validation and every is not None and rounds % every == 0 and tasks > 0 and not by_epoch
