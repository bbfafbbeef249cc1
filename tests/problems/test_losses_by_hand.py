"""Which examples a loss may look at: the other set is not a number, and nothing may notice."""

from functools import partial

import pytest
import torch
from torch.nn import functional
from toy import F64

from obbo_lightning import CNN4, FewShot, Sample

NAN = float("nan")


@pytest.fixture
def few_shot(generator):
    problem = FewShot(partial(CNN4, ways=3, filters=2, channels=1, image_size=16, norm="group"), proximity=0.7)
    outer = problem.initial_outer(seed=4).to(F64)
    inner = outer + 0.1 * torch.randn(outer.shape, generator=generator, dtype=F64)
    task = {
        "support": torch.randn(6, 1, 16, 16, generator=generator, dtype=F64),
        "support_labels": torch.tensor([0, 1, 2, 0, 1, 2]),
        "query": torch.randn(9, 1, 16, 16, generator=generator, dtype=F64),
        "query_labels": torch.tensor([2, 1, 0, 2, 1, 0, 2, 1, 0]),
    }
    return problem, outer, inner, task


def logits(problem, weights, images):
    """The network itself with these weights, filled in by hand in the order of its parameters."""
    network = CNN4(ways=3, filters=2, channels=1, image_size=16, norm="group").to(F64)
    start = 0
    for parameter in network.parameters():
        stop = start + parameter.numel()
        parameter.data = weights[0, start:stop].view_as(parameter)
        start = stop
    assert start == weights.shape[1]
    return network(images)


def test_the_inner_loss_is_of_the_support_set_alone(few_shot):
    problem, outer, inner, task = few_shot
    poisoned = {**task, "query": torch.full_like(task["query"], NAN), "query_labels": task["query_labels"] * 0 + 99}
    found = problem.inner_loss(outer, inner, poisoned)
    fit = functional.cross_entropy(logits(problem, inner, task["support"]), task["support_labels"])
    expected = fit.detach() + 0.35 * (outer - inner).square().sum()
    assert float(found) == pytest.approx(float(expected), rel=1e-12)


def test_the_outer_loss_and_the_accuracy_are_of_the_query_set_alone(few_shot):
    problem, outer, inner, task = few_shot
    poisoned = {
        **task,
        "support": torch.full_like(task["support"], NAN),
        "support_labels": task["support_labels"] * 0 + 99,
    }
    answers = logits(problem, inner, task["query"])
    expected = functional.cross_entropy(answers.detach(), task["query_labels"])
    assert float(problem.outer_loss(outer, inner, poisoned)) == pytest.approx(float(expected), rel=1e-12)
    poisoned["support_labels"] = task["support_labels"]
    accuracy = (answers.detach().argmax(-1) == task["query_labels"]).double().mean()
    assert float(problem.scores(outer, inner, poisoned)["accuracy"]) == pytest.approx(float(accuracy))


def test_a_sample_of_either_loss_is_the_mean_over_the_chosen_examples(few_shot):
    problem, outer, inner, task = few_shot
    sample = Sample(seed=8, size=4)
    rows = sample.indices(6)
    fit = functional.cross_entropy(logits(problem, inner, task["support"][rows]), task["support_labels"][rows])
    found = problem.inner_loss(outer, inner, task, sample) - 0.35 * (outer - inner).square().sum()
    assert float(found) == pytest.approx(fit.item(), rel=1e-12)
    rows = sample.indices(9)
    fit = functional.cross_entropy(logits(problem, inner, task["query"][rows]), task["query_labels"][rows])
    assert float(problem.outer_loss(outer, inner, task, sample)) == pytest.approx(fit.item(), rel=1e-12)
