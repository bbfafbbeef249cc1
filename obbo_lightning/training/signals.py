"""How a run is asked to stop: after the round, with a checkpoint; asked twice, at once."""

import signal
import threading
from types import FrameType
from typing import Any


class Stopped(Exception):
    """A signal ended the run after a complete round and its checkpoint."""

    def __init__(self, signum: int, rounds: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} after round {rounds}")
        self.signum = signum


class StopSignals:
    """Remembers SIGINT and SIGTERM until the round is over."""

    def __init__(self) -> None:
        self.came = 0
        self.rounds = 0
        self._handlers: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """From now on; other threads than the main one are sent no signals."""
        if threading.current_thread() is threading.main_thread():
            self._handlers = {n: signal.signal(n, self._remember) for n in (signal.SIGINT, signal.SIGTERM)}

    def give_back(self) -> None:
        """To whoever handled them before."""
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
        self._handlers = {}

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        if self.came:
            raise Stopped(signum, self.rounds)
        self.came = signum
