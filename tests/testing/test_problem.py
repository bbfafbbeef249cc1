"""Central differences, and mistakes of a problem that its contract suite notices."""

import pytest
import torch
from toy import F64, toy_point

from obbo_lightning import Quadratic
from obbo_lightning.streams.quadratic import QuadraticTasks
from obbo_lightning.testing import central_difference, check_problem

STREAM = QuadraticTasks(lanes=2, noise=0.1)


def check(cls):
    good = STREAM.problem
    problem = cls(good.inner_matrix, good.coupling, good.ridge, good.noise)
    check_problem(problem, toy_point(dim=4), toy_point(dim=8), STREAM[3])


def test_central_differences_are_exact_for_polynomials_of_degree_eight():
    point = torch.tensor([[0.5, -1.0], [2.0, 0.25]], dtype=F64)
    powers = torch.arange(1.0, 9.0, dtype=F64)
    found = central_difference(lambda x: (x.unsqueeze(-1) ** powers).sum((-1, -2)), point, step=0.5)
    expected = (powers * point.unsqueeze(-1) ** (powers - 1)).sum(-1)
    assert torch.allclose(found, expected, rtol=1e-12)


class BiasedSample(Quadratic):
    """A sample's loss is off by half a standard deviation of one estimate, which only many samples show."""

    def outer_loss(self, outer, inner, task, sample=None):
        loss = super().outer_loss(outer, inner, task, sample)
        if sample is None:
            return loss
        return loss + 0.5 * self.noise / sample.size**0.5 * inner.norm(dim=-1)


class MixedLanes(Quadratic):
    def inner_loss(self, outer, inner, task, sample=None):
        return super().inner_loss(outer, inner, task, sample) + 1e-6 * inner.sum()


class WrongMixedTerm(Quadratic):
    def mixed_term(self, *arguments):
        return 1.001 * super().mixed_term(*arguments)


class WrongHypergradient(Quadratic):
    def hypergradient(self, outer, task):
        gradient, solution = super().hypergradient(outer, task)
        return gradient + 1e-4, solution


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (BiasedSample, "outer_loss of a sample is a biased estimate"),
        (MixedLanes, "inner_loss of lane 0 depends on another lane"),
        (WrongMixedTerm, "mixed_term is off by"),
        (WrongHypergradient, "hypergradient is off by"),
    ],
)
def test_a_wrong_problem_is_noticed(cls, message):
    check(Quadratic)
    with pytest.raises(AssertionError, match=message):
        check(cls)
