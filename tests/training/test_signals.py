"""How a run is asked to stop."""

import signal
import threading

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


def test_a_thread_that_is_sent_no_signals_does_not_listen_and_a_handler_of_others_stays():
    before = signal.getsignal(signal.SIGUSR1)
    signals = StopSignals()
    thread = threading.Thread(target=signals.listen)
    with pytest.MonkeyPatch.context() as patch:
        failed = []
        patch.setattr(threading, "excepthook", failed.append)
        thread.start()
        thread.join()
    assert failed == []
    assert signal.getsignal(signal.SIGUSR1) is before
    signals.listen()
    try:
        signal.signal(signal.SIGUSR1, signal.default_int_handler)  # somebody else's, from now on
        signals.give_back()
        assert signal.getsignal(signal.SIGUSR1) is signal.default_int_handler
    finally:
        signals.give_back()
        signal.signal(signal.SIGUSR1, before)
