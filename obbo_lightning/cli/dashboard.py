"""`dashboard`: the W&B workspace and report of a project."""

import argparse
import json
import sys

from obbo_lightning.experiments import dashboard
from obbo_lightning.training.loggers import has_login


def run(arguments: argparse.Namespace) -> int:
    """The W&B workspace and report of a project, or what would be sent."""
    if arguments.dry_run:
        found = dashboard.specification(arguments.entity or "ENTITY", arguments.project, arguments.group)
        try:
            arguments.output.write_text(json.dumps(found, indent=2) + "\n")
        except OSError as error:
            raise ValueError(
                f"--output must be a file that can be written, got {arguments.output}: {error.strerror}"
            ) from None
        print(f"{arguments.output}: what would be sent to W&B for project {arguments.project}")
        return 0
    if not has_login():
        raise ValueError("dashboard needs a W&B login, got none: wandb login, or --dry_run to see what would be sent")
    import wandb

    try:
        entity = str(arguments.entity or wandb.Api().default_entity)
        addresses = dashboard.save(entity, arguments.project, arguments.group)
    except (wandb.errors.Error, OSError) as error:
        print(f"obbo: W&B refused: {type(error).__name__} {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print("\n".join(addresses))
    return 0
