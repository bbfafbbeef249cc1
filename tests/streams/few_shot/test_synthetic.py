"""Few-shot tasks from generated images."""

import torch

from obbo_lightning.streams import SyntheticStream


def test_task_has_its_shapes_and_no_image_twice():
    stream = SyntheticStream(image_size=16, ways=3, shots=2, queries=3)
    task = stream.train[0]
    assert task["support"].shape == (6, 3, 16, 16)
    assert task["query"].shape == (9, 3, 16, 16)
    assert task["support_labels"].tolist() == [0, 0, 1, 1, 2, 2]
    images = torch.cat([task["support"], task["query"]]).flatten(1)
    assert len({tuple(image.tolist()) for image in images}) == 15
    assert abs(float(images.mean())) < 1
    assert 0.3 < float(images.std()) < 2
    assert stream.inputs()["mean"] == [0.5] * 3
    assert stream.inputs()["deviation"] == [1 / 3] * 3


def test_splits_are_60_20_20_classes_with_disjoint_superclasses():
    stream = SyntheticStream()
    classes = [set(s.classes.tolist()) for s in (stream.train, stream.validation, stream.test)]
    assert [len(c) for c in classes] == [60, 20, 20]
    superclasses = [{c // 5 for c in chosen} for chosen in classes]
    assert [len(s) for s in superclasses] == [12, 4, 4]
    assert len(set.union(*superclasses)) == 20
    assert [len(s) for s in (stream.train, stream.validation, stream.test)] == [20_000, 600, 600]
