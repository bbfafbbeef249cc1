"""Contract of a geometry, checked at random points of every domain that it supports."""

from itertools import product

import torch
from torch import Tensor

from obbo_lightning.core.domains import Box, Domain, L2Ball, Nonnegative, RealSpace, Simplex
from obbo_lightning.core.geometry import Distance, Geometry
from obbo_lightning.core.regularizers import L1, ElasticNet, NoRegularizer, SquaredL2

DOMAINS: tuple[Domain, ...] = (RealSpace(), Box(0.05, 2.0), Box(-1.0, 1.0), Nonnegative(), L2Ball(1.5), Simplex())
REGULARIZERS: tuple[ElasticNet, ...] = (NoRegularizer(), L1(0.3), SquaredL2(0.7), ElasticNet(0.3, 0.7))


def check_geometry(geometry: Geometry, seed: int = 0, dim: int = 5, lanes: int = 3) -> None:
    """Raise AssertionError where a geometry breaks its contract, with every regularizer and domain that it supports.

    Divergences are nonnegative and satisfy the three-point identity; the mirror map is the gradient of φ; the
    step is feasible, and no random feasible point is better; lanes do not mix; with φ_t held fixed the two lemmas on
    the generalized projection hold with its ρ; and ``unit`` is proportional to q.

    Args:
        geometry: yours.
        seed: of the random points.
        dim: d of the random points.
        lanes: number of points at once.

    >>> from obbo_lightning.geometry import Euclidean
    >>> check_geometry(Euclidean())
    """
    generator = torch.Generator().manual_seed(seed)
    supported = [(h, domain) for domain, h in product(DOMAINS, REGULARIZERS) if geometry.supports(h, domain)]
    assert supported, f"{geometry!r} supports none of the domains {DOMAINS} with any regularizer"
    for h, domain in supported:
        x, y, z = (random_point(domain, (lanes, dim), generator) for _ in range(3))
        distance = geometry.distance(_normal(x, generator), geometry.initial_state(x))
        _check_lanes(geometry, h, domain, x, generator)
        _check_distance(distance, x, y, z)
        _check_step(distance, h, domain, x, generator)
        _check_lemmas(distance, h, domain, x, _normal(x, generator), _normal(x, generator))
        _check_units(geometry, domain, x, _normal(x, generator))


def random_point(domain: Domain, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return a point of X in float64, positive where the domain has no negative points."""
    point = torch.randn(shape, generator=generator, dtype=torch.float64)
    if isinstance(domain, Simplex):
        return point.softmax(-1)
    return domain.project(point.exp() if isinstance(domain, Box) and domain.lower >= 0 else point)


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=torch.float64)


def _check_lanes(geometry: Geometry, h: ElasticNet, domain: Domain, x: Tensor, generator: torch.Generator) -> None:
    directions = [_normal(x, generator) for _ in range(2)]

    def two_steps(lanes: slice) -> Tensor:
        point, state = x[lanes], geometry.initial_state(x[lanes])
        for direction in directions:
            point = geometry.distance(direction[lanes], state).step(point, direction[lanes], 0.1, h, domain)
        return point

    together = two_steps(slice(None))
    for lane in range(len(x)):
        alone = two_steps(slice(lane, lane + 1))
        assert torch.allclose(alone, together[lane], rtol=1e-10, atol=1e-12), "a lane depends on its neighbours"


def _check_distance(distance: Distance, x: Tensor, y: Tensor, z: Tensor) -> None:
    divergence, slack = distance.divergence, 1e-12 * (1 + float(distance.value(x).abs().max()))
    assert bool((divergence(x, y) >= -slack).all()), "a divergence is negative"
    assert bool((divergence(x, x).abs() <= slack).all()), "D(x, x) is not 0"
    # D(x, z) = D(x, y) + D(y, z) + ⟨∇φ(y) − ∇φ(z), x − y⟩
    difference = distance.mirror(y) - distance.mirror(z)
    three_points = divergence(x, y) + divergence(y, z) + (difference * (x - y)).sum(-1)
    error = (divergence(x, z) - three_points).abs()
    allowed = 1e-10 * (1 + three_points.abs() + distance.mirror(z).abs().sum(-1))
    assert bool((error <= allowed).all()), f"the three-point identity is off by {float(error.max()):.3g}"
    point = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(distance.value(point).sum(), point)
    assert torch.allclose(distance.mirror(x), gradient, rtol=1e-10, atol=1e-10), "mirror is not the gradient of value"


def _check_step(distance: Distance, h: ElasticNet, domain: Domain, x: Tensor, generator: torch.Generator) -> None:
    for lr in (1e-3, 0.5):
        direction = 2 * _normal(x, generator)
        after = distance.step(x, direction, lr, h, domain)
        assert bool(domain.contains(after).all()), f"the step leaves {domain!r}: {after}"
        rivals = [after]
        for spread in 20 * (1e-4, 1e-2, 1.0):
            rival = domain.project(after + spread * _normal(x, generator))
            rivals.append(rival.where(distance.accepts(rival).unsqueeze(-1), after))
        # ⟨q, x⟩ + h(x) + D_φ(x, λ)/α
        best, *values = ((direction * at).sum(-1) + h(at) + distance.divergence(at, x) / lr for at in rivals)
        slack = 1e-10 * (1 + best.abs())
        assert all(bool((v >= best - slack).all()) for v in values), f"a feasible point beats the step on {domain!r}"


def _check_lemmas(distance: Distance, h: ElasticNet, domain: Domain, x: Tensor, q1: Tensor, q2: Tensor) -> None:
    rho, lr = distance.strong_convexity(domain), 0.3
    after1, after2 = (distance.step(x, q, lr, h, domain) for q in (q1, q2))
    g1, g2 = (x - after1) / lr, (x - after2) / lr
    # ⟨q, G⟩ ≥ ρ ‖G‖² + (h(λ⁺) − h(λ))/α                            (lem. gen_projection_bound_one)
    left, right = (q1 * g1).sum(-1), rho * g1.square().sum(-1) + (h(after1) - h(x)) / lr
    assert bool((left >= right - 1e-9 * (1 + left.abs())).all()), "lemma 1 on the generalized projection fails"
    # ‖G(q₁) − G(q₂)‖ ≤ ‖q₁ − q₂‖/ρ                                 (lem. gen_projection_bound_two)
    difference, bound = (g1 - g2).norm(dim=-1), (q1 - q2).norm(dim=-1)
    assert bool((rho * difference <= bound * (1 + 1e-9)).all()), "lemma 2 on the generalized projection fails"


def _check_units(geometry: Geometry, domain: Domain, x: Tensor, direction: Tensor) -> None:
    unit, wanted = geometry.unit(x, direction, domain), (*x.shape[:-1], 1)
    for name, values in (("unit", unit), ("reach", geometry.reach(x, domain))):
        assert values.shape == wanted, f"{name} must have shape {wanted}, got {tuple(values.shape)}"
        assert bool(((values > 0) & values.isfinite()).all()), f"{name} must be positive, got {values} on {domain!r}"
    assert torch.equal(geometry.unit(x, 1024 * direction, domain), 1024 * unit), "unit is not proportional to q"
    assert not bool(geometry.unit(x, 0 * direction, domain).any()), "unit of no direction is not 0"
