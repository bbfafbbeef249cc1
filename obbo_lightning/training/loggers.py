"""Loggers beside metrics.csv: W&B (offline where there is no login or network) and TensorBoard."""

import netrc
import os
import uuid
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from rich.console import Console

from obbo_lightning.config.parse import Config
from obbo_lightning.config.registry import short_name
from obbo_lightning.runs.directory import RunDirectory, write_atomically

PATIENCE = 6  # seconds to wait for W&B's server


def make_logger(config: Config, run: RunDirectory, console: Console) -> Logger | None:
    """Return the logger that the configuration names; None for metrics.csv only."""
    if config["logger"] == "tensorboard":
        return TensorBoardLogger(save_dir=run.path, name="tensorboard", version="")
    if config["logger"] != "wandb":
        return None
    import wandb

    wanted = config["wandb"]
    options: dict[str, Any] = {
        "project": wanted["project"] or os.environ.get("WANDB_PROJECT") or "obbo_lightning",
        "name": wanted["name"] or run.path.name,
        "group": wanted["group"] or config["experiment"],
        "tags": wanted["tags"] or [short_name(config[key]["name"]) for key in ("algorithm", "data")],
        "save_dir": run.path,
        "config": config,
        "id": _identity(run),
        "resume": "allow",
    }
    if not has_login():
        os.environ["WANDB_MODE"] = "offline"  # otherwise W&B would ask
    # Do not wait for a network, but for W&B's own process, which starts slowly on a busy machine.
    patience: dict[str, Any] = {"init_timeout": PATIENCE} if os.environ.get("WANDB_MODE", "online") == "online" else {}
    try:
        logger = WandbLogger(settings=wandb.Settings(silent=True, **patience), **options)
        experiment = logger.experiment
    except Exception as error:  # an invalid key, project or tag, or the network: each has its own exception
        console.print(f"W&B cannot be reached ({type(error).__name__}): logging offline")
        os.environ["WANDB_MODE"] = "offline"
        logger = WandbLogger(settings=wandb.Settings(silent=True), **options)
        experiment = logger.experiment
    # The round is the x axis of every chart.
    experiment.define_metric("round")
    experiment.define_metric("*", step_metric="round")
    return logger


def has_login() -> bool:
    """Return whether there are credentials for W&B."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        hosts = netrc.netrc(os.environ.get("NETRC") or os.path.expanduser("~/.netrc")).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any("wandb" in host for host in hosts)


def _identity(run: RunDirectory) -> str:
    """Return the id of the W&B run, stored in the run directory for a resume; a sweep's agent chooses its own."""
    file = run.path / "wandb-id"
    if not file.exists():
        agents = os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None
        write_atomically(file, agents or uuid.uuid4().hex[:8])
    return file.read_text()


def finish_logger(logger: Logger | None, run: RunDirectory, console: Console) -> None:
    """Write what is pending; upload figures and configuration to W&B, and print how an offline run is uploaded."""
    if not isinstance(logger, WandbLogger):
        if logger is not None:
            logger.finalize("success")  # again: the result was logged after the Trainer had closed the file
        return
    import wandb

    experiment, figures = logger.experiment, sorted(run.figures.glob("*.png"))
    artifact = wandb.Artifact(f"run-{experiment.id}", type="run")
    for path in (run.config, run.metrics, run.summary, *figures):
        artifact.add_file(str(path))
    experiment.log_artifact(artifact)
    experiment.log({path.stem: wandb.Image(str(path)) for path in figures})
    directory, offline = experiment.dir, experiment.settings._offline
    experiment.finish()
    if offline:
        console.print(f"W&B was offline; upload with: wandb sync {os.path.dirname(directory)}", soft_wrap=True)
