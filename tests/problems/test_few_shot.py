import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from toy import F64

from obbo_lightning import CNN4, MLP, OBBO, FewShot, FixedPoint, GradientDescent, ResNet12, Unrolled, cli
from obbo_lightning.checks.differences import central_difference
from obbo_lightning.core.estimates import estimate
from obbo_lightning.core.memory import Warm
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.randomness import Key
from obbo_lightning.core.recipes import make_again, recipe_of
from obbo_lightning.streams.synthetic import SyntheticStream

SMALL = {"image_size": 16, "ways": 3, "shots": 2, "queries": 3}
TINY = partial(CNN4, filters=2)


@pytest.fixture(scope="module")
def stream():
    return SyntheticStream(**SMALL)


def double(task):
    return {k: v.double() if v.is_floating_point() else v for k, v in task.items()}


def test_the_networks_size_is_the_designs():
    assert FewShot().initial_outer(0).shape == (1, 114_373)
    assert FewShot(learn_proximity=True).initial_outer(0).shape == (1, 114_374)


@pytest.mark.parametrize("learn_proximity", [False, True])
def test_few_shot_meets_the_contract_of_a_problem(stream, learn_proximity):
    problem = stream.problem(network=TINY, proximity=0.7, learn_proximity=learn_proximity)
    outer = problem.initial_outer(1).double()
    inner = problem.inner_from_outer(outer) + 0.01
    task = double(stream.train[0])
    # a batch of 2 has other statistics than the whole task: samples of batch norm are not unbiased
    from obbo_lightning.checks import problem as checks

    for check in (checks._check_losses, checks._check_lanes):
        check(problem, outer, inner, task)
    checks._check_mixed_term(problem, outer, inner, task, 1e-9)


def test_the_hypergradient_of_the_network_is_right_also_by_its_proximity(stream):
    problem = stream.problem(network=TINY, proximity=0.7, learn_proximity=True)
    task, outer = double(stream.train[0]), problem.initial_outer(1).double()
    solver = GradientDescent(steps=2, lr=0.05, start="outer")
    found = Unrolled()(Oracle(problem, outer, task), solver, None, None)

    def along(coordinates):
        def loss(shift):
            point = outer.clone()
            point[:, coordinates] += shift
            inner = solver(Oracle(problem, point, task), None)
            return problem.outer_loss(point, inner, task)

        return loss

    coordinates = [0, 50, 100, -1]  # the last is log γ
    expected = central_difference(along(coordinates), torch.zeros(1, 4, dtype=F64), step=1e-5)
    assert torch.allclose(found.value[:, coordinates], expected, rtol=1e-5, atol=1e-8)
    assert FixedPoint(2)(Oracle(problem, outer, task), solver, None, None).value.shape == outer.shape


def test_the_memory_layout_of_images_changes_no_hypergradient(stream):
    class AsItCame(FewShot):
        def laid_out(self, task):
            return task

    network = partial(CNN4, ways=3, image_size=16, filters=4)
    task, solver = double(stream.train[0]), GradientDescent(steps=5, lr=0.05, start="outer")
    outer = FewShot(network).initial_outer(1).double()
    laid_out = FewShot(network).laid_out(task)
    assert laid_out["support"].is_contiguous(memory_format=torch.channels_last)
    one, two = (
        FixedPoint(4)(Oracle(problem, outer, task), solver, None, None).value
        for problem in (FewShot(network), AsItCame(network))
    )
    assert float((one - two).norm() / two.norm()) < 1e-12


def test_the_network_is_handed_out_with_the_current_weights(stream):
    problem = stream.problem(network=TINY, learn_proximity=True)
    outer = problem.initial_outer(3)
    network = problem.loaded_network(outer)
    flat = torch.cat([p.detach().flatten() for p in network.parameters()])
    assert torch.equal(flat, outer[0, :-1])
    task = stream.train[0]
    assert torch.allclose(network(task["query"]), problem._logits(outer[:, :-1], task["query"]), atol=1e-5)


def test_initialisation_depends_on_the_seed_and_leaves_the_global_generator_alone():
    problem = FewShot(TINY)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    one, two, other = (problem.initial_outer(seed) for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(torch.rand(1), expected)
    assert math.isclose(
        float(FewShot(TINY, proximity=0.3, learn_proximity=True).initial_outer(0)[0, -1].exp()), 0.3, rel_tol=1e-6
    )


@pytest.mark.parametrize("network", [TINY, partial(MLP, widths=[3], norm="layer"), partial(ResNet12, width=1)])
def test_a_problem_can_be_written_down_and_made_again(stream, network):
    problem = stream.problem(network=network, proximity=0.2, learn_proximity=True)
    again = make_again(recipe_of(problem))
    assert torch.equal(problem.initial_outer(3), again.initial_outer(3))
    assert again.proximity == 0.2


def test_bf16_is_for_inner_steps_alone():
    """The hypergradient at ω^K is the one that full precision gives at that very ω^K."""
    stream = SyntheticStream(image_size=16)
    problem, task = FewShot(partial(CNN4, image_size=16, filters=8)), stream.train[0]
    outer = problem.initial_outer(0)
    found = {}
    for precision in ("full", "bf16"):
        inner = GradientDescent(steps=5, lr=0.05, start="outer", precision=precision)
        found[precision] = estimate(
            problem, OBBO(inner=inner, hypergradient=FixedPoint(4, lr=0.02)), outer, task, Warm(), Key()
        )
    full, low = found["full"], found["bf16"]
    assert full.inner.dtype == low.inner.dtype == low.hypergradient.dtype == torch.float32
    moved = (full.inner - outer).norm()
    assert 1e-5 * moved < (full.inner - low.inner).norm() < 0.5 * moved
    assert low.loss.item() == pytest.approx(full.loss.item(), rel=0.05)
    oracle = Oracle(problem, outer, task, Key())
    there = FixedPoint(4, lr=0.02).differentiate(oracle, GradientDescent(lr=0.05), low.inner, None)
    assert torch.equal(there.value, low.hypergradient)


def test_bf16_is_refused_where_it_would_reach_the_hypergradient(capsys, tmp_path):
    low = GradientDescent(steps=2, start="outer", precision="bf16")
    with pytest.raises(ValueError, match=r"inner\.precision must be full for hypergradient 'Unrolled', got 'bf16'"):
        OBBO(inner=low, hypergradient=Unrolled()).require_fit(FewShot())
    with pytest.raises(ValueError, match=r"inner\.precision must be one of full, bf16, got 'fp8'"):
        GradientDescent(precision="fp8")
    for precision in ("bf16-mixed", "16-true"):
        assert cli.main(["fit", "--trainer.precision", precision, "--output", str(tmp_path)]) == 2
        assert "trainer.precision must be 32 or 64, got" in capsys.readouterr().err


def with_a_norm():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2))


class NormTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = with_a_norm()

    def forward(self, x):
        return self.layers[2](self.layers[1](self.layers[1](self.layers[0](x))))


def test_the_inductive_accuracy_normalises_queries_by_the_support_alone():
    problem, rng = FewShot(with_a_norm()), np.random.default_rng(0)
    task = {"support": torch.tensor(rng.normal(size=(6, 3))), "query": torch.tensor(rng.normal(1, 1, size=(40, 3)))}
    task |= {"support_labels": torch.arange(6) % 2, "query_labels": torch.tensor(rng.integers(0, 2, 40))}
    inner = torch.tensor(rng.normal(size=(1, 16 + 8 + 10)))
    w1, b1, weight, bias, w2, b2 = np.split(inner[0].numpy(), np.cumsum([12, 4, 4, 4, 8]))
    seen, asked = (task[name].numpy() @ w1.reshape(4, 3).T + b1 for name in ("support", "query"))
    normalised = (asked - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-5) * weight + bias
    hits = (normalised @ w2.reshape(2, 4).T + b2).argmax(1) == task["query_labels"].numpy()
    assert problem.further == ("inductive_accuracy",)
    assert float(problem.further_scores(inner, inner, task)["inductive_accuracy"]) == hits.mean()
    assert float(problem.scores(inner, inner, task)["accuracy"]) != hits.mean()  # all queries together
    twice = FewShot(NormTwice()).further_scores(inner, inner, task)
    assert math.isnan(float(twice["inductive_accuracy"]))
    alone = FewShot(partial(MLP, ways=2, shape=[3], widths=[4], norm="layer"))
    assert alone.further == ()
    assert alone.further_scores(inner, inner, task) == {}
