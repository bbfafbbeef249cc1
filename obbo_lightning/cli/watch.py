"""`watch`: what runs are doing now."""

import sys
import time

from obbo_lightning.cli.flags import Flags
from obbo_lightning.runs.status import describe_run, find_run_directories


def run(arguments: list[str]) -> int:
    """Print one line per run, once or repeatedly until all are finished."""
    asked = Flags("watch").parse_args(arguments)
    if asked.every is not None and not asked.every > 0:
        raise ValueError(f"--every must be a positive number of seconds, got {asked.every:g}")
    shown = 0
    try:
        while True:
            runs = find_run_directories(asked.directories)
            if shown and sys.stdout.isatty():
                print(f"\x1b[{shown}F\x1b[J", end="")  # overwrite the lines from before
            print("\n".join(describe_run(one) for one in runs), flush=True)
            shown = len(runs)
            if asked.every is None or all(one.finished for one in runs):
                return 0
            time.sleep(asked.every)
    except KeyboardInterrupt:
        return 130
