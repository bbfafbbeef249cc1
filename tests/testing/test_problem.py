"""The contract of a problem: sound problems pass, each broken rule is noticed."""

import pytest
import torch
from toy import Nonlinear, Proximal, toy_point, toy_task

from obbo_lightning.problems.quadratic import Quadratic
from obbo_lightning.streams import QuadraticTasks
from obbo_lightning.testing import check_problem

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
