"""What a run leaves behind of each lane, round by round, without a run."""

from types import SimpleNamespace

import numpy as np
import polars as pl
import torch
from obbo_lightning.training.lanes import LaneRecorder

from obbo_lightning import OBBO, OnlineBilevelModule
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.streams.quadratic import QuadraticTasks


def pass_by(recorder, module, rounds):
    for t in rounds:
        step = SimpleNamespace(
            hypergradient=torch.tensor([[3.0, 4.0], [0.0, float(t)], [1.0, 0.0]]),
            regret={"euclidean": torch.tensor([1.0, 2.0, 3.0]) * t},
        )
        module.played = SimpleNamespace(step=step)
        recorder.on_train_batch_end(SimpleNamespace(global_step=t), module, None, None, t - 1)


def test_regrets_of_every_100th_and_of_the_last_round_also_after_a_resume(tmp_path):
    stream = QuadraticTasks(lanes=3, outer_dim=2)
    module = OnlineBilevelModule(stream.problem, OBBO(), stream.initial_outer())
    names = pl.DataFrame({"ticker": ["=a", "b", "c"]})
    first, second = (LaneRecorder(RunDirectory(tmp_path), names) for _ in range(2))
    pass_by(first, module, range(1, 131))
    second.load_state_dict(first.state_dict())
    pass_by(second, module, range(131, 251))
    second.write(module, {"test_loss": [0.5, 0.25, 0.125, 0.0, 0.75, 0.375]})  # two tasks
    with np.load(tmp_path / "lanes.npz") as lanes:
        assert lanes["rounds"].tolist() == [100, 200, 250]
        assert lanes["regret"].tolist() == [[t, 2 * t, 3 * t] for t in (100, 200, 250)]
    events = pl.read_csv(tmp_path / "events.csv")
    assert events["ticker"].to_list() == ["'=a", "b", "c"]  # no formula
    assert events.columns == ["ticker", "regret", "gradient_norm", "test_loss"]  # λ has two numbers a lane
    assert events["regret"].to_list() == [250.0, 500.0, 750.0]
    assert events["gradient_norm"].to_list() == [5.0, 250.0, 1.0]
    assert events["test_loss"].to_list() == [0.25, 0.5, 0.25]


def test_a_last_round_that_is_kept_already_is_kept_once(tmp_path):
    stream = QuadraticTasks(lanes=3, outer_dim=2)
    module = OnlineBilevelModule(stream.problem, OBBO(), stream.initial_outer())
    recorder = LaneRecorder(RunDirectory(tmp_path), pl.DataFrame({"ticker": ["a", "b", "c"]}))
    pass_by(recorder, module, range(1, 201))
    recorder.write(module, {})
    with np.load(tmp_path / "lanes.npz") as lanes:
        assert lanes["rounds"].tolist() == [100, 200]
        assert lanes["regret"].shape == (2, 3)


def test_a_run_that_is_resumed_at_its_end_has_its_last_round_and_a_lane_of_one_number_has_its_weight(tmp_path):
    stream = QuadraticTasks(lanes=3, outer_dim=1)
    module = OnlineBilevelModule(stream.problem, OBBO(), torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64))
    names = pl.DataFrame({"ticker": ["a", "b", "c"]})
    first, second = (LaneRecorder(RunDirectory(tmp_path), names) for _ in range(2))
    pass_by(first, module, range(1, 131))
    second.load_state_dict(first.state_dict())
    second.write(module, {"test_loss": []})
    with np.load(tmp_path / "lanes.npz") as lanes:
        assert lanes["rounds"].tolist() == [100, 130]
    events = pl.read_csv(tmp_path / "events.csv")
    assert events.columns == ["ticker", "weight", "regret", "gradient_norm"]  # no test tasks
    assert events["weight"].to_list() == [1.0, 2.0, 3.0]
    assert events["regret"].to_list() == [130.0, 260.0, 390.0]
    assert events["gradient_norm"].to_list() == [5.0, 130.0, 1.0]
    assert second.regret is not first.regret
