"""`watch`: what runs are doing now."""

import argparse
import sys
import time

from obbo_lightning.runs.status import describe_run, find_run_directories


def run(arguments: argparse.Namespace) -> int:
    """Print one line per run, once or repeatedly until all are finished."""
    if arguments.every is not None and not arguments.every > 0:
        raise ValueError(f"--every must be a positive number of seconds, got {arguments.every:g}")
    shown = 0
    while True:
        runs = find_run_directories(arguments.directories)
        if shown and sys.stdout.isatty():
            print(f"\x1b[{shown}F\x1b[J", end="")  # overwrite the lines from before
        print("\n".join(describe_run(one) for one in runs), flush=True)
        shown = len(runs)
        if arguments.every is None or all(one.finished for one in runs):
            return 0
        time.sleep(arguments.every)
