"""Parameter groups of λ: their joint step against SciPy, whose setting is used, names, and refusals."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from toy import F64, example_groups

from obbo_lightning import OAGD, OBBO, SOBBO, SOBOW, Adam, Interval, OnSimplex, OuterStep, Positive, Real
from obbo_lightning.config.serialization import from_config, to_config
from obbo_lightning.core.parameter_groups import ParameterGroup, ParameterGroups, resolve_groups
from obbo_lightning.core.step_size import DEFAULT_SCALE
from obbo_lightning.domains import Box, L2Ball, RealSpace, Simplex
from obbo_lightning.geometry import AdaptiveDiagonal, Burg, Euclidean, NegativeEntropy
from obbo_lightning.regularizers import L1, ElasticNet, NoRegularizer, SquaredL2

MIXES = {
    "plain": ParameterGroups(
        decay=Positive(0.7, lr=0.2), sources=OnSimplex(3, lr=0.5), smoothing=Interval(0.0, 0.3, lr=0.05)
    ),
    "all regularized": ParameterGroups(
        decay=Positive([0.7, 0.2], regularizer=L1(0.4), lr=0.2),
        sources=OnSimplex(3, [0.2, 0.3, 0.5], geometry=Euclidean(), regularizer=SquaredL2(0.8), lr=0.5),
        smoothing=Interval(-0.2, 0.3, size=2, regularizer=ElasticNet(0.3, 0.5), lr=0.05),
    ),
    "Burg and a simplex": ParameterGroups(
        decay=Positive(0.7, upper=2.0, geometry=Burg(), regularizer=ElasticNet(0.1, 0.6), lr=0.2),
        sources=OnSimplex(4, lr=0.5),
        init=Real([0.3, -0.4], regularizer=L1(0.2), lr=0.3),
    ),
    "adaptive": ParameterGroups(
        init=Real([0.3, -0.4, 0.1], geometry=AdaptiveDiagonal(), regularizer=SquaredL2(0.3), lr=0.3),
        sources=OnSimplex(3, lr=0.5),
    ),
}


def phi(geometry, x, q):
    """Return φ(x) and ∇φ(x) of the first round."""
    if isinstance(geometry, AdaptiveDiagonal):
        h = np.sqrt(0.1 * q**2) + 1e-8
        return 0.5 * x @ (h * x), h * x
    if isinstance(geometry, Euclidean):
        return 0.5 * x @ x, x
    if isinstance(geometry, Burg):
        return -np.log(x).sum(), -1 / x
    return (x * np.log(x) - x).sum(), np.log(x)


def joint_objective(groups, start, q):
    """Return the function ⟨q, x⟩ + Σ_b h_b(x_b) + D_b(x_b, λ_b)/α_b and its gradient."""

    def value(x):
        total, gradient = q @ x, q.copy()
        for name, where in groups.slices.items():
            group, lam, y = groups.named[name], start[where], x[where]
            h, alpha = group.regularizer, group.lr
            (at_y, slope_y), (at_lam, slope_lam) = (phi(group.geometry, z, q[where]) for z in (y, lam))
            total += (at_y - at_lam - slope_lam @ (y - lam)) / alpha + 0.5 * h.l2 * y @ y + h.l1 * np.abs(y).sum()
            gradient[where] += (slope_y - slope_lam) / alpha + h.l2 * y + h.l1 * np.sign(y)
        return total, gradient

    return value


def scipy_minimiser(groups, start, q):
    bounds, constraints = [], []
    for name, where in groups.slices.items():
        domain, size = groups.named[name].domain, groups.named[name].size
        if isinstance(domain, Simplex):
            bounds += [(1e-9, 1)] * size
            rows = np.zeros(groups.size)
            rows[where] = 1
            constraints.append({"type": "eq", "fun": lambda x, r=rows: r @ x - 1, "jac": lambda x, r=rows: r})
        elif isinstance(domain, Box):
            bounds += [(max(domain.lower, 1e-9 if name == "decay" else -9), min(domain.upper, 9))] * size
        else:
            bounds += [(-9, 9)] * size
    objective = joint_objective(groups, start, q)
    options = {"ftol": 1e-16, "maxiter": 1000}
    return minimize(objective, start, jac=True, bounds=bounds, constraints=constraints, method="SLSQP", options=options)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("size", [0.1, 1.0, 4.0])
def test_the_step_of_all_groups_is_scipys_joint_minimiser(mix, size):
    groups = MIXES[mix]
    q = size * np.random.default_rng(3).standard_normal(groups.size)
    outer = torch.nn.Parameter(groups.start(dtype=F64))
    start = outer.detach()[0].numpy().copy()
    outer.grad = torch.tensor(q).unsqueeze(0)
    optimizer = OBBO().optimizer(outer, groups)
    optimizer.step()
    x = outer.detach()[0].numpy()
    found, objective = scipy_minimiser(groups, start, q), joint_objective(groups, start, q)
    assert objective(x)[0] <= found.fun + 1e-12
    np.testing.assert_allclose(x, found.x, atol=1e-8)
    assert objective(start)[0] > found.fun + 1e-4
    generalized = optimizer.generalized_gradient(torch.tensor(start).unsqueeze(0), outer)[0].numpy()
    for name, where in groups.slices.items():
        assert generalized[where] == pytest.approx((start[where] - x[where]) / groups.named[name].lr)


def test_views_of_groups_are_differentiable_and_coordinates_have_their_names():
    groups = example_groups()
    outer = groups.start(lanes=2, dtype=F64).requires_grad_()
    views = groups.split(outer)
    shapes = {name: tuple(view.shape) for name, view in views.items()}
    assert shapes == {"decay": (2, 1), "sources": (2, 3), "smoothing": (2, 1), "init": (2, 2)}
    (views["sources"][:, 1] * 2 + views["smoothing"][:, 0]).sum().backward()
    assert outer.grad.tolist() == [[0, 0, 2, 0, 1, 0, 0]] * 2
    names = ["decay", "sources[0]", "sources[1]", "sources[2]", "smoothing", "init[0]", "init[1]"]
    assert groups.coordinates() == {name: i for i, name in enumerate(names)}
    assert outer[0].tolist() == pytest.approx([0.01, 1 / 3, 1 / 3, 1 / 3, 0.15, 0.5, -0.5])
    values = groups.values(outer[0])
    assert (values["decay"].shape, values["sources"].shape) == ((), (3,))  # one number has no axis


def test_groups_are_restored_from_their_config():
    groups = MIXES["all regularized"]
    for given in (groups, ParameterGroups(groups.named)):
        again = from_config(to_config(given))
        assert torch.equal(again.start(), groups.start())
        assert again.named["smoothing"].regularizer == ElasticNet(0.3, 0.5)
        assert again.slices == groups.slices


def run_steps(algorithm, groups=None, rounds=4, size=1.0):
    """Return the outer step after some random hypergradients, and its updates."""
    groups = groups or example_groups()
    generator = torch.Generator().manual_seed(0)
    step = OuterStep(torch.nn.Parameter(groups.start(lanes=2, dtype=F64)), algorithm, 3, groups=groups)
    shape = (1, 2, groups.size)
    return step, [step(size * torch.randn(shape, generator=generator, dtype=F64)) for _ in range(rounds)]


@pytest.mark.parametrize("cls", [OBBO, SOBBO, SOBOW, OAGD, Adam])
@pytest.mark.parametrize("size", [1.0, 1e6])
def test_every_algorithm_moves_each_group_and_stays_in_its_domain(cls, size):
    groups = example_groups()
    _, updates = run_steps(cls(), groups, size=size)
    for name, view in groups.split(updates[-1].outer).items():
        assert groups.named[name].domain.contains(view).all(), name
        assert (view != groups.split(groups.start(dtype=F64))[name]).any(), name
    assert set(updates[-1].step_metrics) >= {f"lr/{name}" for name in groups.named}


OWN = {"geometry": NegativeEntropy(), "regularizer": L1(0.1), "domain": Box(0.1, 9.0), "lr": 0.3}
OTHER = {"geometry": Euclidean(), "regularizer": SquaredL2(0.2), "domain": RealSpace(), "lr": 0.4, "scale": 0.5}
OVERRIDE = {"geometry": AdaptiveDiagonal(), "regularizer": L1(0.7), "domain": L2Ball(8.0), "lr": 0.6, "scale": 0.8}


@pytest.mark.parametrize("key", OTHER)
def test_a_setting_is_the_users_override_else_the_algorithms_else_the_groups(key):
    own = ParameterGroup(torch.ones(2), **OWN)
    groups = ParameterGroups(a=own, b=own)
    # Both settings come together with a geometry and a domain that fit every combination.
    fitting = {"geometry": Euclidean(), "domain": RealSpace()}
    algorithm, override = fitting | {key: OTHER[key]}, fitting | {key: OVERRIDE[key]}
    a, b = resolve_groups(groups, own, algorithm, {"b": override})
    assert (getattr(a, key), getattr(b, key)) == (OTHER[key], OVERRIDE[key])
    a, b = resolve_groups(groups, own, {key: None}, {"b": {key: None}})  # None leaves a setting open
    assert getattr(a, key) == getattr(b, key) == {**OWN, "scale": DEFAULT_SCALE}[key]
    (alone,) = resolve_groups(None, own, algorithm, None)
    assert (alone.name, getattr(alone, key)) == ("", OTHER[key])
    assert [(g.name, g.where) for g in (a, b)] == [("a", slice(0, 2)), ("b", slice(2, 4))]
    assert (own.name, own.lr, own.geometry) == ("", 0.3, NegativeEntropy())  # resolving copies


def test_algorithms_take_the_groups_geometry_their_own_or_the_users():
    steps = {cls: run_steps(cls())[0] for cls in (OBBO, SOBBO, SOBOW, OAGD)}
    used = {cls: [type(group.geometry) for group in step.optimizer.groups] for cls, step in steps.items()}
    assert used[OBBO] == used[SOBBO] == [NegativeEntropy, NegativeEntropy, Euclidean, Euclidean]
    assert used[SOBOW] == used[OAGD] == [Euclidean] * 4
    everywhere = run_steps(OBBO(geometry=Euclidean(), lr=0.1))[0].optimizer.groups
    assert {type(group.geometry) for group in everywhere} == {Euclidean}
    assert [group.domain for group in everywhere] == [group.domain for group in example_groups().named.values()]
    assert [group.lr for group in everywhere] == [0.1] * 4
    overrides = {
        "sources": {"geometry": Euclidean(), "lr": 0.5},
        "decay": {"geometry": Burg(), "scale": 2.0, "domain": Box(0.0, 1.0)},
    }
    found = {group.name: group for group in run_steps(OBBO(groups=overrides))[0].optimizer.groups}
    assert (type(found["sources"].geometry), found["sources"].lr) == (Euclidean, 0.5)
    assert (found["decay"].geometry, found["decay"].domain, found["decay"].scale) == (Burg(), Box(0.0, 1.0), 2.0)
    assert (found["smoothing"].lr, found["smoothing"].scale) == ("auto", DEFAULT_SCALE)


def test_regrets_and_generalized_gradients_of_the_groups_add_up_to_the_total():
    groups = example_groups()
    _, updates = run_steps(OBBO(window=2), groups)
    for update in updates:
        for kind in ("euclidean", "generalized"):
            total = sum(update.regret[f"{kind}/{name}"] for name in groups.named)
            assert torch.allclose(total, update.regret[kind], rtol=1e-12)
        squares = sum(update.step_metrics[f"generalized_norm/{name}"].square() for name in groups.named)
        assert torch.allclose(squares, update.generalized_gradient.square().sum(-1), rtol=1e-12)
        assert update.regret["exact"] is update.regret["exact/decay"] is None
    # the regret of one group from its definition: (1/3) Σ of the last three hypergradients
    vectors = torch.stack([torch.zeros_like(updates[0].hypergradient)] * 2 + [u.hypergradient for u in updates])
    means = torch.stack([vectors[t : t + 3].mean(0) for t in range(4)])[..., groups.slices["sources"]]
    assert torch.allclose(updates[-1].regret["euclidean/sources"], means.square().sum((0, -1)), rtol=1e-12)


def test_a_single_group_is_reported_as_a_lambda_without_groups():
    groups = ParameterGroups(sources=OnSimplex(3, lr=0.1))
    _, updates = run_steps(OBBO(), groups)
    assert list(updates[0].regret) == ["euclidean", "generalized", "exact", "geometry"]
    assert list(updates[0].step_metrics) == ["held_out_gain/sources"]
    plain = OBBO(lr=0.1, geometry=NegativeEntropy(), domain=Simplex())
    step = OuterStep(torch.nn.Parameter(groups.start(lanes=2, dtype=F64)), plain, 3)
    generator = torch.Generator().manual_seed(0)
    for update in updates:
        alone = step(torch.randn((1, 2, 3), generator=generator, dtype=F64))
        assert torch.equal(alone.outer, update.outer)
        assert torch.equal(alone.generalized_gradient, update.generalized_gradient)
        assert torch.equal(alone.regret["generalized"], update.regret["generalized"])


def test_defaults_are_those_of_the_kind_of_number():
    kinds = {"decay": Positive(), "sources": OnSimplex(4), "smoothing": Interval(0.0, 0.3), "init": Real()}
    assert [type(group.geometry) for group in kinds.values()] == [NegativeEntropy] * 2 + [Euclidean] * 2
    assert {(group.lr, type(group.regularizer)) for group in kinds.values()} == {("auto", NoRegularizer)}
    assert kinds["decay"].domain == Box(1e-3, 1e3)
    assert [group.start().tolist() for group in kinds.values()] == [[1.0], [0.25] * 4, [0.15], [0.0]]


def test_positive_numbers_have_bounds_around_their_start_that_can_be_changed():
    tiny = float(torch.finfo(torch.float32).tiny)
    cases = [
        (Positive(0.5), 0.0005, 500.0),
        (Positive([0.1, 10.0]), 1e-4, 1e4),
        (Positive(0.5, lower=0.0), tiny, 500.0),
        (Positive(0.5, lower=0.1), 0.1, 500.0),
        (Positive(0.5, upper=1.0), 0.0005, 1.0),
        (Positive(0.5, lower=0.0, upper=math.inf), tiny, math.inf),
        (Positive(0.5, lower=0.5, upper=0.7), 0.5, 0.7),
        (Positive(1e-37), tiny, 1e-34),
    ]
    for group, lower, upper in cases:
        assert (group.domain.lower, group.domain.upper) == pytest.approx((lower, upper))
    assert Positive(0.5, domain=Box(0.1, 0.9)).domain == Box(0.1, 0.9)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_starts_are_rounded_once_to_the_dtype_of_lambda_and_lie_in_their_domains(dtype):
    third, tenth = torch.tensor([1 / 3, 0.1], dtype=F64).to(dtype).tolist()
    groups = ParameterGroups(
        sources=OnSimplex(3), decay=Positive(0.1, lower=0.1), smoothing=Interval(0.0, 0.1, start=0.1), other=Real(1 / 3)
    )
    outer = groups.start(dtype=dtype)
    assert outer[0].tolist() == [third] * 3 + [tenth] * 2 + [third]
    for name, values in groups.split(outer).items():
        assert groups.named[name].domain.contains(values).all(), name
