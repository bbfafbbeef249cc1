import lightning as L
import pytest

from obbo_lightning.config.layers import parse_arguments
from obbo_lightning.config.schema import complete_config
from obbo_lightning.config.trainer import callback_entries
from obbo_lightning.training.run import make_trainer

MINE = """
import lightning as L
class Mine(L.Callback):
    '''Mine.'''
    def __init__(self, every: int = 3):
        self.every = every
"""


def settings_of(callbacks):
    return complete_config(parse_arguments(["--trainer.callbacks", callbacks])[0])


@pytest.mark.parametrize(
    "written",
    [
        "{name: Timer, duration: '00:00:01:00'}",
        "[{class_path: Timer, init_args: {duration: '00:00:01:00'}}]",
        "[{class_path: lightning.pytorch.callbacks.Timer, init_args: {duration: '00:00:01:00'}}]",
    ],
)
def test_a_callback_is_written_like_any_part_or_as_lightning_does(written):
    settings = settings_of(written)
    (entry,) = callback_entries(settings)
    assert entry["duration"] == "00:00:01:00"
    (timer,) = [c for c in make_trainer(settings).callbacks if isinstance(c, L.pytorch.callbacks.Timer)]
    assert timer.time_remaining() == 60.0


def test_a_callback_of_yours_comes_from_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    settings = settings_of("[{name: 'mine.py:Mine', every: 7}]")
    assert callback_entries(settings)[0]["name"] == f"{tmp_path / 'mine.py'}:Mine"
    assert list(settings["sources"]) == [str(tmp_path / "mine.py")]
    (mine,) = [c for c in make_trainer(settings).callbacks if type(c).__name__ == "Mine"]
    assert mine.every == 7


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("Timr", "trainer.callbacks must name a class, got .*did you mean 'Timer'"),
        ("{name: Timer, duratoin: 3}", "trainer.callbacks: Timer takes duration, interval, verbose, got 'duratoin'"),
        ("{name: EarlyStopping, monitor: loss, patience: often}", "trainer.callbacks: patience: Expected"),
        ("{name: EarlyStopping}", "trainer.callbacks: "),
        ("{name: obbo_lightning.OBBO}", "trainer.callbacks must extend Callback"),
        ("3", "trainer.callbacks must be names, each with its settings, got 3"),
        ("{duration: 3}", "trainer.callbacks must be names, each with its settings, got"),
    ],
)
def test_a_mistake_in_a_callback_is_one_line(written, said):
    with pytest.raises(ValueError, match=said) as refusal:
        settings_of(written)
    assert "\n" not in str(refusal.value)
