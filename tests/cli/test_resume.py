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


def test_checkpoint_and_devices_are_for_one_run(resumed, capsys):
    resumed.codes = {"a": 143}
    assert cli.main(["resume", "a", "--checkpoint", "c.ckpt", "--devices", "2"]) == 143
    ((_, checkpoint, devices, rounds, data),) = resumed
    assert (str(checkpoint), devices, rounds, data) == ("c.ckpt", 2, None, None)
    for flags in (["--checkpoint", "c.ckpt"], ["--devices", "2"]):
        assert cli.main(["resume", "a", "b", *flags]) == 2
        assert "--checkpoint and --devices are for one RUN_DIR, got several" in capsys.readouterr().err
    assert len(resumed) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--algorithm.lr=3"], "got --algorithm: the other settings of a run decide its results and stay"),
        (["--seed", "3"], "got --seed: the other settings of a run decide its results and stay"),
        (["--data.path"], "--data.path needs a value, got none"),
    ],
)
def test_other_settings_cannot_be_changed(flags, message, resumed, capsys):
    assert cli.main(["resume", "a", *flags]) == 2
    assert message in capsys.readouterr().err
    assert not resumed
