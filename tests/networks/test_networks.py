"""CNN4, ResNet12 and MLP against plain functions of their weights."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from obbo_lightning.networks import CNN4, MLP, ResNet12

IMAGES = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def batch_norm(maps, weight, bias):
    """Normalise by the definition of batch norm."""
    mean = maps.mean((0, 2, 3), keepdim=True)
    variance = (maps - mean).square().mean((0, 2, 3), keepdim=True)
    return (maps - mean) / (variance + 1e-5).sqrt() * weight.reshape(1, -1, 1, 1) + bias.reshape(1, -1, 1, 1)


def perturb_weights(network, seed=0):
    """Return the weights in order after moving all of them, because those of a norm start as ones and zeros."""
    generator = torch.Generator().manual_seed(seed)
    for p in network.parameters():
        p.data += 0.3 * torch.randn(p.shape, generator=generator)
    return list(network.double().parameters())


def test_cnn4_is_the_network_of_the_literature():
    network = CNN4(filters=4)
    weights = perturb_weights(network)
    maps = IMAGES.double()
    for conv, conv_bias, scale, shift in zip(*(iter(weights[:-2]),) * 4, strict=True):
        maps = functional.conv2d(maps, conv, conv_bias, padding=1)
        maps = functional.max_pool2d(batch_norm(maps, scale, shift).clamp(min=0), 2)
    expected = maps.flatten(1) @ weights[-2].T + weights[-1]
    assert torch.allclose(network(IMAGES.double()), expected, rtol=1e-10)


def test_resnet12_is_the_network_of_the_literature():
    network = ResNet12(width=2)
    weights = iter(perturb_weights(network))

    def layer(maps):
        conv, scale, shift = (next(weights) for _ in range(3))
        return batch_norm(functional.conv2d(maps, conv, padding=conv.shape[-1] // 2), scale, shift)

    maps, filters = IMAGES.double(), []
    for _ in range(4):
        before = maps
        maps = functional.leaky_relu(layer(maps), 0.1)
        maps = functional.leaky_relu(layer(maps), 0.1)
        maps = functional.leaky_relu(layer(maps) + layer(before), 0.1)  # three convolutions, then the shortcut's
        maps = functional.max_pool2d(maps, 2)
        filters.append(maps.shape[1])
    linear, bias = weights
    assert filters == [2, 5, 10, 20]
    assert torch.allclose(network(IMAGES.double()), maps.mean((2, 3)) @ linear.T + bias, rtol=1e-10)


def test_mlp_is_products_and_relus_of_the_flattened_example():
    network = MLP(ways=3, shape=[2, 4], widths=[5, 6])
    a, a_bias, b, b_bias, c, c_bias = (w.detach().numpy() for w in perturb_weights(network))
    examples = np.random.default_rng(0).normal(size=(7, 2, 4))
    hidden = np.maximum(examples.reshape(7, 8) @ a.T + a_bias, 0)
    expected = np.maximum(hidden @ b.T + b_bias, 0) @ c.T + c_bias
    assert np.allclose(network(torch.from_numpy(examples)).detach().numpy(), expected)
    assert [tuple(p.shape) for p in MLP(ways=2, shape=[4], widths=[]).parameters()] == [(2, 4), (2,)]


def test_sizes_are_those_of_the_literature():
    sizes = [sum(p.numel() for p in network.parameters()) for network in (CNN4(), ResNet12())]
    assert sizes == [114_373, 12_427_525]


@pytest.mark.parametrize("network", [CNN4(filters=2), ResNet12(width=2), MLP()])
def test_last_layer_is_called_linear(network):
    assert isinstance(network.linear, torch.nn.Linear)
    assert network.linear.out_features == 5
    assert list(dict(network.named_parameters()))[-2:] == ["linear.weight", "linear.bias"]
    assert network(IMAGES).shape == (6, 5)
