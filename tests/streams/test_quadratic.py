"""Quadratic tasks: drift, condition numbers, and the sublinear regret of OBBO."""

import math
from itertools import pairwise

import pytest
import torch
from toy import F64

from obbo_lightning import OBBO, online
from obbo_lightning.geometry import AdaptiveDiagonal, Euclidean
from obbo_lightning.hypergradients import ClosedForm, Unrolled
from obbo_lightning.solvers import GradientDescent
from obbo_lightning.streams import QuadraticTasks


@pytest.fixture
def stream():
    return QuadraticTasks(condition_number=[2.0, 20.0], lanes=2, rounds=12, radius=3.0)


def test_condition_numbers_are_the_given_ones(stream):
    eigenvalues = torch.linalg.eigvalsh(stream.problem.inner_matrix)
    assert torch.allclose(eigenvalues[:, -1] / eigenvalues[:, 0], torch.tensor([2.0, 20.0], dtype=F64))
    assert torch.allclose(stream.problem.smoothness(None, None), torch.ones(2, dtype=F64))


def test_tasks_are_a_pure_function_of_seed_and_round(stream):
    again = QuadraticTasks(condition_number=[2.0, 20.0], lanes=2, rounds=500, radius=3.0)
    for t in (11, 0, 5):
        assert all(torch.equal(stream[t][k], again[t][k]) for k in ("b", "c"))
    other = QuadraticTasks(condition_number=[2.0, 20.0], lanes=2, rounds=12, seed=1)
    assert not torch.equal(stream[0]["b"], other[0]["b"])
    assert len(stream) == 12


def test_drift_decays_as_the_root_of_the_round():
    stream = QuadraticTasks(rounds=1000, drift=0.7)
    still = QuadraticTasks(rounds=1000, drift=0.0)
    for t in (0, 3, 99, 999):
        assert math.isclose(float((stream[t]["b"] - still[t]["b"]).norm()), 0.7 / math.sqrt(t + 1), rel_tol=1e-12)
        assert torch.equal(still[t]["c"], still[0]["c"])


def test_each_lane_drifts_in_its_own_direction():
    stream, still = QuadraticTasks(lanes=3, drift=0.5), QuadraticTasks(lanes=3, drift=0.0)
    for name in ("b", "c"):
        moved = (stream[3][name] - still[3][name]) / (0.5 / 4**0.5)  # unit vectors
        assert torch.allclose(moved.norm(dim=-1), torch.ones(3, dtype=torch.float64))
        for vectors in (moved, still[3][name]):
            cosines = vectors @ vectors.T
            assert float((cosines - torch.eye(3, dtype=torch.float64)).abs().max()) < 0.99


@pytest.mark.slow
@pytest.mark.parametrize(
    ("geometry", "hypergradient"),
    [(Euclidean(), Unrolled()), (AdaptiveDiagonal(), ClosedForm())],
    ids=["euclidean", "adaptive"],
)
def test_exact_regret_of_obbo_is_sublinear(geometry, hypergradient):
    """Drift that decays as t^(−1/2), α ≤ 1/(L w_max), w = √T: regret(T)/T falls as T doubles."""
    lengths = [125, 250, 500, 1000]
    widest = math.isqrt(max(lengths))
    averages = []
    for rounds in lengths:
        stream = QuadraticTasks(condition_number=2.0, rounds=rounds, outer_dim=2, inner_dim=3, drift=0.5)
        problem = stream.problem
        # K = log(T)/log(1/(1 − ημ)) + 1 with η = 0.9/ℓ, α = 1/(L w_max)
        steps = math.ceil(math.log(rounds) / -math.log(1 - 0.9 / 2)) + 1
        smoothness = problem.ridge + torch.linalg.matrix_norm(problem.response, ord=2) ** 2  # L
        algorithm = OBBO(
            lr=1 / float(smoothness * widest),
            window=math.isqrt(rounds),
            inner=GradientDescent(steps=steps, lr=0.9),
            hypergradient=hypergradient,
            geometry=geometry,
            domain=stream.domain,
        )
        start = stream.initial_outer() + 1
        *_, last = online(problem, algorithm, stream, start, regret_window=math.isqrt(rounds))
        averages.append(float(last.regret["exact"]) / rounds)
    assert all(later < earlier for earlier, later in pairwise(averages)), averages
    assert averages[-1] < averages[0] / 4, averages
