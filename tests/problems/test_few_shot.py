"""Few-shot problems with any network: losses, hypergradients, dropout, precision, and scores."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from toy import OWN_SIZE, OwnNetwork, double, own_network

from obbo_lightning import OBBO, FewShot
from obbo_lightning.core.memory import InnerState
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.randomness import Key, Sample, derive_seed
from obbo_lightning.core.round import estimate_hypergradient
from obbo_lightning.hypergradients import FixedPoint, Unrolled
from obbo_lightning.networks import CNN4, MLP
from obbo_lightning.solvers import GradientDescent
from obbo_lightning.streams.few_shot.synthetic import SyntheticStream
from obbo_lightning.testing import central_difference, check_problem

TINY = partial(CNN4, ways=3, image_size=16, filters=2)
VECTORS = partial(MLP, ways=3, shape=[4], widths=[6])
LOSSES = ("inner_loss", "outer_loss")


@pytest.fixture(scope="module")
def image_task():
    return SyntheticStream(image_size=16, ways=3, shots=2, queries=3).train[0]


def vector_task(seed):
    """Return 4 support and 5 query vectors for each of 3 classes."""
    g = torch.Generator().manual_seed(seed)
    labels = {"support": torch.arange(12) // 4, "query": torch.arange(15) // 5}
    examples = {k: torch.randn(len(y), 4, generator=g) + y.unsqueeze(-1) for k, y in labels.items()}
    return examples | {f"{k}_labels": y for k, y in labels.items()}


TASKS = [vector_task(seed) for seed in range(3)]
TASK = TASKS[0]


def test_lambda_is_the_trainable_parameters_and_the_logarithm_of_a_learned_proximity():
    assert isinstance(FewShot().network.template, CNN4)
    problem = FewShot(OwnNetwork)
    assert problem.initial_outer(0).shape == (1, OWN_SIZE)
    assert problem.notes()["parameters"] == OWN_SIZE
    learned = FewShot(OwnNetwork, proximity=0.3, learn_proximity=True)
    outer = learned.initial_outer(3)
    assert torch.equal(outer[:, :-1], problem.initial_outer(3))
    assert float(learned.proximity_at(outer)) == pytest.approx(0.3)
    assert FewShot(OwnNetwork, proximity=0).proximity_at(outer) == 0


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_losses_are_those_of_the_module_in_its_mode_on_its_own_examples(mode):
    network = own_network(mode)
    problem = FewShot(network, proximity=0.3)
    outer = problem.initial_outer(0)
    inner = outer + 0.01
    found = {}
    for name, other in zip(LOSSES, ("query", "support"), strict=True):
        task = {**TASK, other: torch.full_like(TASK[other], torch.nan), f"{other}_labels": TASK[f"{other}_labels"] + 99}
        found[name] = getattr(problem, name)(outer, inner, task)
    accuracy = problem.scores(outer, inner, {**TASK, "support": TASK["support"] * torch.nan})["accuracy"]
    with torch.no_grad():
        for p in network.parameters():
            p += 0.01 if p.requires_grad else 0.0
        logits = {name: network(TASK[name]) for name in ("support", "query")}
    fit = functional.cross_entropy(logits["support"], TASK["support_labels"])
    assert float(found["inner_loss"]) == pytest.approx(float(fit + 0.15 * OWN_SIZE * 0.01**2), rel=1e-5)
    query = functional.cross_entropy(logits["query"], TASK["query_labels"])
    assert float(found["outer_loss"]) == pytest.approx(float(query), rel=1e-5)
    hits = logits["query"].argmax(-1) == TASK["query_labels"]
    assert float(accuracy) == pytest.approx(float(hits.float().mean()))
    assert problem.network.transductive == (mode == "train")
    assert problem.notes()["predictions"].startswith("transductive" if mode == "train" else "inductive")


@pytest.mark.parametrize("learn_proximity", [False, True])
def test_few_shot_problems_keep_their_contract(image_task, learn_proximity):
    # Samples of a network with batch norm are not unbiased: a batch of 2 has other statistics.
    problem = FewShot(partial(TINY, norm="group"), proximity=0.7, learn_proximity=learn_proximity)
    outer = problem.initial_outer(1).double()
    check_problem(problem, outer, problem.inner_from_outer(outer) + 0.01, double(image_task), tolerance=1e-9)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_hypergradient_is_that_of_central_differences_also_in_the_proximity(dropout, mode):
    problem = FewShot(own_network(mode, dropout), proximity=0.7, learn_proximity=True)
    task, outer = double(TASK), problem.initial_outer(1).double()
    solver, key = GradientDescent(steps=2, lr=0.05, start="outer"), Key(seed=4)
    found = Unrolled()(Oracle(problem, outer, task, key), solver, InnerState())

    def loss(point):
        return problem.outer_loss(point, solver(Oracle(problem, point, task, key), None), task)

    assert torch.allclose(found.value, central_difference(loss, outer, step=1e-3), rtol=1e-6, atol=1e-8)


def test_the_memory_layout_of_images_does_not_change_a_hypergradient(image_task):
    class SameLayout(FewShot):
        def for_gradients(self, task):
            return task

    task, solver = double(image_task), GradientDescent(steps=5, lr=0.05, start="outer")
    problems = [FewShot(TINY), SameLayout(TINY)]
    outer = problems[0].initial_outer(1).double()
    assert problems[0].for_gradients(task)["support"].is_contiguous(memory_format=torch.channels_last)
    one, two = (FixedPoint(4)(Oracle(problem, outer, task), solver, InnerState()).value for problem in problems)
    assert float((one - two).norm() / two.norm()) < 1e-12


def test_gradients_in_float32_are_as_close_to_float64_as_in_the_plain_layout():
    problem = FewShot(partial(CNN4, filters=8, image_size=64))
    task, outer = SyntheticStream(image_size=64).train[0], problem.initial_outer(0)
    images, labels = task["support"], task["support_labels"]

    def logits(images, dtype=torch.float32):
        with torch.no_grad():
            return problem.network(outer[0].to(dtype), images.to(dtype))

    truth = logits(images, torch.float64)
    assert len(labels) == len(truth)
    found, plain = logits(problem.for_gradients(task)["support"]), logits(images)
    assert float((found - truth).norm()) < 2.5 * float((plain - truth).norm())


def test_rows_and_dropout_follow_the_sample_and_dropout_is_left_out_without_one():
    network, plain, sample = OwnNetwork(dropout=0.5), OwnNetwork(), Sample(11, 4)
    plain.load_state_dict(network.state_dict())
    noisy, quiet = FewShot(network, proximity=0.0), FewShot(plain, proximity=0.0)
    assert (noisy.is_stochastic, quiet.is_stochastic) == (True, False)
    outer = noisy.initial_outer(0)
    for name, kind in zip(LOSSES, ("support", "query"), strict=True):
        found, without = (getattr(noisy, name)(outer, outer, TASK, one) for one in (sample, None))
        assert torch.equal(without, getattr(quiet, name)(outer, outer, TASK))
        examples, labels = TASK[kind], TASK[f"{kind}_labels"]
        rows = torch.randint(len(labels), (4,), generator=torch.Generator().manual_seed(11))
        with torch.random.fork_rng():
            torch.manual_seed(derive_seed(11, "dropout"))  # not the seed of the rows
            expected = functional.cross_entropy(network(examples[rows]), labels[rows])
        assert torch.allclose(found, expected, rtol=1e-5)
    assert torch.equal(*(one.scores(outer, outer, TASK)["accuracy"] for one in (noisy, quiet)))


@pytest.mark.parametrize("network", [VECTORS, OwnNetwork])
def test_stacked_tasks_are_lanes(network):
    problem = FewShot(network)
    outer, lanes = problem.initial_outer(0), problem.stack_as_lanes(TASKS)
    assert lanes["support"].shape == (3, 12, 4)
    assert problem.for_gradients(lanes) is lanes
    for name in LOSSES:
        together = getattr(problem, name)(outer.expand(3, -1), outer.expand(3, -1) + 0.1, lanes)
        alone = torch.cat([getattr(problem, name)(outer, outer + 0.1, task) for task in TASKS])
        assert torch.allclose(together, alone, rtol=1e-5)
    assert FewShot(partial(OwnNetwork, dropout=0.5)).stack_as_lanes(TASKS) is None


def test_bf16_is_for_inner_steps_only():
    """The hypergradient at ω^K is the one that full precision gives at the same ω^K."""
    task = SyntheticStream(image_size=16).train[0]
    problem = FewShot(partial(CNN4, image_size=16, filters=8))
    outer, estimator, found = problem.initial_outer(0), FixedPoint(4, lr=0.02), {}
    for precision in ("full", "bf16"):
        inner = GradientDescent(steps=5, lr=0.05, start="outer", precision=precision)
        algorithm = OBBO(inner=inner, hypergradient=estimator)
        found[precision] = estimate_hypergradient(problem, algorithm, outer, task, InnerState(), Key())
    full, low = found["full"], found["bf16"]
    assert full.inner.dtype == low.inner.dtype == low.value.dtype == torch.float32
    moved = (full.inner - outer).norm()
    assert 1e-5 * moved < (full.inner - low.inner).norm() < 0.5 * moved
    assert low.loss.item() == pytest.approx(full.loss.item(), rel=0.05)
    again = estimator(Oracle(problem, outer, task, Key()), lambda *_: low.inner, InnerState())
    assert torch.equal(again.value, low.value)


def test_the_inductive_accuracy_normalises_queries_by_the_support():
    first, norm, last = nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2)
    problem, rng = FewShot(nn.Sequential(first, norm, last)), np.random.default_rng(0)
    task = {"support": torch.tensor(rng.normal(size=(6, 3))), "query": torch.tensor(rng.normal(1, 1, size=(40, 3)))}
    task |= {"support_labels": torch.arange(6) % 2, "query_labels": torch.tensor(rng.integers(0, 2, 40))}
    inner = torch.tensor(rng.normal(size=(1, 16 + 8 + 10)))
    w1, b1, weight, bias, w2, b2 = np.split(inner[0].numpy(), np.cumsum([12, 4, 4, 4, 8]))
    support, query = (task[name].numpy() @ w1.reshape(4, 3).T + b1 for name in ("support", "query"))
    normalised = (query - support.mean(0)) / np.sqrt(support.var(0) + 1e-5) * weight + bias
    hits = (normalised @ w2.reshape(2, 4).T + b2).argmax(1) == task["query_labels"].numpy()
    assert problem.evaluation_score_names == ("inductive_accuracy",)
    assert float(problem.evaluation_scores(inner, inner, task)["inductive_accuracy"]) == hits.mean()
    assert float(problem.scores(inner, inner, task)["accuracy"]) != hits.mean()  # normalised by the queries
    twice = FewShot(nn.Sequential(first, norm, norm, last)).evaluation_scores(inner, inner, task)
    assert math.isnan(float(twice["inductive_accuracy"]))
    inductive = FewShot(partial(MLP, ways=2, shape=[3], widths=[4], norm="layer"))
    assert inductive.evaluation_score_names == ()
    assert inductive.evaluation_scores(inner, inner, task) == {}
