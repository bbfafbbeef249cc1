"""How much a step size matters: python -m benchmarks.steps CONFIG [--seeds 0 1] [--flags --data.path FILE …].

OBBO on one stream, over two decades of a fixed α in the geometry of each block and in the Euclidean one, and over two
decades of `scale` with `lr: auto`. The mean of the stream's metric over all rounds and seeds, as a Markdown table and
as a CSV file (``--output``).
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

DECADES = (0.1, 0.3, 1.0, 3.0, 10.0)  # times the middle
SCALES = (0.03, 0.1, 0.3, 1.0, 3.0)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="of the stream: a file, or the name of a shipped one")
    parser.add_argument("--alpha", type=float, default=1.0, help="middle of the two decades, natural geometry")
    parser.add_argument("--euclidean", type=float, default=0.1, help="the same for the Euclidean one")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--output", type=Path, help="a CSV file")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="of every run")
    asked = parser.parse_args()
    rows = []
    for kind, value, flags in settings(asked.alpha, asked.euclidean):
        scores = [play([*asked.flags, *flags, "--config", asked.config, "--seed", str(seed)]) for seed in asked.seeds]
        rows.append({"step": kind, "value": value, "mean": statistics.fmean(scores), "seeds": len(scores)})
        print(f"| {kind} | {value:g} | {rows[-1]['mean']:.4f} |", flush=True)
    if asked.output:
        pl.DataFrame(rows).write_csv(asked.output)


def settings(alpha: float, euclidean: float) -> Iterator[tuple[str, float, list[str]]]:
    """What is played: what it is called, its value, and the flags for it."""
    for factor in DECADES:
        yield "alpha, natural", alpha * factor, ["--algorithm.lr", str(alpha * factor)]
    for factor in DECADES:
        flags = ["--algorithm.geometry", "euclidean", "--algorithm.lr", str(euclidean * factor)]
        yield "alpha, euclidean", euclidean * factor, flags
    for scale in SCALES:
        yield "scale", scale, ["--algorithm.scale", str(scale)]


def play(flags: list[str]) -> float:
    """The mean of the stream's metric over all rounds of one run."""
    with tempfile.TemporaryDirectory() as folder:
        quiet = ["--evaluation.baselines", "false", "--trainer.enable_progress_bar", "false", "--output", folder]
        with contextlib.redirect_stdout(io.StringIO()):
            if cli.main(["fit", *flags, *quiet]):
                raise SystemExit(f"a run failed: {' '.join(flags)}")
        (summary,) = (json.loads(path.read_text()) for path in Path(folder).glob("*/*/summary.json"))
    return float(summary[f"stream_{summary['metric']}"])


if __name__ == "__main__":
    main()
