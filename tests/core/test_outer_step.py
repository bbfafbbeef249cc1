import copy
import math

import pytest
import torch
from hypothesis import assume, given, strategies as st
from scipy.optimize import minimize
from toy import F64

from obbo_lightning import (
    L1,
    OBBO,
    AdaptiveDiagonal,
    Box,
    BregmanProx,
    Burg,
    ElasticNet,
    Euclidean,
    L2Ball,
    NegativeEntropy,
    Nonnegative,
    NoRegularizer,
    RealSpace,
    Simplex,
    SquaredL2,
    generalized_gradient,
)
from obbo_lightning.checks import check_geometry
from obbo_lightning.checks.geometry import objective, random_point
from obbo_lightning.core.geometry import DiagonalQuadratic
from obbo_lightning.core.outer_step import OuterStep

GEOMETRIES = [Euclidean(), AdaptiveDiagonal(), NegativeEntropy(), Burg()]
REGULARIZERS = [NoRegularizer(), L1(0.3), SquaredL2(0.7), ElasticNet(0.3, 0.7)]
DOMAINS = [RealSpace(), Box(-0.5, 1.0), Box(0.05, 2.0), Nonnegative(), L2Ball(0.8), Simplex()]
TRIPLES = [(g, h, x) for g in GEOMETRIES for h in REGULARIZERS for x in DOMAINS if g.supports(h, x)]
REFUSED = [(g, h, x) for g in GEOMETRIES for h in REGULARIZERS for x in DOMAINS if not g.supports(h, x)]
any_seed = st.integers(0, 2**31)


def setting(geometry, domain, seed, dim=5, lanes=2, size=1.0):
    """λ, q and φ_t at random."""
    generator = torch.Generator().manual_seed(seed)
    outer = random_point(domain, (lanes, dim), generator)
    direction = size * torch.randn(lanes, dim, generator=generator, dtype=F64)
    distance = geometry.distance(direction, geometry.initial_state(outer))
    return outer, direction, distance, generator


def kkt_residual(distance, regularizer, domain, outer, direction, lr, x):
    """The distance of 0 from q + ∂h(x) + (∇φ(x) − ∇φ(λ))/α + N_X(x), the largest coordinate of each lane."""
    smooth = direction + regularizer.l2 * x + (distance.mirror(x) - distance.mirror(outer)) / lr
    zero, l1 = x == 0, regularizer.l1
    low, high = (
        torch.where(zero, smooth - l1, smooth + l1 * x.sign()),
        torch.where(zero, smooth + l1, smooth + l1 * x.sign()),
    )
    if isinstance(domain, L2Ball) and float(x.norm()) > domain.radius * (1 - 1e-12):
        # N_X = {μ x : μ ≥ 0}; μ from the coordinates that are not at the kink of h
        multiplier = max(0.0, -float((low[~zero] * x[~zero]).sum() / x.square().sum()))
        low, high = low + multiplier * x, high + multiplier * x
    elif isinstance(domain, Simplex):
        active = x > 0
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
def test_step_is_the_argmin(geometry, regularizer, domain, lr):
    for seed, size in [(0, 1.0), (1, 0.05), (2, 30.0)]:
        outer, direction, distance, generator = setting(geometry, domain, seed, size=size)
        x = distance.step(outer, direction, lr, regularizer, domain)
        assert domain.contains(x).all()
        for lane in range(2):
            row = slice(lane, lane + 1)
            phi = DiagonalQuadratic(distance.scale[row]) if isinstance(geometry, AdaptiveDiagonal) else distance
            residual = kkt_residual(phi, regularizer, domain, outer[row], direction[row], lr, x[row])
            scale = 1 + float(direction[row].norm()) + float(phi.mirror(outer[row]).norm()) / lr
            assert residual <= 1e-8 * scale
        best = objective(distance, regularizer, outer, direction, lr, x).repeat(1000)
        # A thousand rivals of each lane, as lanes; half of them are near by.
        outer, direction, x = (values.repeat(1000, 1) for values in (outer, direction, x))
        if isinstance(distance, DiagonalQuadratic) and isinstance(distance.scale, torch.Tensor):
            distance = DiagonalQuadratic(distance.scale.repeat(1000, 1))
        rivals = random_point(domain, (2000, 5), generator)
        i = torch.arange(2000).unsqueeze(-1) // 2
        near = domain.project(x + 10 ** (-4 * (i % 9) / 9) * (rivals - x))
        rivals = torch.where(i % 2 == 1, near, rivals)
        accepted = distance.accepts(rivals)
        assert accepted.float().mean() > 0.4
        values = objective(distance, regularizer, outer, direction, lr, rivals)
        assert (values >= best - 1e-11 * (1 + best.abs()))[accepted].all()


@pytest.mark.parametrize(("geometry", "regularizer", "domain"), TRIPLES, ids=str)
def test_step_agrees_with_scipy(geometry, regularizer, domain):
    outer, direction, distance, _ = setting(geometry, domain, seed=3, lanes=1, dim=3)
    lr = 0.2
    x = distance.step(outer, direction, lr, regularizer, domain)

    def value(point):
        candidate = torch.tensor(point, dtype=F64).unsqueeze(0)
        return float(objective(distance, regularizer, outer, direction, lr, candidate))

    bounds = [(-10, 10)] * 3
    constraints = []
    if isinstance(domain, Box):
        bounds = [
            (
                max(domain.lower, 1e-9 if distance.accepts(-outer).any().logical_not() else domain.lower),
                min(domain.upper, 100),
            )
        ] * 3
    elif isinstance(domain, Simplex):
        bounds = [(1e-9, 1)] * 3
        constraints = [{"type": "eq", "fun": lambda p: p.sum() - 1}]
    elif isinstance(domain, L2Ball):
        constraints = [{"type": "ineq", "fun": lambda p: domain.radius**2 - (p**2).sum()}]
    found = minimize(value, outer[0].numpy(), bounds=bounds, constraints=constraints, method="SLSQP", tol=1e-12)
    assert value(x[0].numpy()) <= found.fun + 1e-9
    assert torch.allclose(x[0], torch.tensor(found.x), atol=1e-3)


@pytest.mark.parametrize(("geometry", "regularizer", "domain"), TRIPLES, ids=str)
@given(seed=any_seed, log_lr=st.floats(-4, 1), log_size=st.floats(-3, 2))
def test_the_lemmas_on_the_generalized_projection_hold(geometry, regularizer, domain, seed, log_lr, log_size):
    lr = 10**log_lr
    outer, q1, distance, generator = setting(geometry, domain, seed, size=10**log_size)
    q2 = q1 + 10**log_size * torch.randn(q1.shape, generator=generator, dtype=F64)
    rho = distance.strong_convexity(domain)
    if isinstance(geometry, AdaptiveDiagonal):
        assert rho >= geometry.rho
    g1, g2 = (generalized_gradient(distance, outer, q, lr, regularizer, domain) for q in (q1, q2))
    after = outer - lr * g1
    largest = torch.maximum(after, outer - lr * g2).max()
    assume(float(largest) < 1e100)  # the multiplicative update on an unbounded set may overflow what follows
    # ⟨q, G⟩ ≥ ρ‖G‖² + (h(λ⁺) − h(λ))/α
    left = (q1 * g1).sum(-1)
    right = rho * g1.square().sum(-1) + (regularizer(after) - regularizer(outer)) / lr
    slack = 1e-10 * (1 + left.abs() + q1.norm(dim=-1) * outer.norm(dim=-1) / lr)
    assert (left >= right - slack).all()
    # ‖G(q₁) − G(q₂)‖ ≤ ‖q₁ − q₂‖/ρ
    rounding = 1e-13 * outer.norm(dim=-1) / lr
    assert (rho * ((g1 - g2).norm(dim=-1) - rounding) <= (q1 - q2).norm(dim=-1) * (1 + 1e-9)).all()


def test_rho_is_the_one_of_the_design():
    assert Euclidean().strong_convexity(RealSpace()) == 1
    assert NegativeEntropy().strong_convexity(Simplex()) == 1
    assert NegativeEntropy().strong_convexity(Box(0.0, 4.0)) == 1 / 4
    assert NegativeEntropy().strong_convexity(Nonnegative()) == 0
    assert Burg().strong_convexity(Box(0.0, 4.0)) == 1 / 16


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@given(seed=any_seed)
def test_divergences_are_nonnegative_and_satisfy_the_three_point_identity(geometry, seed):
    domain = Box(0.05, 2.0)
    x, _, distance, generator = setting(geometry, domain, seed)
    y, z = (random_point(domain, (2, 5), generator) for _ in range(2))
    assert (distance.divergence(x, y) >= 0).all()
    assert (distance.divergence(x, x) == 0).all()
    definition = distance.value(x) - distance.value(y) - (distance.mirror(y) * (x - y)).sum(-1)
    assert torch.allclose(distance.divergence(x, y), definition, rtol=1e-9, atol=1e-10)
    three_points = distance.divergence(x, y) + distance.divergence(y, z)
    three_points += ((distance.mirror(y) - distance.mirror(z)) * (x - y)).sum(-1)
    assert torch.allclose(distance.divergence(x, z), three_points, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("geometry", "domain"),
    [
        (NegativeEntropy(), Simplex()),
        (NegativeEntropy(), Nonnegative()),
        (Euclidean(), Simplex()),
        (Burg(), Box(0, 5.0)),
    ],
    ids=str,
)
def test_steps_stay_finite_and_no_coordinate_dies_for_huge_gradients(geometry, domain, dtype):
    outer = torch.nn.Parameter(torch.full((2, 4), 0.25, dtype=dtype))
    optimizer = BregmanProx([outer], lr=1.0, geometry=geometry, domain=domain)
    push = torch.tensor([[1e4, -1e4, 0.0, 1.0], [-1e4, 1e4, 1e4, 1e4]], dtype=dtype)
    for sign in (1, 1, 1, -1, -1, -1, -1, -1):
        outer.grad = sign * push
        optimizer.step()
        assert outer.isfinite().all()
        assert domain.contains(outer.detach()).all()
    if not isinstance(geometry, Euclidean):
        assert (outer > 0).all()
        outer.grad = -torch.ones_like(outer) * torch.tensor([3.0, 2.0, 1.0, 0.0], dtype=dtype) * 1e4
        before = outer.detach().clone()
        optimizer.step()
        assert (outer[:, 0] > before[:, 0]).any() or (outer[:, 0] >= 1).all()  # a floored coordinate comes back


def test_ball_step_is_exact_for_wildly_different_scales():
    generator = torch.Generator().manual_seed(0)
    scale = 10 ** (8 * torch.rand(1, 200, generator=generator, dtype=F64) - 6)
    outer = L2Ball(1.0).project(torch.randn(1, 200, generator=generator, dtype=F64))
    direction = 100 * torch.randn(1, 200, generator=generator, dtype=F64)
    distance, domain = DiagonalQuadratic(scale), L2Ball(1.0)
    x = distance.step(outer, direction, 0.1, NoRegularizer(), domain)
    scale_of_residual = 1 + float(direction.norm()) + float(distance.mirror(outer).norm()) / 0.1
    assert kkt_residual(distance, NoRegularizer(), domain, outer, direction, 0.1, x) <= 1e-8 * scale_of_residual
    assert math.isclose(float(x.norm()), 1.0, rel_tol=1e-12)


@pytest.mark.parametrize(("geometry", "regularizer", "domain"), REFUSED, ids=str)
def test_other_triples_are_refused_with_the_list(geometry, regularizer, domain):
    outer = torch.nn.Parameter(torch.full((1, 4), 0.25))
    with pytest.raises(ValueError, match="these are") as refusal:
        BregmanProx([outer], 0.1, geometry, regularizer, domain)
    for line in ("Euclidean, AdaptiveDiagonal:", "NegativeEntropy:", "Burg:", type(domain).__name__):
        assert line in str(refusal.value)


def test_what_is_supported_is_what_the_design_lists():
    def supported(geometry):
        return {(type(h).__name__, str(x)) for g, h, x in TRIPLES if g is geometry}

    every = {(type(h).__name__, str(x)) for h in REGULARIZERS for x in DOMAINS}
    positive = [str(x) for x in (Box(0.05, 2.0), Nonnegative(), Simplex())]
    assert supported(GEOMETRIES[0]) == supported(GEOMETRIES[1]) == every
    assert supported(GEOMETRIES[2]) == {(h, x) for h in ("NoRegularizer", "L1") for x in positive}
    assert supported(GEOMETRIES[3]) == {(type(h).__name__, str(Box(0.05, 2.0))) for h in REGULARIZERS}


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_geometry_contract(geometry):
    check_geometry(geometry)


def test_geometry_contract_catches_a_wrong_step():
    class Overshooting(Euclidean):
        def step(self, outer, direction, lr, regularizer, domain):
            return domain.project(outer - 1.1 * lr * direction)

    with pytest.raises(AssertionError, match="beats the step"):
        check_geometry(Overshooting())


def test_geometry_contract_catches_a_rho_that_is_too_large():
    class Boasting(Euclidean):
        def strong_convexity(self, domain):
            return 2.0

    with pytest.raises(AssertionError, match="lemma"):
        check_geometry(Boasting())


def drive(optimizer, outer, gradients):
    path = []
    for gradient in gradients:
        outer.grad = gradient.clone()
        optimizer.step()
        path.append(outer.detach().clone())
    return torch.stack(path)


@pytest.mark.parametrize(
    ("geometry", "reference"),
    [
        (Euclidean(), lambda p: torch.optim.SGD(p, lr=0.03)),
        (AdaptiveDiagonal(decay=0.9, rho=1e-8), lambda p: torch.optim.RMSprop(p, lr=0.03, alpha=0.9, eps=1e-8)),
        (AdaptiveDiagonal(decay=0.7, rho=1e-3), lambda p: torch.optim.RMSprop(p, lr=0.03, alpha=0.7, eps=1e-3)),
        (
            AdaptiveDiagonal(decay=0.8, rho=1e-2, bias_correction=True),
            lambda p: torch.optim.Adam(p, lr=0.03, betas=(0.0, 0.8), eps=1e-2),
        ),
    ],
    ids=["sgd", "rmsprop", "rmsprop-0.7", "adam"],
)
def test_unconstrained_steps_are_those_of_torch_optim(geometry, reference, generator):
    gradients = torch.randn(50, 3, 7, generator=generator, dtype=F64)
    first = torch.randn(3, 7, generator=generator, dtype=F64)
    ours, theirs = torch.nn.Parameter(first.clone()), torch.nn.Parameter(first.clone())
    path = drive(BregmanProx([ours], lr=0.03, geometry=geometry), ours, gradients)
    expected = drive(reference([theirs]), theirs, gradients)
    assert torch.allclose(path, expected, rtol=1e-13, atol=1e-15)


def test_euclidean_with_l1_is_ista(generator):
    a = torch.randn(20, 8, generator=generator, dtype=F64)
    y = torch.randn(20, generator=generator, dtype=F64)
    lr, weight = 0.01, 0.5
    outer = torch.nn.Parameter(torch.zeros(1, 8, dtype=F64))
    optimizer = BregmanProx([outer], lr, regularizer=L1(weight))
    ista = torch.zeros(8, dtype=F64)
    for _ in range(300):
        outer.grad = (a.mT @ (a @ outer.detach()[0] - y)).unsqueeze(0)
        optimizer.step()
        z = ista - lr * a.mT @ (a @ ista - y)
        ista = torch.where(z > lr * weight, z - lr * weight, torch.where(z < -lr * weight, z + lr * weight, 0.0))
        assert torch.allclose(outer.detach()[0], ista, rtol=1e-12, atol=1e-14)
    # and its limit solves the lasso: |Aᵀ(Ax − y)| ≤ weight, with equality and the right sign where x ≠ 0
    gradient = a.mT @ (a @ ista - y)
    assert (gradient.abs() <= weight + 1e-6).all()
    assert torch.allclose(gradient[ista != 0], -weight * ista[ista != 0].sign(), atol=1e-6)


def test_optimizer_state_survives_a_round_trip(generator):
    gradients = torch.randn(10, 2, 3, generator=generator, dtype=F64)
    one = torch.nn.Parameter(torch.zeros(2, 3, dtype=F64))
    first = BregmanProx([one], 0.1, AdaptiveDiagonal())
    drive(first, one, gradients[:5])
    other = torch.nn.Parameter(one.detach().clone())
    second = BregmanProx([other], 0.1, AdaptiveDiagonal())
    second.load_state_dict(copy.deepcopy(first.state_dict()))  # torch hands out live tensors
    assert torch.equal(drive(first, one, gradients[5:]), drive(second, other, gradients[5:]))


def test_closure_is_evaluated_with_gradients_on():
    outer = torch.nn.Parameter(torch.tensor([[2.0]]))
    optimizer = BregmanProx([outer], lr=0.5)

    def closure():
        optimizer.zero_grad()
        loss = 0.5 * outer.square().sum()
        loss.backward()
        return float(loss.detach())

    assert float(optimizer.step(closure)) == 2.0
    assert outer.tolist() == [[1.0]]


@pytest.mark.parametrize(
    ("dtype", "shift", "tolerance"), [(torch.float32, 2.0**17, 1e-6), (F64, 2.0**17, 1e-12), (F64, 2.0**40, 1e-12)]
)
def test_a_common_shift_of_the_direction_does_not_move_a_simplex_step(dtype, shift, tolerance):
    outer = torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=dtype)
    direction = torch.tensor([[0.5, -0.25, 0.125, 0.0]], dtype=dtype)
    assert torch.equal((direction + shift) - shift, direction)  # the sum itself is not rounded
    scale = torch.tensor([[1.0, 2.0, 0.5, 1.0]], dtype=dtype)
    plain, shifted = (
        DiagonalQuadratic(scale).step(outer, q, 0.25, NoRegularizer(), Simplex())
        for q in (direction, direction + shift)
    )
    # x_i = λ_i − s_i (q_i + τ) with s = α/scale and Σ s_i (q_i + τ) = 0; all are positive here
    own = (0.25 / scale.numpy(), direction.numpy())
    expected = outer.numpy() - own[0] * (own[1] - (own[0] * own[1]).sum() / own[0].sum())
    assert (expected > 0).all()
    assert torch.allclose(plain, torch.from_numpy(expected).to(dtype), atol=tolerance)
    assert torch.allclose(shifted, plain, atol=tolerance)


@pytest.mark.parametrize("geometry", [Euclidean(), AdaptiveDiagonal()], ids=str)
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e4), (torch.float32, 1e8), (F64, 1e8), (F64, 1e30)])
def test_a_huge_simplex_step_ends_in_the_corner_of_the_smallest_entry(geometry, dtype, size):
    outer = torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=dtype)
    huge = torch.tensor([[-size, size, 0.0, 1.0]], dtype=dtype)
    phi = geometry.distance(huge, geometry.initial_state(outer))
    corner = phi.step(outer, huge, 1e8, NoRegularizer(), Simplex())
    assert corner.tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_entropy_follows_changes_far_below_the_rounding_of_the_logarithm():
    outer = torch.nn.Parameter(torch.full((1, 1), 1e5))
    optimizer = BregmanProx([outer], lr=1.0, geometry=NegativeEntropy(), domain=Nonnegative())
    for _ in range(10_000):
        outer.grad = torch.full((1, 1), -4e-7)
        optimizer.step()
    assert abs(float(outer.detach()) / 1e5 - math.exp(4e-3)) < 5e-4


def test_adaptive_scale_recovers_from_a_square_that_overflows():
    outer = torch.nn.Parameter(torch.zeros(1, 1))
    optimizer = BregmanProx([outer], lr=0.1, geometry=AdaptiveDiagonal())
    outer.grad = torch.full((1, 1), 1e25)
    optimizer.step()
    assert optimizer.state[outer]["second_moment"].isfinite().all()
    for _ in range(3000):
        outer.grad = torch.ones(1, 1)
        before = outer.detach().clone()
        optimizer.step()
    assert float(before - outer.detach()) > 0.05


def test_burg_stays_above_zero():
    outer = torch.nn.Parameter(torch.full((1, 1), 1e-30))
    optimizer = BregmanProx([outer], lr=1.0, geometry=Burg(), domain=Box(0.0, 1.0))
    for _ in range(3):
        outer.grad = torch.full((1, 1), 3e38)
        optimizer.step()
    assert float(outer.detach()) >= torch.finfo(torch.float32).tiny


def test_a_copied_optimizer_still_knows_its_geometry():
    outer = torch.nn.Parameter(torch.full((1, 2), 0.5))
    optimizer = copy.deepcopy(BregmanProx([outer], 0.1, NegativeEntropy(), domain=Simplex()))
    (copied,) = optimizer.param_groups[0]["params"]
    copied.grad = torch.tensor([[1.0, -1.0]])
    optimizer.step()
    assert torch.allclose(copied.sum(), torch.tensor(1.0))
    assert float(copied.detach()[0, 0]) < 0.5


class Preconditioned(AdaptiveDiagonal):
    """A user's geometry that calls its weights something else."""

    def distance(self, direction, state):
        return Weighted(super().distance(direction, state).scale)


class Weighted(DiagonalQuadratic):
    def __init__(self, w):
        super().__init__(scale=w)


class Shared(AdaptiveDiagonal):
    def distance(self, direction, state):
        scale = super().distance(direction, state).scale
        return DiagonalQuadratic(scale.mean(0, keepdim=True).expand_as(scale))


def test_geometry_contract_looks_at_lanes():
    check_geometry(Preconditioned())
    with pytest.raises(AssertionError, match="neighbours"):
        check_geometry(Shared())


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_the_length_of_a_step_is_in_the_geometrys_own_norm(geometry):
    outer = torch.nn.Parameter(torch.tensor([[0.5, 1.5], [1.0, 0.25]]))  # float32: a divergence must not drown
    before, direction = outer.detach().double(), torch.tensor([[0.3, -0.2], [0.1, 0.4]])
    optimizer = BregmanProx([outer], 1e-3, geometry, domain=Box(0.0, 10.0))
    outer.grad = direction
    optimizer.step()
    moved = (outer.detach().double() - before) / 1e-3
    # 2 D_φ(λ⁺, λ) ≈ ⟨λ⁺ − λ, ∇²φ(λ) (λ⁺ − λ)⟩: exact where φ is quadratic
    curvature = {
        "Euclidean": torch.ones(2, 2, dtype=F64),
        "AdaptiveDiagonal": (0.1 * direction.double().square()).sqrt() + 1e-8,
        "NegativeEntropy": 1 / before,
        "Burg": 1 / before.square(),
    }[type(geometry).__name__]
    expected = (curvature * moved.square()).sum(-1).sqrt()
    assert torch.allclose(optimizer.lengths.squeeze(-1), expected, rtol=2e-3)


def test_with_adaptive_steps_the_regret_of_the_geometry_has_the_units_of_f():
    """In the Euclidean norm it counts coordinates: 10 d in the first round, d in later ones, whatever f is times."""
    totals = {}
    for scale in (1.0, 100.0):
        outer = torch.nn.Parameter(torch.zeros(1, 50, dtype=F64))
        step = OuterStep(outer, OBBO(lr=1e-3, window=1, geometry=AdaptiveDiagonal()), regret_window=1)
        for _ in range(3):
            record = step(torch.full((1, 1, 50), scale, dtype=F64))
        totals[scale] = {name: float(record.regret[name]) for name in ("euclidean", "generalized", "geometry")}
    v = 1 - 0.9 ** torch.arange(1.0, 4.0, dtype=F64)  # v_t of a constant q = 1
    assert totals[1.0]["generalized"] == pytest.approx(50 * float((1 / v).sum()), rel=1e-6)
    assert totals[100.0]["generalized"] == pytest.approx(totals[1.0]["generalized"], rel=1e-6)
    assert totals[1.0]["geometry"] == pytest.approx(50 * float((1 / v.sqrt()).sum()), rel=1e-6)  # Σ ⟨q, H_t⁻¹ q⟩
    assert totals[100.0]["geometry"] == pytest.approx(100 * totals[1.0]["geometry"], rel=1e-6)


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_skipped_round_counts_in_the_regret_as_the_one_before_it(window):
    def regrets(values):
        outer = torch.nn.Parameter(torch.zeros(1, 1, dtype=F64))
        step = OuterStep(outer, OBBO(lr=1e-3, window=1), window, on_nonfinite="skip")
        found = [step(torch.tensor([[[x]]], dtype=F64), torch.tensor([[2 * x]], dtype=F64)).regret for x in values]
        return [(float(one["euclidean"]), float(one["exact"])) for one in found]

    assert regrets([3.0, 4.0, math.nan, math.inf, 5.0, math.nan]) == regrets([3.0, 4.0, 4.0, 4.0, 5.0, 5.0])
    assert regrets([math.nan, 3.0]) == regrets([0.0, 3.0])  # nothing is known yet
