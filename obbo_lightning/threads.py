"""Threads that do not wait for each other by spinning. Nothing here imports torch: it must not be loaded before."""

import os

# A thread of OpenMP that waits for another one spins for a while before it sleeps, beside other work on the very core
# that the other one needs: a round of the default took 50 times as long. A bound costs nothing on an idle machine.
BOUNDS = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}


def bound_spinning() -> None:
    """Bound how long the threads of OpenMP spin, in this process and in those that it starts; what is set stays.

    It works before torch is imported, and `obbo` does it. In a script of your own, begin with

    >>> from obbo_lightning.threads import bound_spinning
    >>> bound_spinning()
    """
    for variable, bound in BOUNDS.items():
        os.environ.setdefault(variable, bound)
