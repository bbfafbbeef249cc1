"""Components become plain values and back."""

import copy
import inspect
import pickle
from functools import partial

import pytest
import torch
from toy import Proximal

from obbo_lightning import OBBO, FewShot
from obbo_lightning.config.registry import UntrustedError, untrusted_source
from obbo_lightning.config.serialization import from_config, to_config
from obbo_lightning.geometry import Euclidean
from obbo_lightning.networks import CNN4
from obbo_lightning.streams.quadratic import QuadraticTasks


def make_network():
    return torch.nn.Linear(1, 1)


class Own(OBBO):
    """Component of this file."""


def test_component_is_constructed_again_from_its_arguments():
    config = to_config(OBBO(lr=0.5))
    assert config["component"] == "obbo_lightning.algorithms.obbo.OBBO"
    assert (config["init_args"]["lr"], config["init_args"]["window"]) == (0.5, 10)  # defaults are written as well
    assert from_config(config).lr == 0.5
    assert from_config(to_config(Proximal(proximity=0.7))).proximity == 0.7


def test_tensors_dtypes_lists_and_networks_are_plain_values():
    problem = QuadraticTasks(lanes=2).problem
    assert torch.equal(from_config(to_config(problem)).inner_matrix, problem.inner_matrix)
    assert from_config(to_config([torch.float64, {"a": (1, 2)}])) == [torch.float64, {"a": [1, 2]}]
    few_shot = FewShot(partial(CNN4, 3, filters=2, image_size=16))  # with a positional argument
    assert from_config(to_config(few_shot)).initial_outer(0).shape == few_shot.initial_outer(0).shape
    with pytest.raises(ValueError, match="Linear cannot be written as plain values"):
        to_config(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="what the function make_network makes cannot be written as plain values"):
        to_config(make_network)


@pytest.mark.parametrize("name", ["subprocess.Popen", "builtins.print", "torch.nn.Linear"])
def test_class_that_is_no_component_is_refused(name):
    with pytest.raises(ValueError, match="may name components and networks"):
        from_config({"component": name, "init_args": {}})
    with untrusted_source("trust it"), pytest.raises(UntrustedError, match="trust it"):
        from_config({"component": name, "init_args": {}})


def test_own_component_needs_trust():
    config = to_config(Own(lr=0.5))
    assert type(from_config(config)) is Own
    with untrusted_source("trust it"), pytest.raises(UntrustedError, match="trust it"):
        from_config(config)


def test_components_are_copied_pickled_and_have_the_signature_of_their_constructor():
    assert type(copy.deepcopy(Euclidean())) is Euclidean
    assert pickle.loads(pickle.dumps(OBBO(lr=0.3))).init_args == {"lr": 0.3}
    assert {"lr", "window"} <= set(inspect.signature(OBBO).parameters)
    assert not inspect.signature(Euclidean).parameters
    with pytest.raises(TypeError, match="windw"):
        OBBO(windw=3)
