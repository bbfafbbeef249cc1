"""The progress bar."""

from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from obbo_lightning.training.progress import RoundProgress


@pytest.fixture
def make_bar(tmp_path):
    with (tmp_path / "screen").open("w") as screen:
        yield lambda: RoundProgress("loss", Console(file=screen))


def make_trainer(**options):
    usual = {"is_global_zero": True, "num_training_batches": 200, "global_step": 3, "callback_metrics": {}}
    return SimpleNamespace(**{**usual, **options})


def test_the_bar_has_the_round_the_recent_mean_the_last_test_score_and_the_regret(make_bar):
    bar, trainer = make_bar(), make_trainer()
    bar.on_train_start(trainer, None)
    (shown,) = bar._progress.tasks
    assert (shown.completed, shown.total) == (3, 200)
    for trainer.global_step in range(4, 104):
        t = trainer.global_step
        metrics = {"round": t, "loss": float(t), "regret/euclidean": 10.0 * t}
        bar.on_train_batch_end(trainer, None, {"metrics": metrics}, None, t)
    assert shown.completed == 103
    assert shown.fields["text"].startswith("loss 78.5  regret 1.03e+03  ")  # the mean of rounds 54 to 103
    trainer.callback_metrics["test_loss"] = torch.tensor(0.5)  # the evaluation of the last round comes after the bar
    bar.teardown(trainer, None, "fit")
    assert "  test 0.5  regret" in shown.fields["text"]
    assert bar._progress is None
    bar.teardown(trainer, None, "fit")


def test_an_endless_stream_has_no_total_and_an_exception_stops_the_bar(make_bar):
    bar, trainer = make_bar(), make_trainer(num_training_batches=float("inf"))
    bar.on_train_start(trainer, None)
    assert bar._progress.tasks[0].total is None
    bar.on_exception(trainer, None, RuntimeError())
    assert bar._progress is None


def test_other_processes_than_the_first_show_nothing(make_bar):
    bar, trainer = make_bar(), make_trainer(is_global_zero=False)
    bar.on_train_start(trainer, None)
    bar.on_train_batch_end(trainer, None, {"metrics": {}}, None, 0)
    assert bar._progress is None
