"""Memory of this machine, checked before anything is allocated."""

import os
from functools import cache
from pathlib import Path

LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container


def require_memory(name: str, value: object, needed: float) -> None:
    """Refuse a value that needs more than half of the memory by itself: the rest of a run needs the other half.

    >>> require_memory("window", 10**12, 8e15)
    Traceback (most recent call last):
    ValueError: window must fit into the memory of this machine (... GB), got 1000000000000, which needs about 8e+06 GB
    """
    available = memory()
    if needed > available / 2:
        raise ValueError(
            f"{name} must fit into the memory of this machine ({available / 1e9:.3g} GB), got {value!r}, which needs "
            f"about {needed / 1e9:.3g} GB"
        )


@cache
def memory() -> int:
    """Return the bytes that this machine has, or that its control group may use."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in LIMITS:
        try:
            found.append(int(Path(file).read_text()))
        except (OSError, ValueError):  # no such version, or no limit
            continue
    return min(found)
