"""Measure the start-up time of the program: python -m benchmarks.start [--repeats N].

Every action is a new process; the actions alternate, and medians are compared with upper bounds.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable

from benchmarks.interleaved import medians, report

ACTIONS = {
    "import torch": ["-c", "import torch"],
    "import lightning": ["-c", "import lightning"],
    "obbo --help": ["-m", "obbo_lightning", "--help"],
    "a wrong command": ["-m", "obbo_lightning", "fitt"],
    "a wrong flag of fit": ["-m", "obbo_lightning", "fit", "--seedd", "3"],
    "import obbo_lightning; OBBO()": ["-c", "import obbo_lightning; obbo_lightning.OBBO()"],
    "one round of fit": ["-m", "obbo_lightning", "fit", "--rounds", "1", "--evaluation.tasks", "1"],
}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = medians({name: starter(words, folder) for name, words in ACTIONS.items()}, asked.repeats)
    torch, lightning = found["import torch"], found["import lightning"]
    rows: list[tuple[str, float, float | None]] = [
        ("obbo --help, seconds", found["obbo --help"], 0.5),
        ("a wrong command, seconds", found["a wrong command"], 0.5),
        ("a wrong flag of fit / import torch", found["a wrong flag of fit"] / torch, 1.3),
        ("import obbo_lightning; OBBO() - import torch, seconds", found["import obbo_lightning; OBBO()"] - torch, 0.3),
        ("one round of fit / import lightning", found["one round of fit"] / lightning, 1.25),
    ]
    report(f"import torch {torch:.2f} s, import lightning {lightning:.2f} s", rows)


def starter(words: list[str], folder: str) -> Callable[[], object]:
    """Return a function that starts Python with these arguments."""
    return lambda: subprocess.run([sys.executable, *words], cwd=folder, capture_output=True)


if __name__ == "__main__":
    main()
