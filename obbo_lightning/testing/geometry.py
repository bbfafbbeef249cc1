"""Contract of a geometry, checked at random points of every domain that it supports."""

from collections.abc import Iterator

import torch
from torch import Tensor

from obbo_lightning.core.domains import Box, Domain, L2Ball, Nonnegative, RealSpace, Simplex
from obbo_lightning.core.geometry import Distance, Geometry
from obbo_lightning.core.regularizers import L1, ElasticNet, NoRegularizer, SquaredL2

DOMAINS: tuple[Domain, ...] = (RealSpace(), Box(0.05, 2.0), Box(-1.0, 1.0), Nonnegative(), L2Ball(1.5), Simplex())
REGULARIZERS: tuple[ElasticNet, ...] = (NoRegularizer(), L1(0.3), SquaredL2(0.7), ElasticNet(0.3, 0.7))


def check_geometry(geometry: Geometry, seed: int = 0, dim: int = 5, lanes: int = 3) -> None:
    """Raise AssertionError where a geometry breaks its contract, with every regularizer and domain that it supports.

    Divergences are nonnegative and satisfy the three-point identity; the mirror map is the gradient of φ, and
    ``inverse_mirror`` its inverse; the step is feasible, and no random feasible point is better; lanes do not mix; with
    φ_t held fixed the two lemmas on the generalized projection hold with its ρ; and ``unit`` is proportional to q.

    Args:
        geometry: yours.
        seed: of the random points.
        dim: d of the random points.
        lanes: number of points at once.

    >>> from obbo_lightning.geometry import Euclidean
    >>> check_geometry(Euclidean())
    """
    generator = torch.Generator().manual_seed(seed)
    triples = list(supported_triples(geometry))
    assert triples, f"{geometry!r} supports none of the domains {DOMAINS} with any regularizer"
    for regularizer, domain in triples:
        outer = random_point(domain, (lanes, dim), generator)
        state = geometry.initial_state(outer)
        distance = geometry.distance(_normal((lanes, dim), generator), state)
        _check_lanes(geometry, regularizer, domain, outer, generator)
        _check_divergence(distance, domain, outer, generator)
        _check_mirror(distance, outer)
        _check_step(distance, regularizer, domain, outer, generator)
        _check_lemmas(distance, regularizer, domain, outer, generator)
        _check_units(geometry, domain, outer, generator)


def supported_triples(geometry: Geometry) -> Iterator[tuple[ElasticNet, Domain]]:
    """Yield the pairs of regularizer and domain that a geometry supports, among `REGULARIZERS` and `DOMAINS`."""
    for domain in DOMAINS:
        for regularizer in REGULARIZERS:
            if geometry.supports(regularizer, domain):
                yield regularizer, domain


def random_point(domain: Domain, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return a point of X in float64, positive where the domain has no negative points."""
    point = _normal(shape, generator)
    if isinstance(domain, Simplex):
        return point.softmax(-1)
    if isinstance(domain, Box) and domain.lower >= 0:
        return domain.project(point.exp())
    return domain.project(point)


def objective(
    distance: Distance, regularizer: ElasticNet, outer: Tensor, direction: Tensor, lr: float, candidate: Tensor
) -> Tensor:
    """Return ⟨q, x⟩ + h(x) + D_φ(x, λ)/α ``[lanes]``, which the step minimises."""
    linear = (direction * candidate).sum(-1)
    return linear + regularizer(candidate) + distance.divergence(candidate, outer) / lr


def _check_divergence(distance: Distance, domain: Domain, outer: Tensor, generator: torch.Generator) -> None:
    x, y, z = outer, *(random_point(domain, tuple(outer.shape), generator) for _ in range(2))
    scale = 1 + float(distance.value(x).abs().max())
    assert bool((distance.divergence(x, y) >= -1e-12 * scale).all()), "a divergence is negative"
    assert bool((distance.divergence(x, x).abs() <= 1e-12 * scale).all()), "D(x, x) is not 0"
    # D(x, z) = D(x, y) + D(y, z) + ⟨∇φ(y) − ∇φ(z), x − y⟩
    three_points = (
        distance.divergence(x, y)
        + distance.divergence(y, z)
        + ((distance.mirror(y) - distance.mirror(z)) * (x - y)).sum(-1)
    )
    error = (distance.divergence(x, z) - three_points).abs()
    allowed = 1e-10 * (1 + three_points.abs() + distance.mirror(z).abs().sum(-1))
    assert bool((error <= allowed).all()), f"the three-point identity is off by {float(error.max()):.3g}"


def _check_mirror(distance: Distance, outer: Tensor) -> None:
    point = outer.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(distance.value(point).sum(), point)
    mirror = distance.mirror(outer)
    assert torch.allclose(mirror, gradient, rtol=1e-10, atol=1e-10), "mirror is not the gradient of value"
    assert torch.allclose(distance.inverse_mirror(mirror), outer, rtol=1e-10, atol=1e-12), (
        "inverse_mirror does not undo mirror"
    )


def _check_step(
    distance: Distance, regularizer: ElasticNet, domain: Domain, outer: Tensor, generator: torch.Generator
) -> None:
    for lr in (1e-3, 0.5):
        direction = 2 * _normal(tuple(outer.shape), generator)
        after = distance.step(outer, direction, lr, regularizer, domain)
        assert bool(domain.contains(after).all()), f"the step leaves {domain!r}: {after}"
        best = objective(distance, regularizer, outer, direction, lr, after)
        for spread in (1e-4, 1e-2, 1.0):
            for _ in range(20):
                rival = domain.project(after + spread * _normal(tuple(outer.shape), generator))
                rival = rival.where(distance.accepts(rival).unsqueeze(-1), after)
                value = objective(distance, regularizer, outer, direction, lr, rival)
                slack = 1e-10 * (1 + best.abs())
                assert bool((value >= best - slack).all()), f"a feasible point beats the step on {domain!r}"


def _check_lanes(
    geometry: Geometry, regularizer: ElasticNet, domain: Domain, outer: Tensor, generator: torch.Generator
) -> None:
    directions = [_normal(tuple(outer.shape), generator) for _ in range(2)]

    def two_steps(lanes: slice) -> Tensor:
        point, state = outer[lanes], geometry.initial_state(outer[lanes])
        for direction in directions:
            point = geometry.distance(direction[lanes], state).step(point, direction[lanes], 0.1, regularizer, domain)
        return point

    together = two_steps(slice(None))
    for lane in range(outer.shape[0]):
        alone = two_steps(slice(lane, lane + 1))
        assert torch.allclose(alone, together[lane], rtol=1e-10, atol=1e-12), "a lane depends on its neighbours"


def _check_lemmas(
    distance: Distance, regularizer: ElasticNet, domain: Domain, outer: Tensor, generator: torch.Generator
) -> None:
    rho, lr = distance.strong_convexity(domain), 0.3
    q1, q2 = (_normal(tuple(outer.shape), generator) for _ in range(2))
    after1, after2 = (distance.step(outer, q, lr, regularizer, domain) for q in (q1, q2))
    g1, g2 = (outer - after1) / lr, (outer - after2) / lr
    # ⟨q, G⟩ ≥ ρ ‖G‖² + (h(λ⁺) − h(λ))/α                            (lem. gen_projection_bound_one)
    left = (q1 * g1).sum(-1)
    right = rho * g1.square().sum(-1) + (regularizer(after1) - regularizer(outer)) / lr
    assert bool((left >= right - 1e-9 * (1 + left.abs())).all()), "lemma 1 on the generalized projection fails"
    # ‖G(q₁) − G(q₂)‖ ≤ ‖q₁ − q₂‖/ρ                                 (lem. gen_projection_bound_two)
    difference, bound = (g1 - g2).norm(dim=-1), (q1 - q2).norm(dim=-1)
    assert bool((rho * difference <= bound * (1 + 1e-9)).all()), "lemma 2 on the generalized projection fails"


def _check_units(geometry: Geometry, domain: Domain, outer: Tensor, generator: torch.Generator) -> None:
    direction = _normal(tuple(outer.shape), generator)
    unit, reach = geometry.unit(outer, direction, domain), geometry.reach(outer, domain)
    for name, values in (("unit", unit), ("reach", reach)):
        wanted = (*outer.shape[:-1], 1)
        assert values.shape == wanted, f"{name} must have shape {wanted}, got {tuple(values.shape)}"
        assert bool(((values > 0) & values.isfinite()).all()), f"{name} must be positive, got {values} on {domain!r}"
    assert torch.equal(geometry.unit(outer, 1024 * direction, domain), 1024 * unit), "unit is not proportional to q"
    assert not bool(geometry.unit(outer, 0 * direction, domain).any()), "unit of no direction is not 0"


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)
