"""The contract suite of algorithms notices a state that is not saved, a domain that is ignored, and changed tasks."""

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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(StateNotSaved, hypergradient=ClosedForm()), "resume"),
        (lambda lr, domain: OBBO(lr=100 * lr, hypergradient=ClosedForm()), "L2Ball"),
        (partial(OBBO, hypergradient=TasksChanged()), "same seed|in place"),
    ],
    ids=["state not saved", "domain ignored", "tasks changed"],
)
def test_a_broken_algorithm_is_noticed(make, message):
    with pytest.raises(AssertionError, match=message):
        check_algorithm(make, lr=1e-2)
