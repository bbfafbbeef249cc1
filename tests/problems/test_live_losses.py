"""The losses of a module that somebody else trains: of which batch, in which precision."""

from typing import NamedTuple

import pytest
import torch
from torch import nn

from obbo_lightning import Hyperparameters, Positive
from obbo_lightning.networks.live import LiveNetwork
from obbo_lightning.problems.live import AsTrained, LiveProblem, as_precise


class Pair(NamedTuple):
    x: torch.Tensor
    labels: torch.Tensor


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.hyper = nn.Linear(3, 1), Hyperparameters(decay=Positive(0.5))


def loss(module, batch, hyper):
    return module.linear(batch["x"]).square().mean() + hyper["decay"]


def test_a_batch_is_as_precise_as_the_outer_variable_however_it_is_nested_and_labels_stay_labels():
    half, labels = torch.ones(2, dtype=torch.bfloat16), torch.tensor([0, 1])
    found = as_precise({"a": [half, (labels, "text")], "b": Pair(half, labels), "c": None}, torch.float64)
    assert found["a"][0].dtype == found["b"].x.dtype == torch.float64
    assert found["a"][1] == (labels, "text")
    assert found["b"].labels is labels
    assert (type(found["a"]), type(found["a"][1]), type(found["b"])) == (list, tuple, Pair)
    assert found["c"] is None


def test_each_loss_has_its_own_batch_in_full_precision_also_where_training_has_less():
    network = LiveNetwork(Model())
    problem = LiveProblem(network, loss, lambda *given: 10 + loss(*given))
    g = torch.Generator().manual_seed(1)
    task = {name: {"x": torch.randn(8, 3, generator=g)} for name in ("training", "validation")}
    outer, inner = network.hyper.outer, network.flat().unsqueeze(0)
    expected = [float(loss(network.module, task[name], network.hyper).detach()) for name in ("training", "validation")]
    with torch.autocast("cpu", torch.bfloat16):
        found = [float(problem.inner_loss(outer, inner, task)), float(problem.outer_loss(outer, inner, task))]
    assert found == pytest.approx([expected[0], 10 + expected[1]], rel=1e-6)
    with torch.no_grad():  # to be reported: where it was differentiated
        assert float(problem.inner_loss(outer, 0 * inner, task)) == found[0]


def test_the_inner_variable_is_the_weights_as_they_are_and_the_step_the_one_that_was_given():
    network = LiveNetwork(Model())
    solver = AsTrained(network, 0.25)
    with torch.no_grad():
        network.module.linear.bias.fill_(7.0)
    assert solver(None, torch.zeros(1, 4))[0, -1] == 7.0
    assert solver.step_size == 0.25
