"""What a round reports besides λ, from vectors and problems that are written out here."""

import pytest
import torch
from toy import F64, Nonlinear, toy_point, toy_task

from obbo_lightning import (
    OAGD,
    OBBO,
    Box,
    ConjugateGradient,
    FixedPoint,
    GradientDescent,
    L2Ball,
    Sample,
    Simplex,
    Unrolled,
    Warm,
    online,
    part,
)
from obbo_lightning.core.estimates import Estimate, _lane, estimate, judge, solve
from obbo_lightning.core.hypergradients.base import relative_norm
from obbo_lightning.core.outer_step import OuterStep
from obbo_lightning.core.randomness import Key
from obbo_lightning.core.rounds import combine
from obbo_lightning.core.share import Share, stack_warm
from obbo_lightning.streams.quadratic import QuadraticStream


def test_the_error_and_the_yardstick_are_of_the_newest_task():
    step = OuterStep(torch.nn.Parameter(torch.zeros(2, 2, dtype=F64)), OAGD(lr=0.1, window=2), regret_window=2)
    past, newest, exact = torch.tensor(
        [[[9.0, 9.0], [9.0, 9.0]], [[3.0, 4.0], [1.0, 0.0]], [[0.0, 0.0], [1.0, 2.0]]], dtype=F64
    )
    found = step(torch.stack([past, newest]), exact)
    assert found.hypergradient_error.tolist() == [5.0, 2.0]
    assert found.hypergradient.equal(newest)
    # w_R = 2: half of each vector in the first round
    assert found.regret["euclidean"].tolist() == [25 / 4, 1 / 4]
    assert found.regret["exact"].tolist() == [0.0, 5 / 4]
    # q = (past + newest)/2, and the generalized gradient of a plain step is q itself
    assert torch.allclose(found.direction, (past + newest) / 2)
    assert torch.allclose(found.generalized, (past + newest) / 2)
    assert torch.allclose(found.regret["generalized"], ((past + newest) / 2).square().sum(-1))


@pytest.mark.parametrize(
    ("hypergradient", "gradients", "products"),
    [
        (Unrolled(), 4 + 1, 4),  # back through each of four steps
        (FixedPoint(3, lr=0.1), 4 + 2, 2 + 1),  # two Hessians, one mixed term; f and the graph of g
        (ConjugateGradient(3), 4 + 2, 3 + 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_oracle_calls_are_counted_one_by_one(hypergradient, gradients, products):
    algorithm = OBBO(inner=GradientDescent(steps=4, lr=0.1), hypergradient=hypergradient)
    found = estimate(Nonlinear(), algorithm, toy_point(), toy_task(), Warm(), Key())
    assert found.calls == {"gradients": gradients, "products": products}
    rounds = [[toy_task(seed=0), toy_task(seed=1)], [toy_task(seed=2), toy_task(seed=3)]]
    oagd = OAGD(window=2, lr=1e-3, inner=GradientDescent(steps=4, lr=0.1), hypergradient=hypergradient)
    first, second = online(Nonlinear(), oagd, rounds, toy_point())
    assert first.calls == {"gradients": 2 * gradients, "products": 2 * products}
    assert second.calls == {"gradients": 4 * gradients, "products": 4 * products}


def test_the_inner_loss_that_is_reported_is_at_the_new_inner_variable():
    algorithm = OBBO(inner=GradientDescent(steps=2, lr=0.1, start="outer"), hypergradient=FixedPoint(2, lr=0.1))
    outer, task = toy_point(), toy_task()
    (one,) = solve(Nonlinear(), algorithm, Share(), outer, [(task, Warm())], Key())
    expected = Nonlinear().inner_loss(outer, one.estimate.inner, task)
    assert torch.equal(judge(algorithm, one).inner_loss, expected)
    assert not torch.equal(expected, Nonlinear().inner_loss(outer, outer, task))


def test_warm_starts_side_by_side_are_lanes_in_the_order_of_the_tasks():
    warms = [Warm(torch.full((1, 2), float(n)), None if n == 1 else torch.ones(1, 2)) for n in range(3)]
    stacked = stack_warm(warms)
    assert stacked.inner.tolist() == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    assert stacked.solve is None  # not all of them have one
    assert stack_warm([warms[0], warms[2]]).solve.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert stacked.lanes(slice(1, 2)).inner.tolist() == [[1.0, 1.0]]


def test_samples_of_one_size_differ_by_seed():
    assert Sample(1, 5).indices(100).tolist() != Sample(2, 5).indices(100).tolist()


def test_a_rounds_losses_are_those_of_its_own_tasks_also_where_past_ones_are_solved_again():
    inner = GradientDescent(steps=3, lr=0.1)
    oagd = OAGD(window=3, lr=0.1, inner=inner, hypergradient=FixedPoint(3, lr=0.1))
    tasks = [toy_task(seed=n) for n in range(4)]
    outer, carried = toy_point(), torch.zeros(2, 3, dtype=F64)
    for task, played in zip(tasks, online(Nonlinear(), oagd, tasks, outer), strict=True):
        for _ in range(3):
            carried = carried.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(Nonlinear().inner_loss(outer, carried, task).sum(), carried)
            carried = carried - 0.1 * gradient
        assert torch.allclose(played.loss, Nonlinear().outer_loss(outer, carried, task), rtol=1e-12)
        assert torch.allclose(played.inner_loss, Nonlinear().inner_loss(outer, carried, task), rtol=1e-12)
        outer = played.step.outer


def test_the_exact_regret_is_of_the_mean_gradient_of_a_rounds_tasks():
    stream = QuadraticStream(lanes=2, rounds=6)
    algorithm = OBBO(lr=0.05, window=2, inner=GradientDescent(steps=2, lr=0.5), hypergradient=FixedPoint(4, lr=0.5))
    rounds = [[stream[3 * t + j] for j in range(3)] for t in range(2)]
    outer, past, regret = stream.initial_outer(), [], torch.zeros(2, dtype=F64)
    for tasks, played in zip(rounds, online(stream.problem, algorithm, rounds, outer, regret_window=2), strict=True):
        past.append(torch.stack([stream.problem.hypergradient(outer, task)[0] for task in tasks]).mean(0))
        regret = regret + (torch.stack(past[-2:]).sum(0) / 2).square().sum(-1)
        assert torch.allclose(played.step.regret["exact"], regret, rtol=1e-12)
        error = (played.step.hypergradient - past[-1]).norm(dim=-1)
        assert torch.allclose(played.step.hypergradient_error, error, rtol=1e-12)
        outer = played.step.outer


def test_processes_that_divide_lanes_count_their_calls_once():
    stream = QuadraticStream(lanes=5)
    algorithm = OBBO(inner=GradientDescent(steps=7, lr=0.5), hypergradient=FixedPoint(3, lr=0.5))
    met, outer = [(stream[0], Warm())], stream.initial_outer() + 0.1
    parts = []
    for lanes in (None, slice(0, 2), slice(2, 5)):
        share = Share(lanes=lanes)
        solved = [solve(stream.problem, algorithm, share, outer, met, Key())]
        judged = [judge(algorithm, one) for one in solved[0]]
        sent = []
        combine(solved, judged, Share(lanes=lanes, total=lambda flat, sent=sent: sent.append(flat) or flat), 5)
        parts.append(sent[0])
    whole, left, right = parts
    assert torch.allclose(left + right, whole, rtol=1e-12)


def test_relative_norms_of_nothing_are_zero_and_of_an_overflow_infinite():
    zero, one = torch.zeros(1, 2, dtype=F64), torch.tensor([[3.0, 4.0]], dtype=F64)
    blown = torch.full((1, 2), torch.nan, dtype=F64)
    assert relative_norm(zero, zero).tolist() == [0.0]
    assert relative_norm(one, zero).tolist() == [1.0]
    assert relative_norm(one, 2 * one).tolist() == [0.5]
    assert relative_norm(blown, one).tolist() == [torch.inf]
    assert relative_norm(blown, blown).isnan().tolist() == [True]  # of a task that is NaN


def test_a_domain_contains_its_border_and_nothing_beyond_it():
    points = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.5, 0.4], [1.5, -0.5], [torch.nan, 1.0]], dtype=F64)
    assert Simplex().contains(points).tolist() == [True, True, False, False, False]
    assert Box(0.0, 1.0).contains(points).tolist() == [True, True, True, False, False]
    assert Box(-0.5, 1.5).contains(points).tolist() == [True, True, True, True, False]
    assert L2Ball(1.0).contains(points).tolist() == [True, True, True, False, False]


@pytest.mark.parametrize("algorithm", [OBBO(lr=0.1, window=2), part("algorithm", "adam")(lr=0.1)], ids=["obbo", "adam"])
def test_an_outer_step_goes_on_with_the_moments_that_it_had(algorithm):
    vectors = [torch.full((1, 1, 2), float(n), dtype=F64) for n in (1, -3, 2)]
    whole, first = (OuterStep(torch.nn.Parameter(torch.zeros(1, 2, dtype=F64)), algorithm) for _ in range(2))
    for vector in vectors:
        whole(vector)
    for vector in vectors[:2]:
        first(vector)
    second = OuterStep(torch.nn.Parameter(first.outer.detach().clone()), algorithm)
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(vectors[2]).outer, whole.outer.detach())
    assert torch.equal(second.regret["euclidean"].total, whole.regret["euclidean"].total)


def test_some_lanes_of_a_quadratic_have_all_of_its_settings():
    stream = QuadraticStream(lanes=3, noise=0.2)
    task, outer, inner = stream[0], toy_point(3, 4), toy_point(3, 8)
    part_of, some = stream.problem.of_lanes(task, slice(1, 3))
    for name in ("inner_loss", "outer_loss"):
        for sample in (None, Sample(3, 2)):
            whole = getattr(stream.problem, name)(outer, inner, task, sample)
            assert torch.equal(getattr(part_of, name)(outer[1:], inner[1:], some, sample), whole[1:])


def test_a_task_among_several_side_by_side_has_its_own_lane():
    found = Estimate(
        *(torch.arange(3.0).reshape(3, 1) for _ in range(2)),
        Warm(torch.arange(3.0).reshape(3, 1)),
        *(torch.arange(3.0),) * 2,
        {},
    )
    for lane in range(3):
        one = _lane(found, lane)
        assert [float(x) for x in (one.hypergradient, one.inner, one.warm.inner, one.loss, one.residual)] == [lane] * 5
