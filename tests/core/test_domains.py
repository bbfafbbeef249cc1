"""Domains: projections and steps against SciPy and their optimality conditions."""

import math

import pytest
import torch
from toy import F64, normal

from obbo_lightning.domains import Box, L2Ball, Nonnegative, RealSpace, Simplex
from obbo_lightning.geometry import DiagonalQuadratic
from obbo_lightning.regularizers import NoRegularizer


def test_a_domain_contains_its_boundary_and_nothing_beyond_it():
    points = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.5, 0.4], [1.5, -0.5], [torch.nan, 1.0]], dtype=F64)
    assert Simplex().contains(points).tolist() == [True, True, False, False, False]
    assert Box(0.0, 1.0).contains(points).tolist() == [True, True, True, False, False]
    assert Box(-0.5, 1.5).contains(points).tolist() == [True, True, True, True, False]
    assert L2Ball(1.0).contains(points).tolist() == [True, True, True, False, False]
    assert RealSpace().contains(points).tolist() == [True, True, True, True, False]
    near = torch.tensor([[0.1 - 1e-10, 0.9 + 1e-10], [0.1 - 1e-6, 0.9 + 1e-6]], dtype=F64)
    assert Simplex(0.1).contains(near).tolist() == [True, False]  # up to rounding


@pytest.mark.parametrize("domain", [Box(-0.5, 0.25), Nonnegative(), L2Ball(0.8), Simplex(), Simplex(0.1)], ids=str)
def test_projections_are_the_nearest_points(domain):
    points = 2 * normal(50, 4)
    nearest = domain.project(points)
    assert domain.contains(nearest).all()
    # ⟨p − P(p), x − P(p)⟩ ≤ 0 for every x in X
    others = domain.project(2 * normal(200, 4, seed=1))
    products = (points - nearest).unsqueeze(1) * (others - nearest.unsqueeze(1))
    assert float(products.sum(-1).max()) <= 1e-12
    assert torch.allclose(domain.project(nearest), nearest, rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("domain", "extent"),
    [
        (RealSpace(), [0.5**0.5, 1e-3]),  # the root mean square, at least 0.001
        (Nonnegative(), [0.5**0.5, 1e-3]),
        (Box(-1.0, 3.0), [0.4, 0.4]),  # a tenth of the width
        (Box(1e-3, 1.0), [0.5**0.5, 1e-6]),  # bounds that are 1,000-fold apart
        (Box(2e-3, 1.0), [0.0998, 0.0998]),
        (L2Ball(2.0), [0.4, 0.4]),  # a tenth of the diameter
        (Simplex(), [0.5, 0.5]),
    ],
    ids=str,
)
def test_the_extent_is_the_size_of_lambda_or_of_the_domain(domain, extent):
    outer = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=F64)
    assert domain.extent(outer).flatten().tolist() == pytest.approx(extent)


@pytest.mark.parametrize(
    ("dtype", "shift", "tolerance"), [(torch.float32, 2.0**17, 1e-6), (F64, 2.0**17, 1e-12), (F64, 2.0**40, 1e-12)]
)
def test_a_constant_added_to_the_direction_does_not_change_a_simplex_step(dtype, shift, tolerance):
    outer = torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=dtype)
    direction = torch.tensor([[0.5, -0.25, 0.125, 0.0]], dtype=dtype)
    assert torch.equal((direction + shift) - shift, direction)  # the sum itself is not rounded
    scale = torch.tensor([[1.0, 2.0, 0.5, 1.0]], dtype=dtype)
    plain, shifted = (
        DiagonalQuadratic(scale).step(outer, q, 0.25, NoRegularizer(), Simplex())
        for q in (direction, direction + shift)
    )
    # x_i = λ_i − s_i (q_i + τ) with s = α/scale and Σ s_i (q_i + τ) = 0; all are positive here
    step, q = 0.25 / scale.numpy(), direction.numpy()
    expected = outer.numpy() - step * (q - (step * q).sum() / step.sum())
    assert (expected > 0).all()
    assert torch.allclose(plain, torch.from_numpy(expected).to(dtype), atol=tolerance)
    assert torch.allclose(shifted, plain, atol=tolerance)


def test_the_weighted_step_on_a_ball_is_exact_for_very_different_scales():
    generator = torch.Generator().manual_seed(0)
    scale = 10 ** (8 * torch.rand(1, 200, generator=generator, dtype=F64) - 6)
    outer = L2Ball(1.0).project(torch.randn(1, 200, generator=generator, dtype=F64))
    direction = 100 * torch.randn(1, 200, generator=generator, dtype=F64)
    x = DiagonalQuadratic(scale).step(outer, direction, 0.1, NoRegularizer(), L2Ball(1.0))
    assert math.isclose(float(x.norm()), 1.0, rel_tol=1e-12)
    # KKT: the gradient of the objective is −μ x with one μ ≥ 0
    gradient = direction + scale * (x - outer) / 0.1
    multiplier = -float((gradient * x).sum())
    assert multiplier > 0
    magnitude = 1 + float(direction.norm()) + float((scale * outer).norm()) / 0.1
    assert float((gradient + multiplier * x).abs().max()) <= 1e-8 * magnitude
