"""What goes on from round to round and from a run to its resume, besides λ: clocks, counts, where solvers start."""

import csv
import json

import lightning as L
import torch
from obbo_lightning.training.recorder import Recorder
from toy import Nonlinear, toy_point, toy_task

from obbo_lightning import OBBO, SOBOW, OnlineBilevelModule, StreamDataModule, Tasks, cli
from obbo_lightning.hypergradients import FixedPoint, InnerState
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.solvers import GradientDescent
from obbo_lightning.training.evaluation import evaluate


def test_a_recorder_goes_on_with_seconds_calls_and_evaluations(tmp_path):
    first, second = (Recorder(RunDirectory(tmp_path), [], "loss", 5, 5) for _ in range(2))
    first.load_state_dict({"untrained": [1.0, 2.0], "tested": [0.5, 0.25], "seconds": 100.0, "oracle_calls": 7})
    first.oracle_calls += 3
    second.load_state_dict(first.state_dict())
    assert (second.untrained, second.tested, second.oracle_calls) == ([1.0, 2.0], [0.5, 0.25], 10)
    assert 100 <= second.seconds_before <= second.state_dict()["seconds"]


def test_a_resumed_run_has_taken_the_seconds_of_all_its_parts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--config", "quadratic", "--rounds", "4", "--checkpoint.every", "2", "--evaluation.tasks", "2"]
    assert cli.main(["fit", *flags, "--evaluation.every", "3"]) == 0
    (run,) = (tmp_path / "runs" / "quadratic").iterdir()
    assert sorted(p.name for p in run.glob("checkpoints/*.ckpt")) == ["round-00000002.ckpt", "round-00000004.ckpt"]
    rows = csv.DictReader((run / "metrics.csv").read_text().splitlines())
    assert [row["round"] for row in rows if row["test_loss"]] == ["3", "4"]
    before = json.loads((run / "summary.json").read_text())
    (run / "summary.json").unlink()
    for file in (run / "checkpoints").glob("round-00000004.*"):
        file.unlink()
    load = Recorder.load_state_dict
    monkeypatch.setattr(Recorder, "load_state_dict", lambda self, s: load(self, {**s, "seconds": s["seconds"] + 5000}))
    assert cli.main(["resume", str(run)]) == 0
    after = json.loads((run / "summary.json").read_text())
    assert after.pop("seconds") > 5000 > before.pop("seconds")
    assert after == before


def test_a_module_judges_from_where_the_first_of_its_tasks_ended(tmp_path):
    algorithm = OBBO(lr=0.05, window=2, inner=GradientDescent(steps=3, lr=0.2), hypergradient=FixedPoint(3, lr=0.2))
    made = OnlineBilevelModule(Nonlinear(), algorithm, toy_point(1), tasks_per_round=2)
    usual = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    one = L.Trainer(**usual, default_root_dir=tmp_path, enable_checkpointing=False, limit_val_batches=0, max_epochs=1)
    one.fit(made, StreamDataModule(Tasks(lambda t: toy_task(lanes=1, seed=t), 10), rounds=3, tasks_per_round=2))
    task = toy_task(lanes=1, seed=99)
    first, second = (evaluate(made.problem, algorithm, made.outer.detach(), task, warm)["loss"] for warm in made.states)
    assert torch.equal(made.evaluate(task)["loss"], first)
    assert not torch.equal(first, second)


def test_a_checkpoint_has_the_inner_variable_and_the_linear_solution_of_every_task():
    made, other = (OnlineBilevelModule(Nonlinear(), SOBOW(), toy_point(2), tasks_per_round=2) for _ in range(2))
    made.states = [InnerState(toy_point(2, seed=n), toy_point(2, seed=10 + n)) for n in range(2)]
    progress = {"current": {"completed": 1}, "total": {"completed": 1}}
    loop = {"epoch_progress": progress, "epoch_loop.batch_progress": {"is_last_batch": True}}
    checkpoint = {"state_dict": {"outer": made.outer}, "global_step": 3, "loops": {"fit_loop": loop}}
    made.on_save_checkpoint(checkpoint)
    other.float()
    other.on_load_checkpoint(checkpoint)
    for mine, theirs in zip(made.states, other.states, strict=True):
        assert torch.equal(mine.inner, theirs.inner)
        assert torch.equal(mine.solve, theirs.solve)
    assert other.judged_from is other.states[0]
    assert other.outer.dtype == torch.float64  # before λ itself is loaded, or it would lose half of its digits
