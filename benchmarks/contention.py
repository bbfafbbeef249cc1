"""Measure how other work on the same cores slows down a run: python -m benchmarks.contention [--turns N] [--rounds N].

`fit` of the default runs alone and beside one busy process per core, with the spinning of OpenMP bounded by `obbo` and
with the default of libgomp. The variants alternate; medians of the seconds per round are compared, and the number of
different metrics.csv files is printed, which must be 1.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl

from benchmarks.interleaved import report
from obbo_lightning.threads import BOUNDS, usable_cores

LIBGOMP = {"GOMP_SPINCOUNT": "300000"}  # the default of libgomp if there are no more threads than cores
KINDS = {"alone": (False, {}), "beside": (True, {}), "alone, spinning": (False, LIBGOMP)}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=15, help="of each run")
    asked = parser.parse_args()
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    tables = set()
    for _ in range(asked.turns):
        for kind, (busy, environment) in KINDS.items():
            with tempfile.TemporaryDirectory() as folder, busy_cores(usable_cores() if busy else 0):
                run = run_fit(Path(folder), asked.rounds, environment)
                tables.add((run / "metrics.csv").read_bytes())
                # The first rounds include one-time work.
                seconds[kind] += pl.read_csv(run / "timings.csv")["seconds"].to_list()[2:]
    found = {kind: statistics.median(values) for kind, values in seconds.items()}
    report(
        f"a round alone {found['alone']:.3f} s, {usable_cores()} cores, {len(tables)} different metrics.csv",
        [
            ("beside a busy process per core / alone", found["beside"] / found["alone"], 4.0),
            ("alone, bounded / default spinning of libgomp", found["alone"] / found["alone, spinning"], 1.05),
        ],
    )


def run_fit(folder: Path, rounds: int, environment: dict[str, str]) -> Path:
    """Run the default in a new process and return its run directory."""
    words = ["fit", "--rounds", str(rounds), "--evaluation.tasks", "1", "--output", str(folder)]
    clean = {name: value for name, value in os.environ.items() if name not in (*BOUNDS, "OMP_NUM_THREADS")}
    command = [sys.executable, "-m", "obbo_lightning", *words]
    subprocess.run(command, env={**clean, **environment}, check=True, capture_output=True)
    (run,) = folder.glob("*/*")
    return run


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Keep this many processes busy."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
