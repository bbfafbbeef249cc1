"""`resume`: go on with runs that were stopped."""

from pathlib import Path

from obbo_lightning.cli.flags import Flags


def run(arguments: list[str]) -> int:
    """One run, or several one after the other."""
    from obbo_lightning.training.run import resume

    parser = Flags("resume")
    parser.add_argument("directories", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--devices", type=int)
    asked = parser.parse_args(arguments)
    if len(asked.directories) == 1:
        return resume(asked.directories[0], asked.checkpoint, asked.devices)
    if asked.checkpoint or asked.devices:
        raise ValueError("--checkpoint and --devices are for one RUN_DIR, got several")
    return max(_resume_caught(directory) for directory in asked.directories)


def _resume_caught(directory: Path) -> int:
    """One of several: its failure is not the others'; a signal ends all of them."""
    from obbo_lightning.cli import refuse
    from obbo_lightning.training.run import resume

    print(f"run {directory}", flush=True)  # whose words follow
    try:
        code = resume(directory)
    except ValueError as refusal:
        return refuse(str(refusal))
    if code >= 128:
        raise SystemExit(code)
    return code
