"""Measure the effect of the step size: python -m benchmarks.sensitivity CONFIG [--seeds 0 1] [--flags …].

Runs OBBO on one stream over two decades of a fixed α, in the geometry of each parameter group and in the Euclidean one,
and over two decades of `scale` with `lr: auto`. Prints the mean of the prequential metric over all rounds and seeds as
a Markdown table and writes it as a CSV file (``--output``).
"""

import argparse
import contextlib
import io
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from obbo_lightning import cli

DECADES = (0.1, 0.3, 1.0, 3.0, 10.0)  # factors of the middle value
SCALES = (0.03, 0.1, 0.3, 1.0, 3.0)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="configuration: a file, or the name of a shipped one")
    parser.add_argument("--alpha", type=float, default=1.0, help="middle of the two decades, the groups' own geometry")
    parser.add_argument("--euclidean", type=float, default=0.1, help="the same for the Euclidean geometry")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--output", type=Path, help="a CSV file")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="flags of every run")
    asked = parser.parse_args()
    rows = []
    for kind, value, flags in settings(asked.alpha, asked.euclidean):
        shared = [*asked.flags, *flags, "--config", asked.config]
        scores = [mean_score([*shared, "--seed", str(seed)]) for seed in asked.seeds]
        rows.append({"step": kind, "value": value, "mean": statistics.fmean(scores), "seeds": len(scores)})
        print(f"| {kind} | {value:g} | {rows[-1]['mean']:.4f} |", flush=True)
    if asked.output:
        pl.DataFrame(rows).write_csv(asked.output)


def settings(alpha: float, euclidean: float) -> Iterator[tuple[str, float, list[str]]]:
    """Yield each setting: its name, its value, and its flags."""
    for factor in DECADES:
        yield "alpha, natural", alpha * factor, ["--algorithm.lr", str(alpha * factor)]
    for factor in DECADES:
        flags = ["--algorithm.geometry", "euclidean", "--algorithm.lr", str(euclidean * factor)]
        yield "alpha, euclidean", euclidean * factor, flags
    for scale in SCALES:
        yield "scale", scale, ["--algorithm.scale", str(scale)]


def mean_score(flags: list[str]) -> float:
    """Run `fit` and return the mean of the prequential metric over all rounds."""
    with tempfile.TemporaryDirectory() as folder:
        quiet = ["--evaluation.baselines", "false", "--trainer.enable_progress_bar", "false", "--output", folder]
        with contextlib.redirect_stdout(io.StringIO()):
            if cli.main(["fit", *flags, *quiet]):
                raise SystemExit(f"a run failed: {' '.join(flags)}")
        (summary,) = (json.loads(path.read_text()) for path in Path(folder).glob("*/*/summary.json"))
    return float(summary[f"prequential_{summary['metric']}"])


if __name__ == "__main__":
    main()
