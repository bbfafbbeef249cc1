"""Evaluation of λ on tasks that it does not learn from."""

from types import SimpleNamespace

import pytest
import torch
from toy import Nonlinear, toy_point, toy_task

from obbo_lightning import OBBO
from obbo_lightning.core.inner_solvers import InnerSolver
from obbo_lightning.core.memory import InnerState
from obbo_lightning.hypergradients import FixedPoint
from obbo_lightning.solvers import GradientDescent, InnerSGD
from obbo_lightning.training import evaluation
from obbo_lightning.training.evaluation import center, evaluate, evaluate_tasks


@pytest.mark.parametrize("start", [None, toy_point(seed=7)], ids=["initial", "warm start"])
def test_an_evaluation_adapts_to_the_whole_task_also_where_rounds_sample(start):
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


def test_an_evaluation_continues_with_the_momentum_of_the_stream():
    problem, task, outer, inner = Nonlinear(), toy_task(lanes=1, seed=9), toy_point(1), toy_point(1, seed=7)
    algorithm = OBBO(inner=InnerSGD(steps=1, lr=0.1, momentum=0.5), hypergradient=FixedPoint(3, lr=0.1))
    found = evaluate(problem, algorithm, outer, task, InnerState(inner, solver_state=torch.ones_like(inner)))
    at = inner.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(problem.inner_loss(outer, at, task).sum(), at)
    assert torch.allclose(found["loss"], problem.outer_loss(outer, inner - 0.1 * (0.5 + gradient), task))


@pytest.mark.parametrize("warm", [False, True])
def test_only_a_solver_with_warm_starts_is_given_a_start(warm):
    class Recording(InnerSolver):
        warm_starts, step_size, given = warm, None, []

        def __call__(self, oracle, previous):
            self.given.append(previous)
            return toy_point(1)

    solver = Recording()
    evaluate(Nonlinear(), SimpleNamespace(inner=solver), toy_point(1), toy_task(lanes=1), InnerState())
    assert (solver.given[0] is not None) is warm


class Steps:
    """Stands for a module in training, whose tasks go to its device and precision before they are evaluated."""

    def __init__(self, rank, ranks):
        self.outer, self.device, self.seed = torch.nn.Parameter(torch.zeros(2, 3)), "device", 5
        self.problem = SimpleNamespace(evaluation_score_names=["mse"])
        self.algorithm = "algorithm"
        self.processes = SimpleNamespace(rank=rank, size=ranks, shard=SimpleNamespace(sum=lambda values: values))

    def evaluation_start(self):
        return "its state"

    def transfer_batch_to_device(self, task, device, index):
        return task, device


@pytest.mark.parametrize(("rank", "own"), [(0, [0, 2, 4]), (1, [1, 3])])
def test_every_rank_evaluates_some_of_the_tasks_on_its_device_and_in_its_precision(rank, own, monkeypatch):
    asked = []

    def record(problem, algorithm, outer, task, start, seed):
        asked.append((*task, start, seed))
        number = float(task[0])
        return {"loss": torch.full((2,), 1 + number), "mse": torch.full((2,), -1 - number), "accuracy": None}

    monkeypatch.setattr(evaluation, "evaluate", record)
    trainer = SimpleNamespace(precision_plugin=SimpleNamespace(convert_input=lambda task: (*task, "double")))
    scores = evaluate_tasks(trainer, Steps(rank, 2), "loss", range(5))
    assert asked == [(n, "device", "double", "its state", 5) for n in own]
    expected = [1.0 + n if n in own else 0.0 for n in range(5) for _ in range(2)]  # zeros are those of the other rank
    assert scores == {"loss": expected, "mse": [-value for value in expected]}


def test_scores_of_tasks_have_a_mean_with_its_error_and_those_of_lanes_a_median():
    assert center([1.0, 2.0, 6.0], 3) == (3.0, pytest.approx((7 / 3) ** 0.5))
    assert center([1.0, 2.0, 6.0, 1.0, 9.0, 3.0], 3) == (2.5, None)
    assert center([], 0) == (None, None)
