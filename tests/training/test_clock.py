"""Rounds that take much longer than they compute are named, once."""

import pytest
from obbo_lightning.training.clock import RoundClock


class Times:
    """A wall clock and a CPU clock that the test turns."""

    def __init__(self):
        self.wall, self.computed = 100.0, 7.0

    def play(self, clock, rounds, wall, computed, **where):
        for _ in range(rounds):
            clock.begin()
            self.wall, self.computed = self.wall + wall, self.computed + computed
            assert clock.end(**where) == pytest.approx(wall)
            self.wall += 50.0  # between rounds, where a stream may be waited for


@pytest.fixture
def times():
    return Times()


@pytest.fixture
def clock(times):
    return RoundClock(lambda: times.wall, lambda: times.computed)


def test_rounds_that_wait_are_named_once(times, clock, capsys):
    times.play(clock, 30, wall=1.0, computed=0.25)
    said = capsys.readouterr().err
    assert "a round takes 1 s and computes for 0.25 s of them" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("computed", [0.6, 1.0, 2.0])
def test_rounds_that_compute_are_not(times, clock, computed, capsys):
    times.play(clock, 30, wall=1.0, computed=computed)
    assert capsys.readouterr().err == ""


def test_one_slow_round_among_many_is_noise(times, clock, capsys):
    for _ in range(20):
        times.play(clock, 9, wall=1.0, computed=1.0)
        times.play(clock, 1, wall=3.0, computed=1.0)
    assert capsys.readouterr().err == ""


def test_rounds_that_begin_to_wait_later_are_named_too(times, clock, capsys):
    times.play(clock, 50, wall=1.0, computed=1.0)
    assert capsys.readouterr().err == ""
    times.play(clock, 10, wall=1.0, computed=0.2)
    assert "computes for 0.2 s" in capsys.readouterr().err


def test_what_another_device_computes_is_no_waiting(times, clock, capsys):
    times.play(clock, 30, wall=1.0, computed=0.01, on_cpu=False)
    assert capsys.readouterr().err == ""
