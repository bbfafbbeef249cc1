"""Small training sets that are replaced by others."""

import json

import numpy as np
import pytest
import torch
from torch.nn import functional
from toy import SIX

from obbo_lightning import cli, online
from obbo_lightning.config.parse import complete_config, parse_arguments
from obbo_lightning.streams.labelled.examples import Labelled
from obbo_lightning.streams.labelled.regularization import FIXED, RegularizationStream
from obbo_lightning.testing import check_stream
from obbo_lightning.training.run import build

SMALL = ["--data.examples", "20", "--data.batch", "8", "--data.validation", "4", "--data.test", "6"]
TINY = ["--config", "regularization", "--rounds", "3", "--data.period", "2", "--problem.network.filters", "2", *SMALL]


@pytest.fixture(scope="module")
def stream():
    return RegularizationStream(noise=[0.0, 0.5], period=4, examples=300, batch=200, validation=50, test=80)


def settings_of(*flags):
    return complete_config(parse_arguments([*TINY, "--algorithm.inner.batch_size", "4", *flags])[0])


def test_the_stream_keeps_its_contract():
    check_stream(RegularizationStream(period=2, examples=9, batch=4, validation=3, test=3))


def test_a_phase_has_one_training_set_and_the_next_has_another(stream):
    sets = [
        torch.cat([stream.task(t)["train_x"] for t in range(first, first + 4)]).flatten(1).unique(dim=0)
        for first in (0, 4)
    ]
    assert [len(one) for one in sets] == pytest.approx([280, 280], abs=20)  # 800 of 300 with replacement
    assert len(torch.cat(sets).unique(dim=0)) > 1.9 * 270
    tasks = [stream.task(t) for t in (0, 3, 4)]
    assert torch.equal(tasks[0]["validation_x"], tasks[1]["validation_x"])
    assert not torch.equal(tasks[1]["validation_x"], tasks[2]["validation_x"])
    assert not torch.equal(tasks[0]["test_x"], tasks[1]["test_x"])


def test_all_is_right_but_the_training_labels_of_noisy_phases(stream):
    for t, noise in ((0, 0.0), (4, 0.5), (8, 0.0)):
        task, wrong = stream.task(t), {}
        for kind in ("train", "validation", "test"):
            x, y = stream.data.take(stream.data.pools[kind])
            where = (task[f"{kind}_x"].flatten(1)[:, None, ::48] == x.flatten(1)[:, ::48]).all(-1)  # no two are alike
            assert where.any(-1).all(), kind
            wrong[kind] = float((y[where.int().argmax(-1)] != task[f"{kind}_y"]).float().mean())
        assert wrong["validation"] == wrong["test"] == 0
        assert wrong["train"] == pytest.approx(noise * 19 / 20, abs=0.12 * (noise > 0))


def test_the_mix_of_classes_goes_round_in_four_phases(stream):
    angles = 2 * np.pi * np.arange(20) / 20
    for phase in range(5):
        wanted = np.exp(3 * np.cos(angles - phase * np.pi / 2))
        assert stream.mix(phase).numpy() == pytest.approx(wanted / wanted.sum(), rel=1e-4)
    counts = torch.cat([stream.task(t)["test_y"] for t in range(4, 8)]).bincount(minlength=20)
    assert int(counts.argmax()) in (4, 5, 6)
    assert counts[13:18].sum() < 0.05 * counts.sum()


def test_tasks_depend_on_the_seed():
    one, other = (RegularizationStream(examples=9, seed=seed).task(0) for seed in (0, 1))
    for name in ("train_x", "validation_x", "test_x"):
        assert not torch.equal(one[name], other[name])


def test_shrunk_images_have_means_of_pixels():
    images = torch.arange(64, dtype=torch.uint8).reshape(1, 1, 8, 8).repeat(40, 1, 1, 1)
    data = Labelled.of(images, torch.arange(40) % 2).shrunk(4)
    assert data.examples.dtype == torch.uint8
    assert data.examples[0, 0].tolist() == [[14, 18], [46, 50]]  # 13.5 and so on, to even numbers
    assert data.shape == (1, 2, 2)


def trained(network, tasks, decay, smoothing):
    """Accuracy after each round of an ordinary training loop with torch's own optimizer, loss and weight decay."""
    optimizer, found = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=decay), []
    for task in tasks:
        for _ in range(5):
            optimizer.zero_grad()
            functional.cross_entropy(network(task["train_x"]), task["train_y"], label_smoothing=smoothing).backward()
            optimizer.step()
        with torch.no_grad():
            found.append(float((network(task["test_x"]).argmax(-1) == task["test_y"]).float().mean()))
    return found


def test_baselines_are_those_of_an_ordinary_training_loop():
    flags = ["--data.test", "300", "--problem.network.filters", "8", "--algorithm.inner.lr", "0.05"]
    module, _, stream = build(settings_of(*flags, "--algorithm.inner.batch_size", "null", "--data.batch", "64"))
    found = stream.baselines(module.problem, module.algorithm, 3)
    tasks, network = [stream.task(t) for t in range(3)], module.problem.network
    fixed = {pair: trained(network.loaded(network.initial(0)), tasks, *pair) for pair in FIXED}
    turned = [task | {"train_x": task["validation_x"], "train_y": task["validation_y"]} for task in tasks]
    assert found == {
        "hardly any": pytest.approx(fixed[1e-4, 0.0]),
        "the best fixed one in hindsight": pytest.approx(max(fixed.values(), key=sum)),
        "the validation examples alone": pytest.approx(trained(network.loaded(network.initial(0)), turned, 0.0, 0.0)),
    }


@pytest.mark.parametrize("algorithm", SIX)
def test_every_algorithm_plays_it(algorithm):
    module, _, stream = build(settings_of("--algorithm", algorithm))
    start = stream.start(module.problem, 0)
    played = list(online(module.problem, module.algorithm, stream.train[:3], start))
    assert played[-1].scores.keys() == {"accuracy", "cross_entropy"}
    for name, block in module.problem.blocks.split(played[-1].outer / start - 1).items():
        assert block.abs().max() > 1e-3, name


def test_a_run_says_what_it_must_beat(tmp_path):
    flags = ["--output", str(tmp_path), "--trainer.enable_progress_bar", "false", "--algorithm.inner.batch_size", "4"]
    assert cli.main(["fit", *TINY, *flags]) == 0
    (run,) = (tmp_path / "regularization").iterdir()
    assert len(json.loads((run / "summary.json").read_text())["baselines"]) == 3
    assert (run / "outer.csv").read_text().splitlines()[0] == "round,decay,smoothing"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data.noise", "[]"], "data.noise must have a number or more, got []"),
        (["--data.noise", "[1.0]"], "data.noise must lie in [0, 1), got 1.0"),
        (["--data.shrink", "0"], "data.shrink must be an integer of at least 1, got 0"),
        (["--data.shrink", "17"], "data.shrink must be 1 for examples of the shape [3, 16, 16], got 17"),
        (["--data.examples", "0"], "data.examples must be an integer of at least 1, got 0"),
        (["--data.path", "rows.npz"], "data.path must hold images for a CNN, got examples of the shape [2]"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_written(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    np.savez("rows.npz", examples=np.random.default_rng(0).normal(size=(60, 2)), labels=np.arange(60) % 3)
    assert cli.main(["fit", *TINY, *flags]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "runs").exists()
