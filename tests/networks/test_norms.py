"""Norms by name, and batch norm with the statistics of the support examples."""

from functools import partial

import pytest
import torch
from torch import nn

from obbo_lightning.networks import CNN4, MLP, ResNet12
from obbo_lightning.networks.norms import AccurateBatchNorm2d, frozen_batch_norm, with_accurate_batch_norms

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


def outcomes(norm, images, layout, order=1):
    """The output of a norm and its gradients, or those of a function of its gradients, in one memory layout."""
    images = images.to(norm.weight.dtype if norm.affine else images.dtype).contiguous(memory_format=layout)
    variables = [images.requires_grad_(), *norm.parameters()]
    generator = torch.Generator().manual_seed(1)
    output = norm(images)
    factor = torch.randn(output.shape, generator=generator, dtype=torch.double)
    found = torch.autograd.grad((output.square() * factor).sum(), variables, create_graph=order == 2)
    if order == 2:
        found = torch.autograd.grad(sum(one.square().sum() for one in found), variables)
    return [output.detach(), *found]


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("size", [(6, 8), (1, 5), (5, 1)])
def test_accurate_batch_norm_has_the_values_and_derivatives_of_batch_norm(size, affine, order):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3, affine=affine, track_running_stats=False).double()
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    images = torch.randn(4, 3, *size, dtype=torch.double) + 2
    expected = outcomes(norm, images, torch.contiguous_format, order)
    found = outcomes(with_accurate_batch_norms(norm), images, torch.channels_last, order)
    assert type(norm) is AccurateBatchNorm2d
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12 * float(other.abs().max()))


def test_accurate_batch_norm_in_float32_is_as_close_to_float64_as_in_the_plain_layout():
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8, track_running_stats=False)
    accurate, wide = AccurateBatchNorm2d(8, track_running_stats=False), nn.BatchNorm2d(8, track_running_stats=False)
    images = torch.randn(25, 8, 64, 64) + 1
    truth = outcomes(wide.double(), images.double(), torch.contiguous_format)

    def errors(norm, layout):
        pairs = zip(outcomes(norm, images.clone(), layout), truth, strict=True)
        return [float((one - other).norm() / other.norm()) for one, other in pairs]

    plain, found = errors(norm, torch.contiguous_format), errors(accurate, torch.channels_last)
    old = errors(norm, torch.channels_last)
    for k in range(2):  # the output, and the gradient in the images
        assert found[k] < 3 * plain[k] < 0.5 * old[k]


def test_only_batch_norms_that_use_the_statistics_of_a_batch_in_channels_last_are_replaced():
    class Own(nn.BatchNorm2d):
        pass

    network = with_accurate_batch_norms(nn.Sequential(Own(3), nn.BatchNorm1d(3), nn.BatchNorm2d(3)))
    assert [type(module) for module in network] == [Own, nn.BatchNorm1d, AccurateBatchNorm2d]
    accurate, plain = network[2], nn.BatchNorm2d(3)
    images = IMAGES.contiguous(memory_format=torch.channels_last)
    for _ in range(2):
        assert torch.equal(accurate(images), plain(images))  # running statistics are recorded
    assert torch.equal(accurate.running_var, plain.running_var)
    assert torch.equal(accurate.eval()(images), plain.eval()(images))
    assert torch.equal(accurate(IMAGES), plain(IMAGES))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        AccurateBatchNorm2d(3, track_running_stats=False)(images[:1, :, :1, :1])
