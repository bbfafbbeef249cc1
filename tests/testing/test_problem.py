"""The contract of a problem: sound problems pass, each broken rule is noticed."""

import pytest
import torch
from toy import F64, Nonlinear, Proximal, toy_point, toy_task

from obbo_lightning.problems.quadratic import Quadratic
from obbo_lightning.streams import QuadraticTasks
from obbo_lightning.testing import central_difference, check_problem

STREAM = QuadraticTasks(condition_number=[2.0, 20.0], lanes=2)


def test_sound_problems_pass():
    check_problem(STREAM.problem, toy_point(dim=4), toy_point(dim=8), STREAM[3])
    check_problem(Nonlinear(), toy_point(), toy_point(seed=2), toy_task())
    check_problem(Proximal(), toy_point(), toy_point(seed=2), toy_task())


class Broken(Quadratic):
    def __init__(self, good):
        super().__init__(good.inner_matrix, good.coupling)


class WrongMixedTerm(Broken):
    def mixed_term(self, *args):
        return -super().mixed_term(*args)


class WrongSolution(Broken):
    def solution(self, outer, task):
        return super().solution(outer, task) + 1e-3


class WrongHypergradient(Broken):
    def hypergradient(self, outer, task):
        gradient, solution = super().hypergradient(outer, task)
        return 1.001 * gradient, solution


class TooSmooth(Broken):
    def smoothness(self, outer, task):
        return 0.9 * super().smoothness(outer, task)


class MixedLanes(Broken):
    def outer_loss(self, *args):
        return super().outer_loss(*args).flip(0) + super().outer_loss(*args)


class Cumulative(Broken):
    def inner_loss(self, *args):
        return super().inner_loss(*args).cumsum(0)


class Biased(Broken):
    def outer_loss(self, *args):
        return super().outer_loss(*args) * (7 if len(args) == 4 and args[3] else 1)


class MeanLoss(Broken):
    def inner_loss(self, *args):
        return super().inner_loss(*args).mean()


class Restless(Broken):
    def inner_loss(self, *args):
        return super().inner_loss(*args) + (torch.rand(()) if len(args) == 4 and args[3] else 0)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (WrongMixedTerm, "mixed_term is off"),
        (WrongSolution, "the gradient at solution"),
        (WrongHypergradient, "hypergradient is off"),
        (TooSmooth, "below the curvature"),
        (MixedLanes, "depends on another lane"),
        (Cumulative, "depends on another lane"),
        (Biased, "biased estimate"),
        (MeanLoss, "must have shape"),
        (Restless, "same for the same sample"),
    ],
)
def test_broken_problems_are_noticed(broken, message):
    with pytest.raises(AssertionError, match=message):
        check_problem(broken(STREAM.problem), toy_point(dim=4), toy_point(dim=8), STREAM[3])


class BiasedSample(Quadratic):
    """A sample's loss is off by half a standard deviation of one estimate, which only many samples show."""

    def outer_loss(self, outer, inner, task, sample=None):
        loss = super().outer_loss(outer, inner, task, sample)
        if sample is None:
            return loss
        return loss + 0.5 * self.noise / sample.size**0.5 * inner.norm(dim=-1)


def test_small_bias_of_samples_is_noticed():
    good = QuadraticTasks(lanes=2, noise=0.1).problem
    problem = BiasedSample(good.inner_matrix, good.coupling, good.ridge, good.noise)
    with pytest.raises(AssertionError, match="outer_loss of a sample is a biased estimate"):
        check_problem(problem, toy_point(dim=4), toy_point(dim=8), QuadraticTasks(lanes=2, noise=0.1)[3])


def test_central_differences_are_exact_for_polynomials_of_degree_eight():
    point = torch.tensor([[0.5, -1.0], [2.0, 0.25]], dtype=F64)
    powers = torch.arange(1.0, 9.0, dtype=F64)
    found = central_difference(lambda x: (x.unsqueeze(-1) ** powers).sum((-1, -2)), point, step=0.5)
    expected = (powers * point.unsqueeze(-1) ** (powers - 1)).sum(-1)
    assert torch.allclose(found, expected, rtol=1e-12)
