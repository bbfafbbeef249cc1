"""Few-shot tasks: classes, examples and drift."""

import numpy as np
import pytest
import torch

from obbo_lightning.streams import SyntheticStream
from obbo_lightning.streams.few_shot.stored import StoredClasses
from obbo_lightning.streams.few_shot.stream import FewShotTasks
from obbo_lightning.streams.few_shot.synthetic import GeneratedImages


def test_only_training_tasks_depend_on_the_seed_and_drift():
    stream, other = (SyntheticStream(image_size=16, order="drift", period=20, seed=seed) for seed in (0, 1))
    for name in ("train", "validation", "test"):
        tasks, others = getattr(stream, name), getattr(other, name)
        assert torch.equal(tasks[3]["query"], others[3]["query"]) == (name != "train")
        assert torch.equal(tasks.weights(3), torch.ones(len(tasks.classes))) == (name != "train")


def test_drift_is_a_bump_over_superclasses_with_the_given_period():
    classes, superclass = [3, 8, 9, 20, 21], {3: 7, 8: 7, 9: 2, 20: 11, 21: 2}
    drift = {"ways": 2, "order": "drift", "period": 40, "superclass": superclass}
    tasks = FewShotTasks(GeneratedImages(16), torch.tensor(classes), 5, **drift)
    place = np.array([1, 1, 0, 2, 0]) / 3  # superclasses 2, 7 and 11 on a circle
    for t in (0, 10, 33):
        expected = np.exp(3 * np.cos(2 * np.pi * (place - t / 40)))
        assert np.allclose(tasks.weights(t), expected, rtol=1e-5)


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
