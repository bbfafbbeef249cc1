"""Inner solvers: against torch's own optimizers over rounds, their samples, their states, and refusals."""

import pytest
import torch
from toy import Nonlinear, RecordedSamples, toy_point, toy_task

from obbo_lightning import OBBO, online
from obbo_lightning.core.memory import InnerState
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.randomness import Key, Sample, derive_seed
from obbo_lightning.core.round import estimate_hypergradient
from obbo_lightning.hypergradients import FixedPoint
from obbo_lightning.solvers import ExactSolution, GradientDescent, InnerAdam, InnerSGD

TORCH_OPTIMIZERS = {
    "gradient descent": (GradientDescent(3, 0.05), lambda p: torch.optim.SGD([p], 0.05)),
    "momentum": (InnerSGD(3, 0.05, 0.7), lambda p: torch.optim.SGD([p], 0.05, 0.7)),
    "Adam": (InnerAdam(3, 0.02, 0.8, 0.9, 1e-6), lambda p: torch.optim.Adam([p], 0.02, (0.8, 0.9), 1e-6)),
    "samples": (InnerSGD(3, 0.05, batch_size=2), lambda p: torch.optim.SGD([p], 0.05, 0.9)),
}


@pytest.mark.parametrize("name", TORCH_OPTIMIZERS)
def test_rounds_continue_with_the_state_of_torchs_own_optimizer(name):
    solver, make = TORCH_OPTIMIZERS[name]
    problem, tasks, outer = Nonlinear(), [toy_task(seed=t) for t in range(4)], toy_point()
    algorithm = OBBO(lr=0.1, inner=solver, hypergradient=FixedPoint(3, lr=0.2))
    parameter = torch.zeros_like(outer).requires_grad_()
    optimizer = make(parameter)
    for t, (task, finished) in enumerate(zip(tasks, online(problem, algorithm, tasks, outer, seed=3), strict=True)):
        for k in range(3):
            sample = Sample(derive_seed(3, t, 0, "inner", k), 2) if solver.batch_size else None
            optimizer.zero_grad()
            problem.inner_loss(outer, parameter, task, sample).sum().backward()
            optimizer.step()
        assert torch.allclose(finished.states[0].inner, parameter.detach(), rtol=1e-9, atol=1e-12)
        outer = finished.outer
    assert solver.is_stochastic == (name == "samples")
    assert solver.warm_starts


@pytest.mark.parametrize("make", [GradientDescent, InnerSGD, InnerAdam])
def test_every_step_of_every_round_draws_its_own_samples(make):
    solver, problem = make(steps=3, lr=0.1, batch_size=4), RecordedSamples()
    task, outer, first = toy_task(rows=50), toy_point(), toy_point(seed=2)
    keys = [Key(0, 1), Key(0, 2), Key(1, 1)]
    ends = [solver(Oracle(problem, outer, task, key), first) for key in keys]
    seeds = [sample[0] for _, sample in problem.samples]
    assert len(set(seeds)) == 3 * 3
    assert {size for _, (_, size) in problem.samples} == {4}
    assert torch.equal(solver(Oracle(problem, outer, task, keys[0]), first), ends[0])
    assert not torch.equal(ends[0], ends[1])
    whole = solver.without_sampling
    assert (type(whole), whole.batch_size, whole.steps) == (make, None, 3)
    assert whole.without_sampling is whole


def states_of_rounds(state, rounds):
    algorithm = OBBO(inner=InnerSGD(steps=2, lr=0.2), hypergradient=FixedPoint(steps=2))
    for t in rounds:
        state = estimate_hypergradient(Nonlinear(), algorithm, toy_point(), toy_task(seed=t), state, Key(0, t)).state
    return state


def test_a_momentum_is_part_of_the_state_that_a_run_continues_from():
    whole, half = states_of_rounds(InnerState(), range(4)), states_of_rounds(InnerState(), range(2))
    again = states_of_rounds(InnerState(**half.state_dict()), range(2, 4))
    assert torch.equal(again.inner, whole.inner)
    assert torch.equal(again.solver_state, whole.solver_state)
    assert not torch.equal(states_of_rounds(InnerState(half.inner), range(2, 4)).inner, whole.inner)


def test_a_lane_that_overflows_restores_its_momentum_of_the_previous_round():
    task, start = toy_task(), toy_point(seed=2)
    task["x"][1] = torch.nan
    algorithm = OBBO(inner=InnerSGD(steps=1, lr=0.2), hypergradient=FixedPoint(steps=1))
    before = InnerState(start, None, torch.full_like(start, 0.5))
    after = estimate_hypergradient(Nonlinear(), algorithm, toy_point(), task, before, Key()).state
    assert torch.equal(after.solver_state[1], before.solver_state[1])
    assert after.solver_state[0].isfinite().all()
    assert not torch.equal(after.solver_state[0], before.solver_state[0])


def test_positional_arguments_are_steps_step_size_and_the_solvers_own():
    assert InnerSGD(20, 0.1, 0.9) == InnerSGD(steps=20, lr=0.1, momentum=0.9, batch_size=None)
    assert InnerAdam(5, 0.1, 0.7, 0.8) == InnerAdam(steps=5, lr=0.1, beta1=0.7, beta2=0.8)
    assert GradientDescent(5, 0.1, "outer", 3) == GradientDescent(steps=5, lr=0.1, start="outer", batch_size=3)


def test_only_gradient_steps_have_the_step_size_of_a_fixed_point():
    assert (GradientDescent(lr=0.3).step_size, InnerSGD(lr=0.3).step_size) == (0.3, 0.3)
    assert InnerAdam(lr=0.3).step_size is ExactSolution().step_size is None
    OBBO(inner=InnerSGD()).require_compatible(Nonlinear())
