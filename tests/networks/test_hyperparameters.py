"""Hyperparameters: a mapping of tensors, and a submodule that is saved but not trained."""

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from obbo_lightning import Hyperparameters, OnSimplex, Positive


def make():
    return Hyperparameters(decay=Positive(1 / 3), sources=OnSimplex(4))


def test_is_a_mapping():
    hyper = make()
    assert isinstance(hyper, Mapping)
    assert "decay" in hyper
    assert "momentum" not in hyper
    assert (list(hyper), len(hyper)) == (["decay", "sources"], 2)
    assert {name: value.shape for name, value in hyper.items()} == {"decay": (), "sources": (4,)}
    assert hyper.get("momentum") is None
    with pytest.raises(KeyError, match="hyper must be one of decay, sources, got 'momentum'"):
        hyper["momentum"]


def test_groups_are_given_as_mapping_or_keywords():
    given = Hyperparameters({"decay": Positive(1 / 3), "sources": OnSimplex(4)})
    assert torch.equal(given.outer, make().outer)
    assert repr(given) == "Hyperparameters(decay=1, sources=4)"


def test_is_compared_by_identity_as_modules_are():
    hyper = make()
    assert hyper != make()
    assert len({hyper, make()}) == 2
    assert nn.ModuleList([hyper]).to(torch.float64)[0] is hyper


def test_is_saved_but_not_trained():
    hyper = make()
    assert list(hyper.parameters()) == []
    other = make()
    other.outer += 0.5
    hyper.load_state_dict(other.state_dict())
    assert float(hyper["decay"]) == pytest.approx(1 / 3 + 0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_modules_keep_single_precision_hyperparameters(dtype):
    hyper = make().to(dtype)
    assert hyper.outer.dtype == torch.float32
    assert torch.equal(hyper.outer, make().outer)
    assert make().double().outer.dtype == torch.float64
