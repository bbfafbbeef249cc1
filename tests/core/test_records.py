"""What a round reports besides λ, from vectors and problems that are written out here."""

import pytest
import torch
from toy import F64, Nonlinear, toy_point, toy_task

from obbo_lightning import OAGD, OBBO, ConjugateGradient, FixedPoint, GradientDescent, Sample, Unrolled, Warm, online
from obbo_lightning.core.estimates import estimate, judge, solve
from obbo_lightning.core.outer_step import OuterStep
from obbo_lightning.core.randomness import Key
from obbo_lightning.core.share import Share, stack_warm


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
