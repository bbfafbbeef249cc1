"""Norms by name, and batch norm with the statistics of the support examples."""

from functools import partial

import pytest
import torch
from torch import nn

from obbo_lightning.networks import CNN4, MLP, ResNet12
from obbo_lightning.networks.norms import frozen_batch_norm

IMAGES = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))


NETWORKS = {"cnn4": partial(CNN4, filters=8), "resnet12": partial(ResNet12, width=2), "mlp": partial(MLP, widths=[8])}


@pytest.mark.parametrize("norm", ["batch", "group", "layer", "none"])
@pytest.mark.parametrize("name", NETWORKS)
def test_only_batch_norm_depends_on_the_other_images_and_no_norm_has_buffers(name, norm):
    torch.manual_seed(0)
    network = NETWORKS[name](norm=norm)
    together, alone = network(IMAGES), network(IMAGES[:3])
    assert torch.allclose(together[:3], alone, atol=1e-5) == (norm != "batch")
    assert list(network.buffers()) == []
    assert torch.equal(network.eval()(IMAGES), together)


@pytest.mark.parametrize(("norm", "groups"), [("layer", 1), ("group", 2)])
def test_layer_and_group_norms_of_vectors_centre_each_example(norm, groups):
    torch.manual_seed(0)
    linear, layer, *_ = MLP(ways=2, shape=[7], widths=[8], norm=norm).blocks[1]
    hidden = layer(linear(torch.randn(6, 7)))
    assert torch.allclose(hidden.reshape(6, groups, -1).mean(-1), torch.zeros(6, groups), atol=1e-6)


def test_queries_are_normalised_by_mean_and_variance_of_the_support():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(3)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    support, query = torch.randn(5, 3), torch.randn(2, 3)
    frozen = frozen_batch_norm(nn.Sequential(norm), support)
    expected = (query - support.mean(0)) / (support.var(0, unbiased=False) + norm.eps).sqrt() * norm.weight + norm.bias
    assert torch.allclose(frozen(query), expected, atol=1e-6)
    assert torch.allclose(frozen(query[:1]), expected[:1], atol=1e-6)
    assert norm.training


def test_logits_of_the_support_stay_the_same():
    torch.manual_seed(0)
    network, support = CNN4(ways=3, filters=4, image_size=16), torch.randn(9, 3, 16, 16)
    names = list(network.state_dict())
    with torch.no_grad():
        assert torch.allclose(frozen_batch_norm(network, support)(support), network(support), atol=1e-5)
    assert list(network.state_dict()) == names  # the network itself is not changed


def test_norm_that_is_used_twice_is_refused():
    norm = nn.BatchNorm1d(4)
    with pytest.raises(ValueError, match="uses a batch norm twice: predict all queries together"):
        frozen_batch_norm(nn.Sequential(norm, norm), torch.randn(5, 4))
