"""A module that somebody else trains: what functions of it see, and that it stays as it was."""

import pytest
import torch
from torch import nn

from obbo_lightning import Hyperparameters, Positive
from obbo_lightning.networks.live import LiveNetwork


class Model(nn.Module):
    """A part that learns, one that does not, noise, statistics, a part that is not trained, and λ somewhere inside."""

    def __init__(self):
        super().__init__()
        self.learns, self.frozen = nn.Linear(2, 2), nn.Linear(2, 2)
        self.frozen.requires_grad_(False)
        self.noise, self.norm, self.judged = nn.Dropout(0.5), nn.BatchNorm1d(2), nn.BatchNorm1d(2).eval()
        self.inside = nn.Module()
        self.inside.values = Hyperparameters(decay=Positive(1 / 3), rate=Positive(0.5))


def applied(live, function, *arguments, outer=None, seed=0, judging=False):
    outer = live.hyper.outer[0].clone() if outer is None else outer
    return live.apply(outer, live.flat(), function, *arguments, seed=seed, judging=judging)


def test_what_a_function_draws_is_the_same_for_a_seed_and_nobody_else_notices():
    live = LiveNetwork(Model())
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (float(applied(live, lambda *_: torch.rand(()), seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("judging", [False, True])
def test_noise_is_left_out_and_modules_have_the_mode_of_a_training_or_of_a_judgement(judging):
    model = Model()
    before = [(name, module.training) for name, module in model.named_modules()]
    seen = applied(
        LiveNetwork(model),
        lambda module, hyper: {name: one.training for name, one in module.named_modules()},
        judging=judging,
    )
    assert (seen["noise"], seen["norm"], seen["judged"]) == (False, not judging, False)
    assert [(name, module.training) for name, module in model.named_modules()] == before


def test_parameters_that_learn_are_the_vector_and_the_rest_are_copies_as_precise_as_the_outer_variable():
    model = Model().to(torch.bfloat16)
    live, before = LiveNetwork(model), {name: value.clone() for name, value in model.state_dict().items()}
    assert live.flat().shape == (2 * 2 + 2 + 2 + 2 + 2 + 2,)  # the linear layer, and the two norms
    assert live.flat().dtype == torch.float32

    def write(module, hyper):
        values = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for buffer in module.buffers():
            if not buffer.requires_grad:
                buffer.add_(1)
        return {value.dtype for value in values.values() if value.is_floating_point()}

    assert applied(live, write) == {torch.float32}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_values_are_those_that_are_asked_for_wherever_the_function_looks():
    outer = torch.tensor([0.25, 0.125])
    found = applied(
        LiveNetwork(Model()),
        lambda module, extra, hyper: (
            extra,
            float(hyper["decay"]),
            float(module.inside.values["decay"]),
            hyper["rate"],
        ),
        "extra",
        outer=outer,
    )
    assert found == ("extra", 0.25, 0.25, 0.125)


def test_values_of_a_module_that_is_made_half_keep_their_digits():
    hyper = Model().half().inside.values
    assert torch.equal(hyper.outer, torch.tensor([[1 / 3, 0.5]]))
    assert hyper.outer.dtype == torch.float32
    assert {name: float(value) for name, value in dict(hyper).items()} == {"decay": pytest.approx(1 / 3), "rate": 0.5}
