"""`dashboard`: the W&B workspace and report of a project."""

import json
import sys

from obbo_lightning.cli.flags import Flags
from obbo_lightning.experiments import dashboard
from obbo_lightning.training.loggers import has_login


def run(arguments: list[str]) -> int:
    """The W&B workspace and report of a project, or what would be sent."""
    asked = Flags("dashboard").parse_args(arguments)
    if asked.dry_run:
        found = dashboard.specification(asked.entity or "ENTITY", asked.project, asked.group)
        try:
            asked.output.write_text(json.dumps(found, indent=2) + "\n")
        except OSError as error:
            raise ValueError(
                f"--output must be a file that can be written, got {asked.output}: {error.strerror}"
            ) from None
        print(f"{asked.output}: what would be sent to W&B for project {asked.project}")
        return 0
    if not has_login():
        raise ValueError("dashboard needs a W&B login, got none: wandb login, or --dry_run to see what would be sent")
    import wandb

    try:
        entity = str(asked.entity or wandb.Api().default_entity)
        addresses = dashboard.save(entity, asked.project, asked.group)
    except (wandb.errors.Error, OSError) as error:
        print(f"obbo: W&B refused: {type(error).__name__} {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print("\n".join(addresses))
    return 0
