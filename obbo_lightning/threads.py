"""Number of threads of a process, and a bound on how long they spin, which must be set before torch is imported."""

import contextlib
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# A waiting OpenMP thread spins before it sleeps. Beside other work it takes the core that the other thread needs: a
# round of the default took 50 times as long. Too small a bound lets threads sleep between two operations.
BOUNDS = {"GOMP_SPINCOUNT": "80000", "KMP_BLOCKTIME": "1"}
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def bound_spinning() -> None:
    """Bound how long OpenMP threads spin, in this process and in those that it starts; keeps variables that are set.

    It has an effect before torch is imported; the command line calls it. Call it first in a script of your own.
    """
    for variable, bound in BOUNDS.items():
        os.environ.setdefault(variable, bound)


def take_threads(asked: int | str = "auto", processes: int = 1) -> int:
    """Set the number of torch threads of this process, and return it.

    It determines the order in which sums are rounded: a run records it, and a resume uses it again. ``auto`` is
    OMP_NUM_THREADS where it is set, else this process's share of the cores.
    """
    import torch

    if asked != "auto" and (not isinstance(asked, int) or isinstance(asked, bool) or asked < 1):
        raise ValueError(f"threads must be auto, or an integer of at least 1, got {asked!r}")
    threads = share_of_cores(processes) if asked == "auto" else int(asked)
    torch.set_num_threads(threads)
    if processes > 1:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # otherwise Lightning divides the cores itself
    return threads


def share_of_cores(processes: int = 1) -> int:
    """Return what ``auto`` means: a count of cores, not a measurement, so that it is the same every time."""
    if os.environ.get("OMP_NUM_THREADS"):
        return _initial_torch_threads()
    return max(1, min(_initial_torch_threads(), usable_cores()) // processes)


def usable_cores() -> int:
    """Return the number of cores that this process may run on, limited by the CPU quota of its control group."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([allowed, *_quotas()])))


@cache
def _initial_torch_threads() -> int:
    """Return torch's initial number, which respects OMP_NUM_THREADS and leaves out hyperthreads."""
    import torch

    return torch.get_num_threads()


def _quotas() -> Iterator[float]:
    """Yield the CPU quotas, in cores, of the control groups (version 2) of this process, where Linux limits them."""
    with contextlib.suppress(OSError, ValueError):
        here = CGROUPS / OWN_CGROUPS.read_text().partition("0::/")[2].strip()
        for file in (folder / "cpu.max" for folder in (here, *here.parents)):
            quota, period = file.read_text().split() if file.is_file() else ("max", "")
            if quota != "max":
                yield float(quota) / float(period)
