"""`tune`: every method gets the same search, on tasks that are not the test's, whatever kills it."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import yaml
from obbo_lightning.training.recorder import Recorder

from obbo_lightning import cli
from obbo_lightning.config.parse import ConfigError
from obbo_lightning.experiments import tuning
from obbo_lightning.experiments.grid import read_grid
from obbo_lightning.experiments.report import write_report
from obbo_lightning.experiments.search import Trial
from obbo_lightning.experiments.tune import _require_possible, lengthen, methods_of, trial_cell, tune
from obbo_lightning.experiments.tune_request import read_tune
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.training.resume import resume

CONFIGS = Path(__file__).parents[2] / "configs"
ASKED = {
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
        "budget": {"rounds": 8},
        "tasks": 4,
        "prune": "median",
        "rungs": [2],
        "at_once": 1,
    },
}
# Whoever looks at a test task is told so.
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


class Here:
    """Plays cells in this process, one after the other."""

    def __init__(self, jobs, warm=False):
        self.waiting = []

    def start(self, cells, runs):
        self.waiting = list(runs)

    def busy(self):
        if self.waiting:
            resume(self.waiting.pop(0).path)
        return bool(self.waiting)

    def wait(self, seconds):
        pass

    def stop(self):
        return ""

    def last_words(self, run):
        return "it did not finish"


class Killed(BaseException):
    """What no code catches."""


def write(path, **changes):
    path.write_text(yaml.safe_dump({**ASKED, **changes}, sort_keys=False))
    return path


@pytest.fixture(scope="module", autouse=True)
def no_figures_of_single_runs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("obbo_lightning.training.run.draw_figures", lambda *arguments: [])
        yield


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """The whole of `tune`, undisturbed."""
    folder = tmp_path_factory.mktemp("tune")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("obbo_lightning.cli.compare.LocalLauncher", Here)
        assert cli.main(["tune", "--config", str(write(folder / "a.yaml")), "--output", str(folder)]) == 0
    return folder / "small"


def test_a_comparison_is_played_with_what_was_found(played):
    best = yaml.safe_load((played / "tune" / "best.yaml").read_text())
    assert set(best) == {"obbo-window_2", "adam"}
    assert set(best["obbo-window_2"]) == {"algorithm.lr", "algorithm.window"}
    assert set(best["adam"]) == {"algorithm.lr"}  # which has no window
    for name, found in best.items():
        path = played / f"{name}-seed_0-tuned"
        settings = yaml.safe_load(
            (path if path.exists() else played / f"{name}-seed_0").joinpath("config.yaml").read_text()
        )
        assert settings["algorithm"]["lr"] == found["algorithm.lr"]
        assert settings["evaluation"]["split"] == "test"
    trials = pl.read_csv(played / "tune" / "trials.csv")
    for method in ("obbo", "adam"):
        mine = trials.filter(pl.col("method") == method)
        assert 4 < mine["rounds"].sum() <= 8
        assert mine.filter("chosen")["result"].item() == mine.filter(pl.col("state") == "whole")["result"].min()
    assert (played / "tune" / "sensitivity.png").is_file()


def test_trials_are_judged_on_validation_tasks_alone(played):
    run = RunDirectory(played / "tune" / "adam-trial_000")
    rows = pl.read_csv(run.metrics)
    assert rows["validation/loss"].is_not_null().to_list() == [False, False, False, True]
    assert rows["test_loss"].is_null().all()
    trials = pl.read_csv(played / "tune" / "trials.csv").filter(pl.col("method") == "adam")
    assert trials["result"][0] == rows["validation/loss"][-1]
    assert trials["calls"][0] == rows.select(pl.sum("gradients") + pl.sum("products")).item()


def test_a_search_killed_twice_without_test_tasks_chooses_the_same(played, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(POISONED)
    data = {**ASKED["settings"]["data"], "name": "mine.py:Poisoned"}
    path = write(tmp_path / "a.yaml", settings={**ASKED["settings"], "data": data})
    grid = read_grid(path)
    request, folder = read_tune(grid.tune), tmp_path / "tune"
    folder.mkdir()
    ends, left = Recorder.on_train_batch_end, [0]

    def dies(self, *arguments):
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        ends(self, *arguments)

    def play(cells, runs):
        for run in runs:
            if not run.finished:
                resume(run.path)
        return []

    monkeypatch.setattr(Recorder, "on_train_batch_end", dies)
    for left[0] in (3, 5):
        with pytest.raises(Killed):
            tune(grid, request, folder, play)
    left[0] = 0
    tuning.write_search(tune(grid, request, folder, play), request, folder, "again")
    for name in ("trials.csv", "best.yaml", "searched.csv"):
        assert (folder / name).read_text() == (played / "tune" / name).read_text()


def test_a_report_shows_the_search_and_is_made_again_from_its_files(played, tmp_path):
    report = write_report([played], tmp_path / "first", "small")
    assert report.left_out == []  # trials are no runs to be compared
    page = report.page.read_text()
    names = {table.name for table in report.tables}
    assert {"untuned_against_tuned", "search_space", "all_trials"} < names
    assert "sensitivity" in page
    again = write_report([tmp_path / "first"], tmp_path / "second", "small")
    for file in (*(tmp_path / "first").glob("*.csv"), *(tmp_path / "first").glob("*.md")):
        if file.name == "facts.csv":  # says of what it was made
            continue
        assert (tmp_path / "second" / file.name).read_bytes() == file.read_bytes(), file
    assert len(again.tables) == len(report.tables)
    beside = next(table for table in report.tables if table.name == "untuned_against_tuned")
    tuned = pl.read_csv(played / "tune" / "tuned.csv")
    assert [row[0] for row in beside.rows] == tuned["method"].to_list() == ["obbo", "adam"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"search": {"algorithm.window": [1]}},
            "tune.search must have algorithm.lr or (where that is auto) algorithm.scale, which",
        ),
        ({"search": {"algorithm.lr": {"low": 0, "high": 1.0}}}, "tune.search.algorithm.lr must have 0 < low < high"),
        ({"search": {"algorithm.lr": {"low": 0.1}}}, "must be a list, or have low and high"),
        ({"search": {"algorithm.lr": [0.1, 0.1]}}, "must have values that differ"),
        ({"search": {"algorithm.lr": [0.1], "algorithm.discount": [1.0]}}, "tune.search.algorithm.discount must be"),
        ({"budget": 5}, "tune.budget must have keys and values, got 5"),
        ({"budget": {"seconds": 5}}, "tune.budget must have rounds or calls"),
        ({"budget": {"rounds": 3}}, "tune.budget.rounds must be at least 4 for 1 trials of 4 rounds"),
        ({"seeds": [0]}, "tune.seeds must be others than those of the comparison, got 0 in both"),
        ({"rungs": [4]}, "tune.rungs must be before the last of the 4 rounds, got 4"),
        ({"rungs": []}, "tune.rungs must be given with tune.prune median"),
        ({"sampler": "grid"}, "tune.search.algorithm.lr must be a list with tune.sampler grid"),
        ({"sampler": "guess"}, "tune.sampler must be one of tpe, random, grid, got 'guess'"),
        ({"trials": 5}, "tune takes search, rounds, budget"),
        ({"judge": "test"}, "tune.judge must be one of validation, stream, got 'test'"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(changes, said, tmp_path, capsys):
    path = write(tmp_path / "a.yaml", tune={**ASKED["tune"], **changes})
    assert cli.main(["tune", "--config", str(path), "--output", str(tmp_path / "runs")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not (tmp_path / "runs").exists()


def test_tune_needs_something_to_tune(tmp_path, capsys):
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in ASKED.items() if key != "tune"}))
    assert cli.main(["tune", "--config", str(path)]) == 2
    assert "must have a section tune" in capsys.readouterr().err


def test_another_search_in_the_same_folder_is_refused(played, tmp_path, capsys):
    other = write(tmp_path / "a.yaml", tune={**ASKED["tune"], "seed": 1})
    assert cli.main(["tune", "--config", str(other), "--output", str(played.parent)]) == 2
    assert "was begun with another search" in capsys.readouterr().err


def test_trials_compute_alike_however_many_are_played_side_by_side(tmp_path):
    grid = read_grid(write(tmp_path / "a.yaml"))
    request = read_tune({**grid.tune, "seeds": [7, 8], "judge": "stream"})
    method = methods_of(grid, request)[0]
    trial = Trial(3, {"algorithm.lr": 0.5, "algorithm.window": 1}, {}, False, False, 0, 0)
    cell = trial_cell(method, request, trial, 8, 2)
    assert cell.name == "obbo-window_2-trial_003-seed_8"
    assert (cell.settings["threads"], cell.settings["seed"], cell.settings["rounds"]) == (1, 8, 2)
    assert cell.settings["evaluation"]["split"] == "none"  # the stream itself judges
    assert (cell.settings["algorithm"]["lr"], cell.settings["algorithm"]["window"]) == (0.5, 1)


def test_a_trial_that_goes_on_to_its_next_rung_gets_a_job_of_its_own(tmp_path):
    run = RunDirectory(tmp_path)
    run.config.write_text("rounds: 2\nseed: 1\n")
    for name in ("summary.json", "slurm_job.txt"):
        (tmp_path / name).write_text("{}")
    lengthen(run, 2)
    assert run.finished
    lengthen(run, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    assert yaml.safe_load(run.config.read_text()) == {"rounds": 5, "seed": 1}


@pytest.mark.parametrize("path", sorted((CONFIGS / "tune").glob("*.yaml")), ids=lambda path: path.stem)
def test_searches_that_we_ship_give_every_method_the_same(path, capsys):
    grid = read_grid(path)
    request = read_tune(grid.tune)
    methods = methods_of(grid, request)
    assert len(methods) >= 4
    assert all(method.ranges["algorithm.lr"].has(method.untuned["algorithm.lr"]) for method in methods)
    assert path.read_text().startswith("#")
    assert cli.main(["tune", "--config", path.stem, "--dry_run"]) == 0
    assert f"{request.budget:,} {request.unit} on {request.judge}" in capsys.readouterr().out


def test_a_table_is_not_tuned_on_the_rows_of_the_comparison(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, seed in (("late", 0), ("early", 1)):
        x = np.random.default_rng(seed).normal(size=(60, 2))
        pl.DataFrame({"a": x[:, 0], "y": x[:, 0] + x[:, 1]}).write_csv(f"{name}.csv")
    asked = {
        "compare": "mine",
        "base": "forgetting",
        "settings": {"rounds": 2, "data": {"csv": "late.csv", "target": "y", "block": 5, "past": 4}},
        "grid": {"algorithm": ["obbo"], "seed": [0]},
        "tune": {"search": {"algorithm.scale": [0.1]}, "budget": {"rounds": 2}, "judge": "stream", "sampler": "grid"},
    }
    request = lambda: read_tune(asked["tune"])  # noqa: E731
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(asked))
    grid = read_grid(tmp_path / "mine.yaml")
    with pytest.raises(ConfigError, match=r"the rounds of forgetting are the same for every seed here, and the comp"):
        _require_possible(methods_of(grid, request()), request())
    asked["tune"]["settings"] = {"data": {"csv": "early.csv"}}
    assert _require_possible(methods_of(grid, request()), request()).name == "loss"
