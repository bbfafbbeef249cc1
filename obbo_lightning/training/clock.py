"""How long a round takes, and how much of that it computes."""

import sys
import time
from collections.abc import Callable

LOOKED_AT = 5.0  # seconds of rounds that are looked at together: single ones are noise
MUCH = 2.0  # times as long as it computes


class RoundClock:
    """Times rounds; where they take much longer than their CPU time, one line says so, once.

    A round that has a core computes all the time, with several threads even more than a second in a second. One that
    does not waits for something: other work on its cores, memory that is swapped, or another process of its run.

    Args:
        wall: the time.
        computed: CPU time of all threads of this process.
    """

    def __init__(
        self, wall: Callable[[], float] = time.perf_counter, computed: Callable[[], float] = time.process_time
    ) -> None:
        self._wall, self._computed = wall, computed
        self._began = (wall(), computed())
        self._rounds, self._seconds, self._busy = 0, 0.0, 0.0
        self._said = False

    def begin(self) -> None:
        """A round begins."""
        self._began = (self._wall(), self._computed())

    def end(self, on_cpu: bool = True) -> float:
        """The seconds since `begin`; what another device computes is no CPU time."""
        seconds, busy = self._wall() - self._began[0], self._computed() - self._began[1]
        self._rounds, self._seconds, self._busy = self._rounds + 1, self._seconds + seconds, self._busy + busy
        if self._seconds >= LOOKED_AT:
            if on_cpu and not self._said and self._seconds > MUCH * self._busy:
                self._say()
            self._rounds, self._seconds, self._busy = 0, 0.0, 0.0
        return seconds

    def _say(self) -> None:
        self._said = True
        each, busy = self._seconds / self._rounds, self._busy / self._rounds
        print(
            f"obbo: a round takes {each:.2g} s and computes for {busy:.2g} s of them: other work may use its cores "
            "(nothing is wrong; it would be faster alone, or with fewer threads: --threads 1)",
            file=sys.stderr,
        )
