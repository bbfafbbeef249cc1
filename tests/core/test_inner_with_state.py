"""Inner solvers with a state against torch.optim, over rounds and tasks."""

import pytest
import torch
from toy import Nonlinear, toy_point, toy_task

from obbo_lightning import OBBO, FixedPoint, InnerAdam, InnerSGD, Unrolled, online
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.randomness import Key, Sample, derive_seed

SOLVERS = {
    "sgd": (InnerSGD(steps=3, lr=0.05, momentum=0.7), lambda p: torch.optim.SGD([p], 0.05, 0.7)),
    "adam": (InnerAdam(steps=3, lr=0.02, beta1=0.8), lambda p: torch.optim.Adam([p], 0.02, (0.8, 0.999), 1e-8)),
    "samples": (InnerSGD(steps=3, lr=0.05, batch_size=2), lambda p: torch.optim.SGD([p], 0.05, 0.9)),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_rounds_go_on_with_the_state_of_the_solver(name):
    solver, make = SOLVERS[name]
    problem, tasks, outer = Nonlinear(), [toy_task(seed=t) for t in range(4)], toy_point()
    algorithm = OBBO(lr=0.1, inner=solver, hypergradient=FixedPoint(3, lr=0.2))
    rounds = list(online(problem, algorithm, tasks, outer, seed=3))
    parameter = torch.zeros_like(outer).requires_grad_()
    optimizer = make(parameter)
    at = outer
    for t, (task, played) in enumerate(zip(tasks, rounds, strict=True)):
        for k in range(3):
            sample = Sample(derive_seed(3, t, 0, "inner", k), 2) if solver.batch_size else None
            optimizer.zero_grad()
            problem.inner_loss(at, parameter, task, sample).sum().backward()
            optimizer.step()
        assert torch.allclose(played.warms[0].inner, parameter.detach(), rtol=1e-9, atol=1e-12)
        at = played.step.outer
    assert solver.samples == (name == "samples")
    assert solver.carries


def test_the_step_size_of_a_fixed_point_is_that_of_plain_momentum_only():
    assert (InnerSGD(lr=0.3).step_size, InnerAdam(lr=0.3).step_size) == (0.3, None)
    for solver in (InnerSGD(), InnerAdam()):
        with pytest.raises(ValueError, match="must not go back through the steps of an inner solver that has a state"):
            list(online(Nonlinear(), OBBO(inner=solver, hypergradient=Unrolled()), [toy_task()], toy_point()))
        with pytest.raises(ValueError, match="needs a first inner variable"):
            solver(Oracle(Nonlinear(), toy_point(), toy_task(), Key(0, 0)), None)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: InnerSGD(steps=0), "inner.steps must be an integer of at least 1, got 0"),
        (lambda: InnerSGD(lr=0.0), "inner.lr must be a positive finite number, got 0"),
        (lambda: InnerSGD(momentum=1.0), "inner.momentum must"),
        (lambda: InnerSGD(batch_size=0), "inner.batch_size must be an integer of at least 1, got 0"),
        (lambda: InnerAdam(beta1=1.0), "inner.beta1 must"),
        (lambda: InnerAdam(beta2=-0.1), "inner.beta2 must"),
        (lambda: InnerAdam(epsilon=0.0), "inner.epsilon must be a positive finite number, got 0"),
    ],
)
def test_impossible_solvers_are_refused(make, said):
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 the message is compared as it is
        make()
    assert said in str(refusal.value)
