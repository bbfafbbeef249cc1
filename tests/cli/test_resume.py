"""`resume` of one run and of several."""

import signal

import pytest

from obbo_lightning import cli
from obbo_lightning.training import resume as training


@pytest.fixture
def resumed(monkeypatch):
    """Record what each run is asked for; runs end with the codes in ``codes``, or raise the errors there."""

    class Resumed(list):
        def __init__(self):
            self.codes = {}

        def __call__(self, directory, checkpoint=None, devices=None, rounds=None, data=None):
            self.append((str(directory), checkpoint, devices, rounds, data))
            code = self.codes.get(str(directory), 0)
            if isinstance(code, Exception):
                raise code
            return code

    recorder = Resumed()
    monkeypatch.setattr(training, "resume", recorder)
    return recorder


@pytest.mark.parametrize(
    ("codes", "worst"),
    [
        ({}, 0),
        ({"b": 1}, 1),
        ({"b": ValueError("is finished")}, 2),
        ({"a": 1, "b": ValueError("is finished")}, 2),
        ({"a": KeyError("a defect")}, 2),
    ],
)
def test_all_runs_are_resumed_and_the_worst_code_is_returned(codes, worst, resumed, capsys):
    resumed.codes = codes
    assert cli.main(["resume", "a", "b", "c", "--rounds", "7", "--data.path", "x", "--data.beyond=8"]) == worst
    assert resumed == [(name, None, None, 7, {"path": "x", "beyond": 8}) for name in "abc"]
    printed = capsys.readouterr()
    assert printed.out == "run a\nrun b\nrun c\n"
    assert printed.err.count("\n") == sum(isinstance(code, Exception) for code in codes.values())


def test_signal_ends_all_of_them(resumed):
    resumed.codes = {"b": 128 + signal.SIGTERM}
    assert cli.main(["resume", "a", "b", "c"]) == 143
    assert [one[0] for one in resumed] == ["a", "b"]


def test_checkpoint_and_devices_are_those_of_the_flags(resumed):
    resumed.codes = {"a": 143}
    assert cli.main(["resume", "a", "--checkpoint", "c.ckpt", "--devices", "2"]) == 143
    ((_, checkpoint, devices, rounds, data),) = resumed
    assert (str(checkpoint), devices, rounds, data) == ("c.ckpt", 2, None, None)
