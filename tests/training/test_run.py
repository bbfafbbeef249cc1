"""Whole runs: built from a configuration, trained, evaluated, summarised, and ended with an exit code."""

import gc
import inspect
import json
import platform
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import lightning as L
import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from small_runs import TINY, EveryFile, config_of, read_summary, read_table
from toy import SIX, Nonlinear, double, toy_point

from obbo_lightning import ExactCheckpoints, OnlineBilevelModule, ParameterGroups, Stream, Tasks, cli, online
from obbo_lightning.config.build import build_algorithm, build_problem, build_stream
from obbo_lightning.core.step_size import DEFAULT_SCALE
from obbo_lightning.core.tuning_result import TuningResult
from obbo_lightning.problems.quadratic import Quadratic
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.runs.provenance import list_checkpoints, newest_checkpoint
from obbo_lightning.runs.summary import replace_nonfinite
from obbo_lightning.streams.quadratic import QuadraticStream
from obbo_lightning.training import run as run_file
from obbo_lightning.training.run import build, fit, fit_to_exit_code, keep_freed_memory, make_trainer, require_trainer
from obbo_lightning.training.run_writer import RunWriter
from obbo_lightning.training.signals import Stopped

# A network of three filters is far from convex.
pytestmark = pytest.mark.filterwarnings("ignore:the fixed point of the hypergradient:RuntimeWarning")

QUADRATIC = ["--config", "quadratic", "--trainer.accelerator", "cpu"]
TWO = ["--trainer.accelerator", "cpu", "--trainer.devices", "2"]
# λ has parameter groups.
GROUPS = ["--config", "regularization", "--rounds", "8", "--data.examples", "20", "--data.batch", "8"]
GROUPS += ["--data.validation", "4", "--data.test", "9", "--data.period", "2", "--problem.network.filters", "2"]
GROUPS += ["--algorithm.inner.batch_size", "4", "--evaluation.baselines", "false"]


def run_fit(*flags, name="run", callbacks=()):
    """Return the directory of a run."""
    config = config_of(*flags)
    directory = RunDirectory.create("runs", config["experiment"], name)
    fit(config, directory, callbacks=callbacks, quiet=True)
    return directory


def only_run():
    (path,) = Path("runs").glob("*/*")
    return RunDirectory(path)


def final_state(run):
    return torch.load(newest_checkpoint(run.checkpoints), weights_only=True)


# What a run computes.


@pytest.mark.parametrize("algorithm", SIX)
def test_fit_equals_the_plain_loop_bit_for_bit_and_scores_are_prequential(few_shot, algorithm, no_figures):
    flags = [*few_shot, "--algorithm", algorithm, "--rounds", "12", "--trainer.precision", "64-true"]
    flags += ["--data.queries", "10"]
    run, config = run_fit(*flags), config_of(*flags)
    stream, rows = build_stream(config), read_table(run.metrics)
    problem, tasks = build_problem(config, stream), [double(stream.train[t]) for t in range(12)]
    outer = problem.initial_outer(0).double()
    rounds = online(problem, build_algorithm(config), tasks, outer)
    for row, task, finished in zip(rows, tasks, rounds, strict=True):
        for name, value in finished.metrics().items():
            assert row[name] == ("" if value is None else str(value)), name
        scores = problem.scores(outer, finished.estimates[0].inner, task)  # before λ has learned from the task
        assert float(row["accuracy"]) == float(scores["accuracy"])
        outer = finished.outer
    assert algorithm != "obbo" or len({row["accuracy"] for row in rows}) > 1
    state = final_state(run)
    assert torch.equal(state["state_dict"]["outer"], finished.outer)
    assert torch.equal(state["outer_step"]["regret"]["euclidean"]["total"], finished.regret["euclidean"])
    assert state["global_step"] == 12


ROUNDS, REGRET_WINDOW, TASKS = 12, 4, 2


def arrays(task):
    return {name: value[0].numpy() for name, value in task.items()}


def run_in_numpy(stream, a, b, ridge, weights, steps):
    """Return λ_T, and loss and Euclidean regret of each round; of the package it uses the tasks only."""
    outer, inners = np.zeros(4), [np.zeros(8) for _ in range(TASKS)]
    past, regret, rows = [], 0.0, []
    for t in range(ROUNDS):
        gradients, losses = [], []
        for j in range(TASKS):
            task, beta = arrays(stream.train[t * TASKS + j]), inners[j]
            for _ in range(steps):
                beta = beta - 0.9 * (a @ beta - b @ outer - task["b"])
            inners[j] = beta
            by_inner = beta - task["c"]
            losses.append(0.5 * by_inner @ by_inner + 0.5 * ridge * outer @ outer)
            # the exact solution of A v = ∇_β f; ∇²_λβ g · v = −Bᵀ v
            gradients.append(ridge * outer + b.T @ np.linalg.solve(a, by_inner))
        past.insert(0, np.mean(gradients, axis=0))
        mean = np.sum(past[:REGRET_WINDOW], axis=0) / REGRET_WINDOW
        regret += mean @ mean
        rows.append((np.mean(losses), regret))
        outer = outer - 0.002 * sum(w * d for w, d in zip(weights, past, strict=False)) / sum(weights)
    return outer, rows


@pytest.mark.parametrize(
    ("name", "flags", "weights", "steps"),  # weights of the window's hypergradients from the newest on, and K
    [
        ("obbo", ["--algorithm.geometry", "euclidean"], [1.0, 1.0, 1.0], 4),
        ("sobow", ["--algorithm.discount", "0.5"], [1.0, 0.5, 0.25], 1),
    ],
)
def test_a_run_is_its_definition_written_out_in_numpy(name, flags, weights, steps, here, monkeypatch, no_figures):
    flags = [*flags, "--algorithm.hypergradient", "conjugate_gradient", "--algorithm.hypergradient.steps", 20]
    flags += ["--algorithm.inner.steps", steps, "--algorithm.inner.lr", 0.9, "--algorithm.domain", "real"]
    flags += ["--seed", 3, "--rounds", ROUNDS, "--tasks_per_round", TASKS, "--regret_window", REGRET_WINDOW]
    flags += ["--algorithm.window", 3, "--algorithm.lr", "0.002", "--evaluation.tasks", 5, "--evaluation.every", 5]
    poison = Tasks(lambda t: pytest.fail("a run looked at a validation task"), 5)
    monkeypatch.setattr(QuadraticStream, "validation", property(lambda self: poison, lambda self, tasks: None))
    run = run_fit(*QUADRATIC, "--algorithm", name, *flags)
    stream = QuadraticStream(noise=0.1, seed=3)
    problem = stream.train.problem
    a, b, ridge = problem.inner_matrix[0].numpy(), problem.coupling[0].numpy(), problem.ridge
    outer, rows = run_in_numpy(stream, a, b, ridge, weights, steps)
    for row, (loss, regret) in zip(read_table(run.metrics), rows, strict=True):
        assert float(row["loss"]) == pytest.approx(loss, rel=1e-10)
        assert float(row["regret/euclidean"]) == pytest.approx(regret, rel=1e-10)
    summary, tests = read_summary(run), [arrays(stream.test[i]) for i in range(5)]
    losses = []  # of λ_1 and λ_T on the test tasks, whose inner problem is solved exactly
    for at in (np.zeros(4), outer):
        gaps = [np.linalg.solve(a, b @ at + task["b"]) - task["c"] for task in tests]
        losses.append(np.array([0.5 * gap @ gap + 0.5 * ridge * at @ at for gap in gaps]))
    initial, final = losses
    gain = initial - final  # of a loss: lower is better
    assert summary["initial_test_loss"] == pytest.approx(initial.mean(), rel=1e-10)
    assert summary["test_loss"] == pytest.approx(final.mean(), rel=1e-10)
    assert summary["test_loss_se"] == pytest.approx(final.std(ddof=1) / 5**0.5, rel=1e-8)
    assert summary["gain"] == pytest.approx(gain.mean(), rel=1e-10)
    assert summary["gain"] > 0
    assert summary["gain_se"] == pytest.approx(gain.std(ddof=1) / 5**0.5, rel=1e-6)
    assert not summary["higher_is_better"]


def test_the_seed_decides_tasks_start_and_samples(few_shot, monkeypatch, no_figures):
    runs = [run_fit(*few_shot, "--rounds", 3, "--seed", seed, name=f"run{i}") for i, seed in enumerate((0, 3, 3))]
    first, second, third = (run.metrics.read_bytes() for run in runs)
    assert second == third != first
    starts = [build(config_of(*few_shot, "--seed", seed)).module for seed in (0, 3)]
    for seed, module in zip((0, 3), starts, strict=True):
        assert torch.equal(module.outer.detach(), module.problem.initial_outer(seed))
    assert not torch.equal(starts[0].outer, starts[1].outer)
    # the same tasks for both: what is left of the seed are the samples
    init = QuadraticStream.__init__

    def with_seed_7(self, *arguments, seed=0, **options):
        init(self, *arguments, **options, seed=7)

    with_seed_7.__signature__ = inspect.signature(init)
    monkeypatch.setattr(QuadraticStream, "__init__", with_seed_7)
    sampled = ["--algorithm", "sobbo", "--rounds", 3, "--evaluation.tasks", 1]
    one, other = (read_table(run_fit(*QUADRATIC, *sampled, "--seed", s, name=f"s{s}").metrics) for s in (0, 1))
    assert one[0]["hypergradient_norm"] != other[0]["hypergradient_norm"]


def test_evaluations_never_change_training(few_shot, no_figures):
    often, never = (run_fit(*few_shot, "--evaluation.every", every, name=f"every{every}") for every in (1, 1000))
    assert torch.equal(*(final_state(run)["state_dict"]["outer"] for run in (often, never)))
    for row, other in zip(read_table(often.metrics), read_table(never.metrics), strict=True):
        assert {k: v for k, v in row.items() if "test" not in k} == {k: v for k, v in other.items() if "test" not in k}


def test_a_run_directory_holds_what_the_readme_lists(few_shot, capsys):
    assert cli.main(["fit", *few_shot]) == 0
    run = only_run()
    files = {"config.yaml", "metrics.csv", "timings.csv", "fingerprints.csv", "status.json", "provenance.json", ".lock"}
    names = {path.name for path in run.path.iterdir()}
    assert names == {*files, "summary.json", "test_scores.csv", "checkpoints", "figures"}
    assert {path.name for path in run.figures.iterdir()} == {"regret.png", "accuracy.png"}
    assert [path.name for path in list_checkpoints(run.checkpoints)] == ["round-00000008.ckpt", "round-00000010.ckpt"]
    summary, rows = read_summary(run), read_table(run.metrics)
    assert summary["rounds"] == len(rows) == 10
    assert summary["gain"] == pytest.approx(summary["test_accuracy"] - summary["initial_test_accuracy"])
    assert [bool(row["test_accuracy"]) for row in rows] == [False] * 4 + [True] + [False] * 4 + [True]
    assert "seconds" not in rows[0]
    scores = read_table(run.test_scores)
    assert [row["task"] for row in scores] == ["1", "2"]
    for name in ("accuracy", "initial_accuracy"):
        mean = sum(float(row[name]) for row in scores) / 2
        assert mean == pytest.approx(summary[f"{name.replace('accuracy', 'test_accuracy')}"])
    printed = capsys.readouterr().out
    assert "accuracy on 2 test tasks before learning; higher is better" in " ".join(printed.replace("│", " ").split())
    assert str(run.figures / "regret.png") in printed.replace("\n", "")


def test_memory_stays_constant(few_shot, no_figures):
    seen, callback = [], L.Callback()  # resident pages after each round
    callback.on_train_batch_end = lambda *_: seen.append(int(Path("/proc/self/statm").read_text().split()[1]))
    run_fit(*few_shot, "--rounds", 150, "--evaluation.every", 50, "--checkpoint.every", 25, callbacks=[callback])
    assert max(seen[50:]) <= 1.03 * seen[49]


def test_a_run_leaves_neither_its_data_nor_its_signal_handlers_behind(here, no_figures):
    def alive():
        gc.collect()
        return {id(one) for one in gc.get_objects() if type(one) in (QuadraticStream, OnlineBilevelModule)}

    others = alive()
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)}
    assert cli.main(["fit", *QUADRATIC, "--rounds", "3", "--trainer.enable_progress_bar", "false"]) == 0
    assert {n: signal.getsignal(n) for n in before} == before
    assert alive() <= others


def test_the_summary_of_a_run_that_diverges_is_json(here, no_figures):
    run = run_fit(*QUADRATIC, "--rounds", 3, "--on_nonfinite", "skip", "--algorithm.inner.lr", "1e200")
    summary = json.loads(run.summary.read_text(), parse_constant=pytest.fail)  # NaN and infinity are no JSON
    assert (summary["rounds"], summary["prequential_loss"]) == (3, None)
    assert (summary["skipped"], summary["diverged"]) == (3, True)


class SomeNotFinite(QuadraticStream):
    """Its tasks from ``first`` to ``last``, counted from 1, are NaN.

    Args:
        first: first task that is not finite.
        last: last one.
        seed: of the others.
    """

    def __init__(self, first: int = 3, last: int = 5, seed: int = 0):
        super().__init__(seed=seed)
        self.first, self.last, task = first, last, self.train.task
        self.train.task = lambda t: {
            name: value * (torch.nan if first <= t + 1 <= last else 1) for name, value in task(t).items()
        }


@pytest.mark.parametrize(
    ("last", "rounds", "code"),
    [(5, 8, 0), (13, 13, 1), (12, 13, 0), (11, 11, 0), (40, 30, 1)],  # the tasks from the third on
)
def test_a_run_whose_last_ten_rounds_were_skipped_ends_with_code_1(last, rounds, code, here, capsys, no_figures):
    flags = ["--data", "test_run.SomeNotFinite", "--data.last", last, "--rounds", rounds, "--on_nonfinite", "skip"]
    assert cli.main(["fit", *QUADRATIC, *map(str, flags), "--evaluation.tasks", "2"]) == code
    run = only_run()
    summary = read_summary(run)
    assert (summary["skipped"], summary["diverged"]) == (min(last, rounds) - 2, bool(code))
    printed = capsys.readouterr()
    count = f"{summary['skipped']} of {rounds}"
    assert count in printed.out
    end = ", and all of the last 10: the run has diverged; " if code else "; "
    assert f"obbo: warning: rounds skipped as not finite: {count}{end}a smaller algorithm.inner.lr" in printed.err
    # the regret of a skipped round is that of the one before it
    rows = read_table(run.metrics)
    for name in ("regret/generalized", "regret/geometry"):
        before, last_finite, skipped = (float(rows[i][name]) for i in range(3))
        assert skipped - last_finite == pytest.approx(last_finite - before)
    if code:  # and so does the process that continues it, until it recovers
        assert cli.main(["resume", str(run.path), "--rounds", str(rounds + 1), "--trust"]) == int(last > rounds)


@pytest.mark.parametrize("folds", [1, 2])
def test_a_summary_tells_of_each_parameter_group_whether_it_helped(folds, here, monkeypatch, no_figures):
    """The result is that of the plain loop, with the fold of each round and the bounds of the algorithm."""
    monkeypatch.setattr(EveryFile, "folds", folds)
    flags = ["--data", "small_runs.EveryFile", *TINY, "--algorithm.groups.weight.domain.name", "box"]
    flags += ["--algorithm.groups.weight.domain.lower", "0.4999", "--algorithm.groups.weight.domain.upper", "0.5001"]
    run, config = run_fit(*flags), config_of(*flags)
    stream, algorithm = build_stream(config), build_algorithm(config)
    problem = build_problem(config, stream)
    before, result = stream.start(problem, 0), TuningResult(folds, new_examples=folds == 1)
    result.attach(ParameterGroups(weight=algorithm.resolved_groups(problem.groups)[0]))
    tasks = [stream.train[t] for t in range(6)]
    for t, finished in enumerate(online(problem, algorithm, tasks, before, folds=folds)):
        result.add(before, finished, t % folds)
        before = finished.outer
    expected = replace_nonfinite({"weight": {**result.summary()["weight"], "held_out": True}})
    assert read_summary(run)["tuning"] == expected
    assert expected["weight"]["start"] == [0.5]
    assert "reached its" in expected["weight"]["verdict"]
    assert float(read_table(run.outer)[-1]["weight"]) == pytest.approx(expected["weight"]["final"][0])


def test_a_summary_has_no_coordinates_of_a_network_and_a_gain_only_where_steps_are_automatic(few_shot, no_figures):
    fixed = run_fit(*few_shot, "--rounds", 3)
    automatic = run_fit(*few_shot, "--rounds", 3, "--algorithm.lr", "auto", name="auto")
    assert "tuning" not in read_summary(fixed)
    (one,) = read_summary(automatic)["tuning"].values()
    assert set(one) == {"gain", "gain_se", "held_out", "helped", "moved", "verdict"}


@pytest.mark.parametrize(("tasks", "held_out"), [(1, True), (2, False)])
def test_examples_are_held_out_unless_rounds_have_all_folds(tasks, held_out, here, monkeypatch, no_figures):
    monkeypatch.setattr(EveryFile, "folds", 4)
    run = run_fit("--data", "small_runs.EveryFile", *TINY, "--tasks_per_round", tasks)
    assert read_summary(run)["tuning"]["weight"]["held_out"] is held_out


@pytest.mark.parametrize(
    ("flags", "asked"), [((), [4]), (("--evaluation.baselines", "false"), []), (("--tasks_per_round", 2), [])]
)
def test_baselines_are_of_the_rounds_that_were_run(flags, asked, here, monkeypatch, capsys):
    calls, figures = [], []

    def baselines(stream, problem, algorithm, rounds):
        calls.append(rounds)
        return {"half": [0.5] * rounds, "rising": [float(t) for t in range(rounds)]}

    monkeypatch.setattr(Stream, "baselines", baselines)
    monkeypatch.setattr(Quadratic, "notes", lambda problem: {"parameters": 3})
    monkeypatch.setattr(run_file, "draw_figures", lambda *arguments: figures.append(arguments) or [])
    flags = [*QUADRATIC, "--rounds", 9, "--trainer.max_steps", 4, "--evaluation.tasks", 2, *flags]
    run = run_fit(*flags)
    assert capsys.readouterr().out == ""
    assert calls == asked
    summary = read_summary(run)
    ((folder, rounds, metric, initial, _, drawn),) = figures
    assert (folder, metric, len(rounds["loss"])) == (run.figures, "loss", 4)
    assert drawn == (baselines(None, None, None, 4) if asked else {})
    assert initial == pytest.approx(summary["initial_test_loss"])
    assert (summary["rounds"], summary["notes"]) == (4, {"parameters": 3})
    assert summary.get("baselines") == ({"half": 0.5, "rising": 1.5} if asked else None)
    if asked:
        assert [row["rising"] for row in read_table(run.baselines)] == ["0.0", "1.0", "2.0", "3.0"]
    written = yaml.safe_load(run.config.read_text())
    assert written["trainer"] == {"accelerator": "cpu", "devices": 1, "max_steps": 4}  # without Lightning's defaults
    assert written["threads"] == 1
    assert len(read_table(run.fingerprints)[0]["tasks"].split()) == written["tasks_per_round"]


def test_test_and_validation_scores_are_columns_and_validate_agrees(here, capsys, no_figures):
    flags = [*QUADRATIC, "--rounds", "6", "--evaluation.every", "4", "--evaluation.tasks", "3"]
    assert cli.main(["fit", *flags, "--evaluation.split", "both"]) == 0
    run = only_run()
    rows, summary = read_table(run.metrics), read_summary(run)
    for name in ("test_loss", "validation/loss"):
        assert [bool(row[name]) for row in rows] == [False, False, False, True, False, True]
    assert rows[-1]["validation/loss"] != rows[-1]["test_loss"]
    assert (summary["validation_loss"], summary["validation_tasks"]) == (float(rows[-1]["validation/loss"]), 3)
    capsys.readouterr()
    for command, stage in (("validate", "validation"), ("test", "test")):
        assert cli.main([command, str(run.path)]) == 0
        printed = capsys.readouterr().out
        mean, error = (summary[f"{stage}_loss{end}"] for end in ("", "_se"))
        assert f"{stage}/loss" in printed
        assert f"{mean:.4f} ± {error:.4f}" in printed
    saved = json.loads(run.validation.read_text())
    assert (saved["checkpoint"], saved["tasks"]) == ("round-00000006.ckpt", 3)
    assert saved["loss"] == pytest.approx(summary["validation_loss"], rel=1e-12)
    assert saved["loss_se"] == pytest.approx(summary["validation_loss_se"], rel=1e-12)
    assert cli.main(["test", str(run.path), "--tasks", "4"]) == 0
    assert "test on 4 tasks" in capsys.readouterr().out
    assert cli.main(["validate", str(run.path), "--tasks", "many"]) == 2
    assert "validate: argument --tasks: invalid int value: 'many'" in capsys.readouterr().err


def test_a_run_without_evaluation_can_be_tested_later(here, capsys, no_figures):
    run = run_fit(*QUADRATIC, "--rounds", "2", "--evaluation.split", "none")
    assert read_summary(run)["test_tasks"] == 0
    assert cli.main(["test", str(run.path)]) == 0
    assert "test/loss" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config", "forgetting", "--evaluation.split", "validation"], "evaluation.split must be test or none for"),
        ([*QUADRATIC, "--evaluation.split", "train"], "evaluation.split"),
        ([*QUADRATIC, "--threads", "0"], "threads must be auto, or an integer of at least 1, got 0\n"),
        ([*QUADRATIC, "--evaluation.tasks", "601"], "evaluation.tasks must be at most the 600 test tasks, got 601"),
        ([*QUADRATIC, "--trainer.precision", "32"], "trainer.precision must be 64 for a problem that is computed in"),
        *(
            ([*QUADRATIC, "--trainer.precision", name], "trainer.precision must be 32 or 64, got bf16-")
            for name in ("bf16-true", "bf16-mixed", "16-mixed")
        ),
        ([*TWO, "--tasks_per_round", "3"], "tasks_per_round must be a multiple of the 2 processes, got 3"),
        (["--tasks_per_round", "0"], "tasks_per_round must be an integer of at least 1, got 0"),
        (["--tasks_per_round", "4", "--rounds", "20000"], "must be at most the stream's 20000 tasks, 4 per round"),
        (["--several_tasks", "both"], "several_tasks"),
        ([*TWO, "--trainer.strategy", "ddp_spawn", "--tasks_per_round", "2"], "must be ddp, got one that spawns or"),
        ([*TWO, "--trainer.strategy", "fsdp", "--tasks_per_round", "2"], "trainer"),
        ([*GROUPS, "--algorithm.groups.decay.geometry", "round"], "algorithm.groups.decay.geometry must be one of"),
        ([*GROUPS, "--algorithm.groups.decay.lr", "-1"], "algorithm.groups.decay.lr must be a positive finite number"),
        (["--config", "sources", "--algorithm.geometry", "burg"], "algorithm.groups.sources.geometry Burg() with"),
        ([*GROUPS, "--algorithm.geometry.decay", "0.5"], "algorithm.geometry.decay"),
        ([*QUADRATIC, "--algorithm.groups.decay.lr", "1"], "algorithm.groups must be none for a problem"),
        (["--config", "forgetting", "--problem.past", "5"], "problem.past cannot be set, got 5: it follows from the"),
        (["--config", "forgetting", "--problem.ridge", "-1"], "problem.ridge must be a positive finite number, got -1"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*AMP with fp16 is not supported on CPU")
def test_an_impossible_run_is_refused_in_one_line_before_anything_is_written(flags, message, here, capsys):
    assert cli.main(["fit", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not Path("runs").exists()


def test_threads_are_recorded_and_used_again_by_a_resume(here, no_figures):
    """Quadratics are too small to be computed by more than one thread, which forks of this process need."""
    try:
        run = run_fit(*QUADRATIC, "--rounds", 3, "--threads", 2)
        assert yaml.safe_load(run.config.read_text())["threads"] == 2
        run.summary.unlink()
        shutil.rmtree(run.checkpoints)
        torch.set_num_threads(1)
        assert cli.main(["resume", str(run.path)]) == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


# Runs that Lightning or its callbacks end.

STOPPING = "{name: EarlyStopping, monitor: validation/loss, patience: 0, min_delta: 1.0e+9}"


@pytest.mark.parametrize(
    ("flags", "rounds"),
    [
        (["--trainer.max_steps", "7"], 7),
        (["--trainer.limit_train_batches", "9"], 9),
        (["--trainer.val_check_interval", "5", "--trainer.callbacks", STOPPING], 10),
    ],
    ids=["max_steps", "limit_train_batches", "early_stopping"],
)
def test_a_run_that_lightning_ends_early_has_its_summary_and_its_last_evaluation(here, flags, rounds, no_figures):
    run = run_fit(*QUADRATIC, "--rounds", 40, "--evaluation.every", 30, "--evaluation.tasks", 3, *flags)
    rows = read_table(run.metrics)
    assert len(rows) == read_summary(run)["rounds"] == rounds
    assert rows[-1]["test_loss"] != ""
    assert (run.checkpoints / f"round-{rounds:08d}.ckpt").is_file()


# The components and the Trainer.


def test_a_run_is_built_with_every_key_of_its_configuration(monkeypatch):
    asked = []
    monkeypatch.setattr(run_file, "take_threads", lambda *given: asked.append(given) or 1)
    config = config_of(
        *QUADRATIC, "--regret_window", 4, "--on_nonfinite", "skip", "--several_tasks", "loop", "--tasks_per_round", 2,
        "--seed", 5, "--workers", 1, "--threads", 2, "--trainer.devices", 2, "--rounds", 7, "--evaluation.tasks", 3,
    )  # fmt: skip
    module, data, stream, validation = build(config)
    assert asked == [(2, 2)]
    assert config["threads"] == 1
    assert (module.seed, module.several_tasks, module.tasks_per_round) == (5, "loop", 2)
    assert (module.outer_step.regret_window, module.outer_step.on_nonfinite) == (4, "skip")
    assert (data.stream, data.rounds, data.tasks_per_round, validation) == (stream, 7, 2, [])
    loaders = data.train_dataloader(), data.val_dataloader(), data.test_dataloader()
    assert [getattr(loader, "loader", loader).num_workers for loader in loaders] == [1, 1, 1]
    for loader, tasks in zip(loaders[1:], (stream.validation, stream.test), strict=True):
        served = list(loader)
        assert len(served) == 3
        assert all(torch.equal(task["b"], tasks[i]["b"]) for i, task in enumerate(served))
    both = build(config_of(*QUADRATIC, "--evaluation.split", "both", "--evaluation.tasks", 4))
    assert torch.equal(both.validation[3]["b"], both.stream.validation[3]["b"])
    assert len(both.validation) == 4
    assert len(build(config_of(*QUADRATIC, "--evaluation.tasks", 600)).data.test) == 600


def test_the_module_returns_its_network(few_shot):
    module, data, *_ = build(config_of(*few_shot))
    assert module.network()(data.test[0]["query"]).shape == (6, 3)


def test_glibc_takes_the_settings_of_its_allocator():
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")


@pytest.mark.parametrize(("algorithm", "stored"), [("oagd", 8000), ("obbo", 0)])
def test_the_memory_of_a_run_is_estimated_from_its_task_and_its_outer_variable(algorithm, stored, monkeypatch):
    asked = {}
    monkeypatch.setattr(run_file, "require_memory", lambda key, count, size: asked.__setitem__(key, (count, size)))
    config = {"algorithm": {"name": algorithm, "window": 5}, "regret_window": 10, "workers": 1000}
    config |= {"tasks_per_round": 2, "evaluation": {"tasks": 3}}
    start, task = torch.zeros(2, 100, dtype=torch.float64), {"x": torch.zeros(1000, dtype=torch.float64), "name": "x"}
    run_file._require_sizes(config, start, task)
    assert asked == {
        "tasks_per_round": (2, 2 * 8000),
        "evaluation.tasks": (3, 3 * 8000),
        "regret_window": (10, 10 * (1600 + 100)),
        "algorithm.window": (5, 5 * (1600 + stored + 100)),  # OAGD stores tasks, too
    }
    run_file._require_sizes(config, start, None)  # a task that is not known is at least small
    assert asked["tasks_per_round"] == (2, 2000)
    with pytest.raises(ValueError, match="workers must be at most 1000, got 1001"):
        run_file._require_sizes({**config, "workers": 1001}, start, task)


@pytest.mark.parametrize(
    ("flags", "training"),
    [
        ((), 0),
        (("--trainer.limit_val_batches", 2), 2),
        (("--trainer.val_check_interval", 3), 1.0),
        (("--trainer.val_check_interval", 3, "--trainer.limit_val_batches", 0.5), 0.5),
    ],
)
def test_lightning_validates_where_asked_to_and_evaluating_a_run_uses_all_tasks(flags, training):
    config = config_of(*QUADRATIC, *flags)
    trainer, evaluating = make_trainer(config), make_trainer(config, evaluating=True)
    assert (trainer.limit_val_batches, evaluating.limit_val_batches) == (training, 1.0)
    if "--trainer.val_check_interval" in flags:
        assert (trainer.val_check_interval, evaluating.val_check_interval) == (3, 1.0)
    assert (trainer.max_epochs, trainer.num_sanity_val_steps, trainer.log_every_n_steps) == (1, 0, 1)
    assert trainer.checkpoint_callbacks == []
    assert not trainer._accelerator_connector.use_distributed_sampler  # it would halve the stream
    assert not trainer.validate_loop.inference_mode  # adapting needs gradients


def test_options_of_the_user_replace_the_usual_ones_and_his_callbacks_come_first(tmp_path):
    ours = object.__new__(RunWriter)
    names = "[{name: Timer}, {name: lightning.pytorch.callbacks.LambdaCallback}, {name: ModelCheckpoint}]"
    flags = ["--trainer.callbacks", names, "--trainer.log_every_n_steps", 7, "--trainer.enable_model_summary", "true"]
    config = config_of(*QUADRATIC, *flags)
    config["trainer"]["plugins"] = LightningEnvironment()
    trainer = make_trainer(config, [ours], root=tmp_path)
    names = [type(callback).__name__ for callback in trainer.callbacks]
    assert names.index("Timer") < names.index("LambdaCallback") < names.index("ModelCheckpoint")
    assert names[-1] == "RunWriter"
    assert any("ModelSummary" in name for name in names)
    assert trainer.log_every_n_steps == 7
    assert trainer.default_root_dir == str(tmp_path)
    assert trainer.checkpoint_callback is not None
    assert trainer._accelerator_connector.cluster_environment is config["trainer"]["plugins"]
    assert isinstance(trainer.strategy.checkpoint_io, ExactCheckpoints)
    evaluating = {type(callback).__name__ for callback in make_trainer(config, evaluating=True).callbacks}
    assert not evaluating & {"Timer", "ModelCheckpoint"}


def test_a_stream_that_arrives_task_by_task_has_one_process():
    config = config_of(*QUADRATIC)
    module = OnlineBilevelModule(Nonlinear(), build_algorithm(config), toy_point(2), tasks_per_round=2)
    trainer = SimpleNamespace(precision="64-true", strategy=DDPStrategy(), world_size=1)
    components = SimpleNamespace(module=module, stream=SimpleNamespace(train=iter([])))
    require_trainer(trainer, config, components)
    trainer.world_size = 2
    with pytest.raises(ValueError, match=r"trainer\.devices must be 1 for a stream that arrives task by task"):
        require_trainer(trainer, config, components)


# Exit codes.

CONTINUE = "continue with: python -m obbo_lightning resume "


@pytest.mark.parametrize(
    ("error", "rank_zero", "code", "message"),
    [
        (Stopped(15, 3), True, 143, f"stopped by SIGTERM after round 3; {CONTINUE}"),
        (Stopped(2, 3), True, 130, "stopped by SIGINT after round 3"),
        (Stopped(15, 3), False, 0, ""),  # rank 0 reports for all
        (run_file.DamagedTaskError("a.npz: damaged"), True, 2, f"obbo: a.npz: damaged; when it is fixed, {CONTINUE}"),
        (FloatingPointError("an overflow"), True, 1, "obbo: an overflow"),
        (FloatingPointError("an overflow"), False, 1, ""),
        (None, True, 0, ""),
    ],
)
def test_the_end_of_a_run_is_reported_once_and_in_its_exit_code(
    error, rank_zero, code, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(run_file, "fit", Mock(side_effect=error, return_value={}))
    monkeypatch.setattr(run_file, "is_rank_zero", lambda: rank_zero)
    assert fit_to_exit_code({}, RunDirectory(tmp_path), None) == code
    printed = capsys.readouterr().err
    assert message in printed
    assert bool(printed) == bool(message)


def test_a_defect_in_a_run_tells_how_to_continue_and_one_before_it_does_not(tmp_path, monkeypatch):
    run = RunDirectory(tmp_path)
    monkeypatch.setattr(run_file, "fit", Mock(side_effect=RuntimeError("a defect")))
    with pytest.raises(RuntimeError, match="a defect"):
        fit_to_exit_code({}, run, None)
    run.config.touch()
    message = r"RuntimeError: a defect .* continue with: python -m .* resume "
    with pytest.raises(run_file.RunFailedError, match=message):
        fit_to_exit_code({}, run, None)


# Runs whose λ has parameter groups.


def test_a_run_writes_lambda_by_name_and_metrics_of_each_group(here, no_figures):
    run = run_fit(*GROUPS)
    rows, outer = read_table(run.metrics), read_table(run.outer)
    assert [row["round"] for row in outer] == [str(t) for t in range(1, 9)]
    assert list(outer[0]) == ["round", "decay", "smoothing"]
    final = final_state(run)["state_dict"]["outer"][0].tolist()
    assert [float(outer[-1][name]) for name in ("decay", "smoothing")] == final
    for row in rows:
        assert float(row["lr/decay"]) > 0
        assert row["regret/exact/decay"] == ""
    algorithm = yaml.safe_load(run.config.read_text())["algorithm"]
    assert (algorithm["lr"], algorithm["scale"]) == (None, DEFAULT_SCALE)
    assert not {"geometry", "regularizer", "domain"} & set(algorithm)


@pytest.mark.parametrize(
    ("flags", "rates", "geometries", "columns"),
    [
        (
            ["--algorithm.geometry", "euclidean", "--algorithm.groups.smoothing.lr", "0.5"],
            ["auto", 0.5],
            ["Euclidean", "Euclidean"],
            {"lr/decay"},
        ),
        (
            ["--algorithm.lr", "0.1", "--algorithm.groups.smoothing.geometry.name", "adaptive_diagonal"],
            [0.1, 0.1],
            ["NegativeEntropy", "AdaptiveDiagonal"],
            set(),
        ),
    ],
)
def test_flags_are_for_all_groups_or_for_one(flags, rates, geometries, columns, here, no_figures):
    run = run_fit(*GROUPS, *flags, "--rounds", 2)
    module = OnlineBilevelModule.load_from_checkpoint(newest_checkpoint(run.checkpoints))
    groups = module.configure_optimizers().groups
    assert [group.lr for group in groups] == rates
    assert [type(group.geometry).__name__ for group in groups] == geometries
    assert {name for name in read_table(run.metrics)[0] if name.startswith("lr/")} == columns
