"""`resume` of one run and of several."""

import signal
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from obbo_lightning import cli
from obbo_lightning.training import resume as training


@pytest.fixture
def resumed(monkeypatch):
    """Record what each run is asked for; its ``side_effect`` has the codes with which runs end, or their errors."""
    monkeypatch.setattr(training, "resume", Mock(return_value=0))
    return training.resume


@pytest.mark.parametrize(
    ("codes", "worst"),
    [
        ([0, 0, 0], 0),
        ([0, 1, 0], 1),
        ([0, ValueError("is finished"), 0], 2),
        ([1, ValueError("is finished"), 0], 2),
        ([KeyError("a defect"), 0, 0], 2),
    ],
)
def test_all_runs_are_resumed_and_the_worst_code_is_returned(codes, worst, resumed, capsys):
    resumed.side_effect = codes
    assert cli.main(["resume", "a", "b", "c", "--rounds", "7", "--data.path", "x", "--data.beyond=8"]) == worst
    asked = {"rounds": 7, "data": {"path": "x", "beyond": 8}}
    assert resumed.call_args_list == [call(Path(name), **asked) for name in "abc"]
    printed = capsys.readouterr()
    assert printed.out == "run a\nrun b\nrun c\n"
    assert printed.err.count("\n") == sum(isinstance(code, Exception) for code in codes)


def test_signal_ends_all_of_them(resumed):
    resumed.side_effect = [0, 128 + signal.SIGTERM]
    assert cli.main(["resume", "a", "b", "c"]) == 143
    assert resumed.call_count == 2


def test_checkpoint_and_devices_are_those_of_the_flags(resumed):
    resumed.return_value = 143
    assert cli.main(["resume", "a", "--checkpoint", "c.ckpt", "--devices", "2"]) == 143
    resumed.assert_called_once_with(Path("a"), Path("c.ckpt"), 2, rounds=None, data=None)
