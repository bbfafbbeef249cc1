"""The contract suite of algorithms notices each kind of mistake."""

from dataclasses import replace
from functools import partial

import pytest

from obbo_lightning import OBBO
from obbo_lightning.hypergradients import ClosedForm, HypergradientWindow
from obbo_lightning.testing import check_algorithm


class UnsavedWindow(HypergradientWindow):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class StateNotSaved(OBBO):
    def memory(self):
        return UnsavedWindow(3)


class TasksChanged(ClosedForm):
    def __call__(self, oracle, *args):
        oracle.task["b"] += 1e-3
        return super().__call__(oracle, *args)


class HalvedBesideNaN(ClosedForm):
    """The hypergradient of a lane is halved where another lane's is not finite."""

    def __call__(self, *args):
        found = super().__call__(*args)
        return found if found.value.isfinite().all() else replace(found, value=found.value / 2)


class Ascent(ClosedForm):
    def __call__(self, *args):
        found = super().__call__(*args)
        return replace(found, value=-found.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(StateNotSaved, hypergradient=ClosedForm()), "after a resume"),
        (lambda lr, domain: OBBO(lr=100 * lr, hypergradient=ClosedForm()), "the outer variable leaves L2Ball"),
        (partial(OBBO, hypergradient=TasksChanged()), "same seed|in place"),
        (partial(OBBO, hypergradient=HalvedBesideNaN()), "a NaN in one lane changed another"),
        (partial(OBBO, hypergradient=Ascent()), "did not reduce its gradient"),
    ],
    ids=["state not saved", "domain ignored", "tasks changed", "neighbour of a NaN", "ascent"],
)
def test_a_broken_algorithm_is_noticed(make, message):
    with pytest.raises(AssertionError, match=message):
        check_algorithm(make, lr=1e-2)
