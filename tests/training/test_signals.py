"""Signals that ask a run to stop."""

import signal
import threading

import pytest

from obbo_lightning.training.signals import Stopped, StopSignals

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@pytest.fixture
def signals():
    before = {signum: signal.signal(signum, lambda *arguments: None) for signum in SIGNALS}
    yield StopSignals()
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_is_remembered_until_the_round_is_over_and_twice_is_at_once(signum, signals):
    signals.listen()
    signals.rounds = 4
    signal.raise_signal(signum)
    assert signals.received == signum
    for second in SIGNALS:
        with pytest.raises(Stopped, match=f"stopped by {second.name} after round 4") as stop:
            signal.raise_signal(second)
        assert stop.value.signum == second
    assert signals.received == signum


def test_a_signal_is_raised_at_once_where_no_round_is_running(signals):
    signals.listen()
    signals.raise_at_once = True
    with pytest.raises(Stopped, match="stopped by SIGTERM after round 0"):
        signal.raise_signal(signal.SIGTERM)


def test_under_nohup_a_closed_terminal_is_ignored(signals):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    signals.listen()
    signal.raise_signal(signal.SIGHUP)
    assert signals.received == 0


def test_handlers_are_restored_where_nobody_has_replaced_this_one_since(signals):
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    signals.listen()
    signal.signal(signal.SIGUSR1, signal.default_int_handler)  # of somebody else, from now on
    signals.restore()
    assert {n: signal.getsignal(n) for n in SIGNALS} == {**before, signal.SIGUSR1: signal.default_int_handler}


def test_another_thread_does_not_listen(signals):
    before, failed = signal.getsignal(signal.SIGUSR1), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", failed.append)
        thread = threading.Thread(target=signals.listen)
        thread.start()
        thread.join()
    assert failed == []
    assert signal.getsignal(signal.SIGUSR1) is before
