"""The contract suites notice what is planted for them: mistakes that a looser bound would let through."""

import pytest
import torch
from toy import F64, toy_point

from obbo_lightning import OBBO, Quadratic
from obbo_lightning.core.domains import RealSpace
from obbo_lightning.core.geometry import Euclidean
from obbo_lightning.core.regularizers import NoRegularizer
from obbo_lightning.hypergradients import ClosedForm
from obbo_lightning.streams.quadratic import QuadraticTasks
from obbo_lightning.testing import check_algorithm, check_problem
from obbo_lightning.testing.differences import central_difference
from obbo_lightning.testing.geometry import _check_lemmas


def test_central_differences_are_exact_for_polynomials_of_degree_eight():
    point = torch.tensor([[0.5, -1.0], [2.0, 0.25]], dtype=F64)
    powers = torch.arange(1.0, 9.0, dtype=F64)
    found = central_difference(lambda x: (x.unsqueeze(-1) ** powers).sum((-1, -2)), point, step=0.5)
    expected = (powers * point.unsqueeze(-1) ** (powers - 1)).sum(-1)
    assert torch.allclose(found, expected, rtol=1e-12)


class SlightlyBiased(Quadratic):
    """A sample's loss is off by half a deviation of one draw: 2 % of draws would show it, 500 do."""

    def outer_loss(self, outer, inner, task, sample=None):
        loss = super().outer_loss(outer, inner, task, sample)
        if sample is None:
            return loss
        return loss + 0.5 * self.noise / sample.size**0.5 * inner.norm(dim=-1)


def test_a_bias_of_half_a_deviation_is_noticed():
    stream = QuadraticTasks(lanes=2, noise=0.1)
    good = stream.problem
    check_problem(good, toy_point(dim=4), toy_point(dim=8), stream[3])
    biased = SlightlyBiased(good.inner_matrix, good.coupling, good.ridge, good.noise)
    with pytest.raises(AssertionError, match="outer_loss of a sample is a biased estimate"):
        check_problem(biased, toy_point(dim=4), toy_point(dim=8), stream[3])


class Nervous(ClosedForm):
    """A lane beside one that has blown up takes half of its step."""

    def __call__(self, *args):
        found = super().__call__(*args)
        return found if found.value.isfinite().all() else found._replace(value=found.value / 2)


def test_a_lane_that_suffers_from_its_neighbours_nan_is_noticed():
    def nervous(lr=1e-2, domain=None):
        return OBBO(lr=lr, domain=domain, hypergradient=Nervous())

    with pytest.raises(AssertionError, match="a NaN in one lane changed another"):
        check_algorithm(nervous)


class Leaping(Euclidean):
    """Its first step is right, its second one goes five times as far in the other direction."""

    calls = 0

    def step(self, outer, direction, lr, regularizer, domain):
        type(self).evaluations += 1
        return outer - lr * (direction if self.evaluations == 1 else -5 * direction)


def test_a_step_that_leaps_breaks_the_second_lemma_alone():
    arguments = (NoRegularizer(), RealSpace(), toy_point(), torch.Generator().manual_seed(0))
    _check_lemmas(Euclidean(), *arguments)
    with pytest.raises(AssertionError, match="lemma 2"):
        _check_lemmas(Leaping(), *arguments)
