"""Inner solvers against torch's own optimizers over rounds, with and without samples."""

import pytest
import torch
from toy import Nonlinear, toy_point, toy_task

from obbo_lightning import OBBO, online
from obbo_lightning.core.randomness import Sample, derive_seed
from obbo_lightning.hypergradients import FixedPoint
from obbo_lightning.solvers import ExactSolution, GradientDescent, InnerAdam, InnerSGD

TORCH_OPTIMIZERS = {
    "gradient descent": (GradientDescent(3, 0.05), lambda p: torch.optim.SGD([p], 0.05)),
    "momentum": (InnerSGD(3, 0.05, 0.7), lambda p: torch.optim.SGD([p], 0.05, 0.7)),
    "Adam": (InnerAdam(3, 0.02, 0.8, 0.9, 1e-6), lambda p: torch.optim.Adam([p], 0.02, (0.8, 0.9), 1e-6)),
    "samples": (GradientDescent(3, 0.05, batch_size=2), lambda p: torch.optim.SGD([p], 0.05)),
    "samples and momentum": (InnerSGD(3, 0.05, batch_size=2), lambda p: torch.optim.SGD([p], 0.05, 0.9)),
    "samples and Adam": (InnerAdam(3, 0.02, batch_size=2), lambda p: torch.optim.Adam([p], 0.02)),
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
    assert solver.is_stochastic == ("samples" in name)
    assert solver.warm_starts
    whole = solver.without_sampling
    assert (type(whole), whole.batch_size, whole.steps) == (type(solver), None, 3)
    assert whole.without_sampling is whole


def test_only_gradient_steps_have_the_step_size_of_a_fixed_point():
    assert (GradientDescent(lr=0.3).step_size, InnerSGD(lr=0.3).step_size) == (0.3, 0.3)
    assert InnerAdam(lr=0.3).step_size is ExactSolution().step_size is None
    OBBO(inner=InnerSGD()).require_compatible(Nonlinear())
