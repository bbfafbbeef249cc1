"""Hyperparameters as a mapping and a submodule, and functions of a module that leave it unchanged."""

import copy
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from obbo_lightning import Hyperparameters, OnSimplex, Positive
from obbo_lightning.networks.hyperparameters import FunctionalModule


def make():
    return Hyperparameters(decay=Positive(1 / 3), sources=OnSimplex(4))


def test_hyperparameters_are_a_mapping_that_is_compared_by_identity_as_modules_are():
    hyper = make()
    assert isinstance(hyper, Mapping)
    assert "decay" in hyper
    assert "momentum" not in hyper
    assert (list(hyper), len(hyper)) == (["decay", "sources"], 2)
    assert {name: value.shape for name, value in hyper.items()} == {"decay": (), "sources": (4,)}
    assert hyper.get("momentum") is None
    with pytest.raises(KeyError, match="hyper must be one of decay, sources, got 'momentum'"):
        hyper["momentum"]
    given = Hyperparameters({"decay": Positive(1 / 3), "sources": OnSimplex(4)})  # a mapping instead of keywords
    assert torch.equal(given.outer, hyper.outer)
    assert repr(given) == "Hyperparameters(decay=1, sources=4)"
    assert hyper != given
    assert len({hyper, given}) == 2
    assert nn.ModuleList([hyper]).to(torch.float64)[0] is hyper


def test_hyperparameters_are_saved_but_not_trained():
    hyper, other = make(), make()
    assert list(hyper.parameters()) == []
    other.outer += 0.5
    hyper.load_state_dict(other.state_dict())
    assert float(hyper["decay"]) == pytest.approx(1 / 3 + 0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_modules_keep_single_precision_hyperparameters(dtype):
    hyper = make().to(dtype)
    assert hyper.outer.dtype == torch.float32
    assert torch.equal(hyper.outer, make().outer)
    assert make().double().outer.dtype == torch.float64


def test_a_start_is_that_of_double_precision_and_learned_values_are_kept():
    hyper = Hyperparameters(decay=Positive(0.1), sources=OnSimplex(3))
    assert hyper["sources"].tolist() == torch.full((3,), 1 / 3).tolist()
    double = copy.deepcopy(hyper).double()
    assert (double["sources"].tolist(), float(double["decay"])) == ([1 / 3] * 3, 0.1)
    assert nn.ModuleList([copy.deepcopy(hyper)]).to("cpu", torch.float64)[0]["decay"] == 0.1
    assert copy.deepcopy(hyper).half().double()["sources"].tolist() == [1 / 3] * 3
    assert torch.equal(copy.deepcopy(double).float().outer, hyper.outer)
    hyper.outer += 1e-3
    learned = hyper.outer.clone()
    assert torch.equal(hyper.double().outer, learned.double())
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert Hyperparameters(sources=OnSimplex(3))["sources"].tolist() == [1 / 3] * 3
    finally:
        torch.set_default_dtype(before)


class Model(nn.Module):
    """Trained and frozen layers, dropout, batch norm in both modes, and hyperparameters in a submodule."""

    def __init__(self):
        super().__init__()
        self.trained, self.frozen = nn.Linear(2, 2), nn.Linear(2, 2)
        self.frozen.requires_grad_(False)
        self.dropout, self.norm, self.fixed_norm = nn.Dropout(0.5), nn.BatchNorm1d(2), nn.BatchNorm1d(2).eval()
        self.inside = nn.Module()
        self.inside.values = Hyperparameters(decay=Positive(1 / 3), rate=Positive(0.5))


def apply(module, function, *arguments, outer=None, seed=0, evaluating=False):
    functional = FunctionalModule(module)
    outer = functional.hyper.outer[0].clone() if outer is None else outer
    return functional.apply(outer, functional.flat(), function, *arguments, seed=seed, evaluating=evaluating)


def test_random_numbers_depend_on_the_seed_only_and_the_global_state_stays():
    torch.manual_seed(5)
    model, before = Model(), torch.get_rng_state()
    first, again, other = (float(apply(model, lambda *_: torch.rand(()), seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("evaluating", [False, True])
def test_dropout_is_off_and_modes_are_restored(evaluating):
    model = Model()
    before = [(name, module.training) for name, module in model.named_modules()]
    seen = apply(model, lambda m, hyper: {n: one.training for n, one in m.named_modules()}, evaluating=evaluating)
    assert (seen["dropout"], seen["norm"], seen["fixed_norm"]) == (False, not evaluating, False)
    assert [(name, module.training) for name, module in model.named_modules()] == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_state_is_copied_in_the_precision_of_the_outer_variable(dtype):
    model = Model().to(dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flat = FunctionalModule(model).flat()
    assert flat.shape == (2 * 2 + 2 + 2 + 2 + 2 + 2,)  # the trained layer and the two norms
    assert flat.dtype == torch.float32

    def write_to_buffers(module, hyper):
        values = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for buffer in module.buffers():
            if not buffer.requires_grad:
                buffer.add_(1)
        return {value.dtype for value in values.values() if value.is_floating_point()}

    assert apply(model, write_to_buffers) == {torch.float32}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_hyperparameters_are_lambda_as_argument_and_inside_the_module():
    def read(module, extra, hyper):
        return extra, float(hyper["decay"]), float(module.inside.values["decay"]), float(hyper["rate"])

    assert apply(Model(), read, "extra", outer=torch.tensor([0.25, 0.125])) == ("extra", 0.25, 0.25, 0.125)
