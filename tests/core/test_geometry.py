"""Geometries: each supported step is the exact minimiser, and the lemmas of the paper hold."""

import pytest
import torch
from toy import F64

from obbo_lightning.domains import Box, L2Ball, Nonnegative, RealSpace, Simplex
from obbo_lightning.geometry import AdaptiveDiagonal, Burg, DiagonalQuadratic, Euclidean, NegativeEntropy
from obbo_lightning.regularizers import L1, ElasticNet, NoRegularizer, SquaredL2
from obbo_lightning.testing import check_geometry
from obbo_lightning.testing.geometry import random_point

GEOMETRIES = [Euclidean(), AdaptiveDiagonal(), NegativeEntropy(), Burg()]
REGULARIZERS = [NoRegularizer(), L1(0.3), SquaredL2(0.7), ElasticNet(0.3, 0.7)]
DOMAINS = [RealSpace(), Box(-0.5, 1.0), Box(0.05, 2.0), Nonnegative(), L2Ball(0.8), Simplex(), Simplex(0.15)]
TRIPLES = [(g, h, x) for g in GEOMETRIES for h in REGULARIZERS for x in DOMAINS if g.supports(h, x)]


def random_step(geometry, domain, seed, size):
    """Return a random λ, q and φ_t."""
    generator = torch.Generator().manual_seed(seed)
    outer = random_point(domain, (2, 5), generator)
    direction = size * torch.randn(2, 5, generator=generator, dtype=F64)
    return outer, direction, geometry.distance(direction, geometry.initial_state(outer))


def kkt_residual(distance, regularizer, domain, outer, direction, lr, x):
    """Return the distance of 0 from q + ∂h(x) + (∇φ(x) − ∇φ(λ))/α + N_X(x), the largest over coordinates."""
    smooth = direction + regularizer.l2 * x + (distance.mirror(x) - distance.mirror(outer)) / lr
    zero, l1 = x == 0, regularizer.l1
    low = torch.where(zero, smooth - l1, smooth + l1 * x.sign())
    high = torch.where(zero, smooth + l1, smooth + l1 * x.sign())
    if isinstance(domain, L2Ball) and float(x.norm()) > domain.radius * (1 - 1e-12):
        # N_X = {μ x : μ ≥ 0}; μ from the coordinates that are not at the kink of h
        multiplier = max(0.0, -float((low[~zero] * x[~zero]).sum() / x.square().sum()))
        low, high = low + multiplier * x, high + multiplier * x
    elif isinstance(domain, Simplex):
        active = x > domain.floor
        shift = -float(low[active].mean())
        low, high = low + shift, high + shift
        low = torch.where(active, low, -torch.inf)  # N_X at a lower bound is (−∞, 0]
    elif isinstance(domain, Box):
        tiny = torch.finfo(x.dtype).tiny if not isinstance(distance, DiagonalQuadratic) else -torch.inf
        low = torch.where(x <= max(domain.lower, tiny), -torch.inf, low)
        high = torch.where(x >= domain.upper, torch.inf, high)
    return float(torch.maximum(low, -high).clamp(min=0).max())


@pytest.mark.parametrize(("geometry", "regularizer", "domain"), TRIPLES, ids=str)
@pytest.mark.parametrize("lr", [1e-3, 0.1, 3.0])
def test_the_step_satisfies_the_optimality_conditions(geometry, regularizer, domain, lr):
    for seed, size in [(0, 1.0), (1, 0.05), (2, 30.0)]:
        outer, direction, distance = random_step(geometry, domain, seed, size)
        x = distance.step(outer, direction, lr, regularizer, domain)
        assert domain.contains(x).all()
        for lane in range(2):
            row = slice(lane, lane + 1)
            phi = DiagonalQuadratic(distance.scale[row]) if isinstance(geometry, AdaptiveDiagonal) else distance
            residual = kkt_residual(phi, regularizer, domain, outer[row], direction[row], lr, x[row])
            scale = 1 + float(direction[row].norm()) + float(phi.mirror(outer[row]).norm()) / lr
            assert residual <= 1e-8 * scale


def test_the_strong_convexity_is_the_documented_one():
    assert Euclidean().strong_convexity(RealSpace()) == 1
    assert NegativeEntropy().strong_convexity(Simplex()) == 1
    assert NegativeEntropy().strong_convexity(Box(0.0, 4.0)) == 1 / 4
    assert NegativeEntropy().strong_convexity(Nonnegative()) == 0
    assert Burg().strong_convexity(Box(0.0, 4.0)) == 1 / 16


def test_the_supported_combinations_are_the_documented_ones():
    def supported(geometry):
        return {(type(h).__name__, str(x)) for g, h, x in TRIPLES if g is geometry}

    every = {(type(h).__name__, str(x)) for h in REGULARIZERS for x in DOMAINS}
    positive = [str(x) for x in (Box(0.05, 2.0), Nonnegative(), Simplex(), Simplex(0.15))]
    assert supported(GEOMETRIES[0]) == supported(GEOMETRIES[1]) == every
    assert supported(GEOMETRIES[2]) == {(h, x) for h in ("NoRegularizer", "L1") for x in positive}
    assert supported(GEOMETRIES[3]) == {(type(h).__name__, str(Box(0.05, 2.0))) for h in REGULARIZERS}


@pytest.mark.parametrize("geometry", [Euclidean(), AdaptiveDiagonal()], ids=str)
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e4), (torch.float32, 1e8), (F64, 1e8), (F64, 1e30)])
def test_a_huge_simplex_step_ends_at_the_vertex_of_the_smallest_entry(geometry, dtype, size):
    outer = torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=dtype)
    huge = torch.tensor([[-size, size, 0.0, 1.0]], dtype=dtype)
    phi = geometry.distance(huge, geometry.initial_state(outer))
    vertex = phi.step(outer, huge, 1e8, NoRegularizer(), Simplex())
    assert vertex.tolist() == [[1.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_geometries_keep_their_contract(geometry):
    check_geometry(geometry)
