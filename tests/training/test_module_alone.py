"""The module, the datamodule and the run's settings without a run: seeds, ranks, lanes, tasks that arrive."""

import os
import socket
import warnings
from functools import partial
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import torch
from obbo_lightning.training.recorder import Recorder, _planned
from obbo_lightning.training.rows import columns_of, more_columns, values_of
from toy import Nonlinear, toy_point, toy_task

from obbo_lightning import (
    OBBO,
    ExactCheckpoints,
    FewShot,
    OnlineBilevelModule,
    ParameterGroups,
    Positive,
    StreamDataModule,
    Tasks,
)
from obbo_lightning.core.distributed import Shard
from obbo_lightning.core.memory import HypergradientWindow
from obbo_lightning.core.outer_step import OuterStep
from obbo_lightning.hypergradients import ClosedForm, FixedPoint, InnerState
from obbo_lightning.networks import MLP
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.solvers import ExactSolution, GradientDescent, InnerSGD
from obbo_lightning.streams.quadratic import QuadraticTasks
from obbo_lightning.training import run as running
from obbo_lightning.training.checkpoints import save_checkpoint
from obbo_lightning.training.datamodule import ArrivingRounds, InOrder, Seen
from obbo_lightning.training.evaluation import evaluate
from obbo_lightning.training.module import _go_on_in_the_same_epoch, _plain
from obbo_lightning.training.outer_step import BregmanOuterStep
from obbo_lightning.training.run import fit_to_exit_code
from obbo_lightning.training.signals import Stopped
from obbo_lightning.training.trainer import validates_now

SAMPLED = OBBO(inner=GradientDescent(steps=3, lr=0.2, batch_size=2), hypergradient=FixedPoint(3, lr=0.2))


def module(algorithm=SAMPLED, seed=6, lanes=1, **options):
    return OnlineBilevelModule(Nonlinear(), algorithm, toy_point(lanes), seed, **options)


class Noisy(Nonlinear):
    """Its inner loss has noise of its own, as dropout has."""

    random = True

    def inner_loss(self, outer, inner, task, sample=None):
        noise = 0.0 if sample is None else (sample.seed % 1000) / 1000
        return (1 + noise) * super().inner_loss(outer, inner, task)


def test_the_noise_of_an_evaluation_has_the_seed_of_the_run():
    task, start = toy_task(lanes=1, seed=9), InnerState(toy_point(1, seed=7))
    one = OnlineBilevelModule(Noisy(), SAMPLED, toy_point(1), seed=6)
    one.judged_from = start
    expected, other = (evaluate(one.problem, SAMPLED, one.outer, task, start, seed)["loss"] for seed in (6, 0))
    assert torch.equal(one.evaluate(task)["loss"], expected)
    assert not torch.equal(expected, other)


@pytest.mark.parametrize("hook", ["on_validation_epoch_start", "on_test_epoch_start"])
def test_several_processes_judge_from_the_first_task_of_all_of_them(hook):
    one, first = module(), InnerState(toy_point(1, seed=7))
    one.outer_step.ranks = SimpleNamespace(gather_warms=lambda warms: [first, *warms])
    getattr(one, hook)()
    assert torch.equal(one.judged_from.inner, first.inner)
    algorithm = OBBO(inner=ExactSolution(), hypergradient=ClosedForm())
    exact = OnlineBilevelModule(QuadraticTasks().problem, algorithm, torch.zeros(1, 4).double())
    exact.outer_step.ranks = SimpleNamespace(gather_warms=None)  # nothing is carried, and nobody asked
    getattr(exact, hook)()


@pytest.mark.parametrize(("several", "together"), [("auto", False), ("loop", False), ("vmap", True)])
def test_tasks_are_solved_together_where_that_is_asked_for(several, together):
    one = module(tasks_per_round=2, several_tasks=several)
    strategy = SimpleNamespace()
    one._trainer = SimpleNamespace(
        global_rank=0, world_size=1, strategy=strategy, fit_loop=SimpleNamespace(max_epochs=None), datamodule=None
    )
    one.on_fit_start()
    assert one.outer_step.ranks.share.vmap is together
    assert isinstance(one.outer_step.ranks.share, Shard)
    assert one.trainer.fit_loop.max_epochs == 1


@pytest.mark.parametrize(
    ("epochs", "loaded", "rounds", "served", "said"),
    [
        (None, 0, 10, 2, None),
        (1000, 9, 10, 2, None),
        (-1, 0, None, 2, None),
        (3, 0, 10, 2, "max_epochs is 3, and a stream is played once"),
        (1, 10, 10, 2, "nothing is left to play: the checkpoint is of round 10 of 10"),
        (1, 0, 10, 3, "tasks_per_round must be the same for the module and its data, got 2 and 3"),
    ],
)
def test_a_stream_is_played_once_and_the_data_serve_what_the_module_plays(epochs, loaded, rounds, served, said):
    one = module(tasks_per_round=2)
    data = SimpleNamespace(tasks_per_round=served, rounds=rounds)
    one._trainer, one._loaded_round = (
        SimpleNamespace(fit_loop=SimpleNamespace(max_epochs=epochs), datamodule=data),
        loaded,
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if served != 2:
            with pytest.raises(ValueError, match=said):
                one._play_once()
            return
        one._play_once()
    assert one.trainer.fit_loop.max_epochs == 1
    assert [str(one.message)[: len(said)] for one in warned] == [said] if said else not warned


def test_what_goes_with_a_checkpoint_of_lanes_is_numbers_and_words():
    lanes = pl.DataFrame({"ticker": ["A"], "n": [3], "x": [0.5], "when": pl.Series(["2021-01-04"]).str.to_datetime()})
    assert _plain(lanes) == {"ticker": ["A"], "n": [3], "x": [0.5], "when": ["2021-01-04 00:00:00"]}
    assert _plain(None) is None
    progress = {"current": {"ready": 1, "processed": 1, "completed": 1}, "total": {"processed": 1, "completed": 1}}
    loop = {"epoch_progress": progress, "epoch_loop.batch_progress": {"is_last_batch": True, "current": 5}}
    _go_on_in_the_same_epoch(loop)
    assert progress["current"] == {"ready": 1, "processed": 0, "completed": 0}
    assert progress["total"] == {"processed": 0, "completed": 0}
    assert loop["epoch_loop.batch_progress"] == {"is_last_batch": False, "current": 5}


def test_a_checkpoint_of_another_number_of_tasks_is_refused():
    one = module(tasks_per_round=2)
    with pytest.raises(ValueError, match="tasks_per_round must be 3 to continue this run, got 2"):
        one.on_load_checkpoint({"warms": [{}] * 3})
    with pytest.raises(RuntimeError, match="training_step needs the BregmanOuterStep callback"):
        one.training_step([], 0)
    with pytest.raises(ValueError, match="only a problem with a network has one to give, not Nonlinear"):
        one.network()


def test_means_over_tasks_are_logged_once_for_each_epoch():
    one, logged = module(), {}
    one._trainer = SimpleNamespace(world_size=1)
    one.log = lambda name, value: logged.__setitem__(name, float(value))
    for epoch in range(2):
        for seed in range(3):
            one.validation_step(toy_task(lanes=1, seed=10 * epoch + seed), seed)
        losses = np.array([float(one.evaluate(toy_task(lanes=1, seed=10 * epoch + seed))["loss"]) for seed in range(3)])
        one.on_validation_epoch_end()
        assert logged["validation/loss"] == pytest.approx(losses.mean())
        assert logged["validation/loss_se"] == pytest.approx(losses.std(ddof=1) / 3**0.5)
    logged.clear()
    one.test_step(toy_task(lanes=1), 0)
    one.on_test_epoch_end()
    assert set(logged) == {"test/loss"}  # one task has no error


def numbered(n):
    return {"n": torch.tensor([float(n)])}


class Counting:
    """Tasks 0, 1, 2, … up to a number; its state is alive."""

    def __init__(self, length):
        self.state, self.length = {"next": 0}, length

    def __iter__(self):
        return self

    def __next__(self):
        if self.state["next"] >= self.length:
            raise StopIteration
        self.state["next"] += 1
        return numbered(self.state["next"] - 1)


class Resumable(Counting):
    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = dict(state)


@pytest.mark.parametrize(
    ("length", "rounds", "each", "served"), [(7, None, 2, 3), (7, 2, 2, 2), (6, 5, 2, 3), (0, 5, 1, 0)]
)
def test_rounds_that_arrive_are_whole_and_know_where_they_are(length, rounds, each, served):
    arriving = ArrivingRounds(Resumable(length), rounds, each, range(each))
    found = [[int(task["n"]) for task in tasks] for tasks in arriving]
    assert found == [[each * t + i for i in range(each)] for t in range(served)]
    for t in range(max(1, served - 3), served + 1):
        assert arriving.state_after(t) == {"next": each * t}
    assert arriving.state_after(served + 1) is None
    begun = ArrivingRounds(Resumable(length), rounds, each, range(each), played=2, state={"next": 2 * each})
    assert begun.state_after(2) == {"next": 2 * each}
    assert begun.state_after(1) is None


def test_an_iterator_that_was_drawn_from_cannot_be_passed_over_again():
    used = Counting(20)
    next(iter(ArrivingRounds(used, 5, 1, range(1))))
    with pytest.raises(ValueError, match="a stream without state_dict must be made anew to go on with it"):
        next(iter(ArrivingRounds(used, 5, 1, range(1), played=2)))
    assert int(next(iter(ArrivingRounds(Counting(20), 5, 1, range(1), played=2)))[0]["n"]) == 2
    with pytest.raises(TypeError, match="a stream that arrives has no length"):
        len(ArrivingRounds(used, None, 1, range(1)))
    assert len(ArrivingRounds(used, 5, 1, range(1), played=2)) == 5


def test_a_datamodule_serves_what_is_left_and_shows_it_with_its_number():
    seen = []
    data = StreamDataModule(Tasks(numbered, 21), tasks_per_round=2)
    assert data.rounds == 10
    data.show = lambda t, tasks: seen.append((t, [int(task["n"]) for task in tasks]))
    data.trainer = SimpleNamespace(global_step=7, global_rank=0, world_size=1)
    assert len(list(data.train_dataloader())) == 3
    assert seen == [(7, [14, 15]), (8, [16, 17]), (9, [18, 19])]
    assert len(data.train_dataloader().dataset) == 10  # Lightning counts on from the rounds that were played
    data.trainer = SimpleNamespace(global_step=0, global_rank=1, world_size=2)
    assert int(next(iter(data.train_dataloader()))[0]["n"]) == 1
    judged = StreamDataModule(Tasks(numbered, 4), validation=Tasks(numbered, 7), judged=5)
    judged.trainer = data.trainer
    assert [int(task["n"]) for task in judged.val_dataloader()] == [1, 3]
    arriving = StreamDataModule(Resumable(9), rounds=4, tasks_per_round=2)
    arriving.trainer = SimpleNamespace(global_step=0, global_rank=0, world_size=1)
    loader = iter(arriving.train_dataloader())
    next(loader), next(loader)
    arriving.trainer.global_step = 1
    assert arriving.state_dict() == {"stream": {"next": 2}}
    again = StreamDataModule(Resumable(9), rounds=4, tasks_per_round=2)
    again.load_state_dict({"stream": {"next": 2}})
    again.trainer = arriving.trainer
    assert again.state_dict() == {"stream": {"next": 2}}
    assert [[int(task["n"]) for task in tasks] for tasks in again.train_dataloader()] == [[2, 3], [4, 5], [6, 7]]
    for make, said in (
        (
            lambda: StreamDataModule(Tasks(numbered, 21), rounds=11, tasks_per_round=2),
            "at most the stream's 21",
        ),
        (
            lambda: StreamDataModule(Counting(3), workers=1),
            "workers must be 0 for a stream that arrives",
        ),
        (lambda: StreamDataModule(Counting(3), rounds=0), "rounds must be an integer of at least 1"),
    ):
        with pytest.raises(ValueError, match=said):
            make()
    assert isinstance(judged.val_dataloader().dataset, InOrder)
    assert not isinstance(judged.val_dataloader(), Seen)


@pytest.mark.parametrize(
    ("batches", "steps", "planned"), [(10, -1, 10), (10, 6, 6), (5, 6, 5), (float("inf"), -1, float("inf")), (10, 0, 0)]
)
def test_the_last_round_is_the_earlier_of_two_limits(batches, steps, planned):
    assert _planned(SimpleNamespace(num_training_batches=batches, max_steps=steps)) == planned


@pytest.mark.parametrize(
    ("every", "tasks", "enabled", "epochs", "rounds", "now"),
    [
        (3, [5], True, None, 6, True),
        (3, [5], True, 1, 6, True),
        (3, 5, True, 1, 6, True),
        (3, [5], True, 1, 7, False),
        (3, [0], True, 1, 6, False),
        (3, [5], False, 1, 6, False),
        (3, [5], True, 2, 6, False),
        (None, [5], True, 1, 6, False),
    ],
)
def test_a_validation_is_due_when_lightning_makes_one(every, tasks, enabled, epochs, rounds, now):
    trainer = SimpleNamespace(
        val_check_batch=every, num_val_batches=tasks, enable_validation=enabled, check_val_every_n_epoch=epochs
    )
    assert validates_now(trainer, rounds) is now


def test_rows_are_on_disk_before_a_checkpoint_that_follows_them(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("obbo_lightning.runs.table.RoundTable.sync", lambda table: synced.append(table.path.name))
    recorder = Recorder(RunDirectory(tmp_path), [], "loss", 5, 5)
    for zero in (False, True):
        content = {}
        recorder.on_save_checkpoint(SimpleNamespace(should_stop=zero, is_global_zero=zero), None, content)
        assert content == {"ended": zero}
        recorder.on_load_checkpoint(None, None, content)
        assert recorder._ended is zero
    assert synced == ["metrics.csv", "timings.csv"]
    recorder.on_load_checkpoint(None, None, {})
    assert recorder._ended is False


def test_an_outer_step_goes_on_where_its_checkpoint_was():
    parameter = torch.nn.Parameter(toy_point(2))
    algorithm = OBBO(lr=0.1, window=3)
    owner = SimpleNamespace(
        get_parameter={"outer": parameter}.__getitem__,
        optimizers=lambda: SimpleNamespace(optimizer=algorithm.optimizer(parameter, None), step=None),
    )
    first, second = BregmanOuterStep(algorithm, regret_window=2), BregmanOuterStep(algorithm, regret_window=2)
    assert first.state_dict() == {}
    with pytest.raises(RuntimeError, match="must say what this rank computes"):
        first.on_train_start(None, owner)
    for one in (first, second):
        one.ranks = SimpleNamespace(gather_rounds=lambda rounds: rounds, own_rounds=lambda rounds: rounds)
    first.on_train_start(None, owner)
    assert isinstance(first.step, OuterStep)
    for seed in range(4):
        first.step.memory.merge(toy_point(2, seed=seed).unsqueeze(0))
    state = first.state_dict()
    assert "optimizer" not in state
    second.load_state_dict(state)
    second.on_train_start(None, owner)
    assert isinstance(second.step.memory, HypergradientWindow)
    assert second.step.memory.fill == first.step.memory.fill == 3
    found = [one.step.memory.merge(toy_point(2, seed=9).unsqueeze(0)) for one in (first, second)]
    assert torch.equal(*found)
    second.on_train_start(None, owner)  # another fit, without a checkpoint
    assert second.step.memory.fill == 0
    second.load_state_dict({})
    second.on_train_start(None, owner)
    assert second.step.memory.fill == 0


def test_columns_of_blocks_and_of_automatic_steps_have_their_names():
    several = SimpleNamespace(several={"a": 1, "b": 2})
    rates = SimpleNamespace(param_groups=[{"auto": {"": 1.0, "b": 2.0}}])
    assert more_columns(None, SimpleNamespace(param_groups=[{}])) == []
    assert more_columns(several, rates) == [
        *(f"regret/{name}/{block}" for name in ("euclidean", "generalized", "exact") for block in "ab"),
        *("generalized_norm/a", "generalized_norm/b", "lr", "lr/b"),
    ]  # fmt: skip
    assert columns_of("mse", ["lr"])[-2:] == ["lr", "regret/geometry"]
    assert columns_of("mse")[:6] == ["round", "loss", "inner_loss", "mse", "test_mse", "test_mse_se"]
    outer = torch.tensor([[1.0, 5.0], [2.0, 7.0], [9.0, 6.0]])
    assert values_of(outer, {"x": 1, "y": 0}) == {"x": 6.0, "y": 2.0}


@pytest.mark.parametrize(
    ("error", "first", "code", "said"),
    [
        (
            running.DamagedTaskError("a.npz: is damaged"),
            True,
            2,
            "obbo: a.npz: is damaged; when it is mended go on with",
        ),
        (Stopped(15, 3), False, 0, ""),  # rank 0 speaks for all
        (FloatingPointError("inf"), False, 1, ""),
    ],
)
def test_how_a_run_ended_is_said_once_and_in_its_code(error, first, code, said, monkeypatch, capsys):
    monkeypatch.setattr(running, "fit", lambda *arguments, **more: (_ for _ in ()).throw(error))
    monkeypatch.setattr(running, "is_rank_zero", lambda: first)
    assert fit_to_exit_code({}, SimpleNamespace(path="here"), None, None) == code
    found = capsys.readouterr().err
    assert said in found
    assert bool(found) == bool(said)


def test_each_process_judges_some_of_the_tasks_and_all_know_the_scores(tmp_path):
    tasks = [toy_task(lanes=2, seed=s) for s in range(5)]
    one, seen = module(lanes=2), []
    one._trainer = SimpleNamespace(precision_plugin=SimpleNamespace(convert_input=lambda task: task))
    one.evaluate = lambda task: seen.append(task) or {"loss": torch.full((2,), 1.0 + len(seen))}
    recorder = Recorder(RunDirectory(tmp_path), tasks, "loss", 5, 5)
    for rank, mine in ((0, [0, 2, 4]), (1, [1, 3])):
        seen.clear()
        share = SimpleNamespace(sum=lambda values: values)
        one.outer_step.ranks = SimpleNamespace(rank=rank, size=2, share=share)
        scores = recorder._evaluate(one, tasks)
        assert [next(i for i, task in enumerate(tasks) if task["x"] is one["x"]) for one in seen] == mine
        assert [i for i in range(5) if scores[2 * i]] == mine  # zeros are the others'
        assert len(scores) == 10


def test_a_round_is_played_with_its_own_key_and_its_row_has_its_number(monkeypatch):
    from obbo_lightning.training import module as modules

    one, asked, logged = module(seed=11), [], {}
    one._trainer = SimpleNamespace(global_step=7, world_size=1)
    one.outer_step.step = SimpleNamespace(memory=SimpleNamespace(fill=3))
    one.outer_step.ranks = SimpleNamespace(share="share", size=1)
    warms = [InnerState(toy_point(1))]
    monkeypatch.setattr(modules, "play", lambda *given: asked.append(given) or SimpleNamespace(warms=warms))
    monkeypatch.setattr(modules, "row_of", lambda played, fill: {"loss": 0.1, "window_fill": fill, "mse": None})
    one.log_dict = lambda numbers, batch_size: logged.update(numbers)
    one.training_step(["task"], 0)
    ((problem, algorithm, step, tasks, before, key, share),) = asked
    assert (problem, algorithm, step) == (one.problem, one.algorithm, one.outer_step.step)
    assert (tasks, share) == (["task"], "share")
    assert (key.seed, key.round) == (11, 7)
    assert before is not warms
    assert one.states is warms
    assert one.judged_from is warms[0]
    assert one.row == {"round": 7, "loss": 0.1, "window_fill": 3, "mse": None}
    assert {name: float(value) for name, value in logged.items()} == {
        "round": 7, "loss": 0.1, "window_fill": 3, "step": 7,
    }  # fmt: skip


def test_a_part_that_is_given_comes_before_the_one_that_was_saved(tmp_path):
    problem = FewShot(partial(MLP, ways=2, shape=[2], widths=[3]), proximity=0.25)
    made = OnlineBilevelModule(problem, OBBO(lr=0.1, window=3), seed=4, tasks_per_round=2, on_nonfinite="skip")
    progress = {"current": {"completed": 1}, "total": {"completed": 1}}
    loop = {"epoch_progress": progress, "epoch_loop.batch_progress": {"is_last_batch": True}}
    content = {"state_dict": {"outer": made.outer.detach() + 1}, "global_step": 3, "loops": {"fit_loop": loop}}
    made.on_save_checkpoint(content)
    torch.save(content, tmp_path / "x.ckpt")
    saved = OnlineBilevelModule.load_from_checkpoint(tmp_path / "x.ckpt")
    assert torch.equal(saved.outer.detach(), made.outer.detach() + 1)
    assert (saved.problem.proximity, saved.algorithm.memory().window, saved.seed) == (0.25, 3, 4)
    assert (saved.tasks_per_round, saved.outer_step.on_nonfinite, saved._loaded_round) == (2, "skip", 3)
    other = OnlineBilevelModule.load_from_checkpoint(tmp_path / "x.ckpt", algorithm=OBBO(lr=0.1, window=8))
    assert (other.problem.proximity, other.algorithm.memory().window) == (0.25, 8)


@pytest.mark.parametrize(
    ("wanted", "variable", "project"),
    [("mine", "theirs", "mine"), (None, "theirs", "theirs"), (None, None, "obbo_lightning")],
)
def test_a_wandb_run_has_the_names_that_are_given_to_it(wanted, variable, project, tmp_path, monkeypatch):
    from obbo_lightning.training import loggers

    asked = []
    experiment = SimpleNamespace(define_metric=lambda *names, **more: None)
    monkeypatch.setattr(
        loggers, "WandbLogger", lambda **options: asked.append(options) or SimpleNamespace(experiment=experiment)
    )
    monkeypatch.setattr(loggers, "has_login", lambda: True)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    if variable:
        monkeypatch.setenv("WANDB_PROJECT", variable)
    settings = {
        "wandb": {"project": wanted, "name": None, "group": None, "tags": []},
        "logger": "wandb",
        "experiment": "e",
    }
    settings |= {"algorithm": {"name": "mine.py:Own"}, "data": {"name": "market"}}
    run = RunDirectory(tmp_path)
    for _ in range(2):
        loggers.make_logger(settings, run, None)
    first, second = asked
    assert first["id"] == second["id"] == (tmp_path / "wandb-id").read_text()  # a resumed one goes on with it
    assert (first["project"], first["name"], first["group"], first["tags"]) == (
        project,
        tmp_path.name,
        "e",
        ["Own", "market"],
    )
    assert loggers.make_logger({"logger": "csv"}, run, None) is None


@pytest.mark.parametrize("trouble", ["nobody answers", "no login", "refused", "none"])
def test_wandb_that_cannot_be_used_is_offline_at_once(trouble, tmp_path, monkeypatch):
    import wandb

    from obbo_lightning.training import loggers

    class Refused:
        @property
        def experiment(self):
            raise wandb.errors.CommError("a bad key")

    asked, said = [], []
    experiment = SimpleNamespace(define_metric=lambda *names, **more: None)

    def logger(**options):
        asked.append((os.environ.get("WANDB_MODE"), options["settings"].init_timeout))
        offline = os.environ.get("WANDB_MODE") == "offline"
        return Refused() if trouble == "refused" and not offline else SimpleNamespace(experiment=experiment)

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1] if trouble != "nobody answers" else 1
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        monkeypatch.setenv("WANDB_API_KEY", "" if trouble == "no login" else "x" * 40)
        monkeypatch.setattr(loggers, "WandbLogger", logger)
        settings = {"wandb": {"project": "p", "name": None, "group": None, "tags": ["a"]}, "experiment": "e"}
        settings |= {"logger": "wandb", "algorithm": {"name": "obbo"}, "data": {"name": "market"}}
        loggers.make_logger(settings, RunDirectory(tmp_path), SimpleNamespace(print=said.append))
    assert all(patience <= 10 for mode, patience in asked if mode == "online")
    modes = {"refused": ["online", "offline"], "none": ["online"]}.get(trouble, ["offline"])
    assert [mode for mode, _ in asked] == modes
    assert said == (["W&B cannot be reached (CommError): logging offline"] if trouble == "refused" else [])


def test_a_defect_in_a_run_says_how_to_go_on(monkeypatch):
    def defect(*arguments, **more):
        raise RuntimeError("a defect")

    monkeypatch.setattr(running, "fit", defect)
    with pytest.raises(running.RunFailedError, match=r"RuntimeError: a defect .* go on with: python -m .* resume here"):
        fit_to_exit_code({}, SimpleNamespace(path="here"), None, None)


def test_a_module_without_a_start_has_that_of_its_seed():
    class Drawn(Nonlinear):
        def initial_outer(self, seed):
            return torch.full((1, 3), float(seed), dtype=torch.float64)

    assert OnlineBilevelModule(Drawn(), SAMPLED, seed=4).outer.tolist() == [[4.0, 4.0, 4.0]]
    given = torch.zeros(1, 3, dtype=torch.float64)
    assert OnlineBilevelModule(Drawn(), SAMPLED, given, seed=4).outer.tolist() == [[0.0, 0.0, 0.0]]


def test_the_start_that_was_given_is_left_as_it_was():
    start = toy_point(1)
    made = OnlineBilevelModule(Nonlinear(), SAMPLED, start)
    with torch.no_grad():
        made.outer.add_(1)
    assert torch.equal(start, toy_point(1))


def test_a_rank_plays_its_own_of_the_warm_starts_and_saves_those_of_all():
    one = module(tasks_per_round=2)
    one.states = [InnerState(toy_point(1, seed=n)) for n in range(2)]
    every = list(one.states)
    one._trainer = SimpleNamespace(
        global_rank=1, world_size=2, strategy=None, fit_loop=SimpleNamespace(max_epochs=None), datamodule=None
    )
    one.on_fit_start()
    (own,) = one.states
    assert torch.equal(own.inner, every[1].inner)
    one.outer_step.ranks.gather_warms = lambda warms: [every[0], *warms]
    content = {}
    one.on_save_checkpoint(content)
    assert len(content["warms"]) == 2
    assert all(torch.equal(state["inner"], warm.inner) for state, warm in zip(content["warms"], every, strict=True))


def test_a_validation_is_the_mean_over_the_tasks_of_all_ranks(monkeypatch):
    one, logged = module(), {}
    one._trainer = SimpleNamespace(world_size=2)
    one.log = lambda name, value: logged.__setitem__(name, float(value))

    def gather(found, own):
        found[:] = [own, [{"loss": 5.0}]]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    one._judged = [{"loss": torch.tensor([1.0])}]
    one.on_validation_epoch_end()
    assert logged == {"validation/loss": 3.0, "validation/loss_se": 2.0}


def test_on_a_gpu_tasks_are_solved_together_unless_a_loop_is_asked_for(monkeypatch):
    monkeypatch.setattr(OnlineBilevelModule, "device", SimpleNamespace(type="cuda"))
    for several, together in (("auto", True), ("loop", False)):
        one = module(tasks_per_round=2, several_tasks=several)
        one._trainer = SimpleNamespace(
            global_rank=0, world_size=1, strategy=None, fit_loop=SimpleNamespace(max_epochs=None), datamodule=None
        )
        one.on_fit_start()
        assert one.outer_step.ranks.share.vmap is together


def test_a_checkpoint_is_read_to_where_it_is_asked_for(tmp_path, monkeypatch):
    from obbo_lightning.training import module as modules

    asked = []
    monkeypatch.setattr(modules, "read_checkpoint", lambda path, place=None: asked.append((path, place)) or {})
    with pytest.raises(ValueError, match="is of an older version, and does not say how it is made"):
        OnlineBilevelModule.load_from_checkpoint(tmp_path / "x.ckpt", map_location="there")
    assert asked == [(tmp_path / "x.ckpt", "there")]
    saving = ExactCheckpoints()
    saving.save_checkpoint({"x": torch.ones(2)}, tmp_path / "y.ckpt")
    assert saving.load_checkpoint(tmp_path / "y.ckpt", "meta")["x"].is_meta


def test_the_outer_step_is_brought_along_once():
    one = module()
    one._trainer = SimpleNamespace(callbacks=[])
    assert one.configure_callbacks() == [one.outer_step]
    one._trainer.callbacks.append(one.outer_step)  # a second fit with the same Trainer
    assert one.configure_callbacks() == []


def test_the_outer_step_has_the_window_the_policy_and_the_blocks_that_were_given():
    hyper = ParameterGroups(a=Positive(0.5), b=Positive(0.25))
    parameter, algorithm = torch.nn.Parameter(hyper.start()), OBBO(window=3)
    owner = SimpleNamespace(
        get_parameter={"outer": parameter}.__getitem__,
        optimizers=lambda: SimpleNamespace(optimizer=algorithm.optimizer(parameter, hyper), step=None),
    )
    callback = BregmanOuterStep(algorithm, 4, "skip", hyper)
    callback.ranks = SimpleNamespace()
    callback.on_train_start(None, owner)
    windows = {name: regret.memory.window for name, regret in callback.regret.items()}
    assert windows == {"euclidean": 4, "generalized": 1, "exact": 4, "geometry": 1}
    assert callback.step.on_nonfinite == "skip"
    assert list(callback.step.blocks) == ["a", "b"]


def test_a_rank_that_is_not_the_first_removes_no_checkpoint(tmp_path):
    saving = ExactCheckpoints()
    trainer = SimpleNamespace(is_global_zero=False, strategy=saving)
    trainer.save_checkpoint = lambda path: saving.save_checkpoint({}, path)
    for trainer.global_step in (1, 2, 3):
        save_checkpoint(trainer, tmp_path)
    assert len(list(tmp_path.glob("*.ckpt"))) == 3


def test_a_task_is_judged_where_the_module_is_and_in_its_precision(tmp_path):
    one, seen = module(), []
    one._trainer = SimpleNamespace(precision_plugin=SimpleNamespace(convert_input=lambda task: (*task, "precise")))
    one.transfer_batch_to_device = lambda task, device, place: (task, device)
    one.evaluate = lambda task: seen.append(task) or {"loss": torch.zeros(1)}
    one.outer_step.ranks = SimpleNamespace(rank=0, size=1, share=SimpleNamespace(sum=lambda values: values))
    Recorder(RunDirectory(tmp_path), [], "loss", 5, 5)._evaluate(one, ["task"])
    assert seen == [("task", one.device, "precise")]


def test_an_evaluation_goes_on_with_the_momentum_of_the_stream():
    task, outer, inner = toy_task(lanes=1, seed=9), toy_point(1), toy_point(1, seed=7)
    algorithm = OBBO(inner=InnerSGD(steps=1, lr=0.1, momentum=0.5), hypergradient=FixedPoint(3, lr=0.1))
    found = evaluate(Nonlinear(), algorithm, outer, task, InnerState(inner, solver=torch.ones_like(inner)))
    at = inner.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(Nonlinear().inner_loss(outer, at, task).sum(), at)
    expected = Nonlinear().outer_loss(outer, inner - 0.1 * (0.5 + gradient), task)
    assert torch.allclose(found["loss"], expected)


def test_a_wandb_run_is_what_its_user_calls_it_and_has_all_settings(tmp_path, monkeypatch):
    from obbo_lightning.training import loggers

    asked, defined = [], []
    experiment = SimpleNamespace(define_metric=lambda name, **more: defined.append((name, more)))
    monkeypatch.setattr(
        loggers, "WandbLogger", lambda **options: asked.append(options) or SimpleNamespace(experiment=experiment)
    )
    monkeypatch.setattr(loggers, "has_login", lambda: False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_SWEEP_ID", raising=False)
    monkeypatch.setenv("WANDB_RUN_ID", "somebody's")  # without a sweep it is not this run's
    settings = {"wandb": {"project": "p", "name": "n", "group": "g", "tags": ["t"]}, "logger": "wandb"}
    settings |= {"experiment": "e", "algorithm": {"name": "obbo"}, "data": {"name": "market"}}
    loggers.make_logger(settings, RunDirectory(tmp_path), None)
    (options,) = asked
    assert [options[name] for name in ("project", "name", "group", "tags")] == ["p", "n", "g", ["t"]]
    assert options["config"] == settings
    assert (options["save_dir"], options["resume"]) == (tmp_path, "allow")
    assert options["id"] != "somebody's"
    assert defined == [("round", {}), ("*", {"step_metric": "round"})]


@pytest.mark.parametrize(
    ("key", "netrc", "login"),
    [
        ("x", None, True),
        ("", None, False),
        ("", "machine api.wandb.ai login user password x\n", True),
        ("", "machine example.org login user password x\n", False),
        ("", "nonsense\n", False),
    ],
)
def test_a_login_is_a_key_or_a_line_about_wandb_in_netrc(key, netrc, login, tmp_path, monkeypatch):
    from obbo_lightning.training import loggers

    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    if netrc:
        (tmp_path / "netrc").write_text(netrc)
    assert loggers.has_login() is login


@pytest.mark.parametrize(
    ("server", "proxies", "asked"),
    [
        (None, {}, ("api.wandb.ai", 443)),
        ("http://inside", {}, ("inside", 80)),
        ("https://inside:8443", {}, ("inside", 8443)),
        (None, {"https": "http://proxy:3128"}, ("proxy", 3128)),
        (None, {"https": "proxy:3128"}, ("proxy", 3128)),
        (None, {"http": "http://proxy:3128"}, ("api.wandb.ai", 443)),  # of another scheme
        ("https://inside", {"https": "http://proxy:3128"}, ("inside", 443)),  # which no_proxy names
    ],
)
def test_wandb_is_asked_where_it_is_or_at_the_proxy_before_it(server, proxies, asked, monkeypatch):
    from obbo_lightning.training import loggers

    found = []

    def connect(address, timeout):
        found.append(address)
        if len(found) > 1:
            raise OSError
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(loggers, "getproxies", lambda: proxies)
    monkeypatch.setattr(loggers, "proxy_bypass", lambda host: host == "inside")
    monkeypatch.setattr(loggers.socket, "create_connection", connect)
    monkeypatch.setenv("WANDB_BASE_URL", server or "")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert loggers.can_be_reached()
    assert found == [asked]
    assert not loggers.can_be_reached()
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert loggers.can_be_reached()
    assert len(found) == 2  # nobody is asked


def test_figures_and_tables_are_handed_over_and_an_offline_run_says_how_it_is_uploaded(tmp_path, monkeypatch):
    import wandb

    from obbo_lightning.training import loggers

    class Logger:
        def __init__(self, offline):
            settings = SimpleNamespace(_offline=offline)
            self.experiment = SimpleNamespace(id="7", dir="/w/run-7/files", settings=settings, finish=done.clear)
            self.experiment.log_artifact = self.experiment.log = done.append

    class Artifact(list):
        def __init__(self, name, **more):
            super().__init__([name, more["type"]])

        def add_file(self, path):
            self.append(os.path.basename(path))

    said, done, kept = [], [], []
    monkeypatch.setattr(wandb, "Artifact", lambda *given, **more: kept.append(Artifact(*given, **more)) or kept[-1])
    monkeypatch.setattr(wandb, "Image", os.path.basename)
    monkeypatch.setattr(loggers, "WandbLogger", Logger)
    run = RunDirectory(tmp_path)
    run.figures.mkdir()
    for name in ("b.png", "a.png", "a.pdf"):
        (run.figures / name).touch()
    screen = SimpleNamespace(print=lambda text, **more: said.append(text))
    loggers.finish_logger(None, run, screen)
    assert (kept, said) == ([], [])
    for offline in (False, True):
        loggers.finish_logger(Logger(offline), run, screen)
        assert kept.pop() == ["run-7", "run", "config.yaml", "metrics.csv", "summary.json", "a.png", "b.png"]
        assert done == []  # it was finished
    assert said == ["W&B was offline; upload with: wandb sync /w/run-7"]
