"""Signals that ask a run to stop."""

import signal
import threading

import pytest

from obbo_lightning.training.signals import Stopped, StopSignals


@pytest.fixture
def signals():
    made = StopSignals()
    yield made
    made.restore()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_signal_is_remembered_until_the_round_is_over_and_twice_is_at_once(name, signals):
    signum = signal.Signals[name]
    outside = signal.signal(signum, signal.default_int_handler)  # nohup may have had it ignored
    signals.listen()
    try:
        signals.rounds = 4
        signal.raise_signal(signum)
        assert signals.received == signum
        other = signal.SIGINT if signum != signal.SIGINT else signal.SIGTERM
        for second in (signum, other):
            with pytest.raises(Stopped, match=f"stopped by {second.name} after round 4") as stop:
                signal.raise_signal(second)
            assert stop.value.signum == second
        assert signals.received == signum
        signals.restore()
        assert signal.getsignal(signum) is signal.default_int_handler
    finally:
        signals.restore()
        signal.signal(signum, outside)


def test_a_signal_is_raised_at_once_where_no_round_is_running(signals):
    signals.listen()
    signals.raise_at_once = True
    with pytest.raises(Stopped, match="stopped by SIGTERM after round 0"):
        signal.raise_signal(signal.SIGTERM)


def test_under_nohup_a_closed_terminal_is_ignored(signals):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    signals.listen()
    try:
        signal.raise_signal(signal.SIGHUP)
        assert signals.received == 0
    finally:
        signals.restore()
        signal.signal(signal.SIGHUP, before)


def test_another_thread_does_not_listen_and_a_later_handler_stays(signals):
    before, failed = signal.getsignal(signal.SIGUSR1), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", failed.append)
        thread = threading.Thread(target=signals.listen)
        thread.start()
        thread.join()
    assert failed == []
    assert signal.getsignal(signal.SIGUSR1) is before
    signals.listen()
    try:
        signal.signal(signal.SIGUSR1, signal.default_int_handler)  # of somebody else, from now on
        signals.restore()
        assert signal.getsignal(signal.SIGUSR1) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGUSR1, before)
