"""What it costs that a run knows itself and has one owner: python -m benchmarks.keeping [flags of fit].

Plays a run and adds up the time inside of the keeping code: hashes of tables, the manifest with its two syncs, the lock
and the words in state.json. It is compared with the whole run, of the same process in the same seconds, so that what
else the machine does matters little: by a clock on the wall, which knows the waits for the disk, and by the processor's
time, which does not know those for a processor. Clocks around every call are counted as costs, too.

    python -m benchmarks.keeping                                      10,000 rounds of the quadratic stream
    python -m benchmarks.keeping --config fc100 --rounds 20           FC100 as the paper has it
"""

import hashlib
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from obbo_lightning import cli
from obbo_lightning.runs import state, table
from obbo_lightning.training import keeping, run as runs

QUADRATIC = ["--config", "quadratic", "--rounds", "10000"]
SILENT = ["--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu"]


class Clock:
    """Seconds and calls by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.computed: dict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()

    def around(self, owner: Any, function: str, name: str) -> None:
        """Time every call of a function, from now on."""
        setattr(owner, function, self.timed(getattr(owner, function), name))

    def timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The same function with a clock."""

        def call(*given: Any, **named: Any) -> Any:
            began, computed = time.perf_counter(), time.process_time()
            try:
                return function(*given, **named)
            finally:
                self.seconds[name] += time.perf_counter() - began
                self.computed[name] += time.process_time() - computed
                self.calls[name] += 1

        return call


def main(words: Sequence[str]) -> None:
    """Play one run and print a table."""
    clock = Clock()
    for function in ("begin", "on_train_start", "on_save_checkpoint", "conclude"):
        clock.around(keeping.Keeper, function, "manifest and marks")
    clock.around(state, "own", "lock")
    clock.around(state.RunState, "say", "lock")

    def sha256(content: bytes = b"") -> Any:
        found = hashlib.sha256(content)
        return SimpleNamespace(update=clock.timed(found.update, "hash of a row"), hexdigest=found.hexdigest)

    table.hashlib = SimpleNamespace(sha256=sha256)  # type: ignore[assignment, attr-defined]
    clock.around(runs, "fit", "whole run")
    if words and "--help" in words:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        chosen = [*(words or QUADRATIC), *SILENT, "--output", folder]
        if cli.main(["fit", *chosen]):
            sys.exit("the run did not end")
        (run,) = Path(folder).glob("*/*")
        rounds = (run / "metrics.csv").read_text().count("\n") - 1
    whole, computed = clock.seconds.pop("whole run"), clock.computed.pop("whole run")
    print(f"\n{rounds} rounds in {whole:.1f} s, {computed:.1f} s of a processor\n")
    print("| what | calls | seconds | share | of a processor | share |\n|---|---|---|---|---|---|")
    for name in (*clock.seconds, "all"):
        spent, used = (
            found[name] if name in found else sum(found.values()) for found in (clock.seconds, clock.computed)
        )
        print(
            f"| {name} | {clock.calls[name]} | {spent:.3f} | {spent / whole:.2%} | {used:.3f} | {used / computed:.2%} |"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
