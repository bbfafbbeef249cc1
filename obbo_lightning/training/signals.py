"""How a run is asked to stop: after the round, with a checkpoint; asked twice, at once."""

import signal
import threading
from types import FrameType
from typing import Any

# Somebody's, a cluster's, a terminal that is closed, and the one that schedulers send before the time is over.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Stopped(Exception):
    """A signal ended the run after a complete round and its checkpoint."""

    def __init__(self, signum: int, rounds: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} after round {rounds}")
        self.signum = signum


class StopSignals:
    """Remembers signals that ask to stop until the round is over."""

    def __init__(self) -> None:
        self.came = 0
        self.rounds = 0
        self._handlers: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """From now on; other threads than the main one are sent no signals."""
        if threading.current_thread() is threading.main_thread():
            hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN  # nohup wants it to be ignored
            heard = [n for n in STOPPING if n != signal.SIGHUP or hangs_up]
            self._handlers = {n: signal.signal(n, self._remember) for n in heard}

    def give_back(self) -> None:
        """To whoever handled them before; where Lightning has done so already its own must not come back.

        They would keep its Trainer, and with it all data of a run, for as long as the process lives.
        """
        for signum, handler in self._handlers.items():
            if signal.getsignal(signum) == self._remember:
                signal.signal(signum, handler)
        self._handlers = {}

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        if self.came:
            raise Stopped(signum, self.rounds)
        self.came = signum
