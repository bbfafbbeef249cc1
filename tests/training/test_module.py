"""OnlineBilevelModule with a plain Trainer: rounds, logs, evaluations, callbacks and checkpoints."""

import warnings
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import polars as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from small_runs import read_table
from toy import F64, Nonlinear, Proximal, toy_point, toy_task

from obbo_lightning import (
    OAGD,
    OBBO,
    SOBOW,
    BregmanOuterStep,
    FewShot,
    OnlineBilevelModule,
    ParameterGroups,
    Positive,
    StreamDataModule,
    Tasks,
    online,
)
from obbo_lightning.core.memory import HypergradientWindow, InnerState
from obbo_lightning.core.outer_step import OuterStep
from obbo_lightning.hypergradients import ClosedForm, FixedPoint
from obbo_lightning.networks import CNN4
from obbo_lightning.solvers import ExactSolution, GradientDescent
from obbo_lightning.streams.quadratic import QuadraticStream, QuadraticTasks
from obbo_lightning.training import module as module_file
from obbo_lightning.training.evaluation import evaluate

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint"),  # the second trainer has none
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]
INNER = GradientDescent(steps=3, lr=0.2)
ALGORITHM = OBBO(lr=0.05, window=4, inner=INNER, hypergradient=FixedPoint(3))


class WarmStarted(Proximal):
    """Rounds start from the inner variable of the round before."""

    def initial_inner(self, outer, task):
        return torch.zeros_like(outer)


def make_tasks(first=0, length=200):
    return Tasks(lambda t: toy_task(lanes=1, seed=first + t), length)


def make_module(algorithm=ALGORITHM, **options):
    return OnlineBilevelModule(WarmStarted(), algorithm, toy_point(1), **options)


def make_data(rounds=20, **options):
    return StreamDataModule(make_tasks(), rounds, make_tasks(1000, 5), make_tasks(2000, 5), **options)


def outer_after(rounds, algorithm=ALGORITHM):
    *_, last = online(WarmStarted(), algorithm, [make_tasks()[t] for t in range(rounds)], toy_point(1))
    return last.outer


def attach(module, **trainer):
    """Let a module believe that it is trained."""
    usual = {"global_rank": 0, "world_size": 1, "strategy": None, "datamodule": None, "global_step": 0}
    module._trainer = SimpleNamespace(**{**usual, "fit_loop": SimpleNamespace(max_epochs=None), **trainer})
    return module


def make_checkpoint(module):
    """Return the content of a checkpoint of round 3, as Lightning fills it."""
    progress = {"current": {"completed": 1}, "total": {"completed": 1}}
    loop = {"epoch_progress": progress, "epoch_loop.batch_progress": {"is_last_batch": True}}
    content = {"state_dict": {"outer": module.outer.detach()}, "global_step": 3, "loops": {"fit_loop": loop}}
    module.on_save_checkpoint(content)
    return content


def test_a_module_is_made_from_its_data_which_name_the_stream_once(make_trainer):
    data = StreamDataModule(QuadraticStream(seed=3), rounds=5, tasks_per_round=2)
    algorithm = OBBO(inner=ExactSolution(), hypergradient=ClosedForm())
    module = OnlineBilevelModule.from_data(data, algorithm, seed=3, regret_window=4)
    assert (module.tasks_per_round, module.seed, module.outer_step.regret_window) == (2, 3, 4)
    make_trainer().fit(module, data)
    tasks = [[data.train[2 * t], data.train[2 * t + 1]] for t in range(5)]
    *_, last = online(module.problem, algorithm, tasks, data.stream.start(module.problem, 3), seed=3)
    assert torch.equal(module.outer.detach(), last.outer)
    with pytest.raises(ValueError, match="data must serve a Stream, which knows its problem, got tasks only"):
        OnlineBilevelModule.from_data(make_data(), ALGORITHM)


def test_a_plain_trainer_runs_the_plain_loop_and_logs_every_round_with_all_digits(make_trainer, tmp_path):
    logger, seen, callback, module = CSVLogger(tmp_path), [], L.Callback(), make_module()
    callback.on_train_batch_end = lambda trainer, module, outputs, *rest: seen.append(
        (outputs["metrics"], {name: float(v) for name, v in trainer.callback_metrics.items()})
    )
    trainer = make_trainer(logger=logger, log_every_n_steps=1, callbacks=[LearningRateMonitor(), callback])
    trainer.fit(module, make_data(rounds=6))
    rows = read_table(Path(logger.log_dir) / "metrics.csv")
    rounds = [row for row in rows if row["loss"]]
    assert [int(float(row["round"])) for row in rounds] == [int(row["step"]) for row in rounds] == [1, 2, 3, 4, 5, 6]
    expected = online(WarmStarted(), ALGORITHM, [make_tasks()[t] for t in range(6)], toy_point(1))
    for t, (row, finished, (metrics, shown)) in enumerate(zip(rounds, expected, seen, strict=True), 1):
        known = {name: value for name, value in finished.metrics().items() if value is not None}
        assert {name: float(row[name]) for name in known} == known
        assert metrics == {"round": t, **finished.metrics()}
        # callbacks see the metrics of the round, and those of other callbacks
        assert shown == {"round": t, **known, "lr-BregmanProx": pytest.approx(0.05)}
        assert row.get("regret/exact", "") == ""
    assert torch.equal(module.outer.detach(), finished.outer)
    assert any(row["lr-BregmanProx"] for row in rows)


def test_evaluations_adapt_from_the_current_inner_variable(make_trainer):
    module, data, seen, compare = make_module(), make_data(rounds=14), [], L.Callback()

    def mean_loss(tasks):
        return float(torch.stack([module.evaluate(task, module.states[0])["loss"] for task in tasks]).mean())

    compare.on_validation_end = lambda trainer, _: seen.append(
        (float(trainer.callback_metrics["validation/loss"]), mean_loss(data.validation))
    )
    trainer = make_trainer(val_check_interval=7, limit_val_batches=1.0, callbacks=[compare])
    trainer.fit(module, data)
    (found,) = trainer.test(module, data, verbose=False)  # although Lightning is in inference mode
    first, second, tested = [*seen, (found["test/loss"], mean_loss(data.test))]
    for logged, expected in (first, second, tested):
        assert logged == pytest.approx(expected, rel=1e-12)
    assert first != second
    unadapted = [float(module.problem.outer_loss(module.outer, module.states[0].inner, t)) for t in data.test]
    assert found["test/loss"] != pytest.approx(sum(unadapted) / 5, rel=1e-6)


def test_the_noise_of_an_evaluation_has_the_seed_of_the_run():
    class Noisy(Nonlinear):
        """Its inner loss has noise of its own, as dropout has."""

        is_stochastic = True

        def inner_loss(self, outer, inner, task, sample=None):
            noise = 0.0 if sample is None else (sample.seed % 1000) / 1000
            return (1 + noise) * super().inner_loss(outer, inner, task)

    task, start = toy_task(lanes=1, seed=9), InnerState(toy_point(1, seed=7))
    module = OnlineBilevelModule(Noisy(), ALGORITHM, toy_point(1), seed=6)
    expected, other = (evaluate(module.problem, ALGORITHM, module.outer, task, start, s)["loss"] for s in (6, 0))
    assert torch.equal(module.evaluate(task, start)["loss"], expected)
    assert not torch.equal(expected, other)


def test_evaluations_start_where_the_first_task_of_all_processes_ended():
    module, first = make_module(tasks_per_round=2), InnerState(toy_point(1, seed=7))
    module.states = [InnerState(toy_point(1, seed=n)) for n in range(2)]
    assert module.evaluation_start().inner.equal(module.states[0].inner)
    module.processes = SimpleNamespace(gather_states=lambda states: [first, *states])
    assert module.evaluation_start().inner.equal(first.inner)
    algorithm = OBBO(inner=ExactSolution(), hypergradient=ClosedForm())
    exact = OnlineBilevelModule(QuadraticTasks().problem, algorithm, torch.zeros(1, 4).double())
    exact.processes = SimpleNamespace(gather_states=None)  # it starts from nothing, and asks no process
    assert exact.evaluation_start().inner is None


def test_a_validation_is_the_mean_over_the_tasks_of_all_processes(monkeypatch):
    module, logged = attach(make_module(), world_size=2, testing=False), {}
    module.log = lambda name, value: logged.__setitem__(name, float(value))

    def gather(found, own):
        found[:] = [own, [{"loss": 5.0}]]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    module._scores = [{"loss": torch.tensor([0.5, 1.5])}]  # of two lanes
    module.on_validation_epoch_end()
    assert logged == {"validation/loss": 3.0, "validation/loss_se": 2.0}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("several", "vmap"), [("auto", None), ("loop", False), ("vmap", True)])
def test_tasks_are_solved_together_on_a_gpu_and_where_that_is_asked_for(several, vmap, device, monkeypatch):
    monkeypatch.setattr(OnlineBilevelModule, "device", SimpleNamespace(type=device))
    module = attach(make_module(tasks_per_round=2, several_tasks=several))
    module.on_fit_start()
    assert module.processes.shard.vmap is (device == "cuda" if vmap is None else vmap)
    assert module.trainer.fit_loop.max_epochs == 1


@pytest.mark.parametrize(
    ("epochs", "loaded", "rounds", "served", "message"),
    [
        (None, 0, 10, 2, None),
        (1000, 9, 10, 2, None),
        (-1, 0, None, 2, None),
        (3, 0, 10, 2, "max_epochs is 3, but a stream is run once"),
        (1, 10, 10, 2, "no rounds are left: the checkpoint is of round 10 of 10"),
        (1, 0, 10, 3, "tasks_per_round must be the same for the module and its data, got 2 and 3"),
    ],
)
def test_a_stream_is_run_once_and_the_data_serve_the_tasks_of_the_module(epochs, loaded, rounds, served, message):
    data = SimpleNamespace(tasks_per_round=served, rounds=rounds)
    module = attach(make_module(tasks_per_round=2), fit_loop=SimpleNamespace(max_epochs=epochs), datamodule=data)
    module._loaded_round = loaded
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if served != 2:
            with pytest.raises(ValueError, match=message):
                module.on_fit_start()
            return
        module.on_fit_start()
    assert module.trainer.fit_loop.max_epochs == 1
    assert [str(one.message)[: len(message)] for one in warned] == [message] if message else not warned


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "outer must be given for WarmStarted, which has no λ_1 of its own"),
        ((torch.ones(3),), r"outer must be a floating-point tensor \[lanes, d\], got torch.float32 \[3\]"),
        ((torch.ones(1, 3).long(),), r"got torch.int64 \[1, 3\]"),
    ],
)
def test_an_impossible_start_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        OnlineBilevelModule(WarmStarted(), ALGORITHM, *arguments)


def test_the_start_is_that_of_the_seed_unless_it_is_given_and_is_copied():
    class Seeded(Nonlinear):
        def initial_outer(self, seed):
            return torch.full((1, 3), float(seed), dtype=F64)

    assert OnlineBilevelModule(Seeded(), ALGORITHM, seed=4).outer.tolist() == [[4.0, 4.0, 4.0]]
    start = toy_point(1)
    module = OnlineBilevelModule(Seeded(), ALGORITHM, start, seed=4)
    with torch.no_grad():
        module.outer.add_(1)
    assert torch.equal(start, toy_point(1))


def test_a_module_without_a_trainer_or_a_network_has_neither_rounds_nor_a_network():
    with pytest.raises(RuntimeError, match="training_step needs the BregmanOuterStep callback"):
        make_module().training_step([], 0)
    with pytest.raises(ValueError, match="problem must have a network to return one, got WarmStarted"):
        make_module().network()


def test_the_outer_step_is_attached_once():
    module = attach(make_module(), callbacks=[])
    assert module.configure_callbacks() == [module.outer_step]
    module.trainer.callbacks.append(module.outer_step)  # a second fit with the same Trainer
    assert module.configure_callbacks() == []


@pytest.mark.parametrize("algorithm", [ALGORITHM, OAGD(lr=0.05, window=3, inner=INNER)], ids=["obbo", "oagd"])
def test_a_model_checkpoint_continues_bit_for_bit_and_stops_at_max_steps(make_trainer, tmp_path, algorithm):
    saves = ModelCheckpoint(tmp_path / "saves", every_n_train_steps=6, save_top_k=-1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the page on manual optimization among them
        warnings.filterwarnings("ignore", message=".*(LeafSpec|srun).*")
        make_trainer(callbacks=[saves], enable_checkpointing=True).fit(make_module(algorithm), make_data(rounds=14))
    path = tmp_path / "saves" / "epoch=0-step=6.ckpt"
    assert path.with_suffix(".sha256").is_file()
    again, trainer = make_module(algorithm), make_trainer(max_steps=18)
    trainer.fit(again, make_data(rounds=20), ckpt_path=path)
    assert trainer.global_step == 18
    assert torch.equal(again.outer.detach(), outer_after(18, algorithm))


def test_a_checkpoint_needs_nothing_else_to_be_loaded(make_trainer, tmp_path):
    options = {"regret_window": 3, "on_nonfinite": "skip", "seed": 5, "several_tasks": "loop"}
    trainer, module = make_trainer(), OnlineBilevelModule(WarmStarted(0.25), ALGORITHM, toy_point(1), **options)
    trainer.fit(module, make_data())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=r"load_from_checkpoint\(…, trust=True\)"):
        OnlineBilevelModule.load_from_checkpoint(tmp_path / "x.ckpt")  # which names a class of this test
    again = OnlineBilevelModule.load_from_checkpoint(tmp_path / "x.ckpt", trust=True)
    assert torch.equal(again.outer, module.outer)
    assert again.outer.dtype == F64
    assert isinstance(again.problem, WarmStarted)
    assert again.problem.proximity == 0.25
    assert repr(again.algorithm.hypergradient) == repr(module.algorithm.hypergradient)
    assert (again.seed, again.outer_step.regret_window, again.outer_step.on_nonfinite) == (5, 3, "skip")
    assert (again.several_tasks, again.tasks_per_round, again._loaded_round) == ("loop", 1, 20)
    task = make_data().test[0]
    assert torch.equal(again.evaluate(task)["loss"], module.evaluate(task)["loss"])


def test_a_given_component_replaces_the_saved_one_and_a_network_object_must_be_given(tmp_path):
    problem, path = FewShot(CNN4(ways=2, filters=2, channels=1, image_size=16)), tmp_path / "x.ckpt"
    algorithm = OBBO(window=3, inner=GradientDescent(1, 0.1, "outer"), hypergradient=FixedPoint(1))
    module = OnlineBilevelModule(problem, algorithm, tasks_per_round=2)
    torch.save(make_checkpoint(module), path)
    with pytest.raises(ValueError, match="load_from_checkpoint needs problem="):
        OnlineBilevelModule.load_from_checkpoint(path)
    saved = OnlineBilevelModule.load_from_checkpoint(path, problem=problem)
    assert torch.equal(saved.outer, module.outer)
    assert (saved.problem, saved.algorithm.memory().window, saved.tasks_per_round) == (problem, 3, 2)
    other = OnlineBilevelModule.load_from_checkpoint(path, problem=problem, algorithm=OBBO(lr=0.1, window=8))
    assert other.algorithm.memory().window == 8


def test_a_checkpoint_is_read_to_where_it_is_asked_for_and_must_be_of_a_module(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(module_file, "read_checkpoint", lambda path, place=None: asked.append((path, place)) or {})
    with pytest.raises(ValueError, match="must be of an OnlineBilevelModule, got another one"):
        OnlineBilevelModule.load_from_checkpoint(tmp_path / "x.ckpt", map_location="there")
    assert asked == [(tmp_path / "x.ckpt", "there")]


def test_a_checkpoint_has_the_inner_state_of_every_task_of_all_processes():
    module, other = (OnlineBilevelModule(Nonlinear(), SOBOW(), toy_point(2), tasks_per_round=2) for _ in range(2))
    module.states = [InnerState(*(toy_point(2, seed=10 * k + n) for k in range(3))) for n in range(2)]
    content = make_checkpoint(module)
    other.float()
    other.on_load_checkpoint(content)
    for mine, theirs in zip(module.states, other.states, strict=True):
        for name in ("inner", "linear_solution", "solver_state"):
            assert torch.equal(getattr(mine, name), getattr(theirs, name))
    assert other.outer.dtype == F64  # before λ itself is loaded, which would lose half of its digits
    every = list(other.states)
    attach(other, global_rank=1, world_size=2).on_fit_start()
    (own,) = other.states
    assert torch.equal(own.inner, every[1].inner)
    other.processes.gather_states = lambda states: [every[0], *states]
    saved = make_checkpoint(other)["inner_states"]
    assert all(torch.equal(state["inner"], one.inner) for state, one in zip(saved, every, strict=True))
    with pytest.raises(ValueError, match="tasks_per_round must be 2 to continue this run, got 3"):
        make_module(tasks_per_round=3).on_load_checkpoint(content)


def test_a_checkpoint_holds_plain_columns_and_continues_its_epoch():
    lanes = pl.DataFrame({"ticker": ["A"], "n": [3], "x": [0.5], "when": pl.Series(["2021-01-04"]).str.to_datetime()})
    for given, plain in (
        (lanes, {"ticker": ["A"], "n": [3], "x": [0.5], "when": ["2021-01-04 00:00:00"]}),
        (None, None),
    ):
        stream = SimpleNamespace(lanes=given, inputs=lambda: "inputs")
        content = make_checkpoint(attach(make_module(), datamodule=SimpleNamespace(stream=stream)))
        assert (content["inputs"], content["lanes"]) == ("inputs", plain)
    make_module().on_load_checkpoint(content)
    loop = content["loops"]["fit_loop"]
    assert loop["epoch_progress"] == {key: {"processed": 0, "completed": 0} for key in ("current", "total")}
    assert loop["epoch_loop.batch_progress"] == {"is_last_batch": False}


# BregmanOuterStep.


def fake_module(algorithm, outer, groups=None):
    parameter = torch.nn.Parameter(outer)
    optimizer = SimpleNamespace(optimizer=algorithm.optimizer(parameter, groups), step=None)
    processes = SimpleNamespace(gather_entries=lambda rounds: rounds, select_entries=lambda rounds: rounds)
    parts = {"outer": parameter, "algorithm": algorithm, "problem": SimpleNamespace(groups=groups)}
    return SimpleNamespace(**parts, processes=processes, optimizers=lambda: optimizer)


def test_the_outer_step_continues_from_its_checkpoint_once():
    module = fake_module(OBBO(lr=0.1, window=3), toy_point(2))
    first, second = BregmanOuterStep(regret_window=2), BregmanOuterStep(regret_window=2)
    empty, checkpoint = {}, {}
    first.on_save_checkpoint(None, module, empty)
    assert empty == {}  # there is no step yet
    first.on_train_start(None, module)
    assert isinstance(first.step, OuterStep)
    for seed in range(4):
        first.step.memory.merge(toy_point(2, seed=seed).unsqueeze(0))
    first.on_save_checkpoint(None, module, checkpoint)
    assert set(checkpoint["outer_step"]) == {"memory", "regret", "moved"}  # Lightning saves the optimizer
    second.on_load_checkpoint(None, module, checkpoint)
    second.on_train_start(None, module)
    assert isinstance(second.step.memory, HypergradientWindow)
    assert second.step.memory.fill == first.step.memory.fill == 3
    assert torch.equal(*(one.step.memory.merge(toy_point(2, seed=9).unsqueeze(0)) for one in (first, second)))
    for _ in range(2):  # another fit, without a checkpoint, and with one of another module
        second.on_train_start(None, module)
        assert second.step.memory.fill == 0
        second.on_load_checkpoint(None, module, {})


def test_the_outer_step_has_the_window_the_policy_and_the_groups_that_are_given():
    groups = ParameterGroups(a=Positive(0.5), b=Positive(0.25))
    callback = BregmanOuterStep(4, "skip")
    callback.on_train_start(None, fake_module(OBBO(window=3), groups.start(), groups))
    windows = {name: regret.memory.window for name, regret in callback.step.regret.items()}
    assert windows == {"euclidean": 4, "generalized": 1, "exact": 4, "geometry": 1}
    assert callback.step.on_nonfinite == "skip"
    assert list(callback.step.groups) == ["a", "b"]


def test_impossible_arguments_and_several_optimizers_are_refused():
    with pytest.raises(ValueError, match="regret_window must be an integer of at least 1, got 0"):
        BregmanOuterStep(0)
    with pytest.raises(ValueError, match="on_nonfinite must be one of raise, skip, got 'ignore'"):
        BregmanOuterStep(1, "ignore")
    module = SimpleNamespace(optimizers=lambda: [None, None], outer=toy_point(1), problem=Nonlinear())
    with pytest.raises(TypeError, match="one outer variable and one optimizer, got 2"):
        BregmanOuterStep().on_train_start(None, module)
