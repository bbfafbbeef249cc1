"""Labels from several sources: pools, phases, what wrong sources say, and what a learned λ must beat."""

from functools import partial

import numpy as np
import pytest
import torch

from obbo_lightning import OBBO
from obbo_lightning.networks import MLP
from obbo_lightning.problems.sources import SourceWeights
from obbo_lightning.solvers import GradientDescent, InnerSGD
from obbo_lightning.streams.labelled.baselines import fixed_outer, on_validation_alone
from obbo_lightning.streams.labelled.examples import Labelled
from obbo_lightning.streams.labelled.sources import POWERS, SourcesStream


def write(path, **arrays):
    np.savez(path, **{name: values for name, values in arrays.items() if values is not None})
    return str(path)


@pytest.mark.parametrize("channels", [None, 1, 3])
def test_images_of_a_file_are_standardised_by_channel_with_the_training_pool(channels, tmp_path):
    rng = np.random.default_rng(0)
    shape = (50, 4, 6) if channels is None else (50, 4, 6, channels)
    images = rng.integers(0, 256, shape, dtype=np.uint8)
    labels, is_test = np.arange(50) % 3, np.arange(50) >= 40
    images[40:] //= 8  # what is judged on does not count
    data = Labelled.read(write(tmp_path / "a.npz", images=images, kinds=labels, is_test=is_test), "kinds")
    assert data.shape == (channels or 1, 4, 6)
    assert data.classes == 3
    assert sorted(data.pools["test"].tolist()) == list(range(40, 50))
    assert (len(data.pools["train"]), len(data.pools["validation"])) == (36, 4)
    assert sorted(torch.cat(list(data.pools.values())).tolist()) == list(range(50))
    pixels = images.reshape(50, 4, 6, -1).transpose(0, 3, 1, 2) / 255
    seen = pixels[data.pools["train"].numpy()]
    mean, deviation = seen.mean((0, 2, 3)), seen.std((0, 2, 3), ddof=1)
    found, said = data.take(torch.tensor([7, 45]))
    expected = (pixels[[7, 45]] - mean[:, None, None]) / deviation[:, None, None]
    assert np.allclose(found, expected, atol=1e-5)
    assert said.tolist() == [1, 0]
    for pool in ("train", "validation", "test"):
        drawn, _ = data.draw(pool, 200, torch.Generator().manual_seed(0))
        allowed = data.take(data.pools[pool])[0].flatten(1)
        nearest = torch.cdist(drawn.flatten(1), allowed).amin(1)
        assert float(nearest.max()) < 0.05  # of about 5: cdist rounds
        assert len(drawn.flatten(1).unique(dim=0)) > len(allowed) / 2


def test_vectors_without_test_examples_give_a_tenth_of_them(tmp_path):
    examples = np.random.default_rng(0).normal(size=(100, 3))
    examples[:, 2] = 5.0
    path = write(tmp_path / "a.npz", examples=examples, labels=np.arange(100) % 4)
    data, again = (Labelled.read(path, "labels") for _ in range(2))
    assert [len(data.pools[name]) for name in ("train", "validation", "test")] == [81, 9, 10]
    assert data.digest() == again.digest()
    found, _ = data.take(data.pools["train"])
    assert torch.allclose(found[:, :2].mean(0), torch.zeros(2), atol=1e-5)
    assert torch.allclose(found[:, :2].std(0), torch.ones(2), atol=1e-5)
    assert torch.equal(found[:, 2], torch.zeros(81))  # a constant is left alone
    other = Labelled.read(write(tmp_path / "b.npz", examples=examples, labels=(np.arange(100) + 1) % 4), "labels")
    assert other.digest() != data.digest()


X, Y = np.zeros((40, 2)), np.zeros(40, int)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"examples": X}, "data.label must be an array of .*, which are examples, got 'labels'"),
        ({"labels": Y}, "must hold images or examples, got labels"),
        ({"examples": X, "labels": Y[:5]}, r"labels must be whole numbers from 0 \[40\], got int64 \(5,\)"),
        ({"examples": X, "labels": Y - 1}, r"labels must be whole numbers from 0"),
        ({"examples": X, "labels": Y + 0.5}, r"labels must be whole numbers from 0 \[40\], got float64"),
        ({"examples": X, "labels": Y, "is_test": Y[:3]}, r"is_test must have the shape \(40,\), got \(3,\)"),
        ({"examples": X, "labels": Y, "is_test": Y}, "must have examples to test with, got 40 in all"),
        ({"examples": X + np.nan, "labels": Y}, r"examples must be finite numbers \[n, features\]"),
        ({"examples": Y, "labels": Y}, r"examples must be finite numbers \[n, features\]"),
        ({"images": X, "labels": Y}, r"images must be bytes \[n, height, width\]"),
        ({"images": np.zeros((40, 2, 2, 2), np.uint8), "labels": Y}, r"got uint8 \[40, 2, 2, 2\]"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(arrays, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        Labelled.read(write(tmp_path / "a.npz", **arrays), "labels")
    for name in ("none.npz", "a.csv"):
        with pytest.raises(ValueError, match=r"data\.path must be an npz file that exists"):
            Labelled.read(str(tmp_path / name), "labels")


def small(**settings):
    return SourcesStream(
        **{"sources": 4, "wrong": 2, "period": 10, "examples": 50, "validation": 8, "test": 9} | settings
    )


def test_other_sources_are_wrong_from_phase_to_phase():
    stream, other = small(), small(seed=1)
    for t in (0, 9, 10, 35):
        right = stream.right(t)
        assert sorted(right.tolist()) == [0.0, 0.0, 1.0, 1.0]
        assert torch.equal(right, stream.right(t // 10 * 10))
    assert len({tuple(stream.right(10 * p).tolist()) for p in range(12)}) > 3
    assert any(not torch.equal(stream.right(10 * p), other.right(10 * p)) for p in range(6))
    assert not torch.equal(stream.trusted[0], other.trusted[0])
    assert not torch.equal(stream.task(3)["train_x"], other.task(3)["train_x"])
    gradual = small(change="gradual")
    for t in range(30):
        before, now = (stream.right(10 * max(0, phase)) for phase in (t // 10 - 1, t // 10))
        share = 1.0 if t < 10 else min(1.0, (t % 10 + 1) / 5)  # the first phase begins as it is
        assert torch.allclose(gradual.right(t), share * now + (1 - share) * before)


@pytest.mark.parametrize("errors", ["shifted", "random", "adversarial"])
def test_wrong_sources_say_what_their_kind_says(errors):
    stream = small(errors=errors)
    classes = stream.data.classes
    pool = zip(*stream.data.take(stream.data.pools["train"]), strict=True)
    known, said = {tuple(x.tolist()): int(y) for x, y in pool}, {}
    for t in (0, 5, 10):
        task = stream.task(t)
        truth = torch.tensor([known[tuple(x.tolist())] for x in task["train_x"]])
        assert task["train_source"].tolist() == [s for s in range(4) for _ in range(50)]
        honest = task["right"][task["train_source"]] == 1
        assert torch.equal(task["train_y"][honest], truth[honest])
        wrong, told = truth[~honest], task["train_y"][~honest]
        if errors == "shifted":
            assert torch.equal(told, (wrong + 1) % classes)
        elif errors == "random":
            assert 0.02 < float((told == wrong).float().mean()) < 0.25
            assert len(told.unique()) == classes
        else:
            agreed = dict(zip(wrong.tolist(), told.tolist(), strict=True))
            assert [agreed[c] for c in wrong.tolist()] == told.tolist()  # all say the same
            assert sum(c != s for c, s in agreed.items()) == classes // 2
            said[t] = agreed
    if errors == "adversarial":
        assert said[0] == said[5] != said[10]


def test_a_task_is_judged_on_other_examples_than_it_is_trained_on():
    stream = small()
    pools = {p: {tuple(x) for x in stream.data.take(stream.data.pools[p])[0].tolist()} for p in stream.data.pools}
    tasks = [stream.train[t] for t in (0, 7)]
    for task in tasks:
        for name in ("train", "validation", "test"):
            assert {tuple(x) for x in task[f"{name}_x"].tolist()} <= pools[name]
        assert [len(task[f"{name}_y"]) for name in ("train", "validation", "test")] == [200, 8, 9]
    assert torch.equal(tasks[0]["validation_x"], tasks[1]["validation_x"])  # once and for all
    assert not torch.equal(tasks[0]["test_x"], tasks[1]["test_x"])
    assert stream.task_spec() == {"sources": 4, "ways": 10, "shape": (20,)}
    assert len(stream.train) == 1_000_000
    for settings, said in (
        ({"wrong": 4}, r"data\.wrong must be less than the 4 sources, got 4"),
        ({"wrong": -1}, r"data\.wrong must be an integer of at least 0"),
        ({"errors": "rude"}, r"data\.errors must be one of"),
        ({"sources": 1, "wrong": 0}, r"data\.sources must be an integer of at least 2"),
        ({"test": 0}, r"data\.test must be an integer of at least 1"),
    ):
        with pytest.raises(ValueError, match=said):
            small(**settings)


def played(problem, stream, inner, weights, rounds, loss=None):
    """Accuracies where the weights of the sources are given, from torch.optim."""
    network, first, found = None, problem.network.initial(0), []
    for t in range(rounds):
        task = stream.train[t]
        if network is None:
            network = problem.network.loaded(first)
            optimizer = torch.optim.SGD(network.parameters(), inner.lr, inner.momentum)
        for _ in range(inner.steps):
            each = torch.nn.functional.cross_entropy(network(task["train_x"]), task["train_y"], reduction="none")
            value = sum(weights(t)[s] * each[task["train_source"] == s].mean() for s in range(4))
            if loss == "trusted":
                value = torch.nn.functional.cross_entropy(network(task["validation_x"]), task["validation_y"])
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        with torch.no_grad():
            found.append(float((network(task["test_x"]).argmax(-1) == task["test_y"]).float().mean()))
    return found


def test_what_a_learned_weight_must_beat_is_the_same_solver_with_given_weights():
    stream = small(period=2, examples=20, test=50)
    problem = SourceWeights(partial(MLP, ways=10, shape=[20], widths=[6]), sources=4)
    inner = InnerSGD(steps=3, lr=0.2, momentum=0.5)
    algorithm = OBBO(inner=inner)
    found = stream.baselines(problem, algorithm, 5)
    often = torch.stack([stream.right(t) for t in range(5)]).mean(0)
    by_power = []
    for power in POWERS:
        weights = often**power / (often**power).sum()
        by_power.append(played(problem, stream, inner, lambda t, weights=weights: weights, 5))
    truth = played(problem, stream, inner, lambda t: stream.right(t) / stream.right(t).sum(), 5)
    alone = played(problem, stream, inner, lambda t: often, 5, "trusted")
    assert found["equal weights"] == pytest.approx(by_power[0], abs=1e-6)
    assert found["weights that know the truth"] == pytest.approx(truth, abs=1e-6)
    assert found["the trusted examples alone"] == pytest.approx(alone, abs=1e-6)
    assert sum(found["best fixed weights in hindsight"]) == pytest.approx(max(map(sum, by_power)), abs=1e-5)
    assert found["best fixed weights in hindsight"] in [pytest.approx(one, abs=1e-6) for one in by_power]
    with pytest.raises(ValueError, match="problem must be one of a module"):
        on_validation_alone(object(), algorithm, [])


def test_a_fixed_outer_variable_may_be_judged_by_its_loss_and_rounds_may_begin_anew():
    stream = small(examples=5)
    problem = SourceWeights(partial(MLP, ways=10, shape=[20], widths=[6]), sources=4)
    outer = torch.full((2, 4), 0.25)
    tasks = [stream.train[0]] * 3
    carried = fixed_outer(problem, OBBO(inner=GradientDescent(3, 0.1)), tasks, lambda t: outer, "loss")
    assert [tuple(one.shape) for one in carried] == [(2,)] * 3
    assert torch.equal(carried[0][:1], carried[0][1:])
    one = fixed_outer(problem, OBBO(inner=GradientDescent(9, 0.1)), tasks[:1], lambda t: outer, "loss")
    assert torch.allclose(carried[2], one[0], rtol=1e-5)  # three rounds of three steps
