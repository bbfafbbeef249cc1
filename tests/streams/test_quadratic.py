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


def test_condition_numbers_are_the_given_ones():
    stream = QuadraticTasks(condition_number=[2.0, 20.0], lanes=2)
    eigenvalues = torch.linalg.eigvalsh(stream.problem.inner_matrix)
    assert torch.allclose(eigenvalues[:, -1] / eigenvalues[:, 0], torch.tensor([2.0, 20.0], dtype=F64))
    assert torch.allclose(stream.problem.smoothness(None, None), torch.ones(2, dtype=F64))


@pytest.mark.parametrize("name", ["b", "c"])
def test_each_lane_drifts_in_its_own_direction_by_the_inverse_root_of_the_round(name):
    """The number of rounds changes no task."""
    stream, still = QuadraticTasks(lanes=3, rounds=1000, drift=0.7), QuadraticTasks(lanes=3, rounds=1001, drift=0.0)
    assert (len(stream), len(still)) == (1000, 1001)
    for t in (0, 3, 99, 999):
        assert torch.equal(still[t][name], still[0][name])
        moved = (stream[t][name] - still[t][name]) / (0.7 / math.sqrt(t + 1))  # unit vectors
        assert torch.allclose(moved.norm(dim=-1), torch.ones(3, dtype=F64), rtol=1e-12)
        for vectors in (moved, still[t][name]):
            assert float((vectors @ vectors.T - torch.eye(3, dtype=F64)).abs().max()) < 0.99


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
