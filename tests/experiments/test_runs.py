"""Finished runs on disk: which are compared, what they are called, and why others are left out."""

import os
import shutil

import pytest
from small_runs import rewrite_provenance

from obbo_lightning import cli
from obbo_lightning.config.registry import find_component, qualified_name
from obbo_lightning.experiments.runs import _experiment, distinct_labels, find_finished_runs, label_runs
from obbo_lightning.streams.stream import Stream

FAST = ["--config", "quadratic", "--rounds", "5", "--evaluation.every", "2", "--evaluation.tasks", "2"]


class Measured(Stream):
    """Data of a user, with settings in which runs may differ."""

    may_differ = ("folder", "scale")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for algorithm, seed in (("sobow", 0), ("sobow", 1), ("obbo", 0), ("adam", 0)):
        flags = ["--algorithm", algorithm, "--seed", str(seed), "--output", str(root)]
        assert cli.main(["fit", *FAST, *flags]) == 0
    return root


@pytest.fixture
def copied(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "runs")
    (adam,) = (tmp_path / "runs").glob("*/adam-*")
    return tmp_path / "runs", adam


def edit(name, old, new):
    def damage(run):
        text = (run / name).read_text()
        assert old in text
        (run / name).write_text(text.replace(old, new))

    return damage


def changed(name, old, new):
    """Return a function that edits a file of a run as if the run had written it so."""

    def change(path):
        edit(name, old, new)(path)
        rewrite_provenance(path)

    return change


def labels(folder):
    return sorted({run.label for run in label_runs(find_finished_runs([folder])[0])[0]})


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda run: (run / "metrics.csv").write_text("round,loss\n1\n"), "it is damaged: "),
        (lambda run: (run / "metrics.csv").unlink(), "it is damaged: ValueError"),
        (lambda run: os.truncate(run / "metrics.csv", 100), "it is damaged: "),
        (lambda run: (run / "summary.json").write_text('{"rounds": 5'), "it is damaged: JSONDecodeError"),
        (lambda run: (run / "summary.json").unlink(), "it is not finished"),
        (lambda run: (run / "config.yaml").write_text("nothing: 1"), "it is damaged: ProvenanceError"),
        (lambda run: (run / "config.yaml").write_text("a: [1"), "it is damaged: ConfigError"),
        (edit("config.yaml", "drift: 1.0", "drift: 2.0"), "it is damaged: ProvenanceError data.drift must stay 1.0"),
        (edit("summary.json", '"rounds"', ' "rounds"'), "it is damaged: ProvenanceError"),
        (edit("metrics.csv", "\n5,", "\n5,0"), "it is damaged: ValueError"),
        (changed("config.yaml", "drift: 1.0", "drift: 2.0"), "it is of another experiment, with another data than"),
        (changed("config.yaml", "tasks: 2", "tasks: 1"), "it is of another experiment, with another evaluation.tasks"),
    ],
)
def test_what_cannot_be_used_is_left_out_with_a_reason(damage, reason, copied):
    folder, adam = copied
    damage(adam)
    found, left_out = find_finished_runs([folder])
    assert {run.config["algorithm"]["name"] for run in found} == {"obbo", "sobow"}
    (line,) = left_out
    assert line.startswith(f"{adam} is left out: {reason}")
    assert "\n" not in line


def test_own_algorithms_have_short_distinct_names_also_where_they_are_unknown(copied):
    folder, adam = copied
    for file in ("mine", "yours"):
        shutil.copytree(adam, adam.with_name(file))
        changed("config.yaml", "name: adam", f"name: /somewhere/{file}.py:Sparse")(adam.with_name(file))
    assert labels(folder) == ["Sparse_mine", "Sparse_yours", "adam", "obbo", "sobow"]


def test_data_that_cannot_be_loaded_any_more_are_compared(copied):
    folder, _ = copied
    for run in folder.glob("*/*"):
        changed("config.yaml", "name: quadratic", "name: /gone/mine.py:Generated")(run)
    assert labels(folder) == ["adam", "obbo", "sobow"]


def test_runs_may_differ_in_what_their_stream_names(copied):
    folder, adam = copied
    for run in folder.glob("*/*"):
        own = f"name: {qualified_name(Measured)}\n  folder: {run}\n  scale: 1.0"
        changed("config.yaml", "name: quadratic", own)(run)
    shutil.copytree(adam, adam.with_name("again"))
    changed("config.yaml", "scale: 1.0", "scale: 2.0")(adam.with_name("again"))
    assert labels(folder) == ["adam, scale = 1", "adam, scale = 2", "obbo", "sobow"]


def test_each_seed_is_there_once_and_lengths_are_those_of_most(make_run):
    lengths = ((9, 3), (0, 4), (1, 4), (0, 4), (2, 4))
    runs = [make_run("obbo", seed, rounds, metrics={"loss": seed}) for seed, rounds in lengths]
    kept, left_out = label_runs(runs)
    assert [(run.config["seed"], run.config["rounds"]) for run in kept] == [(0, 4), (1, 4), (2, 4)]
    assert left_out == [
        f"{runs[0].directory.path} is left out: 3 rounds, where the other seeds of obbo have 4",
        f"{runs[3].directory.path} is left out: obbo with seed 0 is in {runs[1].directory.path} already",
    ]


def test_seeds_that_gave_the_same_run_count_once(make_run):
    losses = {("obbo", 0): 0.0, ("obbo", 1): 1.0, ("obbo", 7): 0.0, ("adam", 0): 0.0}  # another method's are its own
    kept, left_out = label_runs([make_run(*run, metrics={"loss": loss}) for run, loss in losses.items()])
    assert [(run.label, run.summary["seed"]) for run in kept] == [("obbo", 0), ("obbo", 1), ("adam", 0)]
    assert left_out == []


def test_variants_of_an_algorithm_are_told_apart():
    one = {"name": "obbo", "lr": 1e-4, "inner": {"steps": 3}}
    assert distinct_labels([one, {**one, "lr": 1e-2}, {"name": "adam", "lr": 1.0}]) == [
        "obbo, lr = 0.0001",
        "obbo, lr = 0.01",
        "adam",
    ]
    assert distinct_labels([one, {**one, "inner": {"steps": 4}}])[1] == "obbo, inner.steps = 4"
    adaptive, plain = {"name": "adaptive_diagonal", "decay": 0.9}, {"name": "euclidean"}
    assert distinct_labels([{**one, "geometry": adaptive}, {**one, "geometry": plain}]) == [
        "obbo, geometry = adaptive_diagonal",
        "obbo, geometry = euclidean",
    ]
    assert distinct_labels([one, {**one, "clip": 3.0}])[1] == "obbo, clip = 3"  # the other has none


def test_runs_are_of_one_experiment_if_all_but_the_algorithm_is_the_same(make_run):
    settings = {"data": {"name": "market", "subset": 30, "start": 0.1}, "problem": {"proximity": 0.5}}
    settings |= {"regret_window": 10, "evaluation": {"tasks": 5, "every": 2}}
    run = make_run()
    first = run._replace(stream=find_component("data", "market"), config={**run.config, **settings})

    def same(**changes):
        return _experiment(first._replace(config={**first.config, **changes})) == _experiment(first)

    assert same(algorithm={"name": "adam"}, seed=3, rounds=7)
    assert same(data={**settings["data"], "start": 9.0}, evaluation={"tasks": 5, "every": 50})
    assert not same(problem={"proximity": 0.25})
    assert not same(data={**settings["data"], "subset": 31})
    assert not same(regret_window=11)
    assert not same(evaluation={"tasks": 6, "every": 2})
