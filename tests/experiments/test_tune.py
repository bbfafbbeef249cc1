"""`tune`: every method gets the same search, on tasks that are not the test's, whatever kills it."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import optuna
import polars as pl
import pytest
import yaml
from rich.console import Console

from obbo_lightning import cli
from obbo_lightning.config.parse import ConfigError, read_dataclass
from obbo_lightning.experiments import tune as tuning
from obbo_lightning.experiments.grid import PlannedRun, read_grid
from obbo_lightning.experiments.launch import GridError, LocalLauncher
from obbo_lightning.experiments.report import write_report
from obbo_lightning.experiments.tune import Method, TuneConfig, extend_trial, find_methods, in_range, read_rung, tune
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.streams.stream import Metric
from obbo_lightning.training.resume import resume
from obbo_lightning.training.run_writer import RunWriter

CONFIGS = Path(__file__).parents[2] / "configs"
FILE = {
    "compare": "small",
    "base": "quadratic",
    "settings": {
        "rounds": 5,
        "algorithm": {"inner": {"steps": 2}, "hypergradient": {"steps": 2}},
        "data": {"outer_dim": 3, "inner_dim": 3},
        "evaluation": {"every": 5, "tasks": 3},
        "checkpoint": {"every": 1},
    },
    "grid": {"algorithm": ["obbo", "adam"], "algorithm.window": [2], "seed": [0]},
    "tune": {
        "search": {"algorithm.lr": {"low": 1e-4, "high": 1.0}, "algorithm.window": [1, 2]},
        "rounds": 4,
        "budget": {"rounds": 16},
        "tasks": 4,
        "rungs": [2],
        "at_once": 1,
    },
}
# A stream whose test tasks cannot be looked at.
POISONED = """
from obbo_lightning.streams.quadratic import QuadraticStream

class Poisoned(QuadraticStream):
    @property
    def test(self):
        raise AssertionError("a test task was seen")

    @test.setter
    def test(self, tasks):
        pass
"""
SEARCH = {**FILE["tune"]["search"], "algorithm.window": [1, 10]}
UNTUNED = {"lr": 0.1, "window": 1, "inner": {"steps": 5}}


class Killed(BaseException):
    """What no code catches."""


class LauncherHere(LocalLauncher):
    """Executes runs in this process, one after the other."""

    def execute(self, runs):
        for run in runs:
            resume(run.path)
            yield


def write(path, **changes):
    path.write_text(yaml.safe_dump({**FILE, **changes}, sort_keys=False))
    return path


def section(**changes):
    return read_dataclass(TuneConfig, {**FILE["tune"], **changes}, "tune")


def objective(values, rounds):
    """Return a made-up result, better near 0.1 and with more rounds; not finite for large steps."""
    step = values["algorithm.lr"]
    return None if step > 0.9 else abs(step - 0.1) / rounds + 0.01 * values.get("algorithm.window", 0)


def search_all(evaluations=2, **changes):
    """Return a method after a search with the made-up objective instead of runs."""
    asked = {"search": SEARCH, "budget": {"rounds": 60}, "rungs": [4], "rounds": 10, "at_once": 2, "seed": 1, **changes}
    run = PlannedRun("obbo", {"rounds": 10, "seed": 0, "on_nonfinite": "skip", "algorithm": UNTUNED})
    method = Method("obbo", "obbo", [run], read_dataclass(TuneConfig, asked, "tune"))
    stages = [*asked["rungs"], 10]
    method.plan = lambda number, values, stage: [PlannedRun(json.dumps(values), {"rounds": stages[stage]})]
    method._result = lambda runs, rounds: (objective(json.loads(runs[0].path.name), rounds), evaluations * rounds)
    method.start_study(Metric("loss"), optuna.storages.InMemoryStorage())
    while method.ask():
        for stage in range(len(stages)):
            method.tell(stage, Path())
    return method


def test_rounds_that_pruning_saves_go_to_more_trials_within_the_budget():
    method = search_all(budget={"rounds": 120})
    trials = method.trials
    assert 110 < sum(trial.user_attrs["rounds"] for trial in trials) <= 120  # what is left is not another trial
    assert len(trials) > 12
    pruned = [trial for trial in trials if trial.state.name == "PRUNED" and trial.intermediate_values]
    assert pruned
    assert all(list(trial.intermediate_values) == [4] and trial.user_attrs["rounds"] == 4 for trial in pruned)
    complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
    assert method.best == min(complete, key=lambda trial: trial.value)
    assert method.found == method.best.params
    assert trials[0].params == {"algorithm.lr": 0.1, "algorithm.window": 1}  # the method as it was


@pytest.mark.parametrize(
    ("policy", "skipped", "diverged", "result"),
    [
        ("skip", 3, False, 0.5),
        ("skip", 3, True, None),
        ("raise", 3, False, None),
        ("raise", 0, False, 0.5),
    ],
)
def test_a_trial_fails_that_diverged_or_that_the_comparison_would_have_stopped(
    policy, skipped, diverged, result, tmp_path, monkeypatch
):
    monkeypatch.setattr("obbo_lightning.experiments.tune.require_intact", lambda run: None)
    run = RunDirectory(tmp_path)
    numbers = {"skipped": skipped, "diverged": diverged, "validation_loss": 0.5, "metric": "loss", "rounds": 2}
    run.summary.write_text(json.dumps(numbers))
    run.metrics.write_text("round,gradients,products\n1,2,3\n2,2,3\n")
    planned = PlannedRun("obbo", {"rounds": 2, "seed": 0, "on_nonfinite": policy, "algorithm": UNTUNED})
    method = Method("obbo", "obbo", [planned], section(search=SEARCH, evaluate_on="validation"))
    assert method._result([run], 2) == (result, 10)


def test_a_budget_of_gradient_evaluations_counts_those():
    changes = {"budget": {"gradient_evaluations": 210}, "rungs": []}
    assert len(search_all(**changes).trials) == 10  # 20 each
    assert len(search_all(**changes, evaluations=5).trials) == 4  # 50 each


def test_a_grid_is_every_combination_once():
    lists = {"algorithm.lr": [0.01, 0.1, 0.95], "algorithm.window": [1, 10]}
    method = search_all(search=lists, sampler="grid", rungs=[])
    found = [(trial.params["algorithm.lr"], trial.params["algorithm.window"]) for trial in method.trials]
    assert found == [(step, window) for step in lists["algorithm.lr"] for window in (1, 10)]
    assert [trial.state.name for trial in method.trials] == ["COMPLETE"] * 4 + ["PRUNED"] * 2  # not finite
    assert method.found == {"algorithm.lr": 0.1, "algorithm.window": 1}


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_the_seed_decides_what_is_tried_and_whole_numbers_stay_whole(sampler):
    search = {**SEARCH, "algorithm.inner.steps": {"low": 1, "high": 20}}
    tried = [[t.params for t in search_all(search=search, seed=seed, sampler=sampler).trials] for seed in (0, 0, 2)]
    assert tried[0] == tried[1] != tried[2]
    assert all(isinstance(values["algorithm.inner.steps"], int) for values in tried[0])
    assert all(1e-4 <= values["algorithm.lr"] <= 1 for values in tried[0])


def test_a_method_without_a_value_for_a_setting_is_searched_for_it_and_keeps_its_own_where_no_trial_is_complete():
    method = search_all(search={"algorithm.lr": {"low": 0.95, "high": 1.0}})
    assert method.best is None
    assert method.found == method.untuned == {"algorithm.lr": 0.1}
    run = PlannedRun("obbo", {"rounds": 10, "algorithm": {"lr": "auto", "clip": None, "geometry": {"name": "burg"}}})
    search = {"algorithm.lr": [1], "algorithm.clip": [2.0], "algorithm.geometry": ["burg"], "algorithm.window": [1]}
    method = Method("obbo", "obbo", [run], section(search=search))
    assert method.untuned == {"algorithm.lr": "auto", "algorithm.clip": None, "algorithm.geometry": "burg"}
    assert not in_range("auto", {"low": 0.1, "high": 1.0})


def test_without_optuna_the_refusal_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ValueError, match=r"tune needs optuna.*pip install 'obbo_lightning\[tune\]'"):
        section()


@pytest.fixture(scope="module", autouse=True)
def no_figures_of_single_runs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("obbo_lightning.training.run.draw_figures", lambda *arguments: [])
        yield


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Run the command, undisturbed; return the folder of the comparison."""
    folder = tmp_path_factory.mktemp("tune")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("obbo_lightning.cli.compare.LocalLauncher", LauncherHere)
        assert cli.main(["tune", "--config", str(write(folder / "a.yaml")), "--output", str(folder)]) == 0
    return folder / "small"


def test_a_comparison_runs_with_the_settings_that_were_found(tuned):
    best = yaml.safe_load((tuned / "tune" / "best.yaml").read_text())
    assert set(best) == {"obbo-window_2", "adam"}
    assert set(best["obbo-window_2"]) == {"algorithm.lr", "algorithm.window"}
    assert set(best["adam"]) == {"algorithm.lr"}  # which has no window
    for name, found in best.items():
        path = tuned / f"{name}-seed_0-tuned"
        run = path if path.exists() else tuned / f"{name}-seed_0"
        config = yaml.safe_load((run / "config.yaml").read_text())
        assert config["algorithm"]["lr"] == found["algorithm.lr"]
        assert config["evaluation"]["split"] == "test"
    trials = pl.read_csv(tuned / "tune" / "trials.csv")
    for label in ("obbo", "adam"):
        mine = trials.filter(pl.col("label") == label)
        assert 12 < mine["rounds"].sum() <= 16
        assert mine.filter("chosen")["result"].item() == mine.filter(pl.col("state") == "complete")["result"].min()
    assert (tuned / "tune" / "sensitivity.png").is_file()
    journal = optuna.storages.journal.JournalFileBackend(str(tuned / "tune" / "study.journal"))
    studies = optuna.get_all_study_names(optuna.storages.JournalStorage(journal))
    assert set(studies) == {"obbo-window_2", "adam"}


def test_trials_are_evaluated_on_validation_tasks_alone(tuned):
    run = RunDirectory(tuned / "tune" / "adam-trial_000")
    rows = pl.read_csv(run.metrics)
    assert rows["validation/loss"].is_not_null().to_list() == [False, False, False, True]
    assert rows["test_loss"].is_null().all()
    trials = pl.read_csv(tuned / "tune" / "trials.csv").filter(pl.col("label") == "adam")
    assert trials["result"][0] == rows["validation/loss"][-1]
    assert trials["gradient_evaluations"][0] == rows.select(pl.sum("gradients") + pl.sum("products")).item()


def test_a_search_that_is_killed_in_every_round_chooses_the_same_without_test_tasks(tuned, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(POISONED)
    data = {**FILE["settings"]["data"], "name": "mine.py:Poisoned"}
    grid = read_grid(write(tmp_path / "a.yaml", settings={**FILE["settings"], "data": data}))
    end, left = RunWriter.on_train_batch_end, [0]

    def end_or_die(self, *arguments):
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        end(self, *arguments)

    monkeypatch.setattr(RunWriter, "on_train_batch_end", end_or_die)
    kills = 0
    for left[0] in [2] * 100:  # one round, then death
        try:
            tune(grid, section(), tmp_path, LauncherHere(1), Console(file=io.StringIO()))
            break
        except Killed:
            kills += 1
    assert kills > 20
    for name in ("trials.csv", "best.yaml", "search_space.csv"):
        assert (tmp_path / "tune" / name).read_text() == (tuned / "tune" / name).read_text()


@pytest.mark.parametrize("written", [False, True])
def test_a_trial_that_is_killed_while_it_is_extended_has_its_rung(written, tmp_path, monkeypatch):
    run = RunDirectory(tmp_path)
    run.config.write_text("rounds: 2\nseed: 1\n")
    run.summary.write_text('{"rounds": 2}')
    (tmp_path / "slurm_job.txt").write_text("7_1\n")
    write_file = tuning.write_atomically

    def write_or_die(*arguments):
        if written:
            write_file(*arguments)
        raise Killed

    monkeypatch.setattr(tuning, "write_atomically", write_or_die)
    with pytest.raises(Killed):
        extend_trial(run, 5)
    monkeypatch.undo()
    for _ in range(2):
        assert read_rung(run, 2) == {"rounds": 2}
        assert read_rung(run, 5) is None
        extend_trial(run, 5)
    assert not run.finished
    assert not (tmp_path / "slurm_job.txt").exists()  # a job of its own for the next rounds
    assert yaml.safe_load(run.config.read_text()) == {"rounds": 5, "seed": 1}


def test_a_report_shows_the_search(tuned, tmp_path):
    report = write_report([tuned], tmp_path, "small")
    assert report.left_out == []  # trials are not compared
    assert "sensitivity" in report.page.read_text()
    space = next(table for table in report.tables if table.name == "search_space")
    assert [row[:4] for row in space.rows] == [
        ("obbo", "algorithm.lr", "0.0001 to 1", "0.01"),
        ("obbo", "algorithm.window", "1, 2", "2"),
        ("adam", "algorithm.lr", "0.0001 to 1", "0.01"),
    ]
    assert {row[-2:] for row in space.rows} == {("validation loss (lower is better)", "16 rounds")}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("search", {"algorithm.window": [1]}, "search must have algorithm.lr or (where that is auto) algorithm.scale"),
        ("search", {"algorithm.lr": {"low": 0, "high": 1.0}}, "tune.search.algorithm.lr must be a list of different"),
        ("search", {"algorithm.lr": {"low": 0.1}}, "or have 0 < low < high, got {'low': 0.1}"),
        ("search", {"algorithm.lr": {"low": "a", "high": 1}}, "have 0 < low < high, got {'low': 'a', 'high': 1}"),
        ("search", {"algorithm.lr": [0.1, 0.1]}, "different values, or have 0 < low < high, got [0.1, 0.1]"),
        ("search", {"algorithm.lr": [0.1], "algorithm.discount": [1.0]}, "tune.search.algorithm.discount must be"),
        ("search", 5, "tune.search must be keys and values, got 5"),
        ("budget", 5, "tune.budget must be keys and values, got 5"),
        ("budget", {"seconds": 5}, "tune.budget must have rounds or gradient_evaluations, got {'seconds': 5}"),
        ("budget", {"rounds": 0}, "tune.budget must be an integer of at least 1, got 0"),
        ("budget", {"rounds": 3}, "tune.budget.rounds must be at least 4 for 1 trials of 4 rounds"),
        ("rounds", 2.5, "tune.rounds must be an integer, got 2.5"),
        ("seeds", [0], "tune.seeds must be others than those of the comparison, got 0 in both"),
        ("seeds", [], "tune.seeds must have at least one seed"),
        ("rungs", [4], "tune.rungs must be before the last of the 4 rounds, got 4"),
        ("rungs", [3, 2], "tune.rungs must be positive and increase, got [3, 2]"),
        ("sampler", "grid", "tune.search.algorithm.lr must be a list with tune.sampler grid"),
        ("sampler", "guess", "tune.sampler must be tpe or random or grid, got 'guess'"),
        ("trials", 5, "unknown key 'tune.trials' (value 5); tune takes search, budget, rounds, evaluate_on"),
        ("evaluate_on", "test", "tune.evaluate_on must be validation or prequential, got 'test'"),
        (None, None, "must have a section tune"),
    ],
)
def test_mistakes_are_refused_in_one_line_and_nothing_is_written(key, value, message, tmp_path, capsys):
    path = write(tmp_path / "a.yaml", tune={**FILE["tune"], key: value} if key else None)
    assert cli.main(["tune", "--config", str(path), "--output", str(tmp_path / "runs")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "runs").exists()


def test_another_search_in_the_same_folder_is_refused(tuned, tmp_path, capsys):
    other = write(tmp_path / "a.yaml", tune={**FILE["tune"], "seed": 1})
    assert cli.main(["tune", "--config", str(other), "--output", str(tuned.parent)]) == 2
    assert "was started with other settings" in capsys.readouterr().err


def test_a_trial_that_fails_ends_the_search_with_its_reason(tmp_path):
    grid = read_grid(write(tmp_path / "a.yaml"))
    launcher = LauncherHere(1)
    launcher.execute = lambda runs: iter(())
    expected = "2 trials failed, the first is obbo-window_2-trial_000: it printed nothing"
    with pytest.raises(GridError, match=expected) as refusal:
        tune(grid, section(), tmp_path, launcher, Console(file=io.StringIO()))
    assert refusal.value.exit_code == 1


def test_trials_compute_alike_however_many_run_in_parallel(tmp_path):
    grid = read_grid(write(tmp_path / "a.yaml"))
    method = find_methods(grid, section(seeds=[7, 8], evaluate_on="prequential"))[0]
    run = method.plan(3, {"algorithm.lr": 0.5, "algorithm.window": 1}, 0)[1]
    assert run.name == "obbo-window_2-trial_003-seed_8"
    assert (run.config["threads"], run.config["seed"], run.config["rounds"]) == (1, 8, 2)
    assert run.config["evaluation"]["split"] == "none"  # the rounds themselves are the evaluation
    assert (run.config["algorithm"]["lr"], run.config["algorithm"]["window"]) == (0.5, 1)


@pytest.mark.parametrize("path", sorted((CONFIGS / "tune").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_searches_give_every_method_the_same(path, capsys):
    grid = read_grid(path)
    config = read_dataclass(TuneConfig, grid.tune, "tune")
    methods = find_methods(grid, config)
    assert len(methods) >= 4
    assert all(in_range(method.untuned["algorithm.lr"], config.search["algorithm.lr"]) for method in methods)
    assert path.read_text().startswith("#")
    assert cli.main(["tune", "--config", path.stem, "--dry_run"]) == 0
    assert f"{config.budget['rounds']:,} rounds, evaluated on {config.evaluate_on}" in capsys.readouterr().out


def test_a_table_is_not_tuned_on_the_rows_of_the_comparison(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, seed in (("late", 0), ("early", 1)):
        x = np.random.default_rng(seed).normal(size=(60, 2))
        pl.DataFrame({"a": x[:, 0], "y": x[:, 0] + x[:, 1]}).write_csv(f"{name}.csv")
    settings = {"rounds": 2, "data": {"csv": "late.csv", "target": "y", "block": 5, "past": 4}}
    path = write(tmp_path / "a.yaml", base="forgetting", settings=settings, grid={"algorithm": ["obbo"], "seed": [0]})
    asked = {"search": {"algorithm.scale": [0.1]}, "budget": {"rounds": 2}, "rounds": 0, "rungs": []}
    asked |= {"evaluate_on": "prequential", "sampler": "grid"}
    config = section(**asked)
    with pytest.raises(ConfigError, match=r"the rounds of forgetting are the same for every seed here, and the comp"):
        tuning.require_fair(find_methods(read_grid(path), config), config)
    config = section(**asked, settings={"data": {"csv": "early.csv"}})
    assert tuning.require_fair(find_methods(read_grid(path), config), config).name == "loss"
