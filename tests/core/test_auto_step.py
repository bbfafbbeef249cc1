"""``lr: auto``: steps in the geometry's own units, by hand and in the last bit."""

import copy

import numpy as np
import pytest
import torch
from toy import F64

from obbo_lightning import (
    L1,
    OAGD,
    OBBO,
    SGDM,
    SOBOW,
    Adam,
    AdaptiveDiagonal,
    Blocks,
    Box,
    BregmanProx,
    Burg,
    ClosedForm,
    Euclidean,
    ExactSolution,
    Interval,
    L2Ball,
    NegativeEntropy,
    Nonnegative,
    OnSimplex,
    OuterStep,
    Positive,
    Real,
    RealSpace,
    Simplex,
    online,
)
from obbo_lightning.checks import check_algorithm
from obbo_lightning.problems.quadratic import Quadratic
from obbo_lightning.streams.quadratic import QuadraticStream

PAIRS = [
    (Euclidean(), RealSpace()),
    (Euclidean(), Box(-1.0, 1.0)),
    (Euclidean(), L2Ball(2.0)),
    (Euclidean(), Simplex()),
    (AdaptiveDiagonal(), RealSpace()),
    (AdaptiveDiagonal(), L2Ball(2.0)),
    (AdaptiveDiagonal(), Simplex()),
    (NegativeEntropy(), Nonnegative()),
    (NegativeEntropy(), Box(0.01, 3.0)),
    (NegativeEntropy(), Simplex()),
    (Burg(), Box(0.0, 3.0)),
]
IDS = [f"{type(g).__name__}-{x!r}" for g, x in PAIRS]


def directions(rounds=70, lanes=2, dim=3, seed=0):
    """Random ones; the first two of lane 0 are zero, one blows up, one lane is skipped once."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(0.7 * torch.randn(rounds, lanes, 1, generator=generator, dtype=F64))
    q = sizes * torch.randn(rounds, lanes, dim, generator=generator, dtype=F64)
    q[:2, 0] = 0
    q[20] *= 1e9
    q[30, 1] = 0
    return q


def walk(make, start, q):
    """λ_t of every round, the optimizer, and α_t."""
    outer = torch.nn.Parameter(start.clone())
    optimizer, path, rates = make(outer), [], []
    for direction in q:
        outer.grad = direction.clone()
        optimizer.step()
        path.append(outer.detach().clone())
        rates.append(optimizer.state[outer]["lr"].clone())
    return torch.stack(path), torch.stack(rates), optimizer


def start_in(domain):
    return torch.tensor([[0.2, 0.3, 0.5], [0.4, 0.1, 0.5]], dtype=F64)


@pytest.mark.parametrize(("geometry", "domain"), PAIRS, ids=IDS)
def test_medians_and_cuts_are_those_of_numpy_by_hand(geometry, domain):
    q, start = directions(), start_in(domain)
    path, rates, _ = walk(lambda o: BregmanProx([o], "auto", geometry, domain=domain, scale=0.2), start, q)
    before = torch.cat([start.unsqueeze(0), path[:-1]])
    for lane in range(2):
        seen = []
        for t in range(len(q)):
            lam, d = before[t, lane].numpy(), q[t, lane].numpy()
            centred = d - d.mean() if isinstance(domain, Simplex) else d
            unit = np.abs(lam * d).max() if isinstance(geometry, Burg) else np.abs(centred).max()
            size = {Box: 0.2, L2Ball: 0.4, Simplex: 1 / 3}.get(type(domain), np.sqrt((lam**2).mean()))
            if isinstance(geometry, (NegativeEntropy, Burg)):
                size = 1.0
            if isinstance(geometry, AdaptiveDiagonal):
                size = size / np.sqrt(3)
            if unit > 0:
                seen.append(unit)
            if not seen:
                assert rates[t, lane] == 0
                assert torch.equal(path[t, lane], start[lane])
                continue
            median = np.median(seen[-50:])
            assert float(rates[t, lane]) == pytest.approx(0.2 * size / median, rel=1e-12)
            if isinstance(geometry, Euclidean) and isinstance(domain, RealSpace):
                cut = d * min(1.0, 5 * median / unit) if unit > 0 else d
                np.testing.assert_allclose(path[t, lane], lam - 0.2 * size / median * cut, rtol=1e-12, atol=1e-15)
            if type(geometry) is NegativeEntropy and isinstance(domain, Nonnegative):
                change = np.abs(np.log(path[t, lane].numpy() / lam)).max()
                assert change == pytest.approx(0.2 * min(5, unit / median), rel=1e-9)


@pytest.mark.parametrize(("geometry", "domain"), PAIRS, ids=IDS)
def test_a_thousand_and_twenty_four_times_f_is_the_same_lambda_to_the_last_bit(geometry, domain):
    q, start = directions(seed=1), start_in(domain)
    for h in (None, L1(0.3)):
        both = []
        for factor in (1, 1024, 1 / 1024):
            regularizer = None if h is None else L1(h.l1 * factor)  # h is a part of the objective
            path, rates, _ = walk(
                lambda o, r=regularizer: BregmanProx([o], "auto", geometry, r, domain), start, factor * q
            )
            both.append((path, factor * rates))
        assert (both[0][0][-1] != start).any(-1).all()
        for path, rates in both[1:]:
            assert torch.equal(path, both[0][0])
            assert torch.equal(rates, both[0][1])


@pytest.mark.parametrize("cls", [Adam, SGDM])
def test_torch_rules_are_scale_free_too(cls):
    q, start = directions(seed=2), start_in(RealSpace())
    paths = [walk(cls(lr="auto").outer_rule, start, factor * q)[0] for factor in (1, 1024)]
    assert torch.equal(*paths)
    assert torch.equal(paths[0][1, 0], start[0])
    assert (paths[0][-1] != start).all()


class Scaled(Quadratic):
    factor = 1.0

    def outer_loss(self, *arguments, **keywords):
        return self.factor * super().outer_loss(*arguments, **keywords)

    def hypergradient(self, outer, task):
        gradient, inner = super().hypergradient(outer, task)
        return self.factor * gradient, inner


class ScaledMore(Scaled):
    factor = 1024.0


@pytest.mark.parametrize("cls", [OBBO, SOBOW, OAGD, Adam])
def test_a_whole_run_does_not_know_the_units_of_f(cls):
    stream = QuadraticStream(rounds=15)
    tasks = list(stream)
    tasks[6] = {**tasks[6], "c": 1e7 * tasks[6]["c"]}
    tasks[9] = {**tasks[9], "c": torch.nan * tasks[9]["c"]}
    ends = []
    for made in (Scaled, ScaledMore):
        problem = made(stream.problem.inner_matrix, stream.problem.coupling)
        window = {} if cls is Adam else {"window": 2}
        algorithm = cls(lr="auto", **window, inner=ExactSolution(), hypergradient=ClosedForm(), domain=stream.domain)
        start = stream.initial_outer() + 0.1
        ends.append([r.step.outer for r in online(problem, algorithm, tasks, start, on_nonfinite="skip")])
    assert torch.equal(torch.stack(ends[0]), torch.stack(ends[1]))


def test_the_median_forgets_and_a_blow_up_does_not_count():
    q = torch.ones(120, 1, 1, dtype=F64)
    q[10:15] = 1e6  # blow-ups
    q[60:] = 1e-3  # another scale, for good
    _, rates, _ = walk(lambda o: BregmanProx([o], "auto", domain=Box(-1e3, 1e3)), torch.zeros(1, 1, dtype=F64), q)
    assert torch.equal(rates[:60], rates[:1].expand(60, 1, 1))
    assert float(rates[-1] / rates[0]) == pytest.approx(1000)


@pytest.mark.parametrize("cls", [OBBO, Adam, SGDM])
@pytest.mark.parametrize("named", [False, True])
def test_a_resumed_run_takes_the_same_steps(cls, named):
    blocks = Blocks(decay=Positive(0.2), sources=OnSimplex(3), shift=Interval(-1.0, 1.0)) if named else None
    start = blocks.start(lanes=2, dtype=F64) if named else torch.full((2, 5), 0.2, dtype=F64)
    q = directions(60, dim=5).unsqueeze(1)

    def step_at(outer):
        return OuterStep(torch.nn.Parameter(outer.clone()), cls(lr="auto"), 3, blocks=blocks)

    whole, first = step_at(start), step_at(start)
    for direction in q[:25]:
        whole(direction)
        first(direction)
    state = copy.deepcopy(first.state_dict())
    second = step_at(first.outer.detach())
    second.load_state_dict(state)
    for direction in q[25:]:
        one, other = whole(direction), second(direction)
        assert torch.equal(one.outer, other.outer)
        assert one.numbers
        assert one.numbers.keys() == other.numbers.keys()
        assert all(torch.equal(one.numbers[name], other.numbers[name]) for name in one.numbers)
        for name, regret in one.regret.items():
            assert regret is None or torch.equal(regret, other.regret[name])


def test_a_coordinate_at_zero_and_one_without_bounds_get_going():
    q = -torch.ones(40, 1, 1, dtype=F64)
    path, _, _ = walk(lambda o: BregmanProx([o], "auto"), torch.zeros(1, 1, dtype=F64), q)
    assert float(path[0]) == pytest.approx(0.3e-3)
    assert float(path[-1]) > 1
    block = Real(0.0)
    assert (block.lr, type(block.geometry)) == ("auto", Euclidean)


@pytest.mark.parametrize("cls", [OBBO, SGDM])
def test_algorithms_keep_their_contract_with_auto(cls):
    check_algorithm(cls, lr="auto", scale=0.02)


def test_weights_of_sources_follow_a_switch_of_the_truth_without_a_step_size():
    """Sources whose labels are right or turned around, a scalar regression, everything in closed form."""
    rounds, sources, switch = 120, 5, 60
    generator = torch.Generator().manual_seed(0)
    blocks = Blocks(sources=OnSimplex(sources))
    for factor in (1.0, 1e-6):
        outer = torch.nn.Parameter(blocks.start(dtype=F64))
        step = OuterStep(outer, OBBO(window=1), blocks=blocks)
        on_truth = []
        for t in range(rounds):
            right = torch.arange(sources) % 2 == (0 if t < switch else 1)
            labels = torch.where(right, 1.0, -1.0).to(F64) + 0.3 * torch.randn(sources, generator=generator, dtype=F64)
            # β̂ = Σ w_i y_i minimises Σ w_i (β − y_i)²; f = factor (β̂ − 1)²/2, and ∇F = factor (β̂ − 1) y
            beta = outer.detach()[0] @ labels
            hypergradient = factor * (beta - 1) * labels
            step(hypergradient.reshape(1, 1, -1))
            on_truth.append(float(outer.detach()[0][right].sum()))
        assert np.mean(on_truth[40:60]) > 0.9
        assert on_truth[60] < 0.5
        assert np.mean(on_truth[100:]) > 0.9
