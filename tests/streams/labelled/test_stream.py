"""Labelled examples in pools, and what their streams have in common: baselines, runs, refusals."""

from functools import partial

import numpy as np
import pytest
import torch
from small_runs import config_of
from torch.nn.functional import cross_entropy
from toy import SIX

from obbo_lightning import OBBO, online
from obbo_lightning.networks import MLP
from obbo_lightning.problems.sources import SourceWeights
from obbo_lightning.solvers import GradientDescent, InnerSGD
from obbo_lightning.streams import ImbalanceStream, RegularizationStream, SourcesStream
from obbo_lightning.streams.labelled.regularization import FIXED
from obbo_lightning.streams.labelled.sources import POWERS
from obbo_lightning.streams.labelled.stream import LabelledExamples
from obbo_lightning.training.run import build

IMBALANCE = ["--config", "imbalance", "--data.period", "1", "--data.validation", "2", "--data.test", "3"]
REGULARIZATION = ["--config", "regularization", "--data.period", "2", "--problem.network.filters", "2"]
REGULARIZATION += ["--data.examples", "20", "--data.batch", "8", "--data.validation", "4", "--data.test", "6"]
REGULARIZATION += ["--algorithm.inner.batch_size", "4"]


def built(*flags):
    components = build(config_of(*flags))
    return components.module.problem, components.module.algorithm, components.stream


def write(path, **arrays):
    np.savez(path, **arrays)
    return str(path)


@pytest.mark.parametrize("channels", [None, 1, 3])
def test_images_are_standardised_by_channel_with_the_training_pool(channels, tmp_path):
    rng = np.random.default_rng(0)
    shape = (50, 4, 6) if channels is None else (50, 4, 6, channels)
    images = rng.integers(0, 256, shape, dtype=np.uint8)
    labels, is_test = np.arange(50) % 3, np.arange(50) >= 40
    images[40:] //= 8  # the test pool does not count
    data = LabelledExamples.read(write(tmp_path / "a.npz", images=images, kinds=labels, is_test=is_test), "kinds")
    assert data.shape == (channels or 1, 4, 6)
    assert data.classes == 3
    assert sorted(data.pools["test"].tolist()) == list(range(40, 50))
    assert (len(data.pools["train"]), len(data.pools["validation"])) == (36, 4)
    assert sorted(torch.cat(list(data.pools.values())).tolist()) == list(range(50))
    pixels = images.reshape(50, 4, 6, -1).transpose(0, 3, 1, 2) / 255
    seen = pixels[data.pools["train"].numpy()]
    mean, deviation = seen.mean((0, 2, 3)), seen.std((0, 2, 3), ddof=1)
    found, classes = data.take(torch.tensor([7, 45]))
    assert np.allclose(found, (pixels[[7, 45]] - mean[:, None, None]) / deviation[:, None, None], atol=1e-5)
    assert classes.tolist() == [1, 0]


def test_vectors_without_test_examples_give_a_tenth_of_them(tmp_path):
    examples = np.random.default_rng(0).normal(size=(100, 3))
    examples[:, 2] = 5.0
    path = write(tmp_path / "a.npz", examples=examples, labels=np.arange(100) % 4)
    data = LabelledExamples.read(path, "labels")
    assert [len(data.pools[name]) for name in ("train", "validation", "test")] == [81, 9, 10]
    assert data.digest() == LabelledExamples.read(path, "labels").digest()
    found, _ = data.take(data.pools["train"])
    assert torch.allclose(found[:, :2].mean(0), torch.zeros(2), atol=1e-5)
    assert torch.allclose(found[:, :2].std(0), torch.ones(2), atol=1e-5)
    assert torch.equal(found[:, 2], torch.zeros(81))  # a constant
    path = write(tmp_path / "b.npz", examples=examples, labels=(np.arange(100) + 1) % 4)
    assert LabelledExamples.read(path, "labels").digest() != data.digest()


def test_random_rows_are_of_their_pool_and_class_and_any_of_them():
    data, generator = LabelledExamples.generate_clusters(), torch.Generator().manual_seed(0)
    for pool, rows in data.pools.items():
        drawn = data.random_rows(pool, 20 * len(rows), generator)
        assert set(drawn.tolist()) == set(rows.tolist())
    rows = data.pools["validation"]
    drawn = data.random_rows_of("validation", torch.full((20_000,), 3), generator)
    assert set(drawn.tolist()) == set(rows[data.labels[rows] == 3].tolist())


def test_downsampled_images_have_means_of_pixels():
    images = torch.arange(64, dtype=torch.uint8).reshape(1, 1, 8, 8).repeat(40, 1, 1, 1)
    data = LabelledExamples.from_tensors(images, torch.arange(40) % 2).downsample(4)
    assert data.examples.dtype == torch.uint8
    assert data.examples[0, 0].tolist() == [[14, 18], [46, 50]]  # 13.5 and so on, rounded to even
    assert data.shape == (1, 2, 2)


X, Y = np.zeros((40, 2)), np.zeros(40, int)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"examples": X}, "a.npz must hold labels, got examples"),
        ({"labels": Y}, r"must hold images or examples \[n, features\], got labels"),
        ({"examples": X, "labels": Y[:5]}, r"labels must be integers from 0 \[40\], got int64 \[5\]"),
        ({"examples": X, "labels": Y - 1}, r"labels must be integers from 0"),
        ({"examples": X, "labels": Y + 0.5}, r"labels must be integers from 0 \[40\], got float64"),
        ({"examples": X, "labels": Y, "is_test": Y[:3]}, r"is_test must be integers from 0 \[40\], got int64 \[3\]"),
        ({"examples": X, "labels": Y, "is_test": Y}, "must have examples for the test pool, got 40 in all"),
        ({"examples": X + np.nan, "labels": Y}, "examples must be finite numbers, got NaN or infinity"),
        ({"examples": Y, "labels": Y}, r"must hold images or examples \[n, features\], got"),
        ({"examples": X[..., None], "labels": Y}, r"must hold images or examples \[n, features\], got"),
        ({"images": X, "labels": Y}, r"images must be uint8 \[n, height, width\]"),
        ({"images": np.zeros((40, 2, 2, 2), np.uint8), "labels": Y}, r"got uint8 \[40, 2, 2, 2\]"),
    ],
)
def test_unusable_files_are_refused(arrays, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        LabelledExamples.read(write(tmp_path / "a.npz", **arrays), "labels")
    for name in ("none.npz", "a.csv"):
        with pytest.raises(ValueError, match=r"data\.path must be an npz file that exists"):
            LabelledExamples.read(str(tmp_path / name), "labels")


@pytest.mark.parametrize("make", [SourcesStream, ImbalanceStream, lambda: RegularizationStream(noise=[0.5])])
def test_examples_are_of_their_pools_with_labels_that_are_clean_unless_in_training(make):
    stream = make()
    task, later = stream.train[0], stream.train[1]
    folds = [stream.fold(t) for t in range(2 * stream.folds)]
    assert stream.folds == stream.folds_of(1) == 4
    assert torch.equal(torch.cat(folds[:4]).sort().values, stream.validation_rows(0).sort().values)  # disjoint
    assert all(torch.equal(one, again) for one, again in zip(folds[:4], folds[4:], strict=True))
    assert torch.equal(task["validation_x"], stream.data.take(folds[0])[0])
    assert torch.equal(later["validation_x"], stream.data.take(folds[1])[0])
    assert not torch.equal(task["test_x"], later["test_x"])
    for kind, rows in stream.data.pools.items():
        examples, labels = stream.data.take(rows)
        known = dict(zip(map(tuple, examples.flatten(1).tolist()), labels.tolist(), strict=True))
        clean = [known[tuple(example)] for example in task[f"{kind}_x"].flatten(1).tolist()]
        if kind != "train" or isinstance(stream, ImbalanceStream):
            assert clean == task[f"{kind}_y"].tolist()


def train(network, tasks, loss, steps=5, lr=0.01, momentum=0.9, weight_decay=0.0):
    """Return the test accuracy after each round of an ordinary training loop with torch's own optimizer."""
    network = network.loaded(network.initial(0))
    optimizer, found = torch.optim.SGD(network.parameters(), lr, momentum, weight_decay=weight_decay), []
    for t, task in enumerate(tasks):
        for _ in range(steps):
            optimizer.zero_grad()
            loss(network, t, task).backward()
            optimizer.step()
        with torch.no_grad():
            found.append(float((network(task["test_x"]).argmax(-1) == task["test_y"]).float().mean()))
    return found


def loss_on_validation(stream):
    """A loss on all validation examples: a task has one fold of them."""

    def validation_loss(network, t, task):
        x, y = stream.data.take(stream.validation_rows(t))
        return cross_entropy(network(x), y)

    return validation_loss


def small_sources(**settings):
    usual = {"sources": 4, "wrong": 2, "period": 2, "examples": 20, "validation": 8, "test": 50}
    problem = SourceWeights(partial(MLP, ways=10, shape=[20], widths=[6]), sources=4)
    return SourcesStream(**usual | settings), problem


def test_baselines_of_source_weights_equal_an_ordinary_training_loop():
    stream, problem = small_sources()
    options = {"steps": 3, "lr": 0.2, "momentum": 0.5}
    algorithm = OBBO(inner=InnerSGD(**options))
    found = stream.baselines(problem, algorithm, 5)
    tasks, rights = stream.train[:5], [stream.right(t) for t in range(5)]

    def trained(weights):
        def loss(network, t, task):
            each = cross_entropy(network(task["train_x"]), task["train_y"], reduction="none")
            return sum(weights(t)[s] * each[task["train_source"] == s].mean() for s in range(4))

        return train(problem.network, tasks, loss, **options)

    mean = torch.stack(rights).mean(0)
    by_power = [trained(lambda t, w=mean**power: w / w.sum()) for power in POWERS]
    assert found["equal weights"] == pytest.approx(by_power[0], abs=1e-6)
    truth = trained(lambda t: rights[t] / rights[t].sum())
    assert found["weights that know the truth"] == pytest.approx(truth, abs=1e-6)
    only = train(problem.network, tasks, loss_on_validation(stream), **options)
    assert found["clean validation examples only"] == pytest.approx(only, abs=1e-6)
    assert sum(found["best fixed weights in hindsight"]) == pytest.approx(max(map(sum, by_power)), abs=1e-5)
    assert found["best fixed weights in hindsight"] in [pytest.approx(one, abs=1e-6) for one in by_power]
    sampling = OBBO(inner=InnerSGD(steps=1, lr=0.1, batch_size=8))  # needs as many rows in each train_ tensor
    assert len(stream.baselines(problem, sampling, 2)["clean validation examples only"]) == 2
    with pytest.raises(ValueError, match="problem must be a ModuleProblem to train on its validation loss"):
        stream.train_on_validation_only(object(), algorithm, 1)


def test_baselines_of_imbalance_equal_an_ordinary_training_loop():
    problem, algorithm, stream = built(*IMBALANCE, "--data.test", "20")
    found = stream.baselines(problem, algorithm, 4)
    offsets = [torch.tensor([i * np.log(mu) for i in range(10)]) for mu in (0.4, 0.6, 0.8, 1.0)]

    def plain_loss(network, t, task, offset=0.0):
        return cross_entropy(network(task["train_x"]) + offset, task["train_y"])

    def joint_loss(network, t, task):
        more = stream.data.take(stream.validation_rows(t))
        x, y = (torch.cat([task[f"train_{key}"], added]) for key, added in zip("xy", more, strict=True))
        return cross_entropy(network(x), y)

    losses = {
        "plain training": plain_loss,
        "offsets that know the frequencies": lambda network, t, task: plain_loss(network, t, task, offsets[t]),
        "the balanced examples alone": loss_on_validation(stream),
        "the balanced examples added to every batch": joint_loss,
    }
    assert list(found) == list(losses)
    for name, loss in losses.items():
        assert found[name] == pytest.approx(train(problem.network, stream.train[:4], loss)), name
    assert len({tuple(values) for values in found.values()}) == 4


def test_baselines_of_regularization_equal_an_ordinary_training_loop():
    flags = ["--data.test", "300", "--data.batch", "64", "--problem.network.filters", "8"]
    problem, algorithm, stream = built(*REGULARIZATION, *flags, "--algorithm.inner.batch_size", "null")
    found = stream.baselines(problem, algorithm, 3)
    tasks = stream.train[:3]

    def trained(decay, smoothing):
        def loss(network, t, task):
            return cross_entropy(network(task["train_x"]), task["train_y"], label_smoothing=smoothing)

        return train(problem.network, tasks, loss, lr=0.05, weight_decay=decay)

    fixed = {pair: trained(*pair) for pair in FIXED}
    assert found == {
        "hardly any regularization": pytest.approx(fixed[1e-4, 0.0]),
        "best fixed regularization in hindsight": pytest.approx(max(fixed.values(), key=sum)),
        "validation examples only": pytest.approx(train(problem.network, tasks, loss_on_validation(stream), lr=0.05)),
    }


def test_inner_state_of_a_baseline_is_carried_from_round_to_round():
    stream, problem = small_sources(examples=5)
    outer, first = torch.full((2, 4), 0.25), stream.train[0]
    stream.task = lambda t: first
    problem.scores = lambda *given: {"accuracy": problem.outer_loss(*given)}
    carried = stream.train_with_fixed_outer(problem, OBBO(inner=GradientDescent(3, 0.1)), 3, lambda t: outer)
    assert [len(losses) for losses in carried] == [3, 3]
    assert carried[0] == carried[1]  # the lanes have the same λ
    once, _ = stream.train_with_fixed_outer(problem, OBBO(inner=GradientDescent(9, 0.1)), 1, lambda t: outer)
    assert carried[0][2] == pytest.approx(once[0], rel=1e-5)  # three rounds of three steps


@pytest.mark.parametrize("algorithm", SIX)
@pytest.mark.parametrize(
    ("flags", "scores", "change"),
    [
        (IMBALANCE, {"accuracy", "balanced_accuracy"}, lambda outer, start: outer - start),
        (REGULARIZATION, {"accuracy", "cross_entropy"}, lambda outer, start: outer / start - 1),
    ],
    ids=["imbalance", "regularization"],
)
def test_every_algorithm_changes_all_parameter_groups(algorithm, flags, scores, change):
    problem, algorithm, stream = built(*flags, "--algorithm", algorithm)
    start = stream.start(problem, 0)
    *_, last = online(problem, algorithm, stream.train[:3], start)
    assert last.scores.keys() == scores
    for name, values in problem.groups.split(change(last.outer, start)).items():
        assert values.abs().max() > 1e-3, name


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([*IMBALANCE, "--data.kept", "[]"], "data.kept must have at least one number, got []"),
        ([*IMBALANCE, "--data.kept", "[0.5, 0.0]"], "data.kept must lie in (0, 1], got 0.0"),
        ([*IMBALANCE, "--data.period", "0"], "data.period must be an integer of at least 1, got 0"),
        ([*IMBALANCE, "--data.batch", "0"], "data.batch must be an integer of at least 1, got 0"),
        ([*IMBALANCE, "--data.test", "-1"], "data.test must be an integer of at least 1, got -1"),
        ([*IMBALANCE, "--data.path", "rare.npz"], "must have every class in the test pool, got none of class 1"),
        ([*REGULARIZATION, "--data.noise", "[]"], "data.noise must have at least one number, got []"),
        ([*REGULARIZATION, "--data.noise", "[1.0]"], "data.noise must lie in [0, 1), got 1.0"),
        ([*REGULARIZATION, "--data.shrink", "0"], "data.shrink must be an integer of at least 1, got 0"),
        ([*REGULARIZATION, "--data.shrink", "17"], "must be 1 for examples of the shape [3, 16, 16], got 17"),
        ([*REGULARIZATION, "--data.examples", "0"], "data.examples must be an integer of at least 1, got 0"),
        ([*REGULARIZATION, "--data.path", "rare.npz"], "must hold images for a CNN, got examples of the shape [2]"),
    ],
)
def test_impossible_settings_are_refused(tmp_path, flags, message, refusal):
    labels, is_test = np.arange(60) % 3, np.arange(60) < 12
    labels[:12] = labels[:12] // 2 * 2  # no test example of class 1
    examples = np.random.default_rng(0).normal(size=(60, 2))
    np.savez(tmp_path / "rare.npz", examples=examples, labels=labels, is_test=is_test)
    assert message in refusal(*flags)
