"""Classifier heads for another number of classes."""

from functools import partial

import pytest
import torch
from torch import nn

from obbo_lightning.networks import MLP
from obbo_lightning.networks.classifier_head import resize_classifier


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [2, 3, 7])
def test_classes_take_the_learned_rows_in_turn(dtype, classes):
    make = partial(MLP, ways=3, shape=[2], widths=[4])
    network = make().to(dtype)
    before = torch.get_rng_state()
    resized = resize_classifier(network, make, 3, classes).state_dict()
    assert torch.equal(torch.get_rng_state(), before)  # the global generator is unchanged
    rows = torch.arange(classes) % 3
    for name, learned in network.state_dict().items():
        assert resized[name].dtype == dtype
        assert torch.equal(resized[name], learned[rows] if len(learned) == 3 else learned), name


class Square(nn.Module):
    def __init__(self, ways=2):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ways, ways))


def test_networks_that_cannot_be_resized_are_refused():
    make = partial(Square, ways=2)
    with pytest.raises(ValueError, match=r"weight of the network is \[2, 2\], and with .* \[3, 3\]"):
        resize_classifier(make(), make, 2, 3)
    for other in (None, Square):
        with pytest.raises(ValueError, match="labels must be of 2 classes for a network whose class has no"):
            resize_classifier(make(), other, 2, 3)
