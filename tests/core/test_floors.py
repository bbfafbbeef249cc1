"""The simplex with a floor: exact against SciPy, feasible, and without a floor as before."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from obbo_lightning import (
    BregmanProx,
    Euclidean,
    NegativeEntropy,
    NoRegularizer,
    OnSimplex,
    Simplex,
    SquaredL2,
)
from obbo_lightning.core.domains import entropic_simplex
from obbo_lightning.core.geometry import DiagonalQuadratic

F64 = torch.float64


def point(d, floor, seed):
    draw = torch.rand(1, d, generator=torch.Generator().manual_seed(seed), dtype=F64) ** 4
    return floor + (1 - d * floor) * draw / draw.sum()


@pytest.mark.parametrize("floor", [0.0, 1e-3, 0.05, 0.124])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["entropy", "euclidean", "quadratic", "ridge"])
def test_the_step_is_the_joint_minimiser(kind, floor, seed):
    d, lr = 8, 0.7
    outer = point(d, floor, seed)
    g = torch.Generator().manual_seed(100 + seed)
    direction = 3 * torch.randn(1, d, generator=g, dtype=F64)
    scale = torch.rand(1, d, generator=g, dtype=F64) + 0.2
    distance = {"entropy": NegativeEntropy(), "quadratic": DiagonalQuadratic(scale)}.get(kind, Euclidean())
    regularizer = SquaredL2(0.5) if kind == "ridge" else NoRegularizer()
    found = distance.step(outer, direction, lr, regularizer, Simplex(floor))
    assert bool(Simplex(floor).contains(found))

    def objective(x):
        at = torch.from_numpy(x)[None]
        value = (direction * at).sum() + 0.5 * regularizer.l2 * at.square().sum()
        return float(value + distance.divergence(at, outer.clamp(min=1e-300)).sum() / lr)

    least = max(floor, 1e-14)
    best = min(
        (
            minimize(
                objective,
                start,
                method="SLSQP",
                bounds=[(least, 1.0)] * d,
                constraints={"type": "eq", "fun": lambda x: x.sum() - 1},
                options={"ftol": 1e-15, "maxiter": 2000},
            )
            for start in (np.full(d, 1 / d), found[0].numpy())
        ),
        key=lambda one: one.fun,
    )
    assert objective(found[0].numpy()) <= best.fun + 1e-9
    assert np.abs(found[0].numpy() - best.x).max() <= 2e-5
    assert float(found.sum()) == pytest.approx(1.0, abs=1e-12)


def test_conditions_of_an_entropic_floor_hold_to_the_last_digits():
    """KKT: one c for all coordinates above the floor, and c w_i at most the floor for the others."""
    for seed in range(50):
        g = torch.Generator().manual_seed(seed)
        weights = torch.rand(3, 6, generator=g, dtype=F64) ** 8
        weights = weights / weights.sum(-1, keepdim=True)
        floor = float(torch.rand(1, generator=g)) / 6
        found = entropic_simplex(weights, floor)
        assert torch.allclose(found.sum(-1), torch.ones(3, dtype=F64), atol=1e-14)
        free = found > floor
        factor = (found / weights).where(free, torch.nan)
        centre = factor.nanmean(-1, keepdim=True)
        assert bool(((factor - centre).abs() <= 1e-12 * centre).logical_or(~free).all())
        assert bool((centre * weights <= floor * (1 + 1e-12)).logical_or(free).all())


def test_a_weight_at_its_floor_comes_back_at_once():
    outer = torch.nn.Parameter(torch.tensor([[0.5, 0.5]]))
    optimizers = {floor: BregmanProx([outer], 1.0, NegativeEntropy(), domain=Simplex(floor)) for floor in (0.0, 0.01)}
    weights = {}
    for floor, optimizer in optimizers.items():
        outer.data.fill_(0.5)
        for t in range(40):
            outer.grad = torch.tensor([[1.0, 0.0]]) if t < 35 else torch.tensor([[0.0, 1.0]])
            optimizer.step()
        weights[floor] = float(outer.detach()[0, 0])
    assert weights[0.0] < 1e-10
    assert weights[0.01] > 0.5


def test_floors_that_leave_nothing_are_refused():
    with pytest.raises(ValueError, match=r"domain.floor must be less than 1/4 for 4 weights, got 0.25"):
        Simplex(0.25).project(torch.ones(1, 4))
    with pytest.raises(ValueError, match=r"domain.floor must be less than 1/4 for 4 weights, got 0.25"):
        entropic_simplex(torch.full((1, 4), 0.25), 0.25)
    with pytest.raises(ValueError, match="start must lie in"):
        OnSimplex(2, start=[0.95, 0.05], floor=0.1)
    with pytest.raises(ValueError, match=r"domain.floor must be zero or a positive finite number"):
        Simplex(-0.1)
    assert OnSimplex(4, floor=0.1).domain == Simplex(0.1)
