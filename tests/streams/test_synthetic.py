"""Few-shot tasks: drawn images, and what all sources of examples have in common."""

from functools import partial

import pytest
import torch
from torch import nn

from obbo_lightning import FewShot, Metric
from obbo_lightning.networks import CNN4, MLP
from obbo_lightning.streams.few_shot.stream import Drawing, FewShotTasks
from obbo_lightning.streams.few_shot.synthetic import DrawnClasses, SyntheticStream
from obbo_lightning.training.datamodule import StreamDataModule

SMALL = {"image_size": 16, "ways": 3, "shots": 2, "queries": 3}


@pytest.fixture(scope="module")
def stream():
    return SyntheticStream(**SMALL)


def test_tasks_decide_of_a_network_what_it_takes_and_was_not_given(stream):
    assert stream.task_spec() == {"ways": 3, "shape": [3, 16, 16], "channels": 3, "image_size": 16}
    assert tuple(stream.task_spec()) == stream.decided
    assert stream.metric == Metric("accuracy", higher_is_better=True)
    template = stream.problem().network.template
    assert isinstance(template, CNN4)
    assert (template.linear.in_features, template.linear.out_features) == (64, 3)
    small = stream.problem(network=partial(MLP, widths=[4]), proximity=0.1)
    assert (small.network.template.blocks[1][0].in_features, small.proximity) == (3 * 16 * 16, 0.1)
    own = stream.problem(network=lambda ways: nn.Sequential(nn.Flatten(), nn.Linear(768, 7 * ways)))
    assert own.network.template[1].out_features == 21
    given = nn.Sequential(nn.Flatten(), nn.Linear(768, 3))
    assert torch.equal(stream.problem(network=given).initial_outer(0)[0, -3:], given[1].bias.detach())
    assert torch.equal(stream.start(small, 4), small.initial_outer(4))


def test_another_problem_may_be_posed_by_the_same_tasks(stream):
    class Scored(FewShot):
        pass

    assert type(stream.problem(Scored)) is Scored


def test_tasks_are_a_pure_function_of_seed_and_round(stream):
    again = SyntheticStream(**SMALL)
    for t in (5, 0, 3):
        assert all(torch.equal(stream.train[t][k], again.train[t][k]) for k in stream.train[t])
    assert not torch.equal(SyntheticStream(**SMALL, seed=1).train[0]["query"], stream.train[0]["query"])
    assert torch.equal(SyntheticStream(**SMALL, seed=1).test[0]["query"], stream.test[0]["query"])


def test_a_task_has_its_shapes_and_no_image_twice(stream):
    task = stream.train[0]
    assert task["support"].shape == (6, 3, 16, 16)
    assert task["query"].shape == (9, 3, 16, 16)
    assert task["support_labels"].tolist() == [0, 0, 1, 1, 2, 2]
    images = torch.cat([task["support"], task["query"]]).flatten(1)
    assert len({tuple(image.tolist()) for image in images}) == 15
    assert abs(float(images.mean())) < 1
    assert 0.3 < float(images.std()) < 2


def test_splits_are_60_20_20_classes_with_disjoint_superclasses():
    stream = SyntheticStream()
    classes = [set(s.classes.tolist()) for s in (stream.train, stream.validation, stream.test)]
    assert [len(c) for c in classes] == [60, 20, 20]
    superclasses = [{c // 5 for c in chosen} for chosen in classes]
    assert [len(s) for s in superclasses] == [12, 4, 4]
    assert len(set.union(*superclasses)) == 20
    assert [len(s) for s in (stream.train, stream.validation, stream.test)] == [20_000, 600, 600]


def test_drift_moves_the_mix_of_superclasses_and_iid_does_not():
    drift, still = SyntheticStream(order="drift", period=100).train, SyntheticStream().train
    assert torch.equal(still.weights(0), still.weights(50))
    assert float(drift.weights(0).argmax()) != float(drift.weights(50).argmax())
    assert torch.allclose(drift.weights(0), drift.weights(100), atol=1e-4)


@pytest.mark.parametrize("workers", [0, 2])
def test_any_number_of_workers_serves_the_same_stream(stream, workers):
    loader = StreamDataModule(stream.train, rounds=4, workers=workers).train_dataloader()
    for t, (task,) in enumerate(loader):
        assert all(torch.equal(task[k], stream.train[t][k]) for k in task)
    assert t == 3
    assert len(loader) == 4


@pytest.mark.parametrize(
    ("drawing", "message"),
    [
        ({"ways": 1}, "data.ways must be an integer of at least 2, got 1"),
        ({"shots": 0}, "data.shots must be an integer of at least 1, got 0"),
        ({"queries": 0}, "data.queries must be an integer of at least 1, got 0"),
        ({"order": "random"}, "data.order must be one of iid, drift, got 'random'"),
        ({"period": 0}, "data.period must be an integer of at least 1, got 0"),
        ({"ways": 4}, "data.ways must be at most the 3 classes of the train split, got 4"),
    ],
)
def test_impossible_draws_are_refused(drawing, message):
    with pytest.raises(ValueError, match=message):
        FewShotTasks(DrawnClasses(), range(3), 10, Drawing(**drawing), (0, "train"))
