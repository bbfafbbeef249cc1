"""Base classes of algorithms: keyword-only settings, what they refuse, and which settings reach the outer step."""

from dataclasses import FrozenInstanceError

import pytest
import torch
from toy import SIX

from obbo_lightning import OBBO
from obbo_lightning.config.registry import find_component
from obbo_lightning.domains import Box
from obbo_lightning.hypergradients import ClosedForm, StochasticNeumann
from obbo_lightning.regularizers import L1
from obbo_lightning.solvers import ExactSolution, GradientDescent

# these algorithms have a geometry of their own, or no window
NOT_TAKEN = {"sobow": ["geometry"], "oagd": ["geometry"], "adam": ["geometry", "window"], "sgdm": ["window"]}


@pytest.mark.parametrize("name", SIX)
def test_arguments_are_keywords_and_unknown_names_are_refused(name):
    cls = find_component("algorithm", name)
    with pytest.raises(TypeError, match="positional"):
        cls(0.1)
    for unknown in ("windw", *NOT_TAKEN.get(name, ())):
        with pytest.raises(TypeError, match=unknown):
            cls(**{unknown: 3})
    with pytest.raises(FrozenInstanceError):
        cls().lr = 0.1


@pytest.mark.parametrize("name", SIX)
def test_given_settings_reach_the_outer_step(name):
    given = {"lr": 0.25, "inner": ExactSolution(), "hypergradient": ClosedForm(), "domain": Box(0.0, 1.0), "clip": 3.0}
    windowed = name not in ("adam", "sgdm")
    if windowed:
        given |= {"window": 3, "regularizer": L1(0.5)}
    algorithm = find_component("algorithm", name)(**given)
    assert algorithm.init_args == given
    assert (algorithm.inner, algorithm.hypergradient, algorithm.clip) == (ExactSolution(), ClosedForm(), 3.0)
    outer = torch.nn.Parameter(torch.full((1, 2), 0.5))
    optimizer = algorithm.optimizer(outer)
    assert optimizer.param_groups[0]["lr"] == 0.25
    if windowed:
        assert algorithm.memory().window == 3
        (group,) = optimizer.groups
        assert (group.regularizer, group.domain) == (L1(0.5), Box(0.0, 1.0))
    outer.grad = torch.tensor([[100.0, -100.0]])
    for _ in range(10):
        optimizer.step()
    assert outer.tolist() == [[0.0, 1.0]]


def test_tasks_are_solved_as_lanes_only_without_samples():
    assert OBBO().supports_vmap
    assert not OBBO(inner=GradientDescent(batch_size=2)).supports_vmap
    assert not OBBO(hypergradient=StochasticNeumann(3)).supports_vmap
