"""λ of named blocks: its step is the joint minimiser, and everything else sees one tensor."""

import functools
import re

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from toy import F64

from obbo_lightning import (
    L1,
    OAGD,
    OBBO,
    SOBBO,
    SOBOW,
    Adam,
    AdaptiveDiagonal,
    Algorithm,
    Blocks,
    Box,
    BregmanProx,
    BregmanRule,
    Burg,
    ElasticNet,
    Euclidean,
    FixedPoint,
    GradientDescent,
    Interval,
    NegativeEntropy,
    NoMemory,
    OnSimplex,
    OuterStep,
    Positive,
    Real,
    Simplex,
    SquaredL2,
    Weights,
)
from obbo_lightning.core.recipes import make_again, recipe_of

LR = {"decay": 0.2, "sources": 0.5, "smoothing": 0.05, "init": 0.3}
MIXES = {
    "plain": Blocks(decay=Positive(0.7, lr=0.2), sources=OnSimplex(3, lr=0.5), smoothing=Interval(0.0, 0.3, lr=0.05)),
    "h on all": Blocks(
        decay=Positive([0.7, 0.2], regularizer=L1(0.4), lr=0.2),
        sources=OnSimplex(3, [0.2, 0.3, 0.5], geometry=Euclidean(), regularizer=SquaredL2(0.8), lr=0.5),
        smoothing=Interval(-0.2, 0.3, size=2, regularizer=ElasticNet(0.3, 0.5), lr=0.05),
    ),
    "burg and a second simplex": Blocks(
        decay=Positive(0.7, upper=2.0, geometry=Burg(), regularizer=ElasticNet(0.1, 0.6), lr=0.2),
        sources=OnSimplex(4, lr=0.5),
        init=Real([0.3, -0.4], regularizer=L1(0.2), lr=0.3),
    ),
    "an adaptive block": Blocks(
        init=Real([0.3, -0.4, 0.1], geometry=AdaptiveDiagonal(), regularizer=SquaredL2(0.3), lr=0.3),
        sources=OnSimplex(3, lr=0.5),
    ),
}


def phi(geometry, x, q):
    if isinstance(geometry, AdaptiveDiagonal):  # of the first round
        h = np.sqrt(0.1 * q**2) + 1e-8
        return 0.5 * x @ (h * x), h * x
    if isinstance(geometry, Euclidean):
        return 0.5 * x @ x, x
    if isinstance(geometry, Burg):
        return -np.log(x).sum(), -1 / x
    return (x * np.log(x) - x).sum(), np.log(x)


def joint_objective(blocks, start, q):
    """⟨q, x⟩ + Σ_b h_b(x_b) + D_b(x_b, λ_b)/α_b, with its gradient."""

    def value(x):
        total, gradient = q @ x, q.copy()
        for name, where in blocks.slices.items():
            block, lam, y = blocks.named[name], start[where], x[where]
            h, alpha = block.regularizer, LR[name]
            (at_y, slope_y), (at_lam, slope_lam) = (phi(block.geometry, z, q[where]) for z in (y, lam))
            total += (at_y - at_lam - slope_lam @ (y - lam)) / alpha + 0.5 * h.l2 * y @ y + h.l1 * np.abs(y).sum()
            gradient[where] += (slope_y - slope_lam) / alpha + h.l2 * y + h.l1 * np.sign(y)
        return total, gradient

    return value


def scipy_minimiser(blocks, start, q, guess):
    bounds, constraints = [], []
    for name, where in blocks.slices.items():
        domain, size = blocks.named[name].domain, blocks.named[name].size
        if isinstance(domain, Simplex):
            bounds += [(1e-9, 1)] * size
            rows = np.zeros(blocks.size)
            rows[where] = 1
            constraints.append({"type": "eq", "fun": lambda x, r=rows: r @ x - 1, "jac": lambda x, r=rows: r})
        elif isinstance(domain, Box):
            bounds += [(max(domain.lower, 1e-9 if name == "decay" else -9), min(domain.upper, 9))] * size
        else:
            bounds += [(-9, 9)] * size
    objective = joint_objective(blocks, start, q)
    options = {"ftol": 1e-16, "maxiter": 1000}
    return minimize(objective, guess, jac=True, bounds=bounds, constraints=constraints, method="SLSQP", options=options)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("size", [0.1, 1.0, 4.0])
def test_the_step_of_blocks_is_scipys_joint_minimiser(mix, size):
    blocks, generator = MIXES[mix], np.random.default_rng(3)
    q = size * generator.standard_normal(blocks.size)
    outer = torch.nn.Parameter(blocks.start(dtype=F64))
    start = outer.detach()[0].numpy().copy()
    outer.grad = torch.tensor(q).unsqueeze(0)
    optimizer = BregmanRule()(outer, blocks)
    optimizer.step()
    x = outer.detach()[0].numpy()
    found = scipy_minimiser(blocks, start, q, start)
    value = joint_objective(blocks, start, q)
    assert value(x)[0] <= found.fun + 1e-12
    np.testing.assert_allclose(x, found.x, atol=1e-8)
    assert kkt_residual(blocks, value(x)[1], x) < 1e-8
    assert optimizer.generalized(torch.tensor(start).unsqueeze(0), outer)[0].numpy() == pytest.approx(
        np.concatenate([(start[w] - x[w]) / LR[name] for name, w in blocks.slices.items()])
    )


def kkt_residual(blocks, gradient, x):
    """How far −∇ of the joint objective is from the normal cone of X₁ × X₂ × …"""
    worst = 0.0
    for name, where in blocks.slices.items():
        domain, y, g = blocks.named[name].domain, x[where], gradient[where].copy()
        low, high = -np.inf, np.inf
        if isinstance(domain, Simplex):
            low = 0.0
            g -= g[y > 0].mean()  # Σ y = 1 has one multiplier
        elif isinstance(domain, Box):
            low, high = domain.lower, domain.upper
        l1 = blocks.named[name].regularizer.l1
        kink = np.maximum(np.abs(g) - l1, 0) * (y == 0)  # ∂|y| is all of [−1, 1] there
        g = np.where((y == 0) & (l1 > 0), kink, g)
        g = np.where(y <= low, np.minimum(g, 0), np.where(y >= high, np.maximum(g, 0), g))
        worst = max(worst, np.abs(g).max())
    return worst


def test_the_conditions_notice_a_step_that_is_off():
    blocks = MIXES["plain"]
    start = blocks.start(dtype=F64)[0].numpy()
    slope = joint_objective(blocks, start, np.ones(5))(start)[1]
    assert kkt_residual(blocks, slope, start) > 0.1


def hyper():
    return Blocks(decay=Positive(1e-2), sources=OnSimplex(3), smoothing=Interval(0.0, 0.3), init=Real([0.5, -0.5]))


def test_views_can_be_differentiated_and_names_are_those_of_the_blocks():
    blocks = hyper()
    outer = blocks.start(lanes=2, dtype=F64).requires_grad_()
    views = blocks.split(outer)
    assert {name: tuple(view.shape) for name, view in views.items()} == {
        "decay": (2, 1),
        "sources": (2, 3),
        "smoothing": (2, 1),
        "init": (2, 2),
    }
    (views["sources"][:, 1] * 2 + views["smoothing"][:, 0]).sum().backward()
    assert outer.grad.tolist() == [[0, 0, 2, 0, 1, 0, 0]] * 2
    assert blocks.coordinates() == {
        "decay": 0,
        **{f"sources[{i}]": 1 + i for i in range(3)},
        "smoothing": 4,
        "init[0]": 5,
        "init[1]": 6,
    }
    assert outer[0].tolist() == pytest.approx([0.01, 1 / 3, 1 / 3, 1 / 3, 0.15, 0.5, -0.5])
    with pytest.raises(ValueError, match=r"outer must have the 7 coordinates .*sources 3.*, got 6"):
        blocks.split(outer[:, 1:])


def test_weights_of_a_network_start_as_its_own_and_have_no_names():
    network = torch.nn.Linear(3, 2)
    blocks = Blocks({"decay": Positive(1e-2), "init": Weights(network)})
    flat = torch.cat([p.flatten() for p in network.parameters()])
    assert torch.equal(blocks.split(blocks.start())["init"][0], flat)
    assert list(blocks.coordinates()) == ["decay"]
    drawn = Blocks(init=Weights(functools.partial(torch.nn.Linear, 3, 2)))
    assert torch.equal(drawn.start(5), drawn.start(5))
    assert not torch.equal(drawn.start(5), drawn.start(6))


def test_blocks_are_made_again_from_their_recipe():
    blocks = MIXES["h on all"]
    for made in (blocks, Blocks(blocks.named)):
        again = make_again(recipe_of(made))
        assert torch.equal(again.start(), blocks.start())
        assert again.named["smoothing"].regularizer == ElasticNet(0.3, 0.5)
        assert again.slices == blocks.slices


def stepped(algorithm, blocks=None, rounds=4, size=1.0):
    blocks = blocks or hyper()
    generator = torch.Generator().manual_seed(0)
    step = OuterStep(torch.nn.Parameter(blocks.start(lanes=2, dtype=F64)), algorithm, 3, blocks=blocks)
    shape = (1, 2, blocks.size)
    records = [step(size * torch.randn(shape, generator=generator, dtype=F64)) for _ in range(rounds)]
    return step, records


@pytest.mark.parametrize("cls", [OBBO, SOBBO, SOBOW, OAGD, Adam])
def test_every_algorithm_steps_on_blocks_and_stays_in_their_domains(cls):
    blocks = hyper()
    for size in (1.0, 1e6):
        _, records = stepped(cls(), blocks, size=size)
        for name, view in blocks.split(records[-1].outer).items():
            assert blocks.named[name].domain.contains(view).all(), name
            assert (view != blocks.split(blocks.start(dtype=F64))[name]).any(), name
        assert set(records[-1].numbers) >= {f"lr/{name}" for name in blocks.named}


def test_euclidean_methods_take_euclidean_steps_on_each_domain_and_obbo_the_blocks_own():
    blocks = hyper()
    kinds = {cls: [type(b.geometry) for b in stepped(cls())[0].optimizer.blocks] for cls in (OBBO, SOBBO, SOBOW, OAGD)}
    assert kinds[OBBO] == kinds[SOBBO] == [NegativeEntropy, NegativeEntropy, Euclidean, Euclidean]
    assert kinds[SOBOW] == kinds[OAGD] == [Euclidean] * 4
    everywhere = stepped(OBBO(geometry=Euclidean(), lr=0.1))[0].optimizer.blocks
    assert {type(b.geometry) for b in everywhere} == {Euclidean}
    assert [b.domain for b in everywhere] == [b.domain for b in blocks.named.values()]
    assert [b.lr for b in everywhere] == [0.1] * 4
    some = {"sources": {"geometry": "euclidean", "lr": 0.5}, "decay": {"geometry": {"name": "burg"}, "scale": 2.0}}
    some["decay"]["domain"] = {"name": "box", "lower": 0.0, "upper": 1.0}
    made = {b.name: b for b in stepped(OBBO(blocks=some))[0].optimizer.blocks}
    assert (type(made["sources"].geometry), made["sources"].lr) == (Euclidean, 0.5)
    assert (made["decay"].geometry, made["decay"].domain, made["decay"].scale) == (Burg(), Box(0.0, 1.0), 2.0)
    assert (made["smoothing"].lr, made["smoothing"].scale) == ("auto", 0.3)


def test_torch_rules_with_one_lr_for_all_blocks_are_torchs_and_are_projected():
    blocks = Blocks(init=Real([0.5, -0.5]), smoothing=Interval(0.0, 0.3))
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(6, 1, 3, generator=generator, dtype=F64)
    ours, theirs = (torch.nn.Parameter(blocks.start(dtype=F64)) for _ in range(2))
    optimizer, reference = Adam(lr=0.02).outer_rule(ours, blocks), torch.optim.Adam([theirs], lr=0.02)
    for direction in directions:
        ours.grad, theirs.grad = direction.clone(), direction.clone()
        optimizer.step()
        reference.step()
        theirs.data[:, 2].clamp_(0.0, 0.3)
        assert torch.equal(ours.grad, direction)
        assert torch.allclose(ours, theirs, rtol=1e-13, atol=1e-15)


def test_regret_and_generalized_gradient_of_the_blocks_add_up_to_the_total():
    blocks = hyper()
    _, records = stepped(OBBO(window=2), blocks)
    for record in records:
        for kind in ("euclidean", "generalized"):
            parts = sum(record.regret[f"{kind}/{name}"] for name in blocks.named)
            assert torch.allclose(parts, record.regret[kind], rtol=1e-12)
        squares = sum(record.numbers[f"generalized_norm/{name}"].square() for name in blocks.named)
        assert torch.allclose(squares, record.generalized.square().sum(-1), rtol=1e-12)
        assert record.regret["exact"] is None
        assert record.regret["exact/decay"] is None
    # by hand, of one block: (1/3) Σ of the last three hypergradients
    vectors = torch.stack([torch.zeros_like(records[0].hypergradient)] * 2 + [r.hypergradient for r in records])
    means = torch.stack([vectors[t : t + 3].mean(0) for t in range(4)])[..., blocks.slices["sources"]]
    assert torch.allclose(records[-1].regret["euclidean/sources"], means.square().sum((0, -1)), rtol=1e-12)


def test_one_block_is_reported_as_a_lambda_without_blocks_is():
    blocks = Blocks(sources=OnSimplex(3, lr=0.1))
    _, records = stepped(OBBO(), blocks)
    assert list(records[0].regret) == ["euclidean", "generalized", "exact", "geometry"]
    assert records[0].numbers == {}
    plain = OBBO(lr=0.1, geometry=NegativeEntropy(), domain=Simplex())
    step = OuterStep(torch.nn.Parameter(blocks.start(lanes=2, dtype=F64)), plain, 3)
    generator = torch.Generator().manual_seed(0)
    for record in records:
        alone = step(torch.randn((1, 2, 3), generator=generator, dtype=F64))
        assert torch.equal(alone.outer, record.outer)
        assert torch.equal(alone.generalized, record.generalized)
        assert torch.equal(alone.regret["generalized"], record.regret["generalized"])


def test_an_optimizer_of_blocks_knows_a_lambda_that_does_not_fit():
    with pytest.raises(ValueError, match="outer must have the 7 coordinates"):
        OBBO().outer_rule(torch.nn.Parameter(torch.ones(1, 6)), hyper())
    outside = hyper().start()
    outside[0, 4] = 0.5
    with pytest.raises(ValueError, match=r"outer start must lie in Box\(lower=0.0, upper=0.3\)"):
        OBBO().outer_rule(torch.nn.Parameter(outside), hyper())
    with pytest.raises(ValueError, match="lr must be a positive"):
        BregmanProx([torch.nn.Parameter(torch.ones(1, 1))], lr=-1.0)


REFUSED = {
    "no block": (lambda: Blocks(), "blocks must have at least one block, got none"),
    "name": (lambda: Blocks({"a b": Real()}), "blocks must have names of letters, digits and _, got 'a b'"),
    "no mapping": (lambda: Blocks([Real()]), "blocks must be a mapping from names to blocks"),
    "no such block": (lambda: Blocks(a=3.0), "a must be a block, such as Positive(0.1) or Interval(0.0, 1.0), got 3.0"),
    "start outside": (lambda: Interval(0.0, 0.3, 0.5), "start must lie in Box(lower=0.0, upper=0.3), got [0.5]"),
    "zero": (lambda: Positive(0.0), "start must be above 0, and at most its upper end, got"),
    "order": (lambda: Interval(1.0, 0.0), "low must be smaller than high, both finite, got 1.0 and 0.0"),
    "size": (lambda: OnSimplex(1), "size must be an integer of at least 2, got 1"),
    "sizes": (lambda: Real([1.0, 2.0], size=3), "start must be a number or a list of 3, got the shape [2]"),
    "lr": (lambda: Real(lr="fast"), "lr must be a positive finite number or auto, got 'fast'"),
    "triple": (lambda: Positive(1.0, geometry=Burg()), "these are:"),
    "scale": (lambda: OBBO(scale=0.0), "scale must be a positive finite number, got 0.0"),
    "unknown block": (
        lambda: stepped(OBBO(blocks={"x": {}})),
        "blocks must be of decay, sources, smoothing, init",
    ),
    "unknown word": (lambda: OBBO(blocks={"decay": {"window": 3}}), "blocks.decay must be of lr, scale, geometry, reg"),
    "not sobow's": (lambda: SOBOW(blocks={"decay": {"geometry": "burg"}}), "blocks.decay must be of lr, scale, regul"),
    "not adam's": (lambda: Adam(blocks={"decay": {"regularizer": "l1"}}), "blocks.decay must be of lr, scale, domain"),
    "h of adam": (
        lambda: stepped(Adam(), Blocks(a=Real(regularizer=L1(1.0)))),
        "blocks.a.regularizer must be none for an outer rule of torch.optim",
    ),
    "lr of a block": (lambda: stepped(OBBO(blocks={"decay": {"lr": -1}})), "blocks.decay.lr must be a positive"),
    "part of a block": (
        lambda: OBBO(blocks={"decay": {"geometry": "round"}}),
        "blocks.decay.geometry must be one of adaptive_diagonal, euclidean",
    ),
    "no blocks": (
        lambda: OBBO(blocks={"decay": {"lr": 0.1}}).outer_rule(torch.nn.Parameter(torch.ones(1, 1))),
        "blocks must be none for a problem that has no blocks, got decay",
    ),
    "a rule without blocks": (
        lambda: Algorithm(GradientDescent(), FixedPoint(), NoMemory, lambda outer: None).outer_rule(None, hyper()),
        "algorithm must have an outer rule that takes blocks (BregmanRule, ProjectedRule)",
    ),
    "geometry of all": (lambda: stepped(OBBO(geometry=Burg())), "blocks.decay.geometry Burg() with"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(case):
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_what_is_said_of_one_block_wins_over_what_is_said_of_all():
    blocks = Blocks(a=Real(1.0), b=Real(1.0))
    algorithm = OBBO(lr=0.5, geometry=Euclidean(), blocks={"a": {"lr": 0.1}})
    optimizer = algorithm.outer_rule(torch.nn.Parameter(blocks.start()), blocks)
    assert [step.lr for step in optimizer.blocks] == [0.1, 0.5]
