"""Any network as a function of a flat vector: what is trained, constants, dropout, refusals; a group of weights."""

from functools import partial

import pytest
import torch
from torch import nn
from toy import F64, OWN_SIZE, OwnNetwork, own_network

from obbo_lightning import ParameterGroups, Positive, Weights
from obbo_lightning.networks import CNN4
from obbo_lightning.networks.flat import FlatNetwork

EXAMPLES = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


def trained_parameters(network):
    return torch.cat([p.detach().flatten() for p in network.parameters() if p.requires_grad])


@pytest.mark.parametrize(
    "make", [partial(CNN4, filters=2), OwnNetwork, partial(OwnNetwork, 0.3), partial(nn.Linear, 4, 3)]
)
def test_a_factory_is_called_with_the_seed(make):
    network, state = FlatNetwork(make), torch.get_rng_state()
    one, two, other = (network.initial(seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is unchanged
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    torch.manual_seed(1)
    assert torch.equal(one, trained_parameters(make()))
    assert network.size == len(one)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_given_network_starts_from_its_weights_and_is_a_pure_function(mode):
    module = own_network(mode)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    network = FlatNetwork(module)
    assert network.size == OWN_SIZE
    flat = network.initial(0)
    assert torch.equal(flat, network.initial(1))
    assert torch.equal(flat, trained_parameters(module))
    one, two = (network(flat, EXAMPLES) for _ in range(2))
    assert torch.equal(one, two)
    assert torch.equal(one, module(EXAMPLES))  # in its own mode
    assert all(torch.equal(before[k], v) for k, v in network.template.state_dict().items())


def test_a_loaded_network_is_an_ordinary_module_in_the_precision_of_the_vector():
    network = FlatNetwork(own_network("eval"))
    flat = (network.initial(0) + 0.1).double()
    loaded = network.loaded(flat)
    assert torch.equal(trained_parameters(loaded), flat)
    assert loaded.norm.track_running_stats
    assert loaded.frozen.weight.dtype == F64
    assert torch.equal(loaded.frozen.weight.float(), network.template.frozen.weight)
    assert torch.allclose(loaded(EXAMPLES.double()), network(flat, EXAMPLES.double()), rtol=1e-12)


class Sequences(nn.Module):
    """Dropout inside the attention, and between the two layers of the LSTM."""

    def __init__(self, layer):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5 * (layer == "attention"), batch_first=True)
        self.lstm = nn.LSTM(4, 3, num_layers=2, dropout=0.5 * (layer == "lstm"), batch_first=True)

    def forward(self, x):
        x = x.unsqueeze(1)
        return self.lstm(self.attention(x, x, x)[0])[0][:, -1]


@pytest.mark.parametrize(
    "make", [partial(OwnNetwork, 0.5), partial(Sequences, "attention"), partial(Sequences, "lstm")]
)
def test_dropout_follows_a_seed_and_is_left_out_without_one(make):
    network = FlatNetwork(make)
    flat = network.initial(0)
    assert network.is_stochastic
    assert torch.equal(network(flat, EXAMPLES), network(flat, EXAMPLES))
    state = torch.get_rng_state()
    one, again, other = (network(flat, EXAMPLES, noise=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert not FlatNetwork(make().eval()).is_stochastic


def test_weights_of_a_network_start_as_its_own_and_have_no_coordinate_names():
    network = nn.Linear(3, 2)
    groups = ParameterGroups({"decay": Positive(1e-2), "init": Weights(network)})
    flat = torch.cat([p.flatten() for p in network.parameters()])
    assert torch.equal(groups.split(groups.start())["init"][0], flat)
    assert list(groups.coordinates()) == ["decay"]
    from_factory = ParameterGroups(init=Weights(partial(nn.Linear, 3, 2)))
    assert torch.equal(from_factory.start(5), from_factory.start(5))
    assert not torch.equal(from_factory.start(5), from_factory.start(6))
