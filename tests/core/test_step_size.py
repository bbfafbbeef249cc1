"""``lr: auto``: steps in the geometry's own units, against NumPy and free of the units of f to the last bit."""

import numpy as np
import pytest
import torch
from toy import F64

from obbo_lightning import SGDM, Adam, BregmanProx
from obbo_lightning.core.step_size import median_of_positive
from obbo_lightning.domains import Box, L2Ball, Nonnegative, RealSpace, Simplex
from obbo_lightning.geometry import AdaptiveDiagonal, Burg, Euclidean, NegativeEntropy
from obbo_lightning.regularizers import L1

GEOMETRIES = [Euclidean(), AdaptiveDiagonal(), NegativeEntropy(), Burg()]
DOMAINS = [RealSpace(), Nonnegative(), Box(-1.0, 1.0), Box(0.01, 3.0), L2Ball(2.0), Simplex()]
PAIRS = [(g, x) for g in GEOMETRIES for x in DOMAINS if g.supports(L1(0.3), x)]
START = torch.tensor([[0.2, 0.3, 0.5], [0.4, 0.1, 0.5]], dtype=F64)  # lies in all of these domains


def random_directions(rounds=70, lanes=2, dim=3, seed=0):
    """Return random q_t; the first two of lane 0 are zero, one overflows, lane 1 is skipped once."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(0.7 * torch.randn(rounds, lanes, 1, generator=generator, dtype=F64))
    q = sizes * torch.randn(rounds, lanes, dim, generator=generator, dtype=F64)
    q[:2, 0] = 0
    q[20] *= 1e9
    q[30, 1] = 0
    return q


def run_optimizer(make, start, q):
    """Return λ_t and α_t of every round."""
    outer = torch.nn.Parameter(start.clone())
    optimizer, path, rates = make(outer), [], []
    for direction in q:
        outer.grad = direction.clone()
        optimizer.step()
        path.append(outer.detach().clone())
        rates.append(optimizer.state[outer]["lr"].clone())
    return torch.stack(path), torch.stack(rates)


@pytest.mark.parametrize(("geometry", "domain"), PAIRS, ids=str)
def test_medians_and_cuts_are_those_of_numpy(geometry, domain):
    q = random_directions()
    path, rates = run_optimizer(lambda o: BregmanProx([o], "auto", geometry, domain=domain, scale=0.2), START, q)
    before = torch.cat([START.unsqueeze(0), path[:-1]])
    for lane in range(2):
        units = []
        for t in range(len(q)):
            lam, d = before[t, lane].numpy(), q[t, lane].numpy()
            centred = d - d.mean() if isinstance(domain, Simplex) else d
            unit = np.abs(lam * d).max() if isinstance(geometry, Burg) else np.abs(centred).max()
            size = {L2Ball: 0.4, Simplex: 1 / 3}.get(type(domain), max(np.sqrt((lam**2).mean()), 1e-3))
            if type(domain) is Box:
                size = (domain.upper - domain.lower) / 10
            if isinstance(geometry, (NegativeEntropy, Burg)):
                size = 1.0
            if isinstance(geometry, AdaptiveDiagonal):
                size = size / np.sqrt(3)
            if unit > 0:
                units.append(unit)
            if not units:
                assert rates[t, lane] == 0
                assert torch.equal(path[t, lane], START[lane])
                continue
            median = np.median(units[-50:])
            assert float(rates[t, lane]) == pytest.approx(0.2 * size / median, rel=1e-12)
            if isinstance(geometry, Euclidean) and isinstance(domain, RealSpace):
                cut = d * min(1.0, 5 * median / unit) if unit > 0 else d
                np.testing.assert_allclose(path[t, lane], lam - 0.2 * size / median * cut, rtol=1e-12, atol=1e-15)
            if type(geometry) is NegativeEntropy and isinstance(domain, Nonnegative):
                change = np.abs(np.log(path[t, lane].numpy() / lam)).max()
                assert change == pytest.approx(0.2 * min(5, unit / median), rel=1e-9)


@pytest.mark.parametrize(("geometry", "domain"), PAIRS, ids=str)
@pytest.mark.parametrize("l1", [0.0, 0.3])
def test_multiplying_f_by_1024_gives_the_same_lambda_to_the_last_bit(geometry, domain, l1):
    q = random_directions(seed=1)
    results = []
    for factor in (1, 1024, 1 / 1024):
        regularizer = L1(l1 * factor)  # h is a term of the objective, too
        path, rates = run_optimizer(
            lambda o, h=regularizer: BregmanProx([o], "auto", geometry, h, domain), START, factor * q
        )
        results.append((path, factor * rates))
    assert (results[0][0][-1] != START).any(-1).all()
    for path, rates in results[1:]:
        assert torch.equal(path, results[0][0])
        assert torch.equal(rates, results[0][1])


@pytest.mark.parametrize("cls", [Adam, SGDM])
def test_torch_optimizers_do_not_depend_on_the_units_of_f(cls):
    q = random_directions(seed=2)
    paths = [run_optimizer(cls(lr="auto").optimizer, START, factor * q)[0] for factor in (1, 1024)]
    assert torch.equal(*paths)
    assert torch.equal(paths[0][1, 0], START[0])
    assert (paths[0][-1] != START).all()


def test_the_median_adapts_to_a_new_scale_and_ignores_single_outliers():
    q = torch.ones(120, 1, 1, dtype=F64)
    q[10:15] = 1e6  # outliers
    q[60:] = 1e-3  # another scale from here on
    start = torch.zeros(1, 1, dtype=F64)
    _, rates = run_optimizer(lambda o: BregmanProx([o], "auto", domain=Box(-1e3, 1e3)), start, q)
    assert torch.equal(rates[:60], rates[:1].expand(60, 1, 1))
    assert float(rates[-1] / rates[0]) == pytest.approx(1000)


def test_a_coordinate_that_starts_at_zero_without_bounds_moves():
    q = -torch.ones(40, 1, 1, dtype=F64)
    path, _ = run_optimizer(lambda o: BregmanProx([o], "auto"), torch.zeros(1, 1, dtype=F64), q)
    assert float(path[0]) == pytest.approx(0.3e-3)
    assert float(path[-1]) > 1


def test_units_and_medians_that_would_overflow_stay_finite():
    largest = torch.finfo(torch.float32).max
    assert float(median_of_positive(torch.full((1, 2), largest))) == largest
    start, q = torch.full((1, 1), 10.0), torch.full((3, 1, 1), largest)  # λ q overflows
    path, rates = run_optimizer(lambda o: BregmanProx([o], "auto", Burg(), domain=Box(0.0, 100.0)), start, q)
    assert path.isfinite().all()
    assert (rates > 0).all()
