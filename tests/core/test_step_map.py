"""Maps of optimizers against real steps of torch, and hypergradients through them against central differences."""

import copy
import itertools
import math
import warnings

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, Adamax, AdamW, RMSprop
from toy import F64, FromLosses, normal

from obbo_lightning.core.memory import InnerState
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.step_map import SHORT, StepMap, step_map, unknown_optimizers
from obbo_lightning.hypergradients import ConjugateGradient, FixedPoint
from obbo_lightning.solvers import GradientDescent
from obbo_lightning.testing import central_difference

# without momentum of the gradients, so that one real step is one application of the map
PLAIN = {
    "sgd": (SGD, {}),
    "sgd decay": (SGD, {"weight_decay": 0.3}),
    "sgd maximize": (SGD, {"weight_decay": 0.3, "maximize": True}),
    "adam": (Adam, {"betas": (0.0, 0.9)}),
    "adam decay": (Adam, {"betas": (0.0, 0.9), "weight_decay": 0.3, "eps": 1e-2}),
    "adam decoupled": (Adam, {"betas": (0.0, 0.9), "weight_decay": 0.3, "decoupled_weight_decay": True}),
    "amsgrad": (Adam, {"betas": (0.0, 0.5), "amsgrad": True}),
    "adamw": (AdamW, {"betas": (0.0, 0.9), "weight_decay": 0.3}),
    "adamw maximize": (AdamW, {"betas": (0.0, 0.9), "weight_decay": 0.3, "maximize": True}),
    "rmsprop": (RMSprop, {"alpha": 0.8, "weight_decay": 0.3}),
    "rmsprop centered": (RMSprop, {"alpha": 0.8, "centered": True, "eps": 1e-3}),
    "adagrad": (Adagrad, {"weight_decay": 0.3, "lr_decay": 0.1}),
    "adagrad maximize": (Adagrad, {"weight_decay": 0.3, "maximize": True, "initial_accumulator_value": 0.2}),
}
MOMENTUM = {
    "sgd": (SGD, {"momentum": 0.7}),
    "sgd dampening": (SGD, {"momentum": 0.7, "dampening": 0.4}),
    "sgd nesterov": (SGD, {"momentum": 0.7, "nesterov": True}),
    "adam": (Adam, {"betas": (0.8, 0.9)}),
    "amsgrad": (Adam, {"betas": (0.8, 0.9), "amsgrad": True}),
    "rmsprop": (RMSprop, {"alpha": 0.8, "momentum": 0.7}),
    "rmsprop centered": (RMSprop, {"alpha": 0.8, "momentum": 0.7, "centered": True}),
}


def make(cls, options):
    """Return parameters by name, one of them frozen and two with settings of their own, and their optimizer."""
    parameters = {
        name: nn.Parameter(normal(6, seed=i)[: math.prod(shape)].reshape(shape))
        for i, (name, shape) in enumerate({"a": (2, 3), "b": (3,), "frozen": (2,), "c": ()}.items())
    }
    parameters["frozen"].requires_grad_(False)
    own = {"params": [parameters["c"], parameters["b"]], "lr": 0.1}
    if "weight_decay" in options:
        own["weight_decay"] = 0.7
    return parameters, cls([{"params": [parameters["a"], parameters["frozen"]]}, own], lr=0.05, **options)


def trained(parameters):
    return {name: p for name, p in parameters.items() if p.requires_grad}


def flat(parameters):
    return torch.cat([p.detach().flatten() for p in trained(parameters).values()]).clone()


def take_steps(parameters, optimizer, gradients):
    for gradient in gradients:
        pieces = gradient.split([p.numel() for p in trained(parameters).values()])
        for p, piece in zip(trained(parameters).values(), pieces, strict=True):
            p.grad = piece.view_as(p).clone()
        optimizer.step()


def after_steps(cls, options, steps=5):
    parameters, optimizer = make(cls, options)
    take_steps(parameters, optimizer, normal(steps, 10, seed=9))
    return parameters, optimizer


@pytest.mark.parametrize("steps", [1, 6])
@pytest.mark.parametrize(("cls", "options"), PLAIN.values(), ids=PLAIN)
def test_the_map_is_the_last_real_step(cls, options, steps):
    parameters, optimizer = make(cls, options)
    gradients = normal(steps, 10, seed=9)
    take_steps(parameters, optimizer, gradients[:-1])
    before = flat(parameters)
    take_steps(parameters, optimizer, gradients[-1:])
    found = step_map([optimizer], trained(parameters), F64)
    expected = before - found.size * (gradients[-1] + found.decay * before) - found.shrink * before
    assert torch.allclose(flat(parameters), expected, rtol=1e-12, atol=1e-14)


def freeze(optimizer):
    """Keep the averages of squared gradients as they are, with their corrections for the first steps done."""
    for group in optimizer.param_groups:
        if "alpha" in group:
            group["alpha"] = 1.0
        if "betas" in group:
            group["betas"] = (group["betas"][0], 1 - 1e-15)
            for p in group["params"]:
                if p.requires_grad:
                    state, step = optimizer.state[p], 1e18
                    for name in ("exp_avg_sq", "max_exp_avg_sq"):
                        if name in state:
                            state[name] /= 1 - 0.9 ** float(state["step"])
                    state["step"].fill_(step)


@pytest.mark.parametrize(("cls", "options"), MOMENTUM.values(), ids=MOMENTUM)
def test_a_gradient_moves_by_the_effective_step_in_all(cls, options):
    parameters, optimizer = after_steps(cls, options)
    found = step_map([optimizer], trained(parameters), F64)
    freeze(optimizer)
    ends = []
    impulse = 1e-3 * normal(10, seed=4)
    for first in (impulse, -impulse):
        pair = copy.deepcopy((parameters, optimizer.state_dict()))
        again, other = make(cls, options)
        for name, p in pair[0].items():
            again[name].data.copy_(p)
        other.load_state_dict(pair[1])
        quiet = torch.zeros(200, 10, dtype=F64)
        quiet[0] = first
        take_steps(again, other, quiet)
        ends.append(flat(again))
    assert torch.allclose((ends[1] - ends[0]) / 2, found.size * impulse, rtol=1e-6)


def test_before_there_is_a_state_and_where_no_gradient_was_seen_p_is_one():
    for cls in (Adam, AdamW, RMSprop, Adagrad):
        parameters, optimizer = make(cls, {})
        before = step_map([optimizer], trained(parameters), F64).size
        assert torch.equal(before, torch.tensor([0.05] * 6 + [0.1] * 4, dtype=F64)), cls
        gradients = normal(3, 10, seed=9)
        gradients[:, 2] = 0
        take_steps(parameters, optimizer, gradients)
        after = step_map([optimizer], trained(parameters), F64).size
        assert float(after[2]) == 0.05
        assert not torch.isclose(after, before)[torch.arange(10) != 2].any()


def test_settings_of_groups_are_in_the_order_of_the_parameters_and_in_their_precision():
    parameters, optimizer = make(SGD, {"weight_decay": 0.3, "momentum": 0.5})
    found = step_map([optimizer], trained(parameters), F64)
    assert found.size.tolist() == [0.05 / 0.5] * 6 + [0.1 / 0.5] * 4
    assert found.decay.tolist() == [0.3] * 6 + [0.7] * 4
    assert found.shrink == 0.0
    first, second = SGD([parameters["a"]], lr=0.1), AdamW([parameters["b"]], lr=torch.tensor(0.5), weight_decay=0.5)
    both = step_map([first, second], trained(parameters), F64)  # c is not trained
    assert both.size.tolist() == [0.1] * 6 + [0.5] * 3 + [0.0]
    assert both.shrink.tolist() == [0.0] * 6 + [0.25] * 3 + [0.0]
    assert step_map([first], {"a": parameters["a"]}, F64) == StepMap(0.1)


def test_an_unknown_optimizer_is_used_as_gradient_descent_and_named():
    parameters, _ = make(SGD, {})
    given = list(trained(parameters).values())
    unknown = Adamax(given, lr=0.1, weight_decay=0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert step_map([unknown], trained(parameters), F64) == StepMap(0.1, 0.2)
        assert step_map([LBFGS(given)], trained(parameters), F64) == StepMap(1.0)
        del unknown.param_groups[0]["lr"]
        assert step_map([unknown], trained(parameters), F64).size == SHORT
    assert unknown_optimizers([unknown, LBFGS(given), Adam(given), SGD(given)]) == ["Adamax", "LBFGS"]


HESSIAN = normal(10, 10, seed=1) @ normal(10, 10, seed=1).T / 40 + torch.eye(10, dtype=F64) / 5
COUPLING, SLOPE = normal(10, 2, seed=2), normal(10, seed=3)
OUTER = torch.tensor([[0.4, -0.3]], dtype=F64)
# g is quadratic in β and f linear, so that derivatives at β are those at every application of the map
PROBLEM = FromLosses(
    lambda outer, inner: (0.5 * (inner @ HESSIAN * inner) - outer.sin() @ COUPLING.T * inner).sum(-1),
    lambda outer, inner: inner @ SLOPE + outer.square().sum(-1),
)


class Still(GradientDescent):
    """Inner variable that stays where it is, with the map of an optimizer."""

    step_map = None

    def __init__(self, found):
        object.__setattr__(self, "step_map", found)

    def __call__(self, oracle, previous):
        return previous


def hypergradient(estimator, found, inner):
    return estimator(Oracle(PROBLEM, OUTER, {}), Still(found), InnerState(inner)).value


@pytest.mark.parametrize("steps", [1, 2, 6])
@pytest.mark.parametrize(("cls", "options"), [*PLAIN.values(), *MOMENTUM.values()], ids=[*PLAIN, *map(str, MOMENTUM)])
def test_the_fixed_point_is_that_of_central_differences_of_applications_of_the_map(cls, options, steps):
    parameters, optimizer = after_steps(cls, options)
    found = step_map([optimizer], trained(parameters), F64)
    inner = flat(parameters).unsqueeze(0)

    def through(outer):
        beta = inner
        for _ in range(steps):
            gradient = beta @ HESSIAN - outer.sin() @ COUPLING.T
            beta = beta - found.size * (gradient + found.decay * beta) - found.shrink * beta
        return PROBLEM.outer_loss(outer, beta, {})

    expected = central_difference(through, OUTER)
    assert (hypergradient(FixedPoint(steps), found, inner) - expected).abs().max() <= 1e-8 * expected.abs().max()


@pytest.mark.parametrize("name", ["sgd", "sgd decay", "adam decay", "adamw", "rmsprop"])
def test_conjugate_gradients_are_at_the_fixed_point_of_training_with_its_decay(name):
    cls, options = PLAIN[name]
    parameters, optimizer = after_steps(cls, options)
    optimizer.param_groups[1]["params"].pop(0)  # c is not trained
    found = step_map([optimizer], trained(parameters), F64)
    moves, inner = found.size != 0, flat(parameters).unsqueeze(0)
    # 0 = ∇g(β) + (wd + δ P/η) β in the coordinates that are trained
    decay = torch.as_tensor(found.decay + found.shrink / torch.as_tensor(found.size)).expand(10)[moves]

    def through(outer):
        right = outer.sin() @ COUPLING.T - inner[:, ~moves] @ HESSIAN[~moves]
        solution = inner.expand(len(outer), -1).clone()
        solution[:, moves] = torch.linalg.solve(HESSIAN[moves][:, moves] + torch.diag(decay), right[:, moves].T).T
        return PROBLEM.outer_loss(outer, solution, {})

    expected = central_difference(through, OUTER)
    assert int(moves.sum()) == 9
    assert (hypergradient(ConjugateGradient(20), found, inner) - expected).abs().max() <= 1e-8
    if name != "rmsprop":  # which contracts slowly
        assert (hypergradient(FixedPoint(2000), found, inner) - expected).abs().max() <= 1e-6
    warm = InnerState(inner, normal(1, 10, seed=8))
    again = ConjugateGradient(20, warm_start=True)(Oracle(PROBLEM, OUTER, {}), Still(found), warm)
    assert (again.value - expected).abs().max() <= 1e-8


def test_conjugate_gradients_refuse_an_optimizer_that_maximizes():
    for size in (-0.1, torch.tensor([0.1] * 9 + [-0.1], dtype=F64)):
        with pytest.raises(ValueError, match="'ConjugateGradient' needs an optimizer that minimizes, got maximize"):
            hypergradient(ConjugateGradient(5), StepMap(size), normal(1, 10))


def test_a_fixed_point_that_does_not_contract_stops_in_time_and_reports_its_residual():
    def estimate(steps, size, stops=False):
        solver, state = Still(StepMap(size)), InnerState(normal(1, 10))
        return FixedPoint(steps, while_contracting=stops)(Oracle(PROBLEM, OUTER, {}), solver, state)

    contracting, growing = estimate(9, 0.1, stops=True), estimate(9, 3.0, stops=True)
    assert torch.equal(contracting.value, estimate(9, 0.1).value)
    assert float(contracting.residual) < 1
    residuals = [float(estimate(steps, 3.0).residual) for steps in range(1, 10)]
    last = next(i for i, (a, b) in enumerate(itertools.pairwise(residuals)) if b > a)
    assert last < 5
    assert torch.equal(growing.value, estimate(last + 1, 3.0).value)
    assert float(growing.residual) == residuals[last + 1]
    bent = FromLosses(
        lambda outer, inner: (outer * inner).sum(-1) + (inner.abs() ** 1.5).sum(-1), lambda o, i: i.sum(-1)
    )
    zero = torch.zeros(1, 2, dtype=F64)  # where the Hessian is infinite
    found = FixedPoint(3, while_contracting=True)(Oracle(bent, zero, {}), Still(StepMap(0.1)), InnerState(zero))
    assert found.value.tolist() == [[-0.1, -0.1]]
    assert not float(found.residual) < 1
