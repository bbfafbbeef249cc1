"""`resume`: continue runs where they were stopped, or beyond their end."""

import argparse
from pathlib import Path
from typing import Any

from obbo_lightning.cli import refuse_error


def run(arguments: argparse.Namespace) -> int:
    """Continue one run, or several one after the other."""
    from obbo_lightning.config.parse import read_flags
    from obbo_lightning.training.resume import resume

    overrides = read_flags(arguments.overrides).config
    for key in overrides:
        if key != "data":
            raise ValueError(
                f"resume takes --rounds, --data.KEY, --checkpoint and --devices, got --{key}: the other settings of a "
                "run decide its results and stay"
            )
    options = {"rounds": arguments.rounds, "data": overrides.get("data")}
    if len(arguments.directories) == 1:
        return resume(arguments.directories[0], arguments.checkpoint, arguments.devices, **options)
    if arguments.checkpoint or arguments.devices:
        raise ValueError("--checkpoint and --devices are for one RUN_DIR, got several")
    return max(_resume_one(directory, options) for directory in arguments.directories)


def _resume_one(directory: Path, options: dict[str, Any]) -> int:
    """Continue one of several runs; the others continue after its failure, but not after a signal."""
    from obbo_lightning.training.resume import resume

    print(f"run {directory}", flush=True)
    try:
        code = resume(directory, **options)
    except Exception as error:
        return refuse_error(error)
    if code >= 128:
        raise SystemExit(code)
    return code
