"""How many threads a process may use, and that they do not wait for each other by spinning.

Importing this does not import torch: bounds on spinning must be set before torch is loaded.
"""

import os
from functools import cache
from pathlib import Path

# A thread of OpenMP that waits for another one spins for a while before it sleeps, beside other work on the very core
# that the other one needs: a round of the default took 50 times as long. A bound costs nothing on an idle machine. Too
# small a one lets threads sleep between two operations, and beside other work it takes long to wake them.
BOUNDS = {"GOMP_SPINCOUNT": "80000", "KMP_BLOCKTIME": "1"}
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def bound_spinning() -> None:
    """Bound how long the threads of OpenMP spin, in this process and in those that it starts; what is set stays.

    It works before torch is imported, and `obbo` does it. In a script of your own, begin with

    >>> from obbo_lightning.threads import bound_spinning
    >>> bound_spinning()
    """
    for variable, bound in BOUNDS.items():
        os.environ.setdefault(variable, bound)


def take_threads(asked: int | str = "auto", processes: int = 1) -> int:
    """Let torch compute with so many threads in this process; returns the number.

    The number decides in which order sums are rounded: a run records it, and a resume asks for it again.

    Args:
        asked: how many; ``auto``: OMP_NUM_THREADS where it is set, else this process's share of the cores.
        processes: how many processes of this machine share the cores.
    """
    import torch

    if asked != "auto" and (not isinstance(asked, int) or isinstance(asked, bool) or asked < 1):
        raise ValueError(f"threads must be auto, or an integer of at least 1, got {asked!r}")
    threads = share_of_cores(processes) if asked == "auto" else int(asked)
    torch.set_num_threads(threads)
    if processes > 1:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # Lightning divides the cores by itself where it is not set
    return threads


def share_of_cores(processes: int = 1) -> int:
    """What ``auto`` means: a count of cores, never a measurement, so that it is the same every time."""
    if os.environ.get("OMP_NUM_THREADS"):
        return _torch_began_with()
    return max(1, min(_torch_began_with(), usable_cores()) // processes)


def usable_cores() -> int:
    """Cores that this process may run on, and no more than its control group may use of them in a second."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([allowed, *_quotas()])))


@cache
def _torch_began_with() -> int:
    """Torch's own number, which knows OMP_NUM_THREADS and leaves out hyperthreads; before a run has set another."""
    import torch

    return torch.get_num_threads()


def _quotas() -> list[float]:
    """CPU seconds a second of the control groups that this process is in, where Linux limits them."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return []
    found = []
    for _, controllers, place in (line.split(":", 2) for line in lines):
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = [CGROUPS] if not controllers else [CGROUPS / controllers, CGROUPS / "cpu"]
        for mount in mounts:
            here = mount / place.strip("/")
            found += [quota for folder in (here, *here.parents) if (quota := _quota(folder)) is not None]
    return found


def _quota(folder: Path) -> float | None:
    """Of one control group: ``cpu.max`` of version 2, or the two files of version 1; None where there is no limit."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return float(quota) / float(period) if quota not in ("max", "-1") else None
    except (OSError, ValueError):
        return None
