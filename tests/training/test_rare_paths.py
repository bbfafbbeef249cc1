"""What few runs meet: stopped while they wait, limits of the trainer, rows behind a checkpoint, other test tasks."""

import contextlib
import csv
import json
import os
import signal
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.strategies import DDPStrategy
from obbo_lightning.training.played import Played, require_same_past
from obbo_lightning.training.recorder import Recorder
from rich.console import Console
from toy import Nonlinear, toy_point, toy_task

from obbo_lightning import OBBO, ExactCheckpoints, OnlineBilevelModule, Stream, StreamDataModule, Tasks
from obbo_lightning.config.parse import complete_config, parse_arguments
from obbo_lightning.hypergradients import FixedPoint, InnerState
from obbo_lightning.problems.quadratic import Quadratic
from obbo_lightning.runs.checkpoints import CheckpointError, list_checkpoints
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.solvers import GradientDescent
from obbo_lightning.streams.fingerprints import fingerprint_of
from obbo_lightning.training import recorder as recording, resume as resuming, run as running
from obbo_lightning.training.checkpoints import save_checkpoint
from obbo_lightning.training.distributed import _on_cpu, local_processes, lost_rank, require_strategy
from obbo_lightning.training.evaluation import Scores, evaluate
from obbo_lightning.training.progress import RoundProgress
from obbo_lightning.training.resume import Start, _changed, _require_more, _require_unfinished
from obbo_lightning.training.run import build
from obbo_lightning.training.signals import Stopped, StopSignals
from obbo_lightning.training.trainer import make_trainer, require_trainer

ALGORITHM = OBBO(lr=0.05, window=2, inner=GradientDescent(steps=3, lr=0.2), hypergradient=FixedPoint(3, lr=0.2))
QUADRATIC = ["--config", "quadratic", "--trainer.accelerator", "cpu"]


def settings_of(*flags):
    return complete_config(parse_arguments([*QUADRATIC, *map(str, flags)])[0])


def made(seed=0, **options):
    return OnlineBilevelModule(Nonlinear(), ALGORITHM, toy_point(1), seed, **options)


def recorded(folder, test, rounds, checkpoint=None, every=100, saved=2, callbacks=(), blocks=None, judged=(), **more):
    """A run of the toy problem with a recorder: the module and the recorder."""
    module, run = made(), RunDirectory(folder)
    folder.mkdir(exist_ok=True)
    recorder = Recorder(run, test, "loss", every, saved, module.more_columns, blocks)
    usual = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    usual |= {"plugins": [ExactCheckpoints()], "limit_val_batches": 0, "max_epochs": 1, "num_sanity_val_steps": 0}
    one = L.Trainer(**{**usual, **more}, callbacks=[*callbacks, recorder], default_root_dir=folder)
    tasks = Tasks(lambda t: toy_task(lanes=1, seed=t), 50)
    one.fit(module, StreamDataModule(tasks, rounds, judged), ckpt_path=checkpoint)
    return module, recorder


def losses(outer, tasks, warm):
    return [float(evaluate(Nonlinear(), ALGORITHM, outer, task, warm)["loss"]) for task in tasks]


@pytest.mark.filterwarnings("ignore:the test tasks are others than before round 4")
def test_on_other_test_tasks_the_first_outer_variable_is_judged_again_from_the_beginning(tmp_path):
    before, now = ([toy_task(lanes=1, seed=s) for s in seeds] for seeds in ((100, 101), (200, 201, 202)))
    _, first = recorded(tmp_path, before, 4)
    assert first.untrained == losses(toy_point(1), before, InnerState())
    module, second = recorded(tmp_path, now, 6, list_checkpoints(tmp_path / "checkpoints")[-1])
    assert second.untrained == losses(toy_point(1), now, InnerState())
    assert second.tested == losses(module.outer.detach(), now, module.states[0])
    assert second.tested != losses(module.outer.detach(), now, InnerState())
    _, third = recorded(tmp_path, now, 8, list_checkpoints(tmp_path / "checkpoints")[-1])
    assert third.untrained == second.untrained


class End(L.Callback):
    """Ends a run after a round, as EarlyStopping does."""

    def __init__(self, after):
        self.after = after

    def on_train_batch_end(self, trainer, *arguments):
        trainer.should_stop = trainer.global_step >= self.after


def read(path):
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.mark.parametrize(("ended", "rounds", "judged"), [(None, 7, [3, 6, 7]), (5, 7, [3, 5]), (6, 7, [3, 6])])
def test_rows_evaluations_and_checkpoints_come_when_they_are_due_and_at_the_end(ended, rounds, judged, tmp_path):
    test = [toy_task(lanes=1, seed=100)]
    callbacks = [] if ended is None else [End(ended)]
    module, recorder = recorded(tmp_path, test, rounds, every=3, saved=2, callbacks=callbacks)
    played = ended or rounds
    rows, clocks = read(tmp_path / "metrics.csv"), read(tmp_path / "timings.csv")
    assert [int(row["round"]) for row in rows] == [int(row["round"]) for row in clocks] == list(range(1, played + 1))
    assert [int(row["round"]) for row in rows if row["test_loss"]] == judged
    assert [int(row["round"]) for row in clocks if row["evaluation_seconds"]] == judged
    assert (
        float(rows[-1]["test_loss"]) == recorder.tested[0] == losses(module.outer.detach(), test, module.states[0])[0]
    )
    due = [float(row["test_loss"]) for row in rows if row["test_loss"] and int(row["round"]) % 3 == 0][-1]
    assert recorder.due == [due]
    saved = sorted({*range(2, played + 1, 2), played})[-2:]
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == [f"round-{t:08d}.ckpt" for t in saved]
    content = torch.load(list_checkpoints(tmp_path / "checkpoints")[-1], weights_only=True)
    assert content["ended"] == (ended is not None)
    _, unjudged = recorded(tmp_path / "unjudged", [], rounds, every=3, saved=2, callbacks=callbacks)
    names = [path.name for path in list_checkpoints(tmp_path / "unjudged" / "checkpoints")]
    assert names == [f"round-{t:08d}.ckpt" for t in saved]
    assert unjudged.tested == []
    spent = content["callbacks"]["Recorder"]["oracle_calls"]
    assert spent == recorder.oracle_calls == sum(int(row["gradients"]) + int(row["products"]) for row in rows)


def test_a_signal_in_a_round_ends_the_run_after_it_with_a_checkpoint_and_in_the_last_one_does_nothing(tmp_path):
    def interrupt(at):
        callback = L.Callback()
        callback.on_train_batch_start = lambda trainer, *rest: (
            signal.raise_signal(signal.SIGINT) if trainer.global_step == at else None
        )
        return callback

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Stopped, match="stopped by SIGINT after round 3"):
        recorded(tmp_path / "a", [], 7, saved=100, callbacks=[interrupt(2)])
    assert signal.getsignal(signal.SIGINT) is before
    assert [path.name for path in list_checkpoints(tmp_path / "a" / "checkpoints")] == ["round-00000003.ckpt"]
    assert len(read(tmp_path / "a" / "metrics.csv")) == 3
    _, recorder = recorded(tmp_path / "b", [], 3, callbacks=[interrupt(2)])
    assert recorder.row["round"] == 3  # it was the last one: the run is finished


@pytest.mark.parametrize("rounds", [0, 3])
def test_a_signal_while_it_waits_saves_what_was_played(rounds, tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(recording, "save_checkpoint", lambda trainer, folder: saved.append(trainer.global_step))
    recorder = Recorder(RunDirectory(tmp_path), [], "loss", 5, 5)
    recorder.on_wait("tasks")  # nobody asked for anything
    recorder._trainer = SimpleNamespace(global_step=rounds, should_stop=False)
    recorder.on_wait("tasks")
    assert saved == []
    recorder.signals.came = signal.SIGTERM
    with pytest.raises(Stopped, match=f"stopped by SIGTERM after round {rounds}") as stop:
        recorder.on_wait("tasks")
    assert stop.value.signum == signal.SIGTERM
    assert saved == ([rounds] if rounds else [])


def test_a_second_signal_does_not_wait_and_signals_are_given_back():
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    signals = StopSignals()
    signals.listen()
    try:
        signals.rounds = 4
        signal.raise_signal(signal.SIGTERM)
        assert signals.came == signal.SIGTERM
        with pytest.raises(Stopped, match="stopped by SIGINT after round 4"):
            signal.raise_signal(signal.SIGINT)
        assert signals.came == signal.SIGTERM
    finally:
        signals.give_back()
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


# finished, ended, played, rounds, max_steps: whether the run can be played on as it is
FINISHED = [
    ((True, False, 10, 10, None), False),
    ((True, False, 6, 10, 6), False),
    ((True, False, 10, 10, 20), False),
    ((True, False, 10, 10, -1), False),
    ((True, False, 7, 10, None), True),  # its tasks were over before its rounds
    ((True, False, 5, 10, 6), True),
    ((True, True, 7, 10, None), False),
    ((False, False, 10, 10, None), True),
    ((False, True, 7, 10, None), True),
]


@pytest.mark.parametrize(("case", "goes_on"), FINISHED)
def test_a_finished_run_goes_on_only_where_rounds_are_left(case, goes_on):
    finished, ended, played, rounds, limit = case
    run = SimpleNamespace(finished=finished, path="here", summary=SimpleNamespace(name="summary.json"))
    settings = {"rounds": rounds, "trainer": {"max_steps": limit}}
    allowed = contextlib.nullcontext() if goes_on else pytest.raises(ValueError, match="here is finished")
    with allowed:
        _require_unfinished(run, settings, Start(None, played, ended))


# ended, played, rounds, max_steps, val_check_interval, asked: what is said
MORE = [
    ((False, 10, 10, None, None, 20), None),
    ((False, 10, 10, -1, 5, 20), None),
    ((False, 10, 10, 20, 1.0, 20), None),
    ((False, 10, 10, None, None, 10), None),  # killed between its last checkpoint and its summary
    ((False, 6, 10, None, 0.5, 10), None),
    ((True, 7, 10, None, None, 20), "a callback or a limit of its trainer ended it after round 7"),
    ((False, 10, 10, 19, None, 20), "rounds must be at most trainer.max_steps of the run, 19, got 20"),
    ((False, 10, 10, None, 0.5, 20), "rounds must stay 10, of which trainer.val_check_interval is a share"),
    ((False, 10, 10, None, None, 9), "rounds must be at least the 10 that were played, got 9"),
    ((False, 8, 10, None, None, 8), "rounds must be more than the 8 that were played, or 10, got 8"),
]


@pytest.mark.parametrize(("case", "said"), MORE)
def test_more_rounds_are_played_where_that_is_what_would_have_been(case, said):
    ended, played, rounds, limit, interval, asked = case
    settings = {"rounds": rounds, "trainer": {"max_steps": limit, "val_check_interval": interval}}
    allowed = contextlib.nullcontext() if said is None else pytest.raises(ValueError, match=said)
    with allowed:
        _require_more(SimpleNamespace(path="here"), settings, Start(None, played, ended), asked)


class Numbered(Stream):
    """Tasks that hold their numbers, but for some."""

    def __init__(self, length=12, changed=(), origin="1", iterable=False):
        tasks = [{"n": torch.tensor([float(-t if t in changed else t)])} for t in range(length)]
        self.train = iter(tasks) if iterable else Tasks(lambda t: tasks[t], length)
        self.origin = origin

    def source_digests(self):
        return {"numbers": self.origin}


def played_run(folder, rounds, each=1, known=True):
    run = RunDirectory(folder)
    folder.mkdir(exist_ok=True)
    callback, stream = Played(run, Numbered(), each), Numbered()
    trainer = SimpleNamespace(is_global_zero=True, global_step=0)
    callback.on_train_start(trainer, None)
    for t in range(rounds):
        if known:
            callback.see(t, stream.train[t * each : (t + 1) * each])
        trainer.global_step = t + 1
        callback.on_train_batch_end(trainer, None, None, None, t)
    callback.teardown(trainer, None, "fit")
    return run


@pytest.mark.parametrize("iterable", [False, True])
@pytest.mark.parametrize(
    ("each", "played", "changed", "said"),
    [
        (1, 4, [4], None),  # a round behind the checkpoint is played again
        (1, 4, [3], "but they differ from task 4, in round 4 on: 'numbers' has changed"),
        (1, 4, [1], "but they differ from task 2, in round 2 on: 'numbers' has changed"),
        (2, 2, [4], None),
        (2, 2, [3], "but they differ from task 4, in round 2 on"),
        (2, 2, [2], "but they differ from task 3, in round 2 on"),
        (1, 0, [1], None),
    ],
)
def test_the_rounds_before_the_checkpoint_must_be_the_same(each, played, changed, said, iterable, tmp_path):
    run = played_run(tmp_path, 5, each)
    rows = read(run.tasks)
    assert [row["round"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert rows[1]["tasks"] == " ".join(fingerprint_of(Numbered().train[each + i]) for i in range(each))
    now = Numbered(changed=changed, origin="2", iterable=iterable)
    allowed = contextlib.nullcontext() if said is None else pytest.raises(ValueError, match=said)
    with allowed:
        require_same_past(run, now, played, each, changed=False)
    same = Numbered(changed=changed, iterable=iterable)  # nothing says that they are others: they are not drawn again
    require_same_past(run, same, played, each, changed=False)
    with contextlib.nullcontext() if said is None else pytest.raises(ValueError, match=said.partition(":")[0]):
        require_same_past(run, same, played, each, changed=True)


def test_a_stream_that_ends_too_early_and_rounds_that_nobody_wrote_down(tmp_path):
    run = played_run(tmp_path, 5)
    require_same_past(run, Numbered(length=4), 4, 1, changed=True)
    with pytest.raises(ValueError, match=r"data must have the 5 rounds that .* played, and end before task 5"):
        require_same_past(run, Numbered(length=4), 5, 1, changed=True)
    unknown = played_run(tmp_path / "unknown", 5, known=False)
    require_same_past(unknown, Numbered(changed=[2]), 5, 1, changed=True)
    unknown.tasks.unlink()
    callback = Played(unknown, Numbered(), 1)  # a run of a version that did not keep them
    callback.on_train_start(SimpleNamespace(is_global_zero=True, global_step=3), None)
    callback.see(3, [Numbered().train[3]])
    callback.on_train_batch_end(SimpleNamespace(global_step=4), None, None, None, 3)
    callback.teardown(None, None, "fit")
    assert [(row["round"], bool(row["tasks"])) for row in read(unknown.tasks)] == [
        ("1", False), ("2", False), ("3", False), ("4", True),
    ]  # fmt: skip


class Divisible(Nonlinear):
    def select_lanes(self, task, lanes):
        return self, task


@pytest.mark.parametrize(
    ("ranks", "lanes", "tasks", "problem", "said"),
    [
        (1, 1, 3, Nonlinear, None),
        (2, 2, 1, Divisible, None),  # a lane for each
        (2, 5, 1, Divisible, None),
        (3, 2, 1, Divisible, "tasks_per_round must be a multiple of the 3 processes, got 1"),
        (2, 1, 1, Divisible, "tasks_per_round must be a multiple of the 2 processes, got 1"),
        (2, 2, 1, Nonlinear, "tasks_per_round must be a multiple of the 2 processes, got 1"),
        (2, 1, 2, Nonlinear, None),
        (2, 1, 4, Nonlinear, None),
        (2, 8, 3, Divisible, "tasks_per_round must be a multiple of the 2 processes, got 3"),
    ],
)
def test_processes_share_tasks_or_lanes(ranks, lanes, tasks, problem, said):
    trainer = SimpleNamespace(strategy=DDPStrategy(), world_size=ranks)
    allowed = contextlib.nullcontext() if said is None else pytest.raises(ValueError, match=said)
    with allowed:
        require_strategy(trainer, problem(), lanes, tasks)


def test_other_strategies_are_refused_also_for_one_process():
    launcher = type("_MultiProcessingLauncher", (), {})()
    for strategy, ranks, said in (
        (SimpleNamespace(), 1, "trainer.strategy must be auto or ddp, got SimpleNamespace"),
        (DDPStrategy(), 2, "trainer.strategy must be ddp, got one that spawns or forks"),
    ):
        if isinstance(strategy, DDPStrategy):
            strategy._launcher = launcher
        with pytest.raises(ValueError, match=said):
            require_strategy(SimpleNamespace(strategy=strategy, world_size=ranks), Divisible(), 4, 2)


def test_processes_of_this_machine_are_those_of_the_trainer_or_of_torchrun(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert [local_processes(d) for d in (2, "3", [0, 1, 5], "auto", -1, 0, [])] == [2, 3, 3, 1, 1, 1, 1]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert local_processes(1) == local_processes("auto") == 4
    kept = _on_cpu({"a": [torch.ones(1), (1, "x")], "b": None})
    assert kept == {"a": [torch.ones(1), (1, "x")], "b": None}
    assert isinstance(kept["a"][1], tuple)


@pytest.mark.parametrize(
    ("flags", "fit", "judging"),
    [
        ((), 0, 1.0),
        (("--trainer.limit_val_batches", 2), 2, 1.0),
        (("--trainer.val_check_interval", 3), 1.0, 1.0),
        (("--trainer.val_check_interval", 3, "--trainer.limit_val_batches", 0.5), 0.5, 1.0),
    ],
)
def test_a_run_validates_where_it_is_asked_to_and_judging_it_is_on_all_tasks(flags, fit, judging):
    settings = settings_of(*flags)
    trainer = make_trainer(settings)
    assert trainer.limit_val_batches == fit
    assert make_trainer(settings, evaluating=True).limit_val_batches == judging
    if "--trainer.val_check_interval" in flags:
        assert trainer.val_check_interval == 3
        assert make_trainer(settings, evaluating=True).val_check_interval == 1.0
    assert (trainer.max_epochs, trainer.num_sanity_val_steps, trainer.log_every_n_steps) == (1, 0, 1)
    assert trainer.checkpoint_callback is None


@pytest.mark.filterwarnings("ignore:.*(precision|autocast|CUDA|GradScaler)")
@pytest.mark.parametrize(
    ("precision", "allowed"), [(32, False), (64, True), ("bf16-mixed", False), ("16-mixed", False)]
)
def test_a_run_has_all_digits(precision, allowed):
    settings, module = settings_of("--trainer.precision", precision), made()
    said = r"trainer\.precision must be (32 or )?64"
    with contextlib.nullcontext() if allowed else pytest.raises(ValueError, match=said):
        assert require_trainer(settings, module) == 1


def test_validation_and_test_are_on_as_many_tasks_as_the_settings_say():
    settings = settings_of("--evaluation.tasks", 3, "--rounds", 7, "--tasks_per_round", 2)
    module, data, stream = build(settings)
    assert module.tasks_per_round == data.tasks_per_round == 2
    assert data.rounds == 7
    for loader, tasks in ((data.val_dataloader(), stream.validation), (data.test_dataloader(), stream.test)):
        served = list(loader)
        assert len(served) == 3
        assert all(torch.equal(task["b"], tasks[i]["b"]) for i, task in enumerate(served))
    assert len(build(settings_of("--evaluation.tasks", 600)).data.test) == 600
    with pytest.raises(ValueError, match=r"evaluation\.tasks must be at most the 600 test tasks, got 601"):
        build(settings_of("--evaluation.tasks", 601))


def test_two_checkpoints_are_kept_each_with_its_checksum(tmp_path):
    saving = ExactCheckpoints()
    trainer = SimpleNamespace(is_global_zero=True, strategy=saving)
    trainer.save_checkpoint = lambda path: saving.save_checkpoint({"round": trainer.global_step}, path)
    for trainer.global_step in (3, 20, 100):
        save_checkpoint(trainer, tmp_path)
    names = [f"round-{t:08d}.{kind}" for t in (20, 100) for kind in ("ckpt", "sha256")]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize("value", [np.float64(1.0), np.ones(2), object(), {"a": [np.int64(3)]}, ({1: print},)])
def test_what_could_not_be_loaded_again_is_not_saved(value, tmp_path):
    with pytest.raises(CheckpointError, match=r"checkpoint\.mine.* must hold tensors and plain values"):
        ExactCheckpoints().save_checkpoint({"mine": value}, tmp_path / "round-1.ckpt")
    assert os.listdir(tmp_path) == []
    plain = {"mine": [1, 2.0, "x", None, True, {"y": (torch.ones(1), torch.float32, torch.Size([1]))}]}
    ExactCheckpoints().save_checkpoint(plain, tmp_path / "round-1.ckpt")
    assert ExactCheckpoints().load_checkpoint(tmp_path / "round-1.ckpt") == plain


def test_the_bar_has_the_round_the_mean_of_recent_rounds_the_last_test_and_the_regret(tmp_path):
    recorder = Recorder(RunDirectory(tmp_path), [toy_task(lanes=1)] * 2, "loss", 5, 5)
    with (tmp_path / "screen").open("w") as screen:
        bar, module = RoundProgress(recorder, Console(file=screen)), made()
        trainer = SimpleNamespace(is_global_zero=True, num_training_batches=200, global_step=3)
        bar.on_train_start(trainer, module)
        (shown,) = bar._progress.tasks
        assert (shown.completed, shown.total) == (3, 200)
        for t in range(4, 104):
            module.row = {"round": t, "loss": float(t), "regret/euclidean": 10.0 * t}
            bar.on_train_batch_end(trainer, module, None, None, t)
        assert shown.completed == 103
        assert shown.fields["shown"].startswith("loss 78.5  regret 1.03e+03  ")  # the mean of 54 … 103
        recorder.tested = [0.25, 0.75]
        bar.on_train_batch_end(trainer, module, None, None, t)
        assert "  test 0.5  regret" in shown.fields["shown"]
        bar.on_wait("tasks in folder")
        assert shown.fields["shown"] == "waiting for tasks in folder"
        bar.teardown(trainer, module, "fit")
        bar.on_wait("nothing")
        endless = RoundProgress(recorder, Console(file=screen))
        endless.on_train_start(
            SimpleNamespace(is_global_zero=True, num_training_batches=float("inf"), global_step=0), None
        )
        assert endless._progress.tasks[0].total is None
        endless.on_exception(trainer, module, RuntimeError())
        other = RoundProgress(recorder, Console(file=screen))
        other.on_train_start(SimpleNamespace(is_global_zero=False), None)
        assert other._progress is None


def test_a_module_says_what_it_cannot_play():
    problem = Nonlinear()
    for arguments, said in (
        ((problem, ALGORITHM), "outer must be given for Nonlinear, which has no λ_1 of its own"),
        ((problem, ALGORITHM, torch.ones(3)), r"outer must be a floating-point tensor \[lanes, d\], got torch.float32"),
        ((problem, ALGORITHM, torch.ones(1, 3).long()), r"got torch.int64 \[1, 3\]"),
    ):
        with pytest.raises(ValueError, match=said):
            OnlineBilevelModule(*arguments)
    module = made(seed=4, regret_window=3, on_nonfinite="skip", tasks_per_round=2, several_tasks="loop")
    recipe = module._recipe()
    assert [recipe[name] for name in ("seed", "regret_window", "on_nonfinite", "tasks_per_round", "several_tasks")] == [
        4, 3, "skip", 2, "loop",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "played"),
    [((), [4]), (("--evaluation.baselines", "false"), []), (("--tasks_per_round", 2), [])],
)
def test_baselines_are_of_the_rounds_that_were_played(flags, played, tmp_path, monkeypatch, capsys):
    asked, drawn = [], []

    def baselines(stream, problem, algorithm, rounds):
        asked.append(rounds)
        return {"half": [0.5] * rounds, "rising": [float(t) for t in range(rounds)]}

    monkeypatch.setattr(Stream, "baselines", baselines)
    monkeypatch.setattr(Quadratic, "notes", lambda problem: {"parameters": 3})
    monkeypatch.setattr(running, "draw_figures", lambda *arguments: drawn.append(arguments) or [])
    settings = settings_of("--rounds", 9, "--trainer.max_steps", 4, "--evaluation.tasks", 2, *flags)
    run = RunDirectory.create(str(tmp_path), "x", "obbo")
    summary = running.fit(settings, run, quiet=True)
    assert capsys.readouterr().out == ""
    assert asked == played
    ((metrics, figures, metric, untrained, _, baselines_file),) = drawn
    assert (metrics, figures, metric, baselines_file) == (run.metrics, run.figures, "loss", run.baselines)
    assert untrained == pytest.approx(summary["untrained_test_loss"])
    assert summary["rounds"] == 4
    assert json.loads(run.summary.read_text())["notes"] == summary["notes"] == {"parameters": 3}
    assert summary.get("baselines") == ({"half": 0.5, "rising": 1.5} if played else None)
    if played:
        assert [row["rising"] for row in read(run.baselines)] == ["0.0", "1.0", "2.0", "3.0"]
    assert (
        complete_config(yaml.safe_load(run.config.read_text())) == settings
    )  # of the Trainer it has what is not usual
    assert len(read(run.tasks)[0]["tasks"].split()) == settings["tasks_per_round"]


@pytest.mark.parametrize(("count", "rounds"), [(100, [1, 2, 3, 4, 5, 6, 7]), (101, [3, 6])])
def test_a_long_outer_variable_is_written_with_every_evaluation(count, rounds, tmp_path):
    blocks = SimpleNamespace(coordinates=lambda: {f"x[{i}]": i % 3 for i in range(count)})
    module, recorder = recorded(tmp_path, [], 7, every=3, blocks=blocks)
    written = read(tmp_path / "outer.csv")
    assert [int(row["round"]) for row in written] == rounds
    assert len(written[0]) == count + 1
    if count == 100:
        assert [float(written[-1][f"x[{i}]"]) for i in range(3)] == module.outer.detach()[0].tolist()
    _, again = recorded(tmp_path, [], 9, list_checkpoints(tmp_path / "checkpoints")[-1], every=3, blocks=blocks)
    assert [int(row["round"]) for row in read(tmp_path / "outer.csv")] == [*rounds, *([8, 9] if count == 100 else [9])]
    assert recorder.outer.every == again.outer.every == (1 if count == 100 else 3)


@pytest.mark.parametrize(
    ("error", "there", "lost"),
    [
        (RuntimeError("[gloo] x"), True, True),
        (RuntimeError("Connection reset by peer"), True, True),
        (RuntimeError("a defect"), True, False),
        (RuntimeError("[gloo] x"), False, False),
    ],
)
def test_a_process_that_is_gone_is_told_from_a_defect(error, there, lost, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: there)
    assert lost_rank(error) is lost


def test_a_stream_that_is_waited_for_has_one_process(monkeypatch):
    made_of = SimpleNamespace(train=SimpleNamespace(on_wait=None), test=(), start=lambda problem, seed: toy_point(1))
    monkeypatch.setattr(running, "build_stream", lambda settings: made_of)
    monkeypatch.setattr(running, "build_problem", lambda settings, stream: Nonlinear())
    monkeypatch.setattr(running, "require_trainer", lambda settings, module: 2)
    with pytest.raises(ValueError, match=r"trainer\.devices must be 1 for a stream that is waited for, got more"):
        build(settings_of())


def test_judging_again_needs_a_module_that_is_trained(tmp_path):
    recorder = Recorder(RunDirectory(tmp_path), [], "loss", 5, 5)
    with pytest.raises(RuntimeError, match="a batch ended without a round"):
        recorder.on_train_batch_end(SimpleNamespace(global_step=1), made(), None, None, 0)
    with pytest.raises(TypeError, match="the recorder belongs to an OnlineBilevelModule, got LightningModule"):
        recorder.on_train_batch_end(None, L.LightningModule(), None, None, 0)
    said = []
    recorder.state.say = said.append
    for error in (Stopped(15, 3), ValueError("why")):
        recorder.on_exception(None, None, error)
    assert said == ["stopped by SIGTERM after round 3", "stopped by ValueError: why"]


@pytest.mark.parametrize(("saved", "order"), [(2, "V S2 V S4 S5"), (3, "V S3 V S5"), (4, "V V S4 S5")])
def test_a_checkpoint_waits_for_the_validation_of_its_round(saved, order, tmp_path, monkeypatch):
    """A callback that watches the validation must be saved after it."""
    said = []
    monkeypatch.setattr(recording, "save_checkpoint", lambda trainer, folder: said.append(f"S{trainer.global_step}"))
    watching = L.Callback()
    watching.on_validation_end = lambda *arguments: said.append("V")
    recorded(
        tmp_path, [], 5, saved=saved, callbacks=[watching], judged=[toy_task(lanes=1, seed=50)],
        limit_val_batches=1.0, val_check_interval=2,
    )  # fmt: skip
    assert " ".join(said) == order


def test_the_number_of_a_task_counts_all_tasks_of_the_rounds_before(tmp_path):
    stream = Numbered()
    stream.fingerprint = lambda t, task: f"{t}:{int(task['n'])}"
    callback = Played(RunDirectory(tmp_path), stream, 3)
    for t in range(3):
        callback.see(t, stream.train[3 * t : 3 * t + 3])
    assert callback._seen == {1: "0:0 1:1 2:2", 2: "3:3 4:4 5:5", 3: "6:6 7:7 8:8"}


def test_what_is_changed_for_a_resume_is_changed_and_nothing_else():
    before = settings_of("--rounds", 7)
    assert _changed(settings_of("--rounds", 7), None, None) == before
    found = _changed(settings_of("--rounds", 7), 2, {"drift": 0.5})
    assert found["trainer"].pop("devices") == 2
    assert found["data"].pop("drift") == 0.5
    before["trainer"].pop("devices"), before["data"].pop("drift")
    assert found == before
    with pytest.raises(ValueError, match="data must stay quadratic when a run goes on, got 'market'"):
        _changed(settings_of(), None, {"name": "market"})


def test_a_run_goes_on_from_the_newest_checkpoint_or_the_one_that_is_asked_for(tmp_path):
    run = RunDirectory(tmp_path)
    assert Start.of(run, None) == (None, 0, False, None)
    for t, ended in ((3, True), (7, False), (7, False)):  # one of them again: its checksum is the new one's
        content = {"global_step": t, "ended": ended, "size": list(range(len(list_checkpoints(run.checkpoints))))}
        ExactCheckpoints().save_checkpoint(content, run.checkpoints / f"round-{t:08d}.ckpt")
    old, new = list_checkpoints(run.checkpoints)
    assert Start.of(run, None) == (new, 7, False, None)
    assert Start.of(run, old) == (old, 3, True, None)


def playing(folder, monkeypatch, every=5, test=(), came=0, **more):
    """A recorder in the middle of a run that is not played: itself, the module, the trainer, and what it does."""
    done = []
    for name in ("append", "amend"):
        monkeypatch.setattr(
            recording.RoundTable, name, lambda table, row, name=name: done.append(f"{name} {table.path.name}")
        )
    monkeypatch.setattr(
        recording, "save_checkpoint", lambda trainer, folder: done.append(f"save {trainer.global_step}")
    )
    usual = {"global_step": 3, "num_training_batches": 100, "max_steps": -1, "is_global_zero": True, "loggers": []}
    usual |= {"should_stop": False, "enable_validation": False, "val_check_batch": None, "num_val_batches": [0]}
    usual |= {"check_val_every_n_epoch": 1, "state": SimpleNamespace(fn="fit"), "sanity_checking": False}
    usual |= {"precision_plugin": SimpleNamespace(convert_input=lambda task: task)}
    trainer, module = SimpleNamespace(**{**usual, **more}), made()
    module._trainer, module.row = trainer, {"round": trainer.global_step, "loss": 0.5}
    module.played = SimpleNamespace(calls={"gradients": 2, "products": 1})
    module.log_numbers = lambda numbers: done.append({**numbers})
    share = SimpleNamespace(sum=lambda values: values)
    module.outer_step.ranks = SimpleNamespace(any=lambda flag, device: flag or came, rank=0, size=1, share=share)
    module.gather_start = lambda: done.append("gather")
    recorder = Recorder(RunDirectory(folder), test, "loss", every, 100)
    recorder.state.say = done.append
    recorder._clock = SimpleNamespace(begin=lambda: None, end=lambda on_cpu: 0.25 if on_cpu else 0.75)
    return recorder, module, trainer, done


def test_the_signal_of_another_process_ends_the_round_of_this_one_too(tmp_path, monkeypatch):
    recorder, module, trainer, done = playing(tmp_path, monkeypatch, came=signal.SIGTERM)
    with pytest.raises(Stopped, match="stopped by SIGTERM after round 3"):
        recorder.on_train_batch_end(trainer, module, None, None, 2)
    assert recorder.signals.rounds == 3  # what a second signal would say
    assert done[-1] == "save 3"
    trainer.should_stop = True  # a callback has ended it in the same round: it is over, not stopped
    recorder.on_train_batch_end(trainer, module, None, None, 2)


def test_the_first_process_alone_writes_and_all_know_what_was_spent(tmp_path, monkeypatch):
    spent = [{"oracle_calls": 3, "seconds": 0.25}]
    for first, rows in ((True, ["append metrics.csv", "append timings.csv"]), (False, [])):
        recorder, module, trainer, done = playing(tmp_path, monkeypatch, is_global_zero=first)
        recorder.on_train_batch_end(trainer, module, None, None, 2)
        assert done == [*rows, *spent]
    recorder, module, trainer, done = playing(tmp_path, monkeypatch, is_global_zero=False, test=[toy_task(lanes=1)])
    recorder.row, recorder.clock = {"round": 3}, {}
    recorder.on_train_end(trainer, module)
    assert done == ["gather", "evaluating", "save 3"]
    monkeypatch.setattr(OnlineBilevelModule, "device", SimpleNamespace(type="cuda"))
    recorder, module, trainer, done = playing(tmp_path, monkeypatch)
    recorder.on_train_batch_end(trainer, module, None, None, 2)
    assert done[-1]["seconds"] == 0.75  # what a GPU computes is no CPU time


def test_every_logger_gets_an_evaluation_with_its_round_and_what_was_spent_until_then(tmp_path, monkeypatch):
    logged = []
    loggers = [SimpleNamespace(log_metrics=lambda numbers, step: logged.append((step, numbers))) for _ in range(2)]
    recorder, module, trainer, done = playing(tmp_path, monkeypatch, every=3, test=[toy_task(lanes=1)], loggers=loggers)
    recorder.on_train_batch_start(trainer, module, None, 2)
    recorder.on_train_batch_end(trainer, module, None, None, 2)
    assert done[:3] == ["playing", "gather", "evaluating"]
    (step, numbers), other = logged
    assert (step, numbers) == other
    assert step == numbers["round"] == 3
    assert (numbers["oracle_calls"], numbers["seconds"]) == (3, 0.25)
    assert numbers["test_loss"] == recorder.tested[0]
    assert "test_loss_se" not in numbers
    trainer.global_step = 4  # nothing is judged
    recorder.on_train_batch_end(trainer, module, None, None, 3)
    assert len(logged) == 2
    recorder.on_wait("tasks")
    assert done[-1] == "waiting for tasks"


@pytest.mark.parametrize(
    ("waits", "stage", "sanity", "saves"),
    [(-1, "fit", False, True), (0, "fit", False, False), (-1, "validate", False, False), (-1, "fit", True, False)],
)
def test_only_the_validation_of_a_round_ends_the_waiting_of_its_checkpoint(
    waits, stage, sanity, saves, tmp_path, monkeypatch
):
    recorder, module, trainer, done = playing(
        tmp_path, monkeypatch, state=SimpleNamespace(fn=stage), sanity_checking=sanity
    )
    recorder._after_validation = waits
    recorder.on_validation_end(trainer, module)
    assert done == (["save 3"] if saves else [])


def test_a_recorder_is_restored_with_all_that_it_has(tmp_path):
    task = toy_task(lanes=1)
    first, second, third = (Recorder(RunDirectory(tmp_path), [task], "loss", 5, 5) for _ in range(3))
    names = ("untrained", "tested", "due")
    for n, name in enumerate(names):
        setattr(first, name, Scores([float(n)], {"mse": [10.0 + n]}))
    first.oracle_calls, first.seconds_before = 7, 1000.0
    second.load_state_dict(first.state_dict())
    assert [list(getattr(second, name)) for name in names] == [[0.0], [1.0], [2.0]]
    assert [getattr(second, name).further for name in names] == [{"mse": [10.0 + n]} for n in range(3)]
    assert second.oracle_calls == 7
    assert second.seconds_before >= 1000
    assert not second._other_tests
    third.judged_on = [fingerprint_of(toy_task(lanes=1, seed=8))]  # data have grown
    third.load_state_dict(first.state_dict())
    assert third._other_tests
    assert [table.path.name for table in first.tables] == ["metrics.csv", "timings.csv"]
    assert [table.path.name for table in first.kept] == ["metrics.csv"]  # no two runs take the same time


def test_a_process_that_is_not_the_first_writes_where_that_one_does_and_knows_its_last_row(tmp_path, monkeypatch):
    recorder, module, trainer, _ = playing(tmp_path / "mine", monkeypatch, is_global_zero=False, global_step=7)
    answers = [str(tmp_path / "theirs"), {"round": "7", "test_loss": "0.5"}]
    trainer.strategy = SimpleNamespace(broadcast=lambda value: answers.pop(0))
    recorder.test, recorder.untrained = [toy_task(lanes=1)], Scores([1.0])
    recorder.on_train_start(trainer, module)
    try:
        assert recorder.run.path == tmp_path / "theirs"
        assert recorder.row == {"round": "7", "test_loss": "0.5"}
        assert recorder._goes_on  # round 7 was judged because it was the last one then
        assert not (tmp_path / "mine").exists()
    finally:
        recorder.teardown(trainer, module, "fit")


def test_a_run_is_built_with_every_setting(monkeypatch):
    asked = []
    monkeypatch.setattr(running, "take_threads", lambda *given: asked.append(given) or 1)
    settings = settings_of(
        *("--regret_window", 4, "--on_nonfinite", "skip", "--several_tasks", "loop", "--tasks_per_round", 2),
        *("--seed", 5, "--workers", 1, "--threads", 2, "--trainer.devices", 2),
    )
    module, data, stream = build(settings)
    assert asked == [(2, 2)]
    assert settings["threads"] == 1
    assert (module.seed, module.several_tasks, module.tasks_per_round) == (5, "loop", 2)
    assert (module.outer_step.regret_window, module.outer_step.on_nonfinite) == (4, "skip")
    loaders = data.train_dataloader(), data.val_dataloader(), data.test_dataloader()
    assert [loader.num_workers for loader in loaders] == [1, 1, 1]
    assert data.stream is stream


def test_what_the_user_tells_the_trainer_comes_before_what_is_usual_and_his_callbacks_before_ours(tmp_path):
    from lightning.pytorch.plugins.environments import LightningEnvironment

    ours = L.Callback()
    flags = ["--trainer.callbacks", "[{name: Timer}, {name: ModelCheckpoint}]", "--trainer.log_every_n_steps", 7]
    settings = settings_of(*flags, "--trainer.enable_model_summary", "true")
    settings["trainer"]["plugins"] = LightningEnvironment()
    trainer = make_trainer(settings, [ours], root=tmp_path)
    names = [type(callback).__name__ for callback in trainer.callbacks]
    assert names.index("Timer") < names.index("Callback")
    assert any("ModelSummary" in name for name in names)
    assert trainer.log_every_n_steps == 7
    assert trainer.default_root_dir == str(tmp_path)
    assert trainer.checkpoint_callback is not None
    connector = trainer._accelerator_connector
    assert connector.cluster_environment is settings["trainer"]["plugins"]
    assert isinstance(trainer.strategy.checkpoint_io, ExactCheckpoints)
    judging = [type(callback).__name__ for callback in make_trainer(settings, evaluating=True).callbacks]
    assert "Timer" not in judging
    assert "ModelCheckpoint" not in judging


def test_tasks_that_are_given_are_served_instead_of_those_of_the_stream():
    stream = Numbered()
    stream.validation, stream.test = ([{"n": torch.tensor([float(n)])}] for n in (1, 2))
    given = [{"n": torch.tensor([float(n)])} for n in (3, 4)]

    def served(**more):
        data = StreamDataModule(stream, 5, **more)
        return [[int(task["n"]) for task in loader] for loader in (data.val_dataloader(), data.test_dataloader())]

    assert served() == [[1], [2]]
    assert served(validation=given) == [[3, 4], [2]]
    assert served(test=given) == [[1], [3, 4]]
    assert served(validation=[], test=given[:1]) == [[], [3]]


def test_where_the_sources_are_lost_the_tasks_are_compared_and_one_process_keeps_them(tmp_path, monkeypatch):
    run = played_run(tmp_path / "a", 5)
    run.sources.unlink()
    with pytest.raises(ValueError, match="differ from task 2, in round 2 on"):
        require_same_past(run, Numbered(changed=[1]), 5, 1, changed=False)
    require_same_past(run, Numbered(), 5, 1, changed=False)
    synced = []
    monkeypatch.setattr("obbo_lightning.runs.table.RoundTable.sync", lambda table: synced.append(table.path.name))
    for first, tables in ((False, []), (True, ["tasks.csv"])):
        callback = Played(RunDirectory(tmp_path / "b"), Numbered(), 1)
        (tmp_path / "b").mkdir(exist_ok=True)
        callback.on_train_start(SimpleNamespace(is_global_zero=first, global_step=0), None)
        callback.on_save_checkpoint(None, None, {})
        assert synced == [table.path.name for table in callback.tables] == tables
        callback.on_exception(None, None, RuntimeError())


def test_tasks_that_are_waited_for_are_compared_as_far_as_they_have_come(tmp_path):
    class Arriving:
        def __init__(self, tasks):
            self.tasks = tasks

        def so_far(self):
            return iter(self.tasks)

        def __iter__(self):
            raise AssertionError("would wait for more")

    run, stream = played_run(tmp_path, 3), Numbered()
    stream.train = Arriving([stream.train[t] for t in range(3)])
    require_same_past(run, stream, 3, 1, changed=True)
    stream.train.tasks.pop()
    with pytest.raises(ValueError, match="end before task 3"):
        require_same_past(run, stream, 3, 1, changed=True)


@pytest.mark.parametrize(
    ("test", "validation", "row", "judged"),
    [
        (1, 0, {"test_loss": 0.5}, True),
        (1, 1, {"validation/loss": 0.5}, False),
        (0, 1, {"validation/loss": 0.5}, True),
        (0, 1, {"validation/loss": ""}, False),
        (0, 1, {}, False),
        (1, 0, {"test_loss": None}, False),
        (0, 0, {}, True),
    ],
)
def test_a_round_is_judged_where_the_tasks_that_there_are_were_asked(test, validation, row, judged, tmp_path):
    tasks = [toy_task(lanes=1)]
    recorder = Recorder(RunDirectory(tmp_path), test * tasks, "loss", 5, 5, validation=validation * tasks)
    recorder.row = row
    assert recorder._is_judged() is judged


def test_a_recorder_that_is_done_closes_its_tables_and_listens_no_more(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(recording.RoundTable, "close", lambda table: done.append(table.path.name))
    recorder = Recorder(RunDirectory(tmp_path), [], "loss", 5, 5)
    recorder.signals = SimpleNamespace(give_back=lambda: done.append("signals"))
    recorder.teardown(None, None, "fit")
    assert sorted(done) == ["metrics.csv", "signals", "timings.csv"]


def test_a_run_goes_on_with_what_was_asked_for(tmp_path, monkeypatch):
    asked, saved = {}, SimpleNamespace(threads=4)
    run = RunDirectory(tmp_path)
    for file in (run.config, run.summary):
        file.write_text("{}")
    flags = ("--rounds", 7, "--tasks_per_round", 3, "--threads", 2)
    monkeypatch.setattr(resuming, "read_config", lambda run: settings_of(*flags))
    monkeypatch.setattr(Start, "of", lambda run, checkpoint: Start(checkpoint, 5, False, saved))
    monkeypatch.setattr(resuming, "build", lambda settings: SimpleNamespace(stream="stream"))
    for name in ("require_continuable", "require_same_past", "mend_tables", "fit_to_exit_code"):
        monkeypatch.setattr(resuming, name, lambda *given, name=name: asked.__setitem__(name, given) or 3)
    monkeypatch.setattr("warnings.formatwarning", None)
    for data in (None, {"drift": 0.5}):
        with pytest.warns(UserWarning, match=r"was played with 4 threads \(now 2\): its last digits may differ"):
            assert resuming.resume(tmp_path, "there.ckpt", rounds=9, data=data) == 3
        assert asked["require_continuable"][1:] == asked["mend_tables"][1:] == (5, saved)
        assert asked["require_same_past"][1:] == ("stream", 5, 3, data is not None)
        settings, where, checkpoint, parts, _ = asked["fit_to_exit_code"]
        assert (settings["rounds"], where.path, checkpoint, parts.stream) == (9, tmp_path, "there.ckpt", "stream")
        assert settings["data"]["drift"] == (0.5 if data else settings_of(*flags)["data"]["drift"])
    assert not run.summary.exists()
    assert json.loads(run.state.read_text())["doing"] == "beginning"
    run.state.write_text("as it was")
    with pytest.raises(ValueError, match="rounds must be at least the 5 that were played, got 4"):
        resuming.resume(tmp_path, "there.ckpt", rounds=4)
    assert run.state.read_text() == "as it was"


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ((), ["Played", "Recorder", "Keeper", "RoundProgress", "End"]),
        (("--trainer.enable_progress_bar", "false"), ["Played", "Recorder", "Keeper", "End"]),
    ],
)
def test_a_run_is_recorded_as_its_settings_say_and_has_the_callbacks_that_were_given(
    flags, names, tmp_path, monkeypatch
):
    asked = []
    settings = settings_of(
        *("--evaluation.every", 3, "--checkpoint.every", 4, "--evaluation.tasks", 5, "--evaluation.split", "both"),
        *("--tasks_per_round", 2, *flags),
    )
    trainer = SimpleNamespace(fit=lambda module, data, ckpt_path: asked.append((module, data, ckpt_path)))
    monkeypatch.setattr(running, "make_trainer", lambda *given, **more: asked.append((given, more)) or trainer)
    monkeypatch.setattr(running, "_conclude", lambda *given: ([], {"rounds": 1}))
    monkeypatch.setattr(running, "print_summary", lambda *given: None)
    parts, run = build_quietly(settings, monkeypatch), RunDirectory.create(str(tmp_path), "x", "obbo")
    summary = running.fit(settings, run, "there.ckpt", [End(3)], True, parts)
    assert summary == {"rounds": 1}
    ((given, callbacks, logger), more), played = asked
    assert (given is settings, logger, more) == (True, False, {"root": run.path})
    assert [type(callback).__name__ for callback in callbacks] == names
    assert played == (parts.module, parts.data, "there.ckpt")
    fingerprints, recorder, keeper = callbacks[:3]
    assert parts.data.show == fingerprints.see
    assert fingerprints.tasks_per_round == 2
    assert (recorder.evaluate_every, recorder.checkpoint_every, recorder.metric) == (3, 4, "loss")
    assert (len(recorder.test), len(recorder.validation)) == (5, 5)
    assert torch.equal(recorder.validation[4]["b"], parts.stream.validation[4]["b"])
    assert {"validation/loss", "validation/loss_se"} <= set(recorder.metrics.columns)
    assert [table.path.name for table in keeper.tables()] == ["metrics.csv"]
    assert keeper.planned == settings["rounds"]


def build_quietly(settings, monkeypatch):
    """The parts of a run; its trainer is not made."""
    monkeypatch.setattr(running, "require_trainer", lambda settings, module: 1)
    return build(settings)
