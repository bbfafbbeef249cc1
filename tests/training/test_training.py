import csv
import json
import shutil
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from obbo_lightning.training.recorder import Recorder
from toy import SIX

from obbo_lightning import cli, online
from obbo_lightning.config.build import build_algorithm, build_problem, build_stream
from obbo_lightning.config.parse import complete_config, overlay, parse_arguments
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.runs import checkpoints
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.training import run as runs

# A network of three filters is far from convex.
pytestmark = pytest.mark.filterwarnings("ignore:the fixed point of the hypergradient:RuntimeWarning")

TINY = """
experiment: tiny
rounds: 10
on_nonfinite: raise
algorithm: {lr: 0.01, window: 3, inner: {steps: 2, lr: 0.05}, hypergradient: {steps: 2}}
data: {ways: 3, shots: 2, queries: 2, image_size: 16}
problem: {network: {filters: 3}}
evaluation: {every: 5, tasks: 2}
checkpoint: {every: 4}
trainer: {accelerator: cpu}
per_algorithm:
  sobbo:
    inner: {batch_size: 4}
    hypergradient: {name: stochastic_neumann, max_terms: 3, smoothness: 20.0, batch_size: 4}
  sobow:
    discount: 0.9
    inner: {start: previous}
    hypergradient: {name: conjugate_gradient, steps: 2, warm_start: true}
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return ["--config", "tiny.yaml"]


def settings_of(arguments):
    return complete_config(parse_arguments(arguments)[0])


def fit(arguments, name="run", callbacks=()):
    settings = settings_of(arguments)
    directory = RunDirectory.create("runs", settings["experiment"], name)
    runs.fit(settings, directory, callbacks=callbacks, quiet=True)
    return directory


def final_state(directory):
    return torch.load(checkpoints.list_checkpoints(directory.checkpoints)[-1], weights_only=True)


def rows(directory):
    with directory.metrics.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("algorithm", SIX)
def test_fit_is_the_plain_loop_of_the_core_to_the_last_bit(tiny, algorithm):
    arguments = [*tiny, "--algorithm", algorithm, "--rounds", "20", "--trainer.precision", "64-true"]
    state = final_state(fit(arguments))
    settings = settings_of(arguments)
    stream = build_stream(settings)
    problem = build_problem(settings, stream)
    tasks = ({k: v.double() if v.is_floating_point() else v for k, v in stream.train[t].items()} for t in range(20))
    rounds = online(problem, build_algorithm(settings), tasks, problem.initial_outer(0).double())
    *_, last = rounds
    assert torch.equal(state["state_dict"]["outer"], last.outer)
    (outer_step,) = [v for k, v in state["callbacks"].items() if "BregmanOuterStep" in k]
    assert torch.equal(outer_step["regret"]["euclidean"]["total"], last.regret["euclidean"])
    assert state["global_step"] == 20


class Crash(L.Callback):
    """Ends a run without a word, as a power cut would."""

    def __init__(self, at):
        self.at = at

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.at:
            raise ConnectionAbortedError("crash")


@pytest.mark.parametrize("algorithm", SIX)
@pytest.mark.parametrize("at", [6, 9])
def test_a_run_that_crashed_goes_on_as_if_nothing_had_happened(tiny, algorithm, at):
    # at 9 an evaluation was due in the very round of the last checkpoint
    arguments = [*tiny, "--algorithm", algorithm, "--evaluation.every", {6: "5", 9: "4"}[at]]
    arguments += ["--trainer.precision", {6: "64-true", 9: "32-true"}[at]]
    whole = fit(arguments, "whole")
    with pytest.raises(ConnectionAbortedError):
        fit(arguments, "crashed", callbacks=[Crash(at)])
    (directory,) = RunDirectory.create("runs", "tiny", "x").path.parent.glob("crashed-*")
    crashed = RunDirectory(directory)
    assert not crashed.finished
    assert cli.main(["resume", str(directory)]) == 0
    assert crashed.metrics.read_bytes() == whole.metrics.read_bytes()
    one, other = final_state(whole), final_state(crashed)
    assert one["global_step"] == other["global_step"] == 10
    for state in (one, other):
        (recorder,) = [v for k, v in state["callbacks"].items() if "Recorder" in k]
        del recorder["seconds"]
    for key in ("state_dict", "callbacks", "optimizer_states", "warms"):
        assert_same(one[key], other[key], key)
    ignored = {"seconds"}
    summaries = [json.loads(d.summary.read_text()) for d in (whole, crashed)]
    assert all(summaries[0][k] == summaries[1][k] for k in summaries[0].keys() - ignored)


def assert_same(one, other, where):
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for i, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}.{i}")
    else:
        assert one == other, where


class Watch(L.Callback):
    def __init__(self):
        self.steps, self.outers = [], []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.outers.append(module.outer.detach().clone())
        assert trainer.global_step == batch_idx

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps.append(trainer.global_step)


def test_the_global_step_is_the_round_and_accuracy_is_judged_before_learning(tiny):
    watch = Watch()
    arguments = [*tiny, "--data.queries", "10"]
    directory = fit(arguments, callbacks=[watch])
    assert watch.steps == list(range(1, 11))
    settings = settings_of(arguments)
    stream = build_stream(settings)
    problem, algorithm = build_problem(settings, stream), build_algorithm(settings)
    for t, row in enumerate(rows(directory)):
        task, before = stream.train[t], watch.outers[t]
        inner = algorithm.inner(Oracle(problem, before, task), None)
        accuracy = (problem.loaded_network(inner)(task["query"]).argmax(-1) == task["query_labels"]).float().mean()
        assert float(row["accuracy"]) == pytest.approx(float(accuracy))
        assert int(row["round"]) == t + 1
    assert any(row["accuracy"] != rows(directory)[0]["accuracy"] for row in rows(directory))


def test_evaluation_never_changes_training(tiny):
    often = fit([*tiny, "--evaluation.every", "1"], "often")
    never = fit([*tiny, "--evaluation.every", "1000"], "never")
    assert torch.equal(*(final_state(d)["state_dict"]["outer"] for d in (often, never)))
    for a, b in zip(rows(often), rows(never), strict=True):
        assert {k: v for k, v in a.items() if "test" not in k} == {k: v for k, v in b.items() if "test" not in k}


def test_a_run_directory_holds_what_the_readme_says(tiny, capsys):
    assert cli.main(["fit", *tiny]) == 0
    (path,) = (RunDirectory.create("runs", "tiny", "x").path.parent).glob("obbo-*")
    names = {p.name for p in path.iterdir()}
    files = {"config.yaml", "metrics.csv", "timings.csv", "tasks.csv", "state.json", "provenance.json", "summary.json"}
    assert names == {*files, "tests.csv", "checkpoints", "figures"}
    assert {p.name for p in (path / "figures").iterdir()} == {"regret.png", "accuracy.png"}
    assert [p.name for p in checkpoints.list_checkpoints(path / "checkpoints")] == [
        "round-00000008.ckpt",
        "round-00000010.ckpt",
    ]
    summary = json.loads((path / "summary.json").read_text())
    assert summary["rounds"] == 10
    assert summary["gain"] == pytest.approx(summary["test_accuracy"] - summary["untrained_test_accuracy"])
    table = rows(RunDirectory(path))
    assert len(table) == 10
    assert [bool(row["test_accuracy"]) for row in table] == [False] * 4 + [True] + [False] * 4 + [True]
    assert "seconds" not in table[0]
    printed = capsys.readouterr().out
    assert "accuracy on 2 test tasks before learning; higher is better" in " ".join(printed.replace("│", " ").split())
    assert str(path / "figures" / "regret.png") in printed.replace("\n", "")


def test_two_runs_never_share_a_directory(tmp_path):
    paths = {RunDirectory.create(str(tmp_path), "e", "obbo").path for _ in range(5)}
    assert len(paths) == 5


def test_metrics_are_the_numbers_of_the_plain_loop(tiny):
    directory = fit([*tiny, "--trainer.precision", "64-true"])
    settings = settings_of(tiny)
    stream = build_stream(settings)
    problem = build_problem(settings, stream)
    tasks = ({k: v.double() if v.is_floating_point() else v for k, v in stream.train[t].items()} for t in range(10))
    algorithm = build_algorithm(settings)
    for row, played in zip(
        rows(directory), online(problem, algorithm, tasks, problem.initial_outer(0).double()), strict=True
    ):
        assert float(row["loss"]) == float(played.loss)
        assert float(row["inner_loss"]) == float(played.inner_loss)
        assert float(row["regret/euclidean"]) == float(played.regret["euclidean"])
        assert float(row["regret/generalized"]) == float(played.regret["generalized"])
        assert row["regret/exact"] == ""
        assert float(row["hypergradient_norm"]) == float(played.hypergradient.norm())
        assert int(row["gradients"]) == played.evaluations["gradients"]


def resident_kib():
    (line,) = [s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmRSS")]
    return int(line.split()[1])


class MemoryWatch(L.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, *args):
        self.seen.append(resident_kib())


def test_memory_stays_flat(tiny):
    watch = MemoryWatch()
    fit([*tiny, "--rounds", "300", "--evaluation.every", "100", "--checkpoint.every", "50"], callbacks=[watch])
    assert max(watch.seen[50:]) <= 1.03 * watch.seen[49]


def test_a_finished_run_is_not_resumed(tiny, capsys):
    directory = fit(tiny)
    assert cli.main(["resume", str(directory.path)]) == 2
    assert "is finished" in capsys.readouterr().err


def crashed_run(tiny, at=9):
    with pytest.raises(ConnectionAbortedError):
        fit(tiny, "crashed", callbacks=[Crash(at)])
    (path,) = RunDirectory.create("runs", "tiny", "x").path.parent.glob("crashed-*")
    return path


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_offered(tiny, capsys):
    path = crashed_run(tiny)
    older, newest = checkpoints.list_checkpoints(path / "checkpoints")
    newest.write_bytes(newest.read_bytes()[:-100])
    assert cli.main(["resume", str(path)]) == 2
    message = capsys.readouterr().err
    assert newest.name in message
    assert "damaged" in message
    assert f"--checkpoint {older}" in message
    assert cli.main(["resume", str(path), "--checkpoint", str(older)]) == 0


def test_a_half_written_checkpoint_does_not_count(tiny):
    path = crashed_run(tiny)
    (path / "checkpoints" / "round-00000009.part").write_bytes(b"half")
    (path / "checkpoints" / "round-00000009.sha256").write_text("half")
    assert checkpoints.newest_checkpoint(path / "checkpoints").name == "round-00000008.ckpt"


def test_a_disk_that_refuses_leaves_the_older_checkpoint(tiny, monkeypatch):
    def full(trainer, path, *args, **kwargs):
        if trainer.global_step == 8:
            raise OSError(28, "No space left on device")
        return original(trainer, path, *args, **kwargs)

    original = L.Trainer.save_checkpoint
    monkeypatch.setattr(L.Trainer, "save_checkpoint", full)
    with pytest.raises(OSError, match="No space left"):
        fit(tiny, "full")
    (path,) = RunDirectory.create("runs", "tiny", "x").path.parent.glob("full-*")
    assert checkpoints.newest_checkpoint(path / "checkpoints").name == "round-00000004.ckpt"


@pytest.mark.parametrize("command", ["validate", "test"])
def test_more_tasks_than_the_runs_own_can_be_asked_for(tiny, command, capsys):
    directory = fit(tiny)
    assert cli.main([command, str(directory.path), "--tasks", "4"]) == 0
    assert f"{command} on 4 tasks" in capsys.readouterr().out
    assert cli.main([command, str(directory.path), "--tasks", "many"]) == 2
    assert f"{command}: argument --tasks: invalid int value: 'many'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["validate", "test"])
def test_a_run_is_judged_on_other_tasks(tiny, command, capsys):
    directory = fit(tiny)
    capsys.readouterr()
    assert cli.main([command, str(directory.path)]) == 0
    printed = capsys.readouterr().out
    stage = {"validate": "validation", "test": "test"}[command]
    assert f"{stage}/accuracy" in printed
    if command == "test":
        last = rows(directory)[-1]
        assert f"{float(last['test_accuracy']):.4f} ± {float(last['test_accuracy_se']):.4f}" in printed


def test_the_module_hands_out_its_network(tiny):
    module, data, *_ = runs.build(settings_of(tiny))
    network = module.network()
    assert network(data.test[0]["query"]).shape == (6, 3)
    with pytest.raises(RuntimeError, match="BregmanOuterStep"):
        module.training_step(data.train[0], 0)


@pytest.mark.parametrize(
    ("flag", "value"), [("use_distributed_sampler", "false"), ("inference_mode", "false"), ("max_epochs", "3")]
)
def test_what_an_online_run_needs_of_the_trainer_is_set_by_the_run(tiny, flag, value):
    with pytest.raises(ValueError, match=f"trainer.{flag} cannot be set for an online run"):
        settings_of([*tiny, f"--trainer.{flag}", value])
    trainer = runs.make_trainer(settings_of(tiny), [], False)
    assert not trainer._accelerator_connector.use_distributed_sampler  # it would halve the stream
    assert trainer.max_epochs == 1
    assert not trainer.validate_loop.inference_mode  # adapting needs gradients
    assert trainer.checkpoint_callbacks == []


def test_a_callback_of_lightnings_can_be_added_by_name(tiny):
    entry = "[{class_path: lightning.pytorch.callbacks.LambdaCallback}, DeviceStatsMonitor]"
    trainer = runs.make_trainer(settings_of([*tiny, "--trainer.callbacks", entry]), [], False)
    names = [type(c).__name__ for c in trainer.callbacks]
    assert "LambdaCallback" in names
    assert "DeviceStatsMonitor" in names


def test_a_run_that_diverges_still_ends_with_a_summary(tiny):
    arguments = [*tiny, "--on_nonfinite", "skip", "--algorithm.inner.lr", "1e8"]
    summary = json.loads(fit(arguments).summary.read_text())
    assert summary["rounds"] == 10
    assert "NaN" not in json.dumps(summary)


def test_parts_that_get_another_name_keep_what_they_take():
    base = {"algorithm": {"name": "obbo", "lr": 1.0, "geometry": {"name": "adaptive_diagonal", "rho": 0.1}}}
    assert overlay(base, {"algorithm": "sobow"}) == {"algorithm": {"name": "sobow", "lr": 1.0}}
    changed = overlay(base, {"algorithm": {"geometry": "burg"}})
    assert changed["algorithm"]["geometry"] == {"name": "burg"}
    assert overlay(base, {"algorithm": {"lr": 2.0}})["algorithm"]["geometry"]["rho"] == 0.1


def test_learned_proximity_moves(tiny):
    directory = fit([*tiny, "--problem.learn_proximity", "true"])
    outer = final_state(directory)["state_dict"]["outer"]
    assert outer.shape[1] == settings_width(tiny) + 1
    assert float(outer[0, -1].exp()) != pytest.approx(0.5)


def settings_width(arguments):
    return runs.build(settings_of(arguments)).module.outer.shape[1]


def test_recorder_refuses_impossible_intervals(tmp_path):
    run = RunDirectory(tmp_path)
    with pytest.raises(ValueError, match=r"evaluation\.every must be an integer of at least 1, got 0"):
        Recorder(run, [], "accuracy", 0, 1)
    with pytest.raises(ValueError, match=r"checkpoint\.every must be an integer of at least 1, got 0"):
        Recorder(run, [], "accuracy", 1, 0)


def test_shutil_copy_of_a_run_resumes_too(tiny):
    path = crashed_run(tiny)
    moved = path.with_name("moved")
    shutil.copytree(path, moved)
    assert cli.main(["resume", str(moved)]) == 0
    assert RunDirectory(moved).finished


def test_threads_are_recorded_and_a_resume_has_them_again(tmp_path):
    """Quadratics, which are too small to be computed by more than one thread: forks of this process need that."""
    run = ["fit", "--config", "quadratic", "--rounds", "3", "--output", str(tmp_path)]
    try:
        assert cli.main([*run, "--experiment", "usual"]) == 0
        assert cli.main([*run, "--experiment", "two", "--threads", "2"]) == 0
        usual, two = (next((tmp_path / name).iterdir()) for name in ("usual", "two"))
        assert [yaml.safe_load((p / "config.yaml").read_text())["threads"] for p in (usual, two)] == [1, 2]
        (two / "summary.json").unlink()
        for file in (two / "checkpoints").iterdir():
            file.unlink()
        torch.set_num_threads(1)
        assert cli.main(["resume", str(two)]) == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_a_number_of_threads_that_cannot_be_is_refused(tiny, capsys):
    assert cli.main(["fit", *tiny, "--threads", "0"]) == 2
    assert capsys.readouterr().err == "obbo: threads must be auto, or an integer of at least 1, got 0\n"
    assert not Path("runs").exists()
