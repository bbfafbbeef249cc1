import math

import pytest
import torch
from toy import F64

from obbo_lightning import OBBO, FixedPoint, GradientDescent, Unrolled, cli
from obbo_lightning.checks.differences import central_difference
from obbo_lightning.core.estimates import estimate, require_fit
from obbo_lightning.core.memory import Warm
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.randomness import Key
from obbo_lightning.problems.few_shot import CNN4, FewShot
from obbo_lightning.streams.synthetic import SyntheticStream
from obbo_lightning.training.datamodule import StreamDataModule

SMALL = {"image_size": 16, "ways": 3, "shots": 2, "queries": 3}


@pytest.fixture(scope="module")
def stream():
    return SyntheticStream(**SMALL)


def double(task):
    return {k: v.double() if v.is_floating_point() else v for k, v in task.items()}


def test_the_networks_size_is_the_designs():
    assert sum(p.numel() for p in CNN4().parameters()) == 114_373
    assert FewShot().initial_outer(0).shape == (1, 114_373)
    assert FewShot(learn_proximity=True).initial_outer(0).shape == (1, 114_374)


def test_batch_norm_uses_the_statistics_of_the_batch_and_keeps_none():
    network = CNN4(filters=2)
    assert list(network.buffers()) == []
    images = torch.randn(4, 3, 32, 32)
    assert torch.equal(network.train()(images), network.eval()(images))


@pytest.mark.parametrize("learn_proximity", [False, True])
def test_few_shot_meets_the_contract_of_a_problem(stream, learn_proximity):
    problem = stream.problem(filters=2, proximity=0.7, learn_proximity=learn_proximity)
    outer = problem.initial_outer(1).double()
    inner = problem.inner_from_outer(outer) + 0.01
    task = double(stream.train[0])
    # a batch of 2 has other statistics than the whole task: samples of batch norm are not unbiased
    from obbo_lightning.checks import problem as checks

    for check in (checks._check_losses, checks._check_lanes):
        check(problem, outer, inner, task)
    checks._check_mixed_term(problem, outer, inner, task, 1e-9)


def test_the_hypergradient_of_the_network_is_right_also_by_its_proximity(stream):
    problem = stream.problem(filters=2, proximity=0.7, learn_proximity=True)
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

    settings = {"ways": 3, "image_size": 16, "filters": 4}
    task, solver = double(stream.train[0]), GradientDescent(steps=5, lr=0.05, start="outer")
    outer = FewShot(**settings).initial_outer(1).double()
    laid_out = FewShot(**settings).laid_out(task)
    assert laid_out["support"].is_contiguous(memory_format=torch.channels_last)
    one, two = (
        FixedPoint(4)(Oracle(problem, outer, task), solver, None, None).value
        for problem in (FewShot(**settings), AsItCame(**settings))
    )
    assert float((one - two).norm() / two.norm()) < 1e-12


def test_relu_after_the_pool_is_relu_before_it_derivatives_too():
    torch.manual_seed(0)
    ours = CNN4(filters=3)
    usual = CNN4(filters=3)
    usual.load_state_dict(ours.state_dict())
    for block in usual.blocks:
        block[2], block[3] = block[3], block[2]
    assert isinstance(usual.blocks[0][2], torch.nn.ReLU)
    images, found = torch.randn(6, 3, 32, 32), []
    for network in (ours, usual):
        weights = list(network.parameters())
        logits = network(images)
        gradients = torch.autograd.grad(logits.square().sum(), weights, create_graph=True)
        products = torch.autograd.grad(sum(g.square().sum() for g in gradients), weights)
        found.append([logits, *gradients, *products])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_network_is_handed_out_with_the_current_weights(stream):
    problem = stream.problem(filters=2, learn_proximity=True)
    outer = problem.initial_outer(3)
    network = problem.loaded_network(outer)
    flat = torch.cat([p.detach().flatten() for p in network.parameters()])
    assert torch.equal(flat, outer[0, :-1])
    task = stream.train[0]
    assert torch.allclose(network(task["query"]), problem._logits(outer[:, :-1], task["query"]), atol=1e-5)


def test_initialisation_depends_on_the_seed_and_leaves_the_global_generator_alone():
    problem = FewShot(filters=2)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    one, two, other = (problem.initial_outer(seed) for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(torch.rand(1), expected)
    assert math.isclose(
        float(FewShot(filters=2, proximity=0.3, learn_proximity=True).initial_outer(0)[0, -1].exp()), 0.3, rel_tol=1e-6
    )


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


def test_bf16_is_for_inner_steps_alone():
    """The hypergradient at ω^K is the one that full precision gives at that very ω^K."""
    stream = SyntheticStream(image_size=16)
    problem, task = FewShot(image_size=16, filters=8), stream.train[0]
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
        require_fit(FewShot(), OBBO(inner=low, hypergradient=Unrolled()))
    with pytest.raises(ValueError, match=r"inner\.precision must be one of full, bf16, got 'fp8'"):
        GradientDescent(precision="fp8")
    for precision in ("bf16-mixed", "16-true"):
        assert cli.main(["fit", "--trainer.precision", precision, "--output", str(tmp_path)]) == 2
        assert "trainer.precision must be 32 or 64, got" in capsys.readouterr().err
