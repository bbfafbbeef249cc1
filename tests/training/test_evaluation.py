"""λ judged on a task: the adaptation written out by hand."""

import pytest
import torch
from toy import Nonlinear, toy_point, toy_task

from obbo_lightning import OBBO
from obbo_lightning.hypergradients import InnerState
from obbo_lightning.solvers import GradientDescent
from obbo_lightning.training.evaluation import evaluate


@pytest.mark.parametrize("start", [None, toy_point(seed=7)], ids=["initial", "carried"])
def test_an_evaluation_adapts_to_all_of_a_task_also_where_rounds_see_samples(start):
    problem, outer, task = Nonlinear(), toy_point(), toy_task(seed=4)
    algorithm = OBBO(inner=GradientDescent(steps=3, lr=0.2, batch_size=2))
    found = evaluate(problem, algorithm, outer, task, InnerState(start), seed=6)
    inner = torch.zeros_like(outer) if start is None else start
    for _ in range(3):
        inner = inner.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(problem.inner_loss(outer, inner, task).sum(), inner)
        inner = inner - 0.2 * gradient
    assert torch.allclose(found["loss"], problem.outer_loss(outer, inner, task).detach(), rtol=1e-14)
    assert found["loss"].shape == (2,)
