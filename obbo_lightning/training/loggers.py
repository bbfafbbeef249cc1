"""Loggers beside metrics.csv: W&B (online, or offline where there is no login or network) and TensorBoard."""

import netrc
import os
import uuid
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from rich.console import Console

from obbo_lightning.parts import short_name
from obbo_lightning.runs.directory import RunDirectory


def make_logger(settings: dict[str, Any], run: RunDirectory, console: Console) -> Logger | None:
    """The logger that the settings name; None for metrics.csv alone."""
    if settings["logger"] == "tensorboard":
        return TensorBoardLogger(save_dir=run.path, name="tensorboard", version="")
    if settings["logger"] == "wandb":
        return _make_wandb(settings, run, console)
    return None


def _make_wandb(settings: dict[str, Any], run: RunDirectory, console: Console) -> WandbLogger:
    import wandb

    wanted = settings["wandb"]
    options: dict[str, Any] = {
        "project": wanted["project"] or os.environ.get("WANDB_PROJECT") or "obbo_lightning",
        "name": wanted["name"] or run.path.name,
        "group": wanted["group"] or settings["experiment"],
        "tags": wanted["tags"] or [short_name(settings[part]["name"]) for part in ("algorithm", "data")],
        "save_dir": run.path,
        "config": settings,
        "id": _identity(run),
        "resume": "allow",
    }
    if not has_login():
        os.environ["WANDB_MODE"] = "offline"  # otherwise W&B would ask, or give up
    logger = WandbLogger(settings=wandb.Settings(silent=True, init_timeout=30), **options)
    try:
        experiment = logger.experiment
    except wandb.errors.Error as error:
        console.print(f"W&B cannot be reached ({type(error).__name__}): logging offline")
        os.environ["WANDB_MODE"] = "offline"
        logger = WandbLogger(settings=wandb.Settings(silent=True), **options)
        experiment = logger.experiment
    # The round is the x axis of everything.
    experiment.define_metric("round")
    experiment.define_metric("*", step_metric="round")
    return logger


def has_login() -> bool:
    """Whether W&B would let us in without asking."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        hosts = netrc.netrc(os.environ.get("NETRC") or os.path.expanduser("~/.netrc")).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any("wandb" in host for host in hosts)


def _identity(run: RunDirectory) -> str:
    """The W&B run's id, kept beside the run so that a resumed one goes on with it; a sweep's agent chooses its own."""
    file = run.path / "wandb-id"
    if not file.exists():
        agents = os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None
        file.write_text(agents or uuid.uuid4().hex[:8])
    return file.read_text()


def finish_logger(logger: Logger | None, run: RunDirectory, console: Console) -> None:
    """Hand over figures and configuration, and say how an offline run is uploaded."""
    if not isinstance(logger, WandbLogger):
        return
    import wandb

    experiment = logger.experiment
    artifact = wandb.Artifact(f"run-{experiment.id}", type="run")
    for path in (run.config, run.metrics, run.summary, *sorted(run.figures.glob("*.png"))):
        artifact.add_file(str(path))
    experiment.log_artifact(artifact)
    experiment.log({path.stem: wandb.Image(str(path)) for path in sorted(run.figures.glob("*.png"))})
    directory, offline = experiment.dir, experiment.settings._offline
    experiment.finish()
    if offline:
        console.print(f"W&B was offline; upload with: wandb sync {os.path.dirname(directory)}", soft_wrap=True)
