"""Learned weights of sources, against the mean loss of each source."""

from functools import partial

import pytest
import torch
from torch.nn import functional
from toy import F64, normal

from obbo_lightning.networks import MLP
from obbo_lightning.problems.sources import SourceWeights
from obbo_lightning.testing import check_problem

NETWORK = partial(MLP, ways=3, shape=[2], widths=[4])
TASK = {"train_x": normal(12, 2), "train_y": torch.arange(12) % 3, "train_source": torch.arange(12) // 4}
for kind, count in (("validation", 5), ("test", 7)):
    TASK |= {f"{kind}_x": normal(count, 2, seed=count), f"{kind}_y": torch.arange(count) % 3}


def test_losses_and_accuracy_are_those_of_torch():
    problem = SourceWeights(NETWORK, sources=3)
    outer, inner = torch.tensor([[0.5, 0.3, 0.2]], dtype=F64), problem.network.initial(0).double().unsqueeze(0)
    network = problem.network.loaded(inner[0]).requires_grad_(False)
    each = functional.cross_entropy(network(TASK["train_x"]), TASK["train_y"], reduction="none")
    expected = sum(outer[0, s] * each[TASK["train_source"] == s].mean() for s in range(3))
    assert float(problem.inner_loss(outer, inner, TASK)) == pytest.approx(float(expected), rel=1e-12)
    validation = functional.cross_entropy(network(TASK["validation_x"]), TASK["validation_y"])
    assert float(problem.outer_loss(outer, inner, TASK)) == pytest.approx(float(validation), rel=1e-12)
    hits = (network(TASK["test_x"]).argmax(-1) == TASK["test_y"]).double().mean()
    assert float(problem.scores(outer, inner, TASK)["accuracy"]) == pytest.approx(float(hits))


def test_weights_start_equal_and_stay_above_a_fraction_of_that():
    assert torch.allclose(SourceWeights(NETWORK, sources=3).initial_outer(0), torch.full((1, 3), 1 / 3))
    assert SourceWeights(NETWORK, sources=4, floor=0.2).groups.named["sources"].domain.floor == pytest.approx(0.05)


def test_the_problem_keeps_its_contract():
    outer = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], dtype=F64)
    check_problem(SourceWeights(NETWORK, sources=3), outer, normal(2, 27), TASK)
