"""λ judged on a task: the adaptation written out by hand."""

import pytest
import torch
from toy import Nonlinear, toy_point, toy_task

from obbo_lightning import OBBO, GradientDescent, Warm
from obbo_lightning.core.randomness import Sample, derive_seed
from obbo_lightning.training.evaluation import evaluate


@pytest.mark.parametrize("start", [None, toy_point(seed=7)], ids=["initial", "carried"])
def test_an_evaluation_adapts_with_samples_that_no_round_has(start):
    problem, outer, task = Nonlinear(), toy_point(), toy_task(seed=4)
    algorithm = OBBO(inner=GradientDescent(steps=3, lr=0.2, batch_size=2))
    found = evaluate(problem, algorithm, outer, task, Warm(start), seed=6)
    inner = torch.zeros_like(outer) if start is None else start
    for k in range(3):
        sample = Sample(derive_seed(6, -1, 0, "inner", k), 2)
        inner = inner.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(problem.inner_loss(outer, inner, task, sample).sum(), inner)
        inner = inner - 0.2 * gradient
    assert torch.allclose(found["loss"], problem.outer_loss(outer, inner, task).detach(), rtol=1e-14)
    assert found["loss"].shape == (2,)
