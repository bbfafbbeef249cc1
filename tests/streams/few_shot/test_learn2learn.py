"""Task sets of learn2learn as a stream; .ci/run installs learn2learn and runs these tests."""

import importlib.util
import random
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from obbo_lightning import OBBO, online
from obbo_lightning.algorithms.maml import load_learn2learn
from obbo_lightning.networks import CNN4
from obbo_lightning.solvers import GradientDescent
from obbo_lightning.streams import LearnToLearnStream
from obbo_lightning.training.datamodule import StreamDataModule

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("learn2learn") is None, reason="learn2learn is not installed: docker/install-learn2learn"
)


class Images(torch.utils.data.Dataset):
    """Random images with class labels."""

    def __init__(self, classes):
        rng = np.random.default_rng(len(classes))
        self.labels = np.repeat(classes, 6)
        self.images = torch.from_numpy(rng.normal(size=(len(self.labels), 3, 16, 16)).astype(np.float32))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i], int(self.labels[i])


@pytest.fixture(scope="module")
def stream():
    data = load_learn2learn().data

    def taskset(classes):
        dataset = data.MetaDataset(Images(classes))
        transforms = [
            data.transforms.NWays(dataset, 3),
            data.transforms.KShots(dataset, 5),
            data.transforms.LoadData(dataset),
        ]
        return data.Taskset(dataset, transforms, num_tasks=50)

    return LearnToLearnStream(taskset(range(5)), taskset(range(5, 9)), taskset(range(9, 13)), 2, (50, 10, 10), seed=4)


def test_tasks_of_a_taskset_are_indexed(stream):
    first = stream.train[7]
    stream.train[0], stream.train[3]
    random.seed(1)
    again = stream.train[7]
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not torch.equal(first["query"], stream.train[8]["query"])
    assert first["support"].shape == (6, 3, 16, 16)
    assert first["support_labels"].tolist() == [0, 0, 1, 1, 2, 2]
    assert first["query_labels"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert len({tuple(image.flatten().tolist()) for image in torch.cat([first["support"], first["query"]])}) == 15


def test_drawing_a_task_leaves_the_global_generators_unchanged(stream):
    found = []
    for get_task in (lambda: None, lambda: stream.train[0]):
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        get_task()
        found.append((random.random(), np.random.rand(), float(torch.rand(1))))  # noqa: NPY002
    assert found[0] == found[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_any_number_of_workers_gives_the_same_tasks(stream, workers):
    loader = StreamDataModule(stream.train, rounds=4, workers=workers).train_dataloader()
    for t, (task,) in enumerate(loader):
        assert all(torch.equal(task[k], stream.train[t][k]) for k in task)


@pytest.mark.filterwarnings("ignore:the fixed point of the hypergradient:RuntimeWarning")  # the images are noise
def test_rounds_run_on_a_stream_of_learn2learn(stream):
    problem = stream.problem(network=partial(CNN4, filters=2))
    algorithm = OBBO(inner=GradientDescent(2, 0.01, "outer"))
    rounds = list(online(problem, algorithm, stream.train[:3], stream.start(problem, 0)))
    assert len(rounds) == 3
    assert problem.network.template.linear.out_features == 3


@pytest.mark.filterwarnings("ignore:the fixed point of the hypergradient:RuntimeWarning")  # the images are noise
def test_the_example_in_the_documents_runs(capsys):
    load_learn2learn()  # without gym's greeting
    page = (Path(__file__).parents[3] / "docs" / "learn2learn.md").read_text()
    (example,) = re.findall(r"```py\n(.*?)```", page, flags=re.DOTALL)
    exec(compile(example, "learn2learn.md", "exec"), {"__name__": "document"})
    assert capsys.readouterr().out.count("accuracy") == 5


def test_impossible_tasksets_are_refused(stream):
    with pytest.raises(ValueError, match="more than the 5 to adapt on"):
        LearnToLearnStream(stream.train.taskset, stream.train.taskset, stream.train.taskset, 5).train[0]
    with pytest.raises(ValueError, match=r"must be a learn2learn.data.Taskset, got list"):
        LearnToLearnStream([], [], [], 2)
