"""Inner solvers with a state: against torch's own optimizers, across rounds, and what they refuse."""

import pytest
import torch
from toy import Nonlinear, toy_point, toy_task

from obbo_lightning import OBBO, FixedPoint, InnerAdam, InnerSGD, Key, Unrolled
from obbo_lightning.core.estimates import estimate
from obbo_lightning.core.memory import Warm
from obbo_lightning.core.oracle import Oracle

SOLVERS = [
    (InnerSGD(steps=3, lr=0.2, momentum=0.7), lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.7)),
    (
        InnerAdam(steps=3, lr=0.05, beta1=0.8, beta2=0.9, epsilon=1e-6),
        lambda p: torch.optim.Adam(p, lr=0.05, betas=(0.8, 0.9), eps=1e-6),
    ),
]


@pytest.mark.parametrize(("solver", "theirs"), SOLVERS, ids=["sgd", "adam"])
def test_three_rounds_are_nine_steps_of_torchs_own_optimizer(solver, theirs):
    problem, outer = Nonlinear(), toy_point()
    parameter = torch.nn.Parameter(toy_point(seed=2))
    optimizer, warm = theirs([parameter]), Warm(parameter.detach().clone())
    for t in range(3):
        task = toy_task(seed=t)
        oracle = Oracle(problem, outer, task, carried=warm.solver)
        warm = Warm(solver(oracle, warm.inner), None, oracle.carried)
        for _ in range(3):
            optimizer.zero_grad()
            problem.inner_loss(outer, parameter, task).sum().backward()
            optimizer.step()
        assert torch.allclose(warm.inner, parameter.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("solver", [InnerSGD(steps=2, batch_size=4), InnerAdam(steps=2, batch_size=4)])
def test_every_step_has_a_mini_batch_of_its_own_that_depends_on_the_round(solver):
    seen = []

    class Watched(Nonlinear):
        def inner_loss(self, outer, inner, task, sample=None):
            seen.append(None if sample is None else tuple(sample.indices(6).tolist()))
            return super().inner_loss(outer, inner, task, sample)

    for t in range(2):
        solver(Oracle(Watched(), toy_point(), toy_task(), Key(0, t)), toy_point(seed=2))
    assert len(set(seen)) == 4
    assert all(len(rows) == 4 for rows in seen)


def carried_on(warm, rounds):
    problem = Nonlinear()
    algorithm = OBBO(lr=0.1, window=1, inner=InnerSGD(steps=2, lr=0.2), hypergradient=FixedPoint(steps=2))
    for t in rounds:
        warm = estimate(problem, algorithm, toy_point(), toy_task(seed=t), warm, Key(0, t)).warm
    return warm


def test_a_momentum_goes_through_a_checkpoint_and_is_not_forgotten():
    whole = carried_on(Warm(), range(4))
    half = carried_on(Warm(), range(2))
    again = Warm()
    again.load_state_dict(half.state_dict())
    assert torch.equal(carried_on(again, range(2, 4)).inner, whole.inner)
    assert not torch.equal(carried_on(Warm(half.inner), range(2, 4)).inner, whole.inner)
    lane = whole.lanes(slice(1, 2))
    assert torch.equal(lane.solver, whole.solver[1:])


def test_a_warm_start_of_an_earlier_version_has_no_state_of_a_solver():
    warm = Warm(solver=torch.ones(1, 2))
    warm.load_state_dict({"inner": torch.ones(1, 2), "solve": None})
    assert warm.solver is None


def test_a_lane_that_blows_up_gets_its_momentum_of_before_back():
    problem, start = Nonlinear(), toy_point(seed=2)
    task = toy_task()
    task["x"][1] = torch.nan
    algorithm = OBBO(lr=0.1, inner=InnerSGD(steps=1, lr=0.2), hypergradient=FixedPoint(steps=1))
    before = Warm(start, None, torch.full_like(start, 0.5))
    after = estimate(problem, algorithm, toy_point(), task, before, Key()).warm
    assert torch.equal(after.solver[1], before.solver[1])
    assert after.solver[0].isfinite().all()
    assert not torch.equal(after.solver[0], before.solver[0])


@pytest.mark.parametrize("solver", [InnerSGD(), InnerAdam()])
def test_unrolled_refuses_a_state_in_one_line(solver):
    algorithm = OBBO(lr=0.1, inner=solver, hypergradient=Unrolled())
    with pytest.raises(
        ValueError, match=r"hypergradient must not go back .* got 'Unrolled' with inner Inner"
    ) as refusal:
        algorithm.require_fit(Nonlinear())
    assert "\n" not in str(refusal.value)


def test_adam_has_no_step_for_a_fixed_point():
    with pytest.raises(ValueError, match=r"hypergradient.lr must be given for inner InnerAdam"):
        OBBO(inner=InnerAdam()).require_fit(Nonlinear())
    OBBO(inner=InnerSGD()).require_fit(Nonlinear())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: InnerSGD(steps=0), "inner.steps must be an integer of at least 1, got 0"),
        (lambda: InnerSGD(lr=-1.0), "inner.lr must be a positive finite number, got -1.0"),
        (lambda: InnerSGD(momentum=1.0), r"inner.momentum must lie in \[0, 1\), got 1.0"),
        (lambda: InnerSGD(batch_size=0), "inner.batch_size must be an integer of at least 1, got 0"),
        (lambda: InnerAdam(beta1=-0.1), r"inner.beta1 must lie in \[0, 1\), got -0.1"),
        (lambda: InnerAdam(beta2=1.5), r"inner.beta2 must lie in \[0, 1\), got 1.5"),
        (lambda: InnerAdam(epsilon=0.0), "inner.epsilon must be a positive finite number, got 0.0"),
    ],
)
def test_impossible_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
