"""Few-shot tasks from generated images."""

import pytest
import torch

from obbo_lightning.streams import SyntheticStream


def test_no_image_is_twice_in_a_task_and_all_are_standardised():
    stream = SyntheticStream(image_size=16, ways=3, shots=2, queries=3)
    task = stream.train[0]
    images = torch.cat([task["support"], task["query"]]).flatten(1)
    assert len({tuple(image.tolist()) for image in images}) == 15
    assert abs(float(images.mean())) < 1
    assert 0.3 < float(images.std()) < 2
    assert stream.inputs()["mean"] == [0.5] * 3
    assert stream.inputs()["deviation"] == [1 / 3] * 3


class Numbered:
    """Source whose images hold the number of their class."""

    def draw(self, classes, generator):
        return classes.float().reshape(-1, 1, 1, 1).expand(-1, 3, 16, 16)


@pytest.mark.parametrize("order", ["iid", "drift"])
def test_tasks_have_classes_of_their_own_split(order):
    stream = SyntheticStream(order=order, image_size=16)
    for split, outlines in {"train": [0, 2, 4], "validation": [3], "test": [1]}.items():
        tasks = getattr(stream, split)
        assert tasks.classes.tolist() == [c for c in range(100) if c // 5 % 5 in outlines]  # 60, 20 and 20
        tasks.source = Numbered()
        seen = {int(c) for t in range(40) for c in tasks[t]["query"][:, 0, 0, 0].tolist()}
        assert sorted({c // 5 % 5 for c in seen}) == outlines
