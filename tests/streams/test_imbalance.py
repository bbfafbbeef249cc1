"""Classes that come with different frequencies."""

import csv
import json

import numpy as np
import pytest
import torch
from torch.nn import functional
from toy import SIX

from obbo_lightning import cli, online
from obbo_lightning.config.parse import complete_config, parse_arguments
from obbo_lightning.streams.labelled.imbalance import ImbalanceStream
from obbo_lightning.testing import check_stream
from obbo_lightning.training.run import build

TINY = ["--config", "imbalance", "--rounds", "4", "--data.period", "1", "--data.validation", "2", "--data.test", "3"]


def settings_of(*flags):
    return complete_config(parse_arguments([*TINY, *flags])[0])


def test_the_stream_keeps_its_contract():
    check_stream(ImbalanceStream(validation=2, test=2, period=2))


def test_class_i_comes_in_proportion_to_the_power_i_of_its_phase():
    stream = ImbalanceStream(kept=[0.5, 1.0], period=100, test=1)
    for first, kept in ((0, 0.5), (100, 1.0), (200, 0.5)):
        expected = np.array([kept**i for i in range(10)])
        expected /= expected.sum()
        assert stream.frequency(first).numpy() == pytest.approx(expected, rel=1e-5)
        tasks = [stream.task(t) for t in range(first, first + 100)]
        counts = torch.cat([task["train_y"] for task in tasks]).bincount(minlength=10).numpy()
        deviation = np.sqrt(6400 * expected * (1 - expected))
        assert (np.abs(counts - 6400 * expected) < 5 * deviation).all(), counts
        assert torch.equal(tasks[0]["frequency"], stream.frequency(first))


def test_what_is_judged_on_is_balanced_and_of_its_own_pool():
    stream = ImbalanceStream(validation=2, test=3)
    task = stream.task(0)
    assert task["validation_y"].bincount().tolist() == [2] * 10
    assert task["test_y"].bincount().tolist() == [3] * 10
    for kind in ("train", "validation", "test"):
        x, y = stream.data.take(stream.data.pools[kind])
        equal = (task[f"{kind}_x"][:, None] == x).all(-1)
        assert equal.any(-1).all(), kind
        assert torch.equal(y[equal.int().argmax(-1)], task[f"{kind}_y"])
    later = stream.task(1)
    assert torch.equal(task["validation_x"], later["validation_x"])
    assert not torch.equal(task["test_x"], later["test_x"])


def test_every_example_of_a_class_can_be_drawn():
    stream = ImbalanceStream(validation=1)
    rows = stream.data.pools["validation"]
    many = torch.zeros(20_000, dtype=torch.long)
    x, y = stream.data.draw_of("validation", many, torch.Generator().manual_seed(0))
    assert (y == 0).all()
    assert len(x.unique(dim=0)) == int((stream.data.labels[rows] == 0).sum())


def test_tasks_depend_on_the_seed():
    one, other = (ImbalanceStream(seed=seed).task(0) for seed in (0, 1))
    for name in ("train_x", "validation_x", "test_x"):
        assert not torch.equal(one[name], other[name])


def trained(network, tasks, data, offset):
    """Balanced accuracy after each round of an ordinary training loop with torch's own optimizer."""
    optimizer, found = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9), []
    for t, task in enumerate(tasks):
        x, y = data(task)
        for _ in range(5):
            optimizer.zero_grad()
            functional.cross_entropy(network(x) + offset(t), y).backward()
            optimizer.step()
        with torch.no_grad():
            right = (network(task["test_x"]).argmax(-1) == task["test_y"]).float()
        found.append(float(right.mean()))  # as many of each class
    return found


def test_baselines_are_those_of_an_ordinary_training_loop():
    module, _, stream = build(settings_of("--data.test", "20"))
    found = stream.baselines(module.problem, module.algorithm, 4)
    tasks = [stream.task(t) for t in range(4)]
    one = lambda task, kind: (task[f"{kind}_x"], task[f"{kind}_y"])  # noqa: E731
    both = lambda task: [torch.cat(pair) for pair in zip(one(task, "train"), one(task, "validation"), strict=True)]  # noqa: E731
    mu = [0.4, 0.6, 0.8, 1.0]
    wanted = {
        "plain training": (lambda task: one(task, "train"), lambda t: 0.0),
        "offsets that know the frequencies": (
            lambda task: one(task, "train"),
            lambda t: torch.tensor([i * np.log(mu[t]) for i in range(10)]),
        ),
        "the balanced examples alone": (lambda task: one(task, "validation"), lambda t: 0.0),
        "the balanced examples added to every batch": (both, lambda t: 0.0),
    }
    assert list(found) == list(wanted)
    network = module.problem.network
    for name, (data, offset) in wanted.items():
        assert found[name] == pytest.approx(trained(network.loaded(network.initial(0)), tasks, data, offset)), name
    assert len({tuple(values) for values in found.values()}) == 4


@pytest.mark.parametrize("algorithm", SIX)
def test_every_algorithm_plays_it(algorithm):
    module, _, stream = build(settings_of("--algorithm", algorithm))
    start = stream.start(module.problem, 0)
    played = list(online(module.problem, module.algorithm, stream.train[:3], start))
    assert played[-1].scores.keys() == {"accuracy", "balanced_accuracy"}
    for name, block in module.problem.blocks.split(played[-1].outer - start).items():
        assert block.abs().max() > 1e-3, name


def test_a_run_says_what_it_must_beat(tmp_path):
    assert cli.main(["fit", *TINY, "--output", str(tmp_path), "--trainer.enable_progress_bar", "false"]) == 0
    (run,) = (tmp_path / "imbalance").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["metric"] == "balanced_accuracy"
    assert len(summary["baselines"]) == 4
    first = next(csv.DictReader((run / "metrics.csv").read_text().splitlines()))
    assert 0 < float(first["accuracy"]) != float(first["balanced_accuracy"]) > 0
    header = (run / "outer.csv").read_text().splitlines()[0]
    assert header.startswith("round,offset[0],")
    assert header.endswith(",scale[9]")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data.kept", "[]"], "data.kept must have a number or more, got []"),
        (["--data.kept", "[0.5, 0.0]"], "data.kept must lie in (0, 1], got 0.0"),
        (["--data.period", "0"], "data.period must be an integer of at least 1, got 0"),
        (["--data.batch", "0"], "data.batch must be an integer of at least 1, got 0"),
        (["--data.test", "-1"], "data.test must be an integer of at least 1, got -1"),
        (["--data.path", "rare.npz"], "data.path must have every class to test with, got none of class 1"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_written(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    labels, is_test = np.arange(60) % 3, np.arange(60) < 12
    labels[:12] = labels[:12] // 2 * 2  # classes 0 and 2 alone
    np.savez("rare.npz", examples=np.random.default_rng(0).normal(size=(60, 2)), labels=labels, is_test=is_test)
    assert cli.main(["fit", *TINY, *flags]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "runs").exists()
