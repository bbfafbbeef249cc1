"""learn2learn: its tasks as a stream, its MAML and ANIL as algorithms. .ci/run installs it and runs these."""

import importlib.util
import random
import re
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from toy import F64

from obbo_lightning import CNN4, FewShot, GradientDescent, Unrolled, cli, online, part
from obbo_lightning.algorithms.learn_to_learn import load_learn2learn
from obbo_lightning.core.estimates import estimate
from obbo_lightning.core.memory import Warm
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.randomness import Key
from obbo_lightning.streams.learn_to_learn import LearnToLearnStream
from obbo_lightning.streams.synthetic import SyntheticStream
from obbo_lightning.training.datamodule import StreamDataModule

needs_learn2learn = pytest.mark.skipif(
    importlib.util.find_spec("learn2learn") is None,
    reason="learn2learn is not installed: docker/install-learn2learn",
)
SMALL = {"image_size": 16, "ways": 3, "shots": 2, "queries": 3}
FAST = ["--rounds", "3", "--evaluation.tasks", "2", "--problem.network.filters", "4", "--algorithm.inner.steps", "2"]


def double(task):
    return {k: v.double() if v.is_floating_point() else v for k, v in task.items()}


def meta_gradient(name, steps, task, problem, outer):
    algorithm = part("algorithm", name)(inner=GradientDescent(steps, 0.1, "outer"))
    return estimate(problem, algorithm, outer, task, Warm(), Key())


@needs_learn2learn
@pytest.mark.parametrize("steps", [1, 5])
def test_unrolled_without_proximity_is_learn2learns_second_order_maml(steps):
    stream = SyntheticStream(**SMALL)
    problem = stream.problem(network=partial(CNN4, filters=8), proximity=0.0)
    outer, task = problem.initial_outer(0).double(), double(stream.train[0])
    ours = Unrolled()(Oracle(problem, outer, task), GradientDescent(steps, 0.1, "outer"), None, None)
    theirs = meta_gradient("maml", steps, task, problem, outer)
    assert theirs.hypergradient.dtype == F64
    assert float((ours.value - theirs.hypergradient).abs().max()) <= 1e-10
    assert float(theirs.hypergradient.norm()) > 0.1
    assert torch.allclose(ours.inner, theirs.inner, rtol=0, atol=1e-12)
    assert theirs.calls == {"gradients": steps + 1, "products": steps}


@needs_learn2learn
def test_the_gradient_of_anil_is_the_derivative_of_what_it_does():
    stream = SyntheticStream(**SMALL)
    problem = stream.problem(network=partial(CNN4, filters=2))
    outer, task = problem.initial_outer(0).double(), double(stream.train[0])
    found = meta_gradient("anil", 2, task, problem, outer)
    weights = sum(list(problem.network.sizes.values())[-2:])
    assert torch.equal(found.inner[:, :-weights], outer[:, :-weights])  # the features stay
    assert not torch.equal(found.inner[:, -weights:], outer[:, -weights:])

    def loss(shift, coordinate):
        point = outer.clone()
        point[0, coordinate] += shift
        return float(meta_gradient("anil", 2, task, problem, point).loss)

    for coordinate in (0, 40, outer.shape[1] - weights, outer.shape[1] - 1):
        slope = (loss(1e-5, coordinate) - loss(-1e-5, coordinate)) / 2e-5
        assert abs(slope - float(found.hypergradient[0, coordinate])) < 1e-7


class HeadFirst(torch.nn.Module):
    """A network whose last layer was registered first, with a frozen one, an unused one, and norms that remember."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.head = torch.nn.Linear(6, 3)
        self.body = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(768, 6), torch.nn.BatchNorm1d(6), torch.nn.Tanh(), torch.nn.Linear(6, 6)
        )
        self.body[4].requires_grad_(False)
        self.unused = torch.nn.Linear(2, 2)
        self.noise = torch.nn.Dropout(dropout)

    def forward(self, images):
        return self.head(self.noise(self.body(images)))


@needs_learn2learn
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("name", ["maml", "anil"])
def test_any_network_is_adapted_and_its_gradient_is_right(name, dropout):
    stream = SyntheticStream(**SMALL)
    problem = FewShot(partial(HeadFirst, dropout))
    outer, task = problem.initial_outer(0).double(), double(stream.train[0])
    found = meta_gradient(name, 2, task, problem, outer)
    again = meta_gradient(name, 2, task, problem, outer)
    assert torch.equal(found.hypergradient, again.hypergradient)
    assert found.hypergradient.shape == found.inner.shape == outer.shape
    moved = found.inner != outer
    head = 6 * 3 + 3
    assert bool(moved[0, :head].any())
    assert bool(moved[0, head:].any()) == (name == "maml")

    def loss(shift, coordinate):
        point = outer.clone()
        point[0, coordinate] += shift
        return float(meta_gradient(name, 2, task, problem, point).loss)

    for coordinate in (0, head - 1, head + 5, outer.shape[1] - 1):  # the last is of the unused layer
        slope = (loss(1e-5, coordinate) - loss(-1e-5, coordinate)) / 2e-5
        assert abs(slope - float(found.hypergradient[0, coordinate])) < 1e-7


@needs_learn2learn
def test_anil_needs_a_linear_layer_at_the_end():
    stream = SyntheticStream(**SMALL)
    make = lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 3), torch.nn.Tanh())  # noqa: E731
    problem = FewShot(make)
    outer, task = problem.initial_outer(0), stream.train[0]
    assert meta_gradient("maml", 1, task, problem, outer).loss.isfinite()
    with pytest.raises(ValueError, match=r"'anil' needs a network that ends in an nn.Linear, got Sequential"):
        meta_gradient("anil", 1, task, problem, outer)


@needs_learn2learn
@pytest.mark.parametrize("name", ["maml", "anil"])
def test_maml_and_anil_are_algorithms_of_fit_on_the_same_tasks(name, tmp_path, capsys):
    assert cli.main(["fit", "--algorithm", name, *FAST, "--output", str(tmp_path)]) == 0
    assert f"{name}, synthetic stream" in capsys.readouterr().out
    assert cli.main(["test", *map(str, tmp_path.glob("*/*"))]) == 0
    assert cli.main(["fit", "--algorithm", name, "--data", "quadratic"]) == 2
    assert "a few-shot problem" in capsys.readouterr().err


@needs_learn2learn
@pytest.mark.parametrize("flags", [["--algorithm.inner.start", "previous"], ["--algorithm.inner.batch_size", "3"]])
def test_what_learn2learn_does_not_do_is_refused(flags, capsys):
    assert cli.main(["fit", "--algorithm", "maml", *FAST, *flags]) == 2
    assert "inner must start at 'outer' and use whole tasks" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["maml", "anil"])
def test_without_learn2learn_one_line_says_how_to_get_it(name, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "learn2learn", None)
    assert cli.main(["fit", "--algorithm", name, *FAST]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "docker/install-learn2learn" in error


class Pictures(torch.utils.data.Dataset):
    """Images by class as people have them."""

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
        dataset = data.MetaDataset(Pictures(classes))
        transforms = [
            data.transforms.NWays(dataset, 3),
            data.transforms.KShots(dataset, 5),
            data.transforms.LoadData(dataset),
        ]
        return data.Taskset(dataset, transforms, num_tasks=50)

    return LearnToLearnStream(taskset(range(5)), taskset(range(5, 9)), taskset(range(9, 13)), 2, (50, 10, 10), seed=4)


@needs_learn2learn
def test_a_taskset_becomes_a_stream_by_index(stream):
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


@needs_learn2learn
def test_asking_for_a_task_leaves_the_global_generators_alone(stream):
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    expected = random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    stream.train[0]
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected  # noqa: NPY002


@needs_learn2learn
@pytest.mark.parametrize("workers", [0, 2])
def test_any_number_of_workers_gives_the_same_tasks(stream, workers):
    loader = StreamDataModule(stream.train, rounds=4, workers=workers).train_dataloader()
    for t, (task,) in enumerate(loader):
        assert all(torch.equal(task[k], stream.train[t][k]) for k in task)


@needs_learn2learn
@pytest.mark.filterwarnings("ignore:the fixed point of the hypergradient:RuntimeWarning")  # the images are noise
def test_a_stream_of_learn2learn_is_played_like_any_other(stream):
    problem = stream.problem(network=partial(CNN4, filters=2))
    algorithm = part("algorithm", "obbo")(inner=GradientDescent(2, 0.01, "outer"))
    rounds = list(online(problem, algorithm, stream.train[:3], stream.start(problem, 0)))
    assert len(rounds) == 3
    assert problem.network.template.linear.out_features == 3


@needs_learn2learn
@pytest.mark.filterwarnings("ignore:the fixed point of the hypergradient:RuntimeWarning")  # the images are noise
def test_the_example_of_the_documents_runs(capsys):
    load_learn2learn()  # without gym's greeting
    page = (Path(__file__).parents[2] / "docs" / "learn2learn.md").read_text()
    (example,) = re.findall(r"```py\n(.*?)```", page, flags=re.DOTALL)
    exec(compile(example, "learn2learn.md", "exec"), {"__name__": "document"})
    assert capsys.readouterr().out.count("accuracy") == 5


@needs_learn2learn
def test_uneven_tasks_and_other_things_are_refused(stream):
    with pytest.raises(ValueError, match="more than the 5 to adapt on"):
        LearnToLearnStream(stream.train.taskset, stream.train.taskset, stream.train.taskset, 5).train[0]
    with pytest.raises(ValueError, match=r"must be a learn2learn.data.Taskset, got list"):
        LearnToLearnStream([], [], [], 2)
