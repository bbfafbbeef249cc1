"""What Lightning's users know works: a plain Trainer with its loggers, callbacks and checkpoints."""

import csv
import signal
import warnings
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from toy import F64, Proximal, toy_point, toy_task

from obbo_lightning import (
    OAGD,
    OBBO,
    ExactCheckpoints,
    FewShot,
    OnlineBilevelModule,
    StreamDataModule,
    Tasks,
    cli,
    online,
)
from obbo_lightning.hypergradients import FixedPoint
from obbo_lightning.networks import CNN4
from obbo_lightning.runs.checkpoints import CheckpointError
from obbo_lightning.solvers import GradientDescent
from obbo_lightning.training.evaluation import evaluate

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint"),  # the second trainer has none
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]
INNER = GradientDescent(steps=3, lr=0.2)


def tasks(first=0, length=200):
    return Tasks(lambda t: toy_task(lanes=1, seed=first + t), length)


OURS = OBBO(lr=0.05, window=4, inner=INNER, hypergradient=FixedPoint(3))


def module(algorithm=OURS, **options):
    return OnlineBilevelModule(Warmed(), algorithm, toy_point(1), **options)


class Warmed(Proximal):
    """Rounds start from the last one's inner variable."""

    def initial_inner(self, outer, task):
        return torch.zeros_like(outer)


def data(rounds=20, **options):
    return StreamDataModule(tasks(), rounds, tasks(1000, 5), tasks(2000, 5), **options)


def trainer(tmp_path, **options):
    usual = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    usual |= {"default_root_dir": tmp_path, "plugins": [ExactCheckpoints()], "enable_checkpointing": False}
    usual |= {"max_epochs": 1}
    return L.Trainer(**{**usual, **options})


def outer_after(rounds, algorithm=OURS):
    *_, last = online(Warmed(), algorithm, [tasks()[t] for t in range(rounds)], toy_point(1))
    return last.outer


def judged(made, task, start):
    return evaluate(made.problem, made.algorithm, made.outer.detach(), task, start)["loss"]


def test_a_plain_trainer_plays_the_plain_loop(tmp_path):
    made = module()
    trainer(tmp_path, limit_val_batches=0).fit(made, data())
    assert torch.equal(made.outer.detach(), outer_after(20))


def test_every_round_is_in_the_log_under_its_number(tmp_path):
    logger = CSVLogger(tmp_path)
    made = module()
    one = trainer(tmp_path, logger=logger, log_every_n_steps=1, limit_val_batches=0, callbacks=[LearningRateMonitor()])
    one.fit(made, data(rounds=6))
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
    rounds = [row for row in rows if row["loss"]]
    assert [int(float(row["round"])) for row in rounds] == [1, 2, 3, 4, 5, 6]
    assert [int(row["step"]) for row in rounds] == [1, 2, 3, 4, 5, 6]
    played = list(online(Warmed(), made.algorithm, [tasks()[t] for t in range(6)], toy_point(1)))
    for row, one_round in zip(rounds, played, strict=True):
        assert float(row["loss"]) == float(one_round.loss)  # all digits
        assert float(row["regret/euclidean"]) == float(one_round.regret["euclidean"])
    assert any(row["lr-BregmanProx"] for row in rows)


def test_a_validation_starts_from_the_current_inner_variable(tmp_path):
    """With start: previous a stale inner variable would give another loss."""
    made, seen = module(), []

    class Watch(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            warm = pl_module.states[0]
            expected = [
                evaluate(made.problem, made.algorithm, made.outer.detach(), task, warm)["loss"]
                for task in data().validation
            ]
            seen.append((float(trainer.callback_metrics["validation/loss"]), float(torch.stack(expected).mean())))

    trainer(tmp_path, val_check_interval=7, callbacks=[Watch()], num_sanity_val_steps=0).fit(made, data(rounds=14))
    assert len(seen) == 2
    for logged, expected in seen:
        assert logged == pytest.approx(expected, rel=1e-12)
    assert seen[0][0] != seen[1][0]


def test_test_adapts_although_lightning_is_in_inference_mode(tmp_path):
    made = module()
    one = trainer(tmp_path, limit_val_batches=0)
    one.fit(made, data())
    (found,) = one.test(made, data(), verbose=False)
    losses = [
        evaluate(made.problem, made.algorithm, made.outer.detach(), t, made.states[0])["loss"] for t in data().test
    ]
    assert found["test/loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-12)
    unadapted = [float(made.problem.outer_loss(made.outer, made.states[0].inner, task)) for task in data().test]
    assert found["test/loss"] != pytest.approx(sum(unadapted) / 5, rel=1e-6)


def test_early_stopping_ends_a_stream(tmp_path):
    stop = EarlyStopping("validation/loss", patience=0, min_delta=1e9)
    one = trainer(tmp_path, val_check_interval=5, callbacks=[stop], num_sanity_val_steps=0)
    one.fit(module(), data(rounds=40))
    assert one.global_step == 10


@pytest.mark.parametrize("algorithm", [OURS, OAGD(lr=0.05, window=3, inner=INNER)], ids=["obbo", "oagd"])
def test_a_model_checkpoint_goes_on_bit_for_bit_and_stops_at_max_steps(tmp_path, algorithm):
    saves = ModelCheckpoint(tmp_path / "saves", every_n_train_steps=6, save_top_k=-1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the page on manual optimization among them
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")
        trainer(tmp_path, callbacks=[saves], enable_checkpointing=True, limit_val_batches=0).fit(
            module(algorithm), data(rounds=14)
        )
    path = tmp_path / "saves" / "epoch=0-step=6.ckpt"
    assert path.with_suffix(".sha256").is_file()
    again = module(algorithm)
    one = trainer(tmp_path, limit_val_batches=0, max_steps=18)
    one.fit(again, data(rounds=20), ckpt_path=path)
    assert one.global_step == 18
    assert torch.equal(again.outer.detach(), outer_after(18, algorithm))


def test_a_damaged_model_checkpoint_is_refused(tmp_path):
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=6, save_top_k=-1)
    trainer(tmp_path, callbacks=[saves], enable_checkpointing=True, limit_val_batches=0).fit(module(), data(rounds=6))
    path = tmp_path / "epoch=0-step=6.ckpt"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="damaged"):
        trainer(tmp_path).fit(module(), data(), ckpt_path=path)
    with pytest.raises(CheckpointError, match="damaged"):
        OnlineBilevelModule.load_from_checkpoint(path)


def test_a_checkpoint_needs_nothing_else_to_be_loaded(tmp_path):
    one = trainer(tmp_path, limit_val_batches=0)
    made = module(regret_window=3, on_nonfinite="skip", seed=5)
    one.fit(made, data())
    one.save_checkpoint(tmp_path / "x.ckpt")
    again = OnlineBilevelModule.load_from_checkpoint(tmp_path / "x.ckpt")
    assert torch.equal(again.outer, made.outer)
    assert again.outer.dtype == F64
    assert isinstance(again.problem, Warmed)
    assert again.problem.proximity == 0.5
    assert repr(again.algorithm.hypergradient) == repr(made.algorithm.hypergradient)
    assert (again.seed, again.outer_step.regret_window, again.outer_step.on_nonfinite) == (5, 3, "skip")
    task = data().test[0]
    assert torch.equal(again.evaluate(task)["loss"], made.evaluate(task)["loss"])


def test_a_network_that_was_given_as_an_object_must_be_given_again(tmp_path):
    network = CNN4(ways=2, filters=2, channels=1, image_size=16)
    images = torch.zeros(4, 1, 16, 16)
    task = {
        "support": images,
        "support_labels": torch.arange(4) % 2,
        "query": images,
        "query_labels": torch.arange(4) % 2,
    }
    few_shot = FewShot(network)
    made = OnlineBilevelModule(few_shot, OBBO(inner=GradientDescent(1, 0.1, "outer"), hypergradient=FixedPoint(1)))
    one = trainer(tmp_path)
    one.fit(made, StreamDataModule([task, task]))
    one.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="load_from_checkpoint needs problem="):
        OnlineBilevelModule.load_from_checkpoint(tmp_path / "x.ckpt")
    again = OnlineBilevelModule.load_from_checkpoint(tmp_path / "x.ckpt", problem=few_shot)
    assert torch.equal(again.outer, made.outer)


def test_a_checkpoint_cannot_name_anything_but_parts(tmp_path):
    one = trainer(tmp_path)
    one.fit(module(), data(rounds=2))
    one.save_checkpoint(tmp_path / "x.ckpt")
    state = torch.load(tmp_path / "x.ckpt", weights_only=True)
    state["recipe"]["problem"] = {"part": "subprocess.Popen", "with": {"args": ["touch", str(tmp_path / "touched")]}}
    torch.save(state, tmp_path / "y.ckpt")
    with pytest.raises(ValueError, match=r"may name parts and networks, got 'subprocess.Popen'"):
        OnlineBilevelModule.load_from_checkpoint(tmp_path / "y.ckpt")
    assert not (tmp_path / "touched").exists()


def test_more_epochs_are_said_to_be_one(tmp_path):
    made = module()
    with pytest.warns(UserWarning, match="max_epochs is 2, and a stream is played once"):
        trainer(tmp_path, max_epochs=2, limit_val_batches=0).fit(made, data(rounds=5))
    assert torch.equal(made.outer.detach(), outer_after(5))


def test_a_checkpoint_at_the_end_of_its_stream_says_that_nothing_is_left(tmp_path):
    made = module()
    one = trainer(tmp_path, limit_val_batches=0)
    one.fit(made, data(rounds=5))
    one.save_checkpoint(tmp_path / "end.ckpt")
    with pytest.warns(UserWarning, match="nothing is left to play: the checkpoint is of round 5 of 5"):
        trainer(tmp_path, limit_val_batches=0).fit(module(), data(rounds=5), ckpt_path=tmp_path / "end.ckpt")


class Counter:
    """An iterator that can say where it is."""

    def __init__(self):
        self.t, self.state = 0, {}

    def __iter__(self):
        return self

    def __next__(self):
        self.t += 1
        return tasks()[self.t - 1]

    def state_dict(self):
        self.state["t"] = self.t
        return self.state  # its own: what was saved must not move with it

    def load_state_dict(self, state):
        self.t = state["t"]


def generated():
    return (tasks()[t] for t in range(50))


class Generated:
    """Tasks from a generator, which cannot say where it is."""

    def __iter__(self):
        return generated()


@pytest.mark.parametrize("stream", [Counter, Generated])
@pytest.mark.parametrize("rounds", [None, 20], ids=["endless", "20"])
def test_tasks_that_arrive_one_by_one_are_resumed_where_they_were(tmp_path, stream, rounds):
    arriving = stream()
    first = trainer(tmp_path, max_steps=7, limit_val_batches=0)
    first.fit(module(), StreamDataModule(arriving, rounds))
    first.save_checkpoint(tmp_path / "x.ckpt")
    if stream is Counter:
        state = torch.load(tmp_path / "x.ckpt", weights_only=True)["StreamDataModule"]
        assert state == {"stream": {"t": 7}}  # not what a loader has looked at ahead
    made = module()
    trainer(tmp_path, max_steps=15, limit_val_batches=0).fit(
        made, StreamDataModule(stream(), rounds), ckpt_path=tmp_path / "x.ckpt"
    )
    assert torch.equal(made.outer.detach(), outer_after(15))


@pytest.mark.parametrize("stream", [Counter, Generated])
def test_rounds_of_several_tasks_that_arrive_are_resumed_where_they_were(tmp_path, stream):
    def play(steps, **options):
        made = module(tasks_per_round=2)
        one = trainer(tmp_path, max_steps=steps, limit_val_batches=0)
        one.fit(made, StreamDataModule(stream(), tasks_per_round=2), **options)
        one.save_checkpoint(tmp_path / "x.ckpt")
        return made.outer.detach()

    whole = play(7)
    play(3)
    assert torch.equal(play(7, ckpt_path=tmp_path / "x.ckpt"), whole)


def test_a_generator_that_was_used_is_not_gone_on_with(tmp_path):
    arriving = generated()
    first = trainer(tmp_path, max_steps=3, limit_val_batches=0)
    first.fit(module(), StreamDataModule(arriving))
    first.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="must be made anew to go on with it"):
        trainer(tmp_path).fit(module(), StreamDataModule(arriving), ckpt_path=tmp_path / "x.ckpt")


class Stored(torch.utils.data.Dataset):
    """Neither a list nor an iterator, but tasks can be asked for by number."""

    def __len__(self):
        return 5

    def __getitem__(self, t):
        return tasks()[t]


def test_a_dataset_of_torch_is_a_sequence_of_tasks(tmp_path):
    made = module()
    one = trainer(tmp_path, limit_val_batches=0)
    one.fit(made, StreamDataModule(Stored()))
    assert one.global_step == 5
    assert torch.equal(made.outer.detach(), outer_after(5))


def test_module_and_data_must_agree_on_the_tasks_of_a_round(tmp_path):
    with pytest.raises(ValueError, match="must be the same for the module and its data, got 1 and 2"):
        trainer(tmp_path).fit(module(), data(tasks_per_round=2))


def test_an_outer_variable_without_lanes_is_refused():
    with pytest.raises(
        ValueError, match=r"outer must be a floating-point tensor \[lanes, d\], got torch.float32 \[3\]"
    ):
        OnlineBilevelModule(Warmed(), OURS, torch.zeros(3))


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    class Odd(Counter):
        def state_dict(self):
            return {"t": np.int64(self.t)}

    one = trainer(tmp_path, max_steps=3, limit_val_batches=0)
    one.fit(module(), StreamDataModule(Odd()))
    with pytest.raises(
        CheckpointError, match=r"StreamDataModule.stream.t must hold tensors and plain values .* got int64"
    ):
        one.save_checkpoint(tmp_path / "x.ckpt")
    assert not (tmp_path / "x.ckpt").exists()


def test_a_stream_that_ends_early_ends_the_run(tmp_path):
    one = trainer(tmp_path, limit_val_batches=0)
    one.fit(module(), StreamDataModule(list(generated())[:6].__iter__(), 20))
    assert one.global_step == 6


def test_arriving_tasks_have_no_loader_processes():
    with pytest.raises(ValueError, match="workers must be 0 for a stream that arrives task by task, got 2"):
        StreamDataModule(generated(), workers=2)


@pytest.mark.parametrize("workers", [1, 2])
def test_any_number_of_loader_processes_serves_the_same_rounds(workers):
    served = StreamDataModule(tasks(), 7, tasks_per_round=2, workers=workers).train_dataloader()
    expected = StreamDataModule(tasks(), 7, tasks_per_round=2).train_dataloader()
    for one, other in zip(served, expected, strict=True):
        assert len(one) == len(other) == 2
        assert all(torch.equal(a["x"], b["x"]) for a, b in zip(one, other, strict=True))


RUN = ["fit", "--config", "quadratic", "--rounds", "40", "--evaluation.every", "30", "--evaluation.tasks", "3"]


@pytest.mark.parametrize(
    ("flags", "rounds"),
    [
        (["--trainer.max_steps", "7"], 7),
        (["--trainer.limit_train_batches", "9"], 9),
        (
            ["--trainer.val_check_interval", "5", "--trainer.callbacks",
             "{name: EarlyStopping, monitor: validation/loss, patience: 0, min_delta: 1.0e+9}"],
            10,
        ),
    ],
    ids=["max_steps", "limit_train_batches", "early_stopping"],
)  # fmt: skip
def test_a_run_that_lightning_ends_early_has_its_summary_and_its_last_evaluation(tmp_path, monkeypatch, flags, rounds):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*RUN, *flags]) == 0
    (run,) = (tmp_path / "runs" / "quadratic").iterdir()
    rows = list(csv.DictReader((run / "metrics.csv").read_text().splitlines()))
    assert len(rows) == rounds
    assert rows[-1]["test_loss"] != ""
    assert (run / "summary.json").is_file()
    assert (run / "checkpoints" / f"round-{rounds:08d}.ckpt").is_file()


def test_resume_takes_the_file_of_a_model_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saves = "{name: ModelCheckpoint, every_n_train_steps: 13, save_top_k: -1, dirpath: saves}"
    watch = ["--trainer.val_check_interval", "20", "--checkpoint.every", "20"]
    assert cli.main([*RUN, "--trainer.callbacks", saves, *watch]) == 0
    (run,) = (tmp_path / "runs" / "quadratic").iterdir()
    assert (run / "checkpoints" / "round-00000020.ckpt").is_file()  # after the validation that was due then
    whole = (run / "metrics.csv").read_bytes()
    (run / "summary.json").unlink()
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("dirpath: saves", "dirpath: other"))
    assert cli.main(["resume", str(run), "--checkpoint", "saves/epoch=0-step=13.ckpt"]) == 0
    assert (run / "metrics.csv").read_bytes() == whole


def stopped_in(rounds, monkeypatch):
    """SIGTERM arrives while this round is played."""
    played = OnlineBilevelModule.training_step

    def step(self, *args):
        played(self, *args)
        if self.trainer.global_step == rounds:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(OnlineBilevelModule, "training_step", step)


STOPPING = "[{name: EarlyStopping, monitor: validation/loss, patience: 0, min_delta: 1.0e+9}, "
STOPPING += "{name: ModelCheckpoint, monitor: validation/loss, save_top_k: -1, filename: '{step}'}]"


@pytest.mark.parametrize("at", [5, 10], ids=["first validation", "the one that ends it"])
def test_a_signal_in_the_round_of_a_validation_changes_nothing(tmp_path, monkeypatch, at):
    monkeypatch.chdir(tmp_path)
    flags = [*RUN, "--trainer.callbacks", STOPPING, "--trainer.val_check_interval", "5", "--checkpoint.every", "3"]
    assert cli.main([*flags, "--output", "whole"]) == 0
    with monkeypatch.context() as patched:
        stopped_in(at, patched)
        code = cli.main([*flags, "--output", "stopped"])
    (whole,), (stopped,) = ((tmp_path / name / "quadratic").iterdir() for name in ("whole", "stopped"))
    if at == 5:
        assert code == 143
        assert cli.main(["resume", str(stopped)]) == 0
    assert code in (0, 143)
    assert (stopped / "metrics.csv").read_bytes() == (whole / "metrics.csv").read_bytes()
    kept = [sorted(p.name for p in (run / "checkpoints").glob("step=*.ckpt")) for run in (whole, stopped)]
    assert kept[0] == kept[1] == ["step=10.ckpt", "step=5.ckpt"]


def test_a_run_that_was_over_is_not_played_on_when_it_lost_its_summary(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*RUN, "--trainer.callbacks", STOPPING, "--trainer.val_check_interval", "5"]) == 0
    (run,) = (tmp_path / "runs" / "quadratic").iterdir()
    rows = (run / "metrics.csv").read_bytes()
    (run / "summary.json").unlink()
    assert cli.main(["resume", str(run)]) == 0
    assert (run / "metrics.csv").read_bytes() == rows


def test_a_validation_without_tasks_delays_neither_checkpoints_nor_signals(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from obbo_lightning.streams.quadratic import QuadraticStream\n"
        "class Mine(QuadraticStream):\n"
        "    def __init__(self, seed: int = 0):\n"
        "        super().__init__(seed=seed)\n"
        "        self.validation = ()\n"
    )
    stopped_in(12, monkeypatch)
    own = ["--data", "mine.py:Mine", "--trainer.val_check_interval", "1", "--checkpoint.every", "5"]
    assert cli.main([*RUN, *own]) == 143
    (run,) = (tmp_path / "runs" / "quadratic").iterdir()
    assert [p.name for p in sorted((run / "checkpoints").glob("*.ckpt"))] == [
        "round-00000010.ckpt",
        "round-00000012.ckpt",
    ]


def test_lanes_of_a_run_that_ended_early_have_their_last_regret(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["--data.subset", "40", "--data.subsets", "60", "--data.horizon", "5", "--rounds", "60"]
    assert cli.main(["fit", "--config", "market", *small, "--trainer.max_steps", "20"]) == 0
    (run,) = (tmp_path / "runs" / "market").iterdir()
    events = list(csv.DictReader((run / "events.csv").read_text().splitlines()))
    rows = list(csv.DictReader((run / "metrics.csv").read_text().splitlines()))
    regrets = sorted(float(event["regret"]) for event in events)
    middle = (regrets[len(regrets) // 2 - 1] + regrets[len(regrets) // 2]) / 2
    assert middle == pytest.approx(float(rows[-1]["regret/euclidean"]), rel=1e-12)
