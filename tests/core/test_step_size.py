"""``lr: auto``: the rule against NumPy, what it promises, and its state."""

import copy
import math

import numpy as np
import pytest
import torch
from toy import F64

from obbo_lightning import (
    OBBO,
    SGDM,
    Adam,
    BregmanProx,
    Interval,
    OnSimplex,
    ParameterGroups,
    Positive,
    Problem,
    Real,
    online,
)
from obbo_lightning.core.step_size import DEFAULT_SCALE, STATE, Fold
from obbo_lightning.domains import Box, L2Ball, Nonnegative, RealSpace, Simplex
from obbo_lightning.geometry import AdaptiveDiagonal, Burg, Euclidean, NegativeEntropy
from obbo_lightning.regularizers import L1
from obbo_lightning.solvers import GradientDescent

GEOMETRIES = [Euclidean(), AdaptiveDiagonal(), NegativeEntropy(), Burg()]
DOMAINS = [RealSpace(), Nonnegative(), Box(-1.0, 1.0), Box(0.01, 3.0), L2Ball(2.0), Simplex()]
PAIRS = [(g, x) for g in GEOMETRIES for x in DOMAINS if g.supports(L1(0.3), x)]
START = torch.tensor([[0.2, 0.3, 0.5], [0.4, 0.1, 0.5]], dtype=F64)  # lies in all of these domains


def random_directions(rounds=70, lanes=2, dim=3, seed=0):
    """Return random d_t; the first two of lane 0 are zero, one overflows its size, lane 1 is skipped once."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(0.7 * torch.randn(rounds, lanes, 1, generator=generator, dtype=F64))
    d = sizes * (0.4 + torch.randn(rounds, lanes, dim, generator=generator, dtype=F64))
    d[:2, 0] = 0
    d[20] *= 1e9
    d[30, 1] = 0
    return d


def averages(d, window):
    """Return q_t."""
    return torch.stack([d[max(0, t + 1 - window) : t + 1].sum(0) / window for t in range(len(d))])


def run_optimizer(make, start, d, window=1, folds=1):
    """Return λ_t and α_t of every round."""
    outer = torch.nn.Parameter(start.clone())
    optimizer, path, rates = make(outer), [], []
    for t, (newest, direction) in enumerate(zip(d, averages(d, window), strict=True)):
        outer.grad = direction.clone()
        optimizer.step(newest=newest, fold=Fold(t % folds, folds))
        path.append(outer.detach().clone())
        rates.append(optimizer.state[outer]["lr"].clone())
    return torch.stack(path), torch.stack(rates)


class Reference:
    """The rule of the module's docstring for one lane, in NumPy, for ``Real``, positive boxes and the simplex."""

    def __init__(self, kind, start, folds):
        self.kind, self.outer = kind, np.array(start)
        self.moves = np.zeros((folds, len(start)))
        self.sizes, self.recent, self.log_scale = [], 0.0, math.log(DEFAULT_SCALE)
        self.reach = 0.0

    def dual(self, q):
        return {"real": q, "positive": self.outer * q, "simplex": q - q.mean()}[self.kind]

    def cosine(self, x, y):
        w = self.outer if self.kind == "simplex" else np.ones_like(x)
        if self.kind == "simplex":
            x, y = x - (w * x).sum() / w.sum(), y - (w * y).sum() / w.sum()
        norms = math.sqrt((w * x * x).sum() * (w * y * y).sum())
        return (w * x * y).sum() / norms if norms else 0.0

    def step(self, newest, q, fold):
        cut = 5 if self.kind == "simplex" else 2
        unit = np.abs(self.dual(q)).max()
        if unit > 0:
            weights = 0.99 ** np.arange(len(self.sizes))[::-1]
            before = (weights * self.sizes).sum() / weights.sum() if self.sizes else unit / cut
            first = not self.sizes
            self.recent = 0.5 * self.recent + 0.5 * (unit if first else min(unit, 10 * before))
            self.sizes.append(unit if first else min(unit, cut * before))
        if not self.sizes:
            return 0.0
        weights = 0.99 ** np.arange(len(self.sizes))[::-1]
        typical = (weights * self.sizes).sum() / weights.sum()
        if self.kind != "simplex":
            typical = max(typical, self.recent)
        direction = self.dual(q) * (min(1.0, cut * typical / unit) if unit > 0 else 1.0)
        size = np.sqrt((self.outer**2).mean())
        self.reach = max(max(size, 1e-3) if self.kind == "real" else 1.0, 0.99 * self.reach)
        d, size = self.dual(newest), np.abs(self.dual(newest)).max()
        others = self.moves.sum(0) - (self.moves[fold] if len(self.moves) > 1 else 0.0)
        c = self.cosine(d, others) * min(1.0, size / typical)
        free = len(q) - (self.kind == "simplex")
        if size > 0:
            self.log_scale = 0.97 * self.log_scale + 0.03 * math.log(0.05) + math.log1p(0.32 * free / (free + 1) * c)
            self.log_scale = min(max(self.log_scale, math.log(0.01)), 0.0)
        length = math.exp(self.log_scale) * self.reach * max(0.0, self.cosine(d, direction))
        if size > 0:
            self.moves *= 0.7
            self.moves[fold] += direction / typical
        if self.kind == "real":
            self.outer = self.outer - length * direction / typical
        else:
            self.outer = self.outer * np.exp(-length * direction / typical)
        if self.kind == "simplex":
            self.outer = self.outer / self.outer.sum()
        return length / typical


KINDS = {
    "real": (Euclidean(), RealSpace()),
    "positive": (NegativeEntropy(), Box(1e-30, 1e30)),
    "simplex": (NegativeEntropy(), Simplex()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("folds", [1, 3])
def test_steps_are_those_of_numpy(kind, window, folds):
    geometry, domain = KINDS[kind]
    d = random_directions()
    path, rates = run_optimizer(
        lambda outer: BregmanProx([outer], "auto", geometry, domain=domain), START, d, window, folds
    )
    q = averages(d, window)
    for lane in range(2):
        start = START[lane] / START[lane].sum() if kind == "simplex" else START[lane]
        reference = Reference(kind, start.numpy(), folds)
        for t in range(len(d)):
            rate = reference.step(d[t, lane].numpy(), q[t, lane].numpy(), t % folds)
            assert float(rates[t, lane]) == pytest.approx(rate, rel=1e-9)
            np.testing.assert_allclose(path[t, lane], reference.outer, rtol=1e-9)


@pytest.mark.parametrize(("geometry", "domain"), PAIRS, ids=str)
@pytest.mark.parametrize(("window", "l1"), [(1, 0.0), (4, 0.0), (4, 0.3)])
def test_multiplying_f_and_h_by_1024_gives_the_same_lambda_to_the_last_bit(geometry, domain, window, l1):
    d = random_directions(seed=1)
    results = []
    for factor in (1, 1024, 1 / 1024):
        h = L1(l1 * factor)
        path, rates = run_optimizer(
            lambda outer, h=h: BregmanProx([outer], "auto", geometry, h, domain), START, factor * d, window, folds=3
        )
        results.append((path, factor * rates))
    assert (results[0][0][-1] != START).any(-1).all()
    for path, rates in results[1:]:
        assert torch.equal(path, results[0][0])
        assert torch.equal(rates, results[0][1])


@pytest.mark.parametrize("cls", [Adam, SGDM])
def test_torch_optimizers_do_not_depend_on_the_units_of_f(cls):
    d = random_directions(seed=2)
    paths = [run_optimizer(cls(lr="auto").optimizer, START, factor * d)[0] for factor in (1, 1024)]
    assert torch.equal(*paths)
    assert torch.equal(paths[0][1, 0], START[0])
    assert (paths[0][-1] != START).all()


@pytest.mark.parametrize(("geometry", "domain"), PAIRS, ids=str)
def test_lambda_stays_until_there_is_a_direction(geometry, domain):
    d = random_directions()
    path, rates = run_optimizer(lambda outer: BregmanProx([outer], "auto", geometry, domain=domain), START, d)
    assert torch.equal(path[1, 0], START[0])
    assert (rates[:2, 0] == 0).all()
    assert (path[0, 1] != START[1]).any()


@pytest.mark.parametrize("size", [5e-324, 1e-310, 1e-320])
def test_a_subnormal_direction_moves_nothing_and_leaves_no_trace(size):
    for kind, (geometry, domain) in KINDS.items():
        d = torch.tensor([1.0, -0.5, 0.2], dtype=F64).expand(12, 1, 3).clone()
        d[:6] *= size
        path, rates = run_optimizer(
            lambda outer, g=geometry, x=domain: BregmanProx([outer], "auto", g, domain=x), START[:1], d
        )
        assert torch.equal(path[5], START[:1]), kind
        assert path.isfinite().all()
        assert rates.isfinite().all()
        assert (path[-1] != START[:1]).any()


def test_sizes_that_would_overflow_stay_finite():
    largest = torch.finfo(torch.float32).max
    start, d = torch.full((1, 1), 10.0), torch.full((3, 1, 1), largest)  # λ q overflows
    for geometry in (Burg(), NegativeEntropy()):
        path, rates = run_optimizer(
            lambda outer, g=geometry: BregmanProx([outer], "auto", g, domain=Box(0.0, 100.0)), start, d
        )
        assert path.isfinite().all()
        assert rates.isfinite().all()


def last_scale(d, folds=1, dim=3):
    outer = torch.nn.Parameter(torch.zeros(1, dim, dtype=F64))
    optimizer = BregmanProx([outer], "auto", domain=Box(-1e6, 1e6))
    for t, direction in enumerate(d):
        outer.grad = direction.reshape(1, dim)
        optimizer.step(fold=Fold(t % folds, folds))
    return float(optimizer.state[outer]["log_scale"].exp())


def test_steps_grow_with_agreement_and_shrink_without():
    generator = torch.Generator().manual_seed(0)
    same = torch.ones(30, 3, dtype=F64)
    noise = torch.randn(300, 3, generator=generator, dtype=F64)
    turning = same * torch.tensor([1.0, -1.0], dtype=F64).repeat(15).unsqueeze(-1)
    assert last_scale(same) == pytest.approx(1.0)
    assert last_scale(noise) < 0.08
    assert last_scale(turning) < 0.02


def test_what_only_one_fold_asks_for_is_no_evidence():
    """Every fold pulls in a direction of its own, always the same: steps on one help no other."""
    own = torch.eye(4, dtype=F64).repeat(50, 1)
    assert last_scale(own, folds=4, dim=4) == pytest.approx(0.05, rel=0.02)  # no agreement, no contradiction
    shared = own + 1.0
    assert last_scale(shared, folds=4, dim=4) > 0.9
    # With one fold the same directions look like evidence: each is compared with its own last steps, too.
    assert last_scale(own[::4], folds=1, dim=4) == pytest.approx(1.0)


def test_a_step_does_not_grow_with_the_size_of_hypergradients():
    """A positive number whose hypergradient grows a thousandfold in ten rounds: log λ moves by s_t, not by more."""
    d = torch.logspace(0, 3, 10, dtype=F64).reshape(10, 1, 1)
    start = torch.ones(1, 1, dtype=F64)
    for sign in (1.0, -1.0):
        outer = torch.nn.Parameter(start.clone())
        optimizer = BregmanProx([outer], "auto", NegativeEntropy(), domain=Box(1e-9, 1e9))
        for direction in d:
            before = outer.detach().clone()
            outer.grad = sign * direction / before  # of log λ
            optimizer.step()
            change = float((outer.detach() / before).log().abs())
            assert change <= 2.01 * float(optimizer.state[outer]["log_scale"].exp())
            assert change < 0.5


def test_a_coordinate_that_starts_at_zero_without_bounds_moves():
    d = -torch.ones(60, 1, 1, dtype=F64)
    path, _ = run_optimizer(lambda outer: BregmanProx([outer], "auto"), torch.zeros(1, 1, dtype=F64), d)
    assert 0 < float(path[0]) < 1e-3
    assert float(path[-1]) > 1


class NoisyQuadratic(Problem):
    """f_t(λ) = ½ ‖λ − target‖² + ⟨noise_t, λ⟩."""

    def __init__(self, group, target):
        self.groups, self.target = ParameterGroups(x=group), torch.tensor([target])

    def inner_loss(self, outer, inner, task, sample=None):
        return (inner - outer).square().sum(-1)

    def outer_loss(self, outer, inner, task, sample=None):
        return 0.5 * (outer - self.target).square().sum(-1) + (task["noise"] * outer).sum(-1)

    def initial_inner(self, outer, task):
        return torch.zeros_like(outer)


@pytest.mark.parametrize("window", [1, 10, 25])
@pytest.mark.parametrize(
    ("group", "target"),
    [
        (Real(0.3), [1.0]),
        (Interval(-10.0, 10.0, start=0.3), [1.0]),
        (Positive(0.3), [1.0]),
        (Positive(0.3, regularizer=L1(0.2)), [1.2]),
        (OnSimplex(2), [0.8, 0.2]),
    ],
    ids=["Real", "Interval", "Positive", "Positive with L1", "OnSimplex"],
)
def test_a_noisy_quadratic_is_solved_with_every_window(group, target, window):
    problem, generator = NoisyQuadratic(group, target), torch.Generator().manual_seed(0)
    optimum = torch.tensor([1.0]) if target == [1.2] else problem.target  # of f + h
    tasks = ({"noise": 0.1 * torch.randn(1, len(target), generator=generator)} for _ in range(400))
    algorithm = OBBO(window=window, inner=GradientDescent(steps=1))
    errors = [
        float((found.outer - optimum).abs().max())
        for found in online(problem, algorithm, tasks, problem.groups.start())
    ]
    assert np.mean(errors[100:]) < 0.12


def test_the_first_scale_fades():
    d = random_directions(rounds=300, seed=3)
    scales = []
    for scale in (0.01, 1.0):
        outer = torch.nn.Parameter(START.clone())
        optimizer = BregmanProx([outer], "auto", scale=scale)
        for direction in d:
            outer.grad = direction.clone()
            optimizer.step()
        scales.append(optimizer.state[outer]["log_scale"].exp())
    torch.testing.assert_close(*scales, rtol=0.01, atol=0)


def test_steps_continue_exactly_from_their_state_and_refuse_other_folds():
    d = random_directions()
    outer = torch.nn.Parameter(START.clone())
    optimizer = BregmanProx([outer], "auto")

    def run(outer, optimizer, rounds):
        for t in rounds:
            outer.grad = d[t].clone()
            optimizer.step(fold=Fold(t % 3, 3))

    run(outer, optimizer, range(30))
    assert set(STATE) <= set(optimizer.state[outer])
    other = torch.nn.Parameter(outer.detach().clone())
    continued = BregmanProx([other], "auto")
    continued.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(outer, optimizer, range(30, 70))
    run(other, continued, range(30, 70))
    assert torch.equal(outer, other)
    outer.grad = d[0].clone()
    with pytest.raises(ValueError, match="folds must be 3 to continue, got 4"):
        optimizer.step(fold=Fold(3, 4))


def test_the_weights_of_a_network_move_by_a_share_of_their_size_in_spite_of_noise():
    """Directions that are mostly noise, as those of a network: a cosine of 0.04 in 2,500 coordinates is evidence."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(1, 2500, generator=generator, dtype=F64)
    d = [0.2 * shared + torch.randn(1, 2500, generator=generator, dtype=F64) for _ in range(200)]
    scales = {}
    for name, directions in {"shared": d, "noise": [one - 0.2 * shared for one in d]}.items():
        outer = torch.nn.Parameter(torch.ones(1, 2500, dtype=F64))
        optimizer = BregmanProx([outer], "auto", AdaptiveDiagonal())
        for direction in directions:
            outer.grad = direction
            optimizer.step()
        scales[name] = float(optimizer.state[outer]["log_scale"].exp())
    assert 0.1 < scales["noise"] < 0.3
    assert scales["shared"] > 2 * scales["noise"]
