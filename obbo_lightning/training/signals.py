"""Stop signals: the first one stops a run after the current round and saves it, a second one stops it at once."""

import signal
import threading
from types import FrameType
from typing import Any

# From a terminal, a cluster, a terminal that is closed, and the one that schedulers send before the time is over.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Stopped(Exception):
    """A signal ended the run after a complete round and its checkpoint."""

    def __init__(self, signum: int, rounds: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} after round {rounds}")
        self.signum = signum


class StopSignals:
    """Handler that remembers a signal until the round is over."""

    def __init__(self) -> None:
        self.received = 0  # the signal
        self.rounds = 0  # that are finished
        self.raise_at_once = False  # because no round is running
        self._handlers: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """Install the handler; only the main thread receives signals."""
        if threading.current_thread() is threading.main_thread():
            hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN  # nohup ignores it
            heard = [n for n in STOP_SIGNALS if n != signal.SIGHUP or hangs_up]
            self._handlers = {n: signal.signal(n, self._handle) for n in heard}

    def restore(self) -> None:
        """Restore the handlers from before, where nobody has replaced this one since."""
        for signum, handler in self._handlers.items():
            if signal.getsignal(signum) == self._handle:
                signal.signal(signum, handler)
        self._handlers = {}

    def raise_while_waiting(self) -> None:
        """Raise at the next signal, because no round is running; at once, if one came since the last round ended."""
        self.raise_at_once = True
        if self.received:
            raise Stopped(self.received, self.rounds)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.received or self.raise_at_once:
            raise Stopped(signum, self.rounds)
        self.received = signum
