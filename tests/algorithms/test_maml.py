"""MAML and ANIL of learn2learn as algorithms, and its tasks as a stream. .ci/run installs it and runs these tests."""

import importlib.util
import sys
from functools import partial

import pytest
import torch
from toy import F64, double

from obbo_lightning import FewShot, cli
from obbo_lightning.algorithms.maml import MetaGradient
from obbo_lightning.config.registry import find_component
from obbo_lightning.core.memory import InnerState
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.randomness import Key
from obbo_lightning.core.round import estimate_hypergradient
from obbo_lightning.hypergradients import Unrolled
from obbo_lightning.networks import CNN4
from obbo_lightning.solvers import GradientDescent
from obbo_lightning.streams.few_shot.synthetic import SyntheticStream

needs_learn2learn = pytest.mark.skipif(
    importlib.util.find_spec("learn2learn") is None, reason="learn2learn is not installed: docker/install-learn2learn"
)
SMALL = {"image_size": 16, "ways": 3, "shots": 2, "queries": 3}
FAST = ["--rounds", "3", "--evaluation.tasks", "2", "--problem.network.filters", "4", "--algorithm.inner.steps", "2"]


def meta_gradient(name, steps, task, problem, outer):
    algorithm = find_component("algorithm", name)(inner=GradientDescent(steps, 0.1, "outer"))
    return estimate_hypergradient(problem, algorithm, outer, task, InnerState(), Key())


@needs_learn2learn
@pytest.mark.parametrize("steps", [1, 5])
def test_unrolled_without_proximity_is_learn2learns_second_order_maml(steps):
    stream = SyntheticStream(**SMALL)
    problem = stream.problem(network=partial(CNN4, filters=8), proximity=0.0)
    outer, task = problem.initial_outer(0).double(), double(stream.train[0])
    ours = Unrolled()(Oracle(problem, outer, task), GradientDescent(steps, 0.1, "outer"), InnerState())
    theirs = meta_gradient("maml", steps, task, problem, outer)
    assert theirs.value.dtype == F64
    assert float((ours.value - theirs.value).abs().max()) <= 1e-10
    assert float(theirs.value.norm()) > 0.1
    assert torch.allclose(ours.inner, theirs.inner, rtol=0, atol=1e-12)
    assert theirs.evaluations == {"gradients": steps + 1, "products": steps}
    assert not MetaGradient().supports_lanes  # task by task


class HeadFirst(torch.nn.Module):
    """A network whose last layer is registered first, with a frozen layer, an unused one, and running statistics."""

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


NETWORKS = {  # with the coordinates of the last layer
    "cnn4": (partial(CNN4, ways=3, image_size=16, filters=2), slice(-9, None)),
    "head first": (HeadFirst, slice(0, 21)),
    "dropout": (partial(HeadFirst, 0.5), slice(0, 21)),
}


@needs_learn2learn
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", ["maml", "anil"])
def test_the_meta_gradient_of_any_network_is_that_of_central_differences(name, network):
    make, head = NETWORKS[network]
    problem = FewShot(make)
    outer, task = problem.initial_outer(0).double(), double(SyntheticStream(**SMALL).train[0])
    found, again = (meta_gradient(name, 2, task, problem, outer) for _ in range(2))
    assert torch.equal(found.value, again.value)
    assert found.value.shape == found.inner.shape == outer.shape
    adapted = (found.inner != outer)[0]
    assert bool(adapted[head].any())
    adapted[head] = False
    assert bool(adapted.any()) == (name == "maml")  # ANIL adapts the last layer only

    def loss(shift, coordinate):
        point = outer.clone()
        point[0, coordinate] += shift
        return float(meta_gradient(name, 2, task, problem, point).loss)

    for coordinate in (0, 20, 26, 40, outer.shape[1] - 9, outer.shape[1] - 1):  # also of the unused layer
        slope = (loss(1e-5, coordinate) - loss(-1e-5, coordinate)) / 2e-5
        assert abs(slope - float(found.value[0, coordinate])) < 1e-7


@needs_learn2learn
def test_anil_needs_a_linear_layer_at_the_end():
    problem = FewShot(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 3), torch.nn.Tanh()))
    outer, task = problem.initial_outer(0), SyntheticStream(**SMALL).train[0]
    assert meta_gradient("maml", 1, task, problem, outer).loss.isfinite()
    with pytest.raises(ValueError, match=r"'anil' needs a network that ends in an nn.Linear, got Sequential"):
        meta_gradient("anil", 1, task, problem, outer)


@needs_learn2learn
@pytest.mark.parametrize("name", ["maml", "anil"])
def test_maml_and_anil_are_algorithms_of_fit(name, tmp_path, capsys):
    assert cli.main(["fit", "--algorithm", name, *FAST, "--output", str(tmp_path)]) == 0
    assert name in capsys.readouterr().out
    assert cli.main(["test", *map(str, tmp_path.glob("*/*"))]) == 0
    assert cli.main(["fit", "--algorithm", name, "--data", "quadratic"]) == 2
    assert "a few-shot problem" in capsys.readouterr().err


@needs_learn2learn
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inner": GradientDescent(start="previous")}, "inner must start at 'outer' and use whole tasks"),
        ({"inner": GradientDescent(start="outer", batch_size=3)}, "inner must start at 'outer' and use whole tasks"),
        ({"lr": 0.0}, "lr must be a positive finite number, got 0.0"),
    ],
)
def test_settings_that_learn2learn_cannot_use_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        find_component("algorithm", "maml")(**settings)


@pytest.mark.parametrize("name", ["maml", "anil"])
def test_without_learn2learn_one_line_tells_how_to_install_it(name, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "learn2learn", None)
    assert cli.main(["fit", "--algorithm", name, *FAST]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "docker/install-learn2learn" in error
