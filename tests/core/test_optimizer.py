"""The outer step as a torch optimizer: reductions to torch.optim and ISTA, extreme values, states, projections."""

import copy
import math

import pytest
import torch
from toy import F64

from obbo_lightning import OBBO, SGDM, Adam, BregmanProx, Interval, ParameterGroups, Real
from obbo_lightning.domains import Box, Nonnegative, Simplex
from obbo_lightning.geometry import AdaptiveDiagonal, Burg, Euclidean, NegativeEntropy


def run_optimizer(optimizer, outer, gradients):
    """Return λ after every step."""
    path = []
    for gradient in gradients:
        outer.grad = gradient.clone()
        optimizer.step()
        path.append(outer.detach().clone())
    return torch.stack(path)


@pytest.mark.parametrize(
    ("geometry", "reference", "settings"),
    [
        (Euclidean(), torch.optim.SGD, {}),
        (AdaptiveDiagonal(decay=0.9, rho=1e-8), torch.optim.RMSprop, {"alpha": 0.9, "eps": 1e-8}),
        (AdaptiveDiagonal(decay=0.7, rho=1e-3), torch.optim.RMSprop, {"alpha": 0.7, "eps": 1e-3}),
        (AdaptiveDiagonal(0.8, 1e-2, bias_correction=True), torch.optim.Adam, {"betas": (0.0, 0.8), "eps": 1e-2}),
    ],
    ids=["sgd", "rmsprop", "rmsprop-0.7", "adam"],
)
def test_unconstrained_steps_are_those_of_torch_optim(geometry, reference, settings, generator):
    gradients = torch.randn(50, 3, 7, generator=generator, dtype=F64)
    first = torch.randn(3, 7, generator=generator, dtype=F64)
    ours, theirs = torch.nn.Parameter(first.clone()), torch.nn.Parameter(first.clone())
    path = run_optimizer(BregmanProx([ours], lr=0.03, geometry=geometry), ours, gradients)
    expected = run_optimizer(reference([theirs], lr=0.03, **settings), theirs, gradients)
    assert torch.allclose(path, expected, rtol=1e-13, atol=1e-15)


def test_a_closure_is_evaluated_with_gradients_enabled():
    outer = torch.nn.Parameter(torch.tensor([[2.0]]))
    optimizer = BregmanProx([outer], lr=0.5)

    def closure():
        optimizer.zero_grad()
        loss = 0.5 * outer.square().sum()
        loss.backward()
        return float(loss.detach())

    assert float(optimizer.step(closure)) == 2.0
    assert outer.tolist() == [[1.0]]


def test_a_copied_optimizer_keeps_its_geometry():
    outer = torch.nn.Parameter(torch.full((1, 2), 0.5))
    optimizer = copy.deepcopy(BregmanProx([outer], 0.1, NegativeEntropy(), domain=Simplex()))
    (copied,) = optimizer.param_groups[0]["params"]
    copied.grad = torch.tensor([[1.0, -1.0]])
    optimizer.step()
    assert torch.allclose(copied.sum(), torch.tensor(1.0))
    assert float(copied.detach()[0, 0]) < 0.5


@pytest.mark.parametrize("geometry", [Euclidean(), AdaptiveDiagonal(), NegativeEntropy(), Burg()], ids=str)
def test_the_length_of_a_step_is_in_the_geometrys_own_norm(geometry):
    outer = torch.nn.Parameter(torch.tensor([[0.5, 1.5], [1.0, 0.25]]))  # float32: D must be computed in float64
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


POSITIVE = [(NegativeEntropy(), Simplex()), (NegativeEntropy(), Nonnegative()), (Burg(), Box(0, 5.0))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("geometry", "domain"), [*POSITIVE, (Euclidean(), Simplex())], ids=str)
def test_huge_gradients_leave_every_coordinate_finite_and_able_to_recover(geometry, domain, dtype):
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
        assert (outer[:, 0] > before[:, 0]).any() or (outer[:, 0] >= 1).all()


def test_entropy_follows_changes_far_below_the_rounding_of_the_logarithm():
    outer = torch.nn.Parameter(torch.full((1, 1), 1e5))
    optimizer = BregmanProx([outer], lr=1.0, geometry=NegativeEntropy(), domain=Nonnegative())
    for _ in range(10_000):
        outer.grad = torch.full((1, 1), -4e-7)
        optimizer.step()
    assert abs(float(outer.detach()) / 1e5 - math.exp(4e-3)) < 5e-4


def test_the_adaptive_scale_recovers_from_a_square_that_overflows():
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


def test_torch_optimizers_with_one_step_size_for_all_groups_are_torchs_own_and_projected(generator):
    groups = ParameterGroups(init=Real([0.5, -0.5]), smoothing=Interval(0.0, 0.3))
    ours, theirs = (torch.nn.Parameter(groups.start(dtype=F64)) for _ in range(2))
    optimizer, reference = Adam(lr=0.02).optimizer(ours, groups), torch.optim.Adam([theirs], lr=0.02)
    for direction in torch.randn(6, 1, 3, generator=generator, dtype=F64):
        ours.grad, theirs.grad = direction.clone(), direction.clone()
        optimizer.step()
        reference.step()
        theirs.data[:, 2].clamp_(0.0, 0.3)
        assert torch.allclose(ours, theirs, rtol=1e-13, atol=1e-15)
    kept = torch.tensor([[3.0, -4.0, 1.0]], dtype=F64)  # by the caller, and not changed
    ours.grad = kept
    SGDM(lr="auto").optimizer(ours, groups).step()
    assert kept.tolist() == [[3.0, -4.0, 1.0]]


@pytest.mark.parametrize("lr", [0.2, "auto"])
def test_a_schedule_multiplies_the_steps_of_all_groups(lr):
    groups = ParameterGroups(first=Real([1.0, 2.0], lr=lr), second=Real([3.0], lr=0.4))
    direction = torch.tensor([[1.0, -2.0, 3.0]], dtype=F64)

    def step(factor):
        outer = torch.nn.Parameter(groups.start(dtype=F64))
        before, optimizer = outer.detach().clone(), OBBO().optimizer(outer, groups)
        optimizer.param_groups[0]["lr"] *= factor
        outer.grad = direction
        optimizer.step()
        return before - outer.detach(), optimizer.generalized_gradient(before, outer)

    (full, gradient), (half, same_gradient) = step(1.0), step(0.5)
    assert torch.allclose(half, full / 2)
    assert torch.allclose(full[:, 2:], 0.4 * direction[:, 2:])
    for found in (gradient, same_gradient):  # of a Euclidean step it is q, whatever α is
        assert torch.allclose(found, direction)
