import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from toy import F64, Nonlinear, Proximal, toy_point, toy_task

from obbo_lightning import OBBO, online
from obbo_lightning.geometry import AdaptiveDiagonal, Euclidean
from obbo_lightning.hypergradients import ClosedForm, Sample, Unrolled
from obbo_lightning.problems.quadratic import Quadratic
from obbo_lightning.solvers import GradientDescent
from obbo_lightning.streams.quadratic import QuadraticTasks
from obbo_lightning.testing import check_problem


@pytest.fixture
def stream():
    return QuadraticTasks(condition_number=[2.0, 20.0], lanes=2, rounds=12, radius=3.0)


def test_problem_contract_holds_for_every_problem_here(stream):
    check_problem(stream.problem, toy_point(dim=4), toy_point(dim=8), stream[3])
    check_problem(Nonlinear(), toy_point(), toy_point(seed=2), toy_task())
    check_problem(Proximal(), toy_point(), toy_point(seed=2), toy_task())


class Broken(Quadratic):
    def __init__(self, good):
        super().__init__(good.inner_matrix, good.coupling)


class WrongMixedTerm(Broken):
    def mixed_term(self, *args):
        return -super().mixed_term(*args)


class WrongSolution(Broken):
    def solution(self, outer, task):
        return super().solution(outer, task) + 1e-3


class WrongHypergradient(Broken):
    def hypergradient(self, outer, task):
        gradient, solution = super().hypergradient(outer, task)
        return 1.001 * gradient, solution


class TooSmooth(Broken):
    def smoothness(self, outer, task):
        return 0.9 * super().smoothness(outer, task)


class MixedLanes(Broken):
    def outer_loss(self, *args):
        return super().outer_loss(*args).flip(0) + super().outer_loss(*args)


class Cumulative(Broken):
    def inner_loss(self, *args):
        return super().inner_loss(*args).cumsum(0)


class Biased(Broken):
    def outer_loss(self, *args):
        return super().outer_loss(*args) * (7 if len(args) == 4 and args[3] else 1)


class MeanLoss(Broken):
    def inner_loss(self, *args):
        return super().inner_loss(*args).mean()


class Restless(Broken):
    def inner_loss(self, *args):
        return super().inner_loss(*args) + (torch.rand(()) if len(args) == 4 and args[3] else 0)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (WrongMixedTerm, "mixed_term is off"),
        (WrongSolution, "the gradient at solution"),
        (WrongHypergradient, "hypergradient is off"),
        (TooSmooth, "below the curvature"),
        (MixedLanes, "depends on another lane"),
        (Cumulative, "depends on another lane"),
        (Biased, "biased estimate"),
        (MeanLoss, "must have shape"),
        (Restless, "same for the same sample"),
    ],
)
def test_problem_contract_catches(stream, broken, complaint):
    with pytest.raises(AssertionError, match=complaint):
        check_problem(broken(stream.problem), toy_point(dim=4), toy_point(dim=8), stream[3])


def test_condition_numbers_are_the_chosen_ones(stream):
    eigenvalues = torch.linalg.eigvalsh(stream.problem.inner_matrix)
    assert torch.allclose(eigenvalues[:, -1] / eigenvalues[:, 0], torch.tensor([2.0, 20.0], dtype=F64))
    assert torch.allclose(stream.problem.smoothness(None, None), torch.ones(2, dtype=F64))
    assert torch.allclose(stream.problem.strong_convexity, torch.tensor([1 / 2, 1 / 20], dtype=F64))


def test_outer_smoothness_is_the_largest_curvature_of_f(stream):
    outer = toy_point(dim=4)
    for lane in range(2):
        hessian = torch.autograd.functional.jacobian(lambda x: stream.problem.hypergradient(x, stream[0])[0], outer)
        largest = torch.linalg.eigvalsh(hessian[lane, :, lane])[-1]
        assert torch.allclose(largest, stream.problem.outer_smoothness[lane], rtol=1e-10)


def test_tasks_are_a_pure_function_of_seed_and_round(stream):
    again = QuadraticTasks(condition_number=[2.0, 20.0], lanes=2, rounds=500, radius=3.0)
    for t in (11, 0, 5):
        assert all(torch.equal(stream[t][k], again[t][k]) for k in ("b", "c"))
    other = QuadraticTasks(condition_number=[2.0, 20.0], lanes=2, rounds=12, seed=1)
    assert not torch.equal(stream[0]["b"], other[0]["b"])
    assert len(list(stream)) == len(stream) == 12
    assert torch.equal(stream[-1]["b"], stream[11]["b"])
    assert len(stream[2:5]) == 3
    with pytest.raises(IndexError, match=r"0\.\.11, got 12"):
        stream[12]


def test_drift_decays_as_the_root_of_the_round():
    stream = QuadraticTasks(rounds=1000, drift=0.7)
    still = QuadraticTasks(rounds=1000, drift=0.0)
    for t in (0, 3, 99, 999):
        assert math.isclose(float((stream[t]["b"] - still[t]["b"]).norm()), 0.7 / math.sqrt(t + 1), rel_tol=1e-12)
        assert torch.equal(still[t]["c"], still[0]["c"])


def test_variation_is_the_supremum_over_the_ball(stream):
    """H and V from their definitions, the suprema found by SciPy from several starts."""
    rounds = 4
    h1, h2, v1 = (x.numpy() for x in stream.variation(rounds))
    problem, rng = stream.problem, np.random.default_rng(0)

    def reduced(point, t):
        outer = torch.tensor(np.broadcast_to(point, (2, 4)).copy(), dtype=F64)
        return problem.outer_loss(outer, problem.solution(outer, stream.task(t)), stream.task(t)).numpy()

    for lane in range(2):
        expected_v = expected_h1 = expected_h2 = 0.0
        for t in range(rounds):
            best = 0.0
            for sign in (1, -1):
                for _ in range(3):
                    found = minimize(
                        lambda p, s=sign, t=t, lane=lane: s * (reduced(p, t + 1) - reduced(p, t))[lane],
                        rng.normal(size=4),
                        constraints=[{"type": "ineq", "fun": lambda p: stream.domain.radius**2 - (p**2).sum()}],
                        method="SLSQP",
                        options={"maxiter": 500},
                        tol=1e-12,
                    )
                    best = max(best, -found.fun)
            expected_v += best
            if t >= 1:
                anywhere = toy_point(dim=4, scale=1.0)
                move = problem.solution(anywhere, stream.task(t)) - problem.solution(anywhere, stream.task(t - 1))
                expected_h1 += float(move[lane].norm())
                expected_h2 += float(move[lane].norm()) ** 2
        assert math.isclose(v1[lane], expected_v, rel_tol=1e-6)
        assert math.isclose(h1[lane], expected_h1, rel_tol=1e-12)
        assert math.isclose(h2[lane], expected_h2, rel_tol=1e-12)


def test_noise_has_mean_zero_and_the_chosen_size():
    stream = QuadraticTasks(noise=0.5, rounds=1)
    outer, inner = stream.initial_outer(), toy_point(lanes=1, dim=8).requires_grad_()

    def gradient(sample):
        return torch.autograd.grad(stream.problem.inner_loss(outer, inner, stream[0], sample).sum(), inner)[0]

    for size in (1, 4):
        noise = torch.cat([gradient(Sample(seed, size)) for seed in range(3000)]) - gradient(None)
        deviation = 0.5 / math.sqrt(size)
        assert (noise.mean(0).abs() <= 4 * deviation / math.sqrt(3000)).all()
        assert torch.allclose(noise.std(0), torch.full((8,), deviation, dtype=F64), rtol=0.06)


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
        algorithm = OBBO(
            lr=1 / float(problem.outer_smoothness * widest),
            window=math.isqrt(rounds),
            inner=GradientDescent(steps=steps, lr=0.9),
            hypergradient=hypergradient,
            geometry=geometry,
            domain=stream.domain,
        )
        rounds_played = online(problem, algorithm, stream, stream.initial_outer() + 1, regret_window=math.isqrt(rounds))
        *_, last = rounds_played
        averages.append(float(last.regret["exact"]) / rounds)
    assert all(later < earlier for earlier, later in pairwise(averages)), averages
    assert averages[-1] < averages[0] / 4, averages
