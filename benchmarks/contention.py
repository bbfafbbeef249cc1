"""What other work on the same cores costs a run: python -m benchmarks.contention [--turns N] [--rounds N].

`fit` of the default alone, and beside one busy process for each core; with spinning bounded as `obbo` does it, and as
libgomp would spin by itself. They take turns; medians of a round's seconds are compared, and the bits must be the same.
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

LIBGOMP = {"GOMP_SPINCOUNT": "300000"}  # its own choice where there are no more threads than cores
KINDS = {"alone": (False, {}), "beside": (True, {}), "alone, spinning": (False, LIBGOMP)}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=15, help="of each run")
    asked = parser.parse_args()
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    tables = set()
    for _ in range(asked.turns):
        for kind, (busy, environment) in KINDS.items():
            with tempfile.TemporaryDirectory() as folder, busy_cores(usable_cores() if busy else 0):
                run = play(Path(folder), asked.rounds, environment)
                tables.add((run / "metrics.csv").read_bytes())
                # The first rounds make what stays.
                seconds[kind] += pl.read_csv(run / "timings.csv")["seconds"].to_list()[2:]
    found = {kind: statistics.median(values) for kind, values in seconds.items()}
    report(
        f"a round alone {found['alone']:.3f} s, {usable_cores()} cores, {len(tables)} kind of bits",
        [
            ("beside a busy process a core / alone", found["beside"] / found["alone"], 4.0),
            ("alone, bounded / as libgomp spins", found["alone"] / found["alone, spinning"], 1.05),
        ],
    )


def play(folder: Path, rounds: int, environment: dict[str, str]) -> Path:
    """One run of the default in a process of its own; returns its directory."""
    words = ["fit", "--rounds", str(rounds), "--evaluation.tasks", "1", "--output", str(folder)]
    clean = {name: value for name, value in os.environ.items() if name not in (*BOUNDS, "OMP_NUM_THREADS")}
    command = [sys.executable, "-m", "obbo_lightning", *words]
    subprocess.run(command, env={**clean, **environment}, check=True, capture_output=True)
    (run,) = folder.glob("*/*")
    return run


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """So many processes that compute and never wait."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
