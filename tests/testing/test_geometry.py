"""The contract suite of geometries notices a step that is only slightly wrong."""

import pytest
from toy import toy_point

from obbo_lightning.domains import RealSpace
from obbo_lightning.geometry import Euclidean
from obbo_lightning.regularizers import NoRegularizer
from obbo_lightning.testing import check_geometry
from obbo_lightning.testing.geometry import _check_lemmas


class LongStep(Euclidean):
    def step(self, outer, direction, lr, regularizer, domain):
        return super().step(outer, direction, 1.01 * lr, regularizer, domain)


def test_a_step_that_is_one_percent_too_long_is_noticed():
    with pytest.raises(AssertionError, match="a feasible point beats the step"):
        check_geometry(LongStep())


class SecondStepWrong(Euclidean):
    """The first step is correct, the second one is five times as long and in the other direction."""

    steps = 0

    def step(self, outer, direction, lr, regularizer, domain):
        type(self).steps += 1
        return outer - lr * (direction if self.steps == 1 else -5 * direction)


def test_a_step_that_breaks_only_the_second_lemma_is_noticed():
    arguments = (NoRegularizer(), RealSpace(), *(toy_point(seed=seed) for seed in range(3)))
    _check_lemmas(Euclidean(), *arguments)
    with pytest.raises(AssertionError, match="lemma 2"):
        _check_lemmas(SecondStepWrong(), *arguments)
