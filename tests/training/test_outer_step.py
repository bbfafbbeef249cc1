"""BregmanOuterStep: the callback that owns the outer step."""

from types import SimpleNamespace

import pytest
import torch
from toy import Nonlinear, toy_point

from obbo_lightning import OBBO, BregmanOuterStep, ParameterGroups, Positive
from obbo_lightning.core.memory import HypergradientWindow
from obbo_lightning.core.outer_step import OuterStep


def make_module(algorithm, outer, groups=None):
    parameter = torch.nn.Parameter(outer)
    optimizer = SimpleNamespace(optimizer=algorithm.optimizer(parameter, groups), step=None)
    processes = SimpleNamespace(gather_entries=lambda rounds: rounds, select_entries=lambda rounds: rounds)
    parts = {"outer": parameter, "algorithm": algorithm, "problem": SimpleNamespace(groups=groups)}
    return SimpleNamespace(**parts, processes=processes, optimizers=lambda: optimizer)


def test_it_continues_from_its_checkpoint_once():
    module = make_module(OBBO(lr=0.1, window=3), toy_point(2))
    first, second = BregmanOuterStep(regret_window=2), BregmanOuterStep(regret_window=2)
    empty, checkpoint = {}, {}
    first.on_save_checkpoint(None, module, empty)
    assert empty == {}  # there is no step yet
    first.on_train_start(None, module)
    assert isinstance(first.step, OuterStep)
    for seed in range(4):
        first.step.memory.merge(toy_point(2, seed=seed).unsqueeze(0))
    first.on_save_checkpoint(None, module, checkpoint)
    assert set(checkpoint["outer_step"]) == {"memory", "regret"}  # Lightning saves the optimizer
    second.on_load_checkpoint(None, module, checkpoint)
    second.on_train_start(None, module)
    assert isinstance(second.step.memory, HypergradientWindow)
    assert second.step.memory.fill == first.step.memory.fill == 3
    assert torch.equal(*(one.step.memory.merge(toy_point(2, seed=9).unsqueeze(0)) for one in (first, second)))
    for _ in range(2):  # another fit, without a checkpoint, and with one of another module
        second.on_train_start(None, module)
        assert second.step.memory.fill == 0
        second.on_load_checkpoint(None, module, {})


def test_it_has_the_window_the_policy_and_the_groups_that_are_given():
    groups = ParameterGroups(a=Positive(0.5), b=Positive(0.25))
    callback = BregmanOuterStep(4, "skip")
    callback.on_train_start(None, make_module(OBBO(window=3), groups.start(), groups))
    windows = {name: regret.memory.window for name, regret in callback.step.regret.items()}
    assert windows == {"euclidean": 4, "generalized": 1, "exact": 4, "geometry": 1}
    assert callback.step.on_nonfinite == "skip"
    assert list(callback.step.groups) == ["a", "b"]


def test_impossible_arguments_and_several_optimizers_are_refused():
    with pytest.raises(ValueError, match="regret_window must be an integer of at least 1, got 0"):
        BregmanOuterStep(0)
    with pytest.raises(ValueError, match="on_nonfinite must be one of raise, skip, got 'ignore'"):
        BregmanOuterStep(1, "ignore")
    module = SimpleNamespace(optimizers=lambda: [None, None], outer=toy_point(1), problem=Nonlinear())
    with pytest.raises(TypeError, match="one outer variable and one optimizer, got 2"):
        BregmanOuterStep().on_train_start(None, module)
