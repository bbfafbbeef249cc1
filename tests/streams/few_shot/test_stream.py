"""Few-shot tasks: classes, examples and drift."""

import numpy as np
import pytest
import torch

from obbo_lightning.streams import SyntheticStream
from obbo_lightning.streams.few_shot.stored import StoredClasses
from obbo_lightning.streams.few_shot.stream import FewShotTasks
from obbo_lightning.streams.few_shot.synthetic import GeneratedImages

SMALL = {"image_size": 16, "ways": 3, "shots": 2, "queries": 3}


def test_tasks_are_a_pure_function_of_seed_and_round():
    stream, again, other = (SyntheticStream(**SMALL, order="drift", period=20, seed=seed) for seed in (0, 0, 1))
    for t in (5, 0, 3):
        assert all(torch.equal(stream.train[t][k], again.train[t][k]) for k in stream.train[t])
    assert not torch.equal(stream.train[3]["query"], other.train[3]["query"])
    assert not torch.equal(stream.train[3]["query"], stream.train[4]["query"])
    assert len(stream.train.weights(3).unique()) > 1
    for name in ("validation", "test"):  # independent of the seed, without drift
        tasks = getattr(stream, name)
        assert torch.equal(tasks.weights(3), torch.ones(20))
        assert torch.equal(tasks[3]["query"], getattr(other, name)[3]["query"])


def test_drift_is_a_bump_over_superclasses_with_the_given_period():
    classes, superclass = [3, 8, 9, 20, 21], {3: 7, 8: 7, 9: 2, 20: 11, 21: 2}
    drift = {"ways": 2, "order": "drift", "period": 40, "superclass": superclass}
    tasks = FewShotTasks(GeneratedImages(16), torch.tensor(classes), 5, **drift)
    place = np.array([1, 1, 0, 2, 0]) / 3  # superclasses 2, 7 and 11 on a circle
    for t in (0, 10, 33):
        expected = np.exp(3 * np.cos(2 * np.pi * (place - t / 40)))
        assert np.allclose(tasks.weights(t), expected, rtol=1e-5)


class Numbered:
    """Source whose images hold the number of their class."""

    def draw(self, classes, generator):
        return classes.float().reshape(-1, 1, 1, 1).expand(-1, 3, 16, 16)


@pytest.mark.parametrize("order", ["iid", "drift"])
def test_tasks_have_classes_of_their_own_split(order):
    stream = SyntheticStream(order=order, image_size=16)
    seen = {}
    for split in ("train", "validation", "test"):
        tasks = getattr(stream, split)
        tasks.source = Numbered()
        seen[split] = {int(c) for t in range(40) for c in tasks[t]["query"][:, 0, 0, 0].tolist()}
    assert {c // 5 % 5 for c in seen["test"]} == {1}  # outlines of the shapes
    assert {c // 5 % 5 for c in seen["validation"]} == {3}
    assert {c // 5 % 5 for c in seen["train"]} == {0, 2, 4}


def test_no_example_is_twice_in_a_task():
    source = StoredClasses(torch.arange(12.0).reshape(12, 1), np.repeat([0, 1], 6), names=[])
    for seed in range(20):
        drawn = source.draw(torch.tensor([1] * 6 + [0] * 3), torch.Generator().manual_seed(seed)).flatten().tolist()
        assert sorted(drawn[:6]) == [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]
        assert len(set(drawn[6:])) == 3
        assert max(drawn[6:]) < 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ways": 1}, "data.ways must be an integer of at least 2, got 1"),
        ({"shots": 0}, "data.shots must be an integer of at least 1, got 0"),
        ({"queries": 0}, "data.queries must be an integer of at least 1, got 0"),
        ({"order": "random"}, "data.order must be one of iid, drift, got 'random'"),
        ({"period": 0}, "data.period must be an integer of at least 1, got 0"),
        ({"ways": 4}, "data.ways must be at most the 3 classes of the train split, got 4"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        FewShotTasks(GeneratedImages(), torch.arange(3), 10, **settings, seed=(0, "train"))
