"""Weights of a network as a parameter group of λ."""

from functools import partial

import torch

from obbo_lightning import ParameterGroups, Positive, Weights


def test_weights_of_a_network_start_as_its_own_and_have_no_coordinate_names():
    network = torch.nn.Linear(3, 2)
    groups = ParameterGroups({"decay": Positive(1e-2), "init": Weights(network)})
    flat = torch.cat([p.flatten() for p in network.parameters()])
    assert torch.equal(groups.split(groups.start())["init"][0], flat)
    assert list(groups.coordinates()) == ["decay"]
    from_factory = ParameterGroups(init=Weights(partial(torch.nn.Linear, 3, 2)))
    assert torch.equal(from_factory.start(5), from_factory.start(5))
    assert not torch.equal(from_factory.start(5), from_factory.start(6))
