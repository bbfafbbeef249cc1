"""How a run is asked to stop."""

import signal

import pytest

from obbo_lightning.training.signals import Stopped, StopSignals


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_signal_is_remembered_until_the_round_is_over_and_twice_is_at_once(name):
    signum = signal.Signals[name]
    outside = signal.signal(signum, signal.default_int_handler)  # nohup may have had it ignored
    signals = StopSignals()
    signals.listen()
    try:
        signal.raise_signal(signum)
        assert signals.came == signum
        with pytest.raises(Stopped, match=f"stopped by {name} after round 0"):
            signal.raise_signal(signum)
        signals.give_back()
        assert signal.getsignal(signum) is signal.default_int_handler
    finally:
        signals.give_back()
        signal.signal(signum, outside)


def test_a_run_that_must_not_notice_a_closed_terminal_does_not():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    signals = StopSignals()
    signals.listen()
    try:
        signal.raise_signal(signal.SIGHUP)
        assert signals.came == 0
    finally:
        signals.give_back()
        signal.signal(signal.SIGHUP, before)
