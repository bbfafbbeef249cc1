"""Every impossible value is refused with its name, the value and what is allowed, before any compute."""

import math
import re

import pytest
import torch
from toy import Nonlinear, Proximal, toy_point, toy_task

from obbo_lightning import OAGD, OBBO, SOBBO, SOBOW, Adam, BregmanProx, OuterStep, online
from obbo_lightning.config.registry import find_component
from obbo_lightning.domains import Box, L2Ball, Nonnegative, Simplex
from obbo_lightning.geometry import AdaptiveDiagonal, Burg, Euclidean, NegativeEntropy, generalized_gradient
from obbo_lightning.hypergradients import (
    ClosedForm,
    ConjugateGradient,
    FixedPoint,
    HypergradientWindow,
    StochasticNeumann,
    Unrolled,
)
from obbo_lightning.metrics import LocalRegret
from obbo_lightning.problems.quadratic import Quadratic
from obbo_lightning.regularizers import L1, ElasticNet
from obbo_lightning.solvers import ExactSolution, GradientDescent
from obbo_lightning.streams.quadratic import QuadraticTasks


def parameter(*values):
    return torch.nn.Parameter(torch.tensor([list(values)]))


NAN = math.nan
CASES = {
    "K": (lambda: GradientDescent(steps=0), "inner.steps must be an integer of at least 1, got 0"),
    "K fraction": (lambda: GradientDescent(steps=2.5), "inner.steps must be an integer of at least 1, got 2.5"),
    "eta": (lambda: GradientDescent(lr=0), "inner.lr must be a positive finite number, got 0"),
    "eta nan": (lambda: GradientDescent(lr=NAN), "inner.lr must be a positive finite number, got nan"),
    "start": (lambda: GradientDescent(start="zero"), "inner.start must be one of previous, outer, got 'zero'"),
    "s": (lambda: GradientDescent(batch_size=0), "inner.batch_size must be an integer of at least 1, got 0"),
    "J": (lambda: FixedPoint(0), "hypergradient.steps must be an integer of at least 1, got 0"),
    "J cg": (lambda: ConjugateGradient(0), "hypergradient.steps must be an integer of at least 1, got 0"),
    "tol": (lambda: ConjugateGradient(tol=-1), "hypergradient.tol must be zero or a positive finite number, got -1"),
    "m": (lambda: StochasticNeumann(0), "hypergradient.max_terms must be an integer of at least 1, got 0"),
    "ell": (lambda: StochasticNeumann(smoothness=-2.0), "hypergradient.smoothness must be a positive finite"),
    "w": (lambda: OBBO(window=0), "window must be an integer of at least 1, got 0"),
    "w sobbo": (lambda: SOBBO(window=0), "window must be an integer of at least 1, got 0"),
    "w sobow": (lambda: SOBOW(window=-3), "window must be an integer of at least 1, got -3"),
    "w oagd": (lambda: OAGD(window=True), "window must be an integer of at least 1, got True"),
    "w memory": (lambda: HypergradientWindow(0), "window must be an integer of at least 1, got 0"),
    "w regret": (lambda: LocalRegret(0), "window must be an integer of at least 1, got 0"),
    "nu": (lambda: SOBOW(discount=1.5), "discount must lie in (0, 1], got 1.5"),
    "alpha": (lambda: OBBO(lr=0.0), "lr must be a positive finite number, got 0.0"),
    "alpha nan": (lambda: Adam(lr=NAN), "lr must be a positive finite number, got nan"),
    "alpha inf": (lambda: BregmanProx([parameter(1.0)], lr=math.inf), "lr must be a positive finite number, got inf"),
    "alpha string": (lambda: OBBO(lr="fast"), "lr must be a positive finite number or auto, got 'fast'"),
    "alpha huge": (lambda: OBBO(lr=10**400), "lr must be a finite number, got one beyond the largest float"),
    "w_R": (
        lambda: OuterStep(parameter(1.0), OBBO(), regret_window=0),
        "regret_window must be an integer of at least 1",
    ),
    "inner type": (lambda: OBBO(inner="gd"), "inner must be an instance of InnerSolver, got 'gd'"),
    "estimator class": (
        lambda: OBBO(hypergradient=Unrolled),
        "hypergradient must be an instance of Estimator, got <class",
    ),
    "domain class": (lambda: OBBO(domain=Simplex), "domain must be an instance of Domain, got <class"),
    "geometry type": (lambda: OBBO(geometry="euclidean"), "geometry must be an instance of Geometry, got 'euclidean'"),
    "regularizer type": (lambda: Adam(regularizer=0.1), "regularizer must be an instance of ElasticNet, got 0.1"),
    "decay string": (lambda: AdaptiveDiagonal(decay="a"), "geometry.decay must be a number, got 'a'"),
    "box string": (lambda: Box("0", "1"), "domain.lower must be a number, got '0'"),
    "group lr": (lambda: BregmanProx([{"params": [parameter(1.0)], "lr": -1}], lr=0.1), "lr must be a positive finite"),
    "added group": (
        lambda: BregmanProx([parameter(0.5)], 0.1, domain=L2Ball(1.0)).add_param_group({"params": [parameter(2.0)]}),
        "outer start must lie in L2Ball(radius=1.0)",
    ),
    "integer outer": (
        lambda: BregmanProx([torch.nn.Parameter(torch.ones(1, 1, dtype=torch.long), requires_grad=False)], 0.1),
        "outer start must be floating-point, got torch.int64",
    ),
    "generalized lr": (
        lambda: generalized_gradient(Euclidean(), torch.ones(1, 1), torch.ones(1, 1), lr=0),
        "lr must be a positive finite number, got 0",
    ),
    "generalized triple": (
        lambda: generalized_gradient(NegativeEntropy(), torch.ones(1, 1), torch.ones(1, 1), lr=0.1),
        "is not supported; these are",
    ),
    "hypergradient shape": (
        lambda: OuterStep(parameter(1.0), OBBO())(torch.ones(1, 2, 1)),
        "hypergradients must have shape [solved, 1, 1], got (1, 2, 1)",
    ),
    "asymmetric": (
        lambda: Quadratic(torch.tensor([[[1.0, 0.5], [0.0, 1.0]]]), torch.eye(2)[None]),
        "must be symmetric",
    ),
    "another memory": (
        lambda: OAGD(window=3).memory().load_state_dict(HypergradientWindow(3).state_dict()),
        "state must be that of a TaskWindow",
    ),
    "another discount": (
        lambda: HypergradientWindow(3, 0.9).load_state_dict(HypergradientWindow(3).state_dict()),
        "discount must be 1.0 to continue from this state, got 0.9",
    ),
    "clip": (lambda: OBBO(clip=-1.0), "clip must be a positive finite number, got -1.0"),
    "rho": (lambda: AdaptiveDiagonal(rho=0.0), "geometry.rho must be a positive finite number, got 0.0"),
    "decay": (lambda: AdaptiveDiagonal(decay=1.0), "geometry.decay must lie in [0, 1), got 1.0"),
    "decay nan": (lambda: AdaptiveDiagonal(decay=NAN), "geometry.decay must lie in [0, 1), got nan"),
    "l1": (lambda: L1(-0.1), "regularizer.l1 must be zero or a positive finite number, got -0.1"),
    "l2": (lambda: ElasticNet(l2=NAN), "regularizer.l2 must be zero or a positive finite number, got nan"),
    "box": (lambda: Box(2.0, 1.0), "domain.lower must be smaller than domain.upper, got 2.0 and 1.0"),
    "box nan": (lambda: Box(NAN, 1.0), "domain.lower must be smaller than domain.upper, got nan and 1.0"),
    "radius": (lambda: L2Ball(0.0), "domain.radius must be a positive finite number, got 0.0"),
    "triple": (lambda: OBBO(geometry=Burg(), domain=Nonnegative()), "Burg: every regularizer; Box with lower >= 0 and"),
    "adam h": (lambda: Adam(regularizer=L1(0.1)), "regularizer must be none for an outer rule of torch.optim"),
    "name": (
        lambda: find_component("algorithm", "obo"),
        "algorithm must be one of obbo, sobbo, sobow, oagd, adam, sgdm, maml, anil, or yours as package.module.Class "
        "or file.py:Class, got 'obo'; did you mean 'obbo'?",
    ),
    "start outside": (
        lambda: BregmanProx([parameter(3.0, 4.0)], 0.1, domain=L2Ball(1.0)),
        "outer start must lie in L2Ball(radius=1.0); lane 0 begins with [3.0, 4.0]",
    ),
    "start not on simplex": (
        lambda: BregmanProx([parameter(0.7, 0.7)], 0.1, NegativeEntropy(), domain=Simplex()),
        "outer start must lie in Simplex(floor=0.0)",
    ),
    "start at the edge of an entropy": (
        lambda: BregmanProx([parameter(0.0, 1.0)], 0.1, NegativeEntropy(), domain=Simplex()),
        "where NegativeEntropy() is smooth; lane 0 begins with [0.0, 1.0]",
    ),
    "start nan": (lambda: BregmanProx([parameter(NAN)], 0.1), "outer start must lie in RealSpace()"),
    "start outside adam": (
        lambda: OuterStep(parameter(2.0), Adam(domain=Box(0.0, 1.0))),
        "outer start must lie in Box(lower=0.0, upper=1.0)",
    ),
    "outer shape": (
        lambda: OuterStep(torch.nn.Parameter(torch.zeros(3)), OBBO()),
        "outer must be a floating-point tensor [lanes, d], got torch.float32 of shape (3,)",
    ),
    "on_nonfinite": (
        lambda: OuterStep(parameter(1.0), OBBO(), on_nonfinite="ignore"),
        "on_nonfinite must be one of raise, skip, got 'ignore'",
    ),
    "condition number": (lambda: QuadraticTasks(condition_number=0.5), "condition_number must be at least 1"),
    "rounds": (lambda: QuadraticTasks(rounds=0), "rounds must be an integer of at least 1, got 0"),
    "dims": (lambda: QuadraticTasks(outer_dim=9, inner_dim=8), "outer_dim must be at most inner_dim (8), got 9"),
    "matrix": (lambda: Quadratic(-torch.eye(2)[None], torch.eye(2)[None]), "inner_matrix must be positive definite"),
}


@pytest.mark.parametrize(("make", "message"), CASES.values(), ids=CASES.keys())
def test_impossible_values_are_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def first_round(problem, algorithm, outer=None, **options):
    outer = toy_point() if outer is None else outer
    return lambda: next(online(problem, algorithm, [toy_task()], outer, **options))


class NoLanes(Nonlinear):
    def inner_loss(self, *args):
        return super().inner_loss(*args).sum()


class NoStart(Nonlinear):
    def initial_inner(self, outer, task):
        return None


class ThinMixedTerm(Nonlinear):
    def mixed_term(self, outer, inner, task, vector, sample=None):
        return vector[:, :1]


class ColumnSmoothness(Nonlinear):
    def smoothness(self, outer, task):
        return torch.ones(2, 1, dtype=torch.float64)


class NegativeSmoothness(Nonlinear):
    def smoothness(self, outer, task):
        return -torch.ones(2, dtype=torch.float64)


ROUNDS = {
    "loss shape": (
        first_round(NoLanes(), OBBO()),
        "NoLanes.inner_loss must return shape (2,), got ()",
    ),
    "no first inner": (first_round(NoStart(), OBBO()), "inner.start 'previous' needs a first inner variable"),
    "inner shape": (
        first_round(NoStart(), OBBO(), inner=torch.zeros(3, 3, dtype=torch.float64)),
        "inner must have shape [2 lanes, p], got (3, 3)",
    ),
    "inner dtype": (
        first_round(NoStart(), OBBO(), inner=torch.zeros(2, 3)),
        "inner must have the dtype of outer, torch.float64, got torch.float32",
    ),
    "inner nan": (
        first_round(NoStart(), OBBO(), inner=toy_point() * NAN),
        "inner start must be finite, got 6 values that are not",
    ),
    "inner list": (first_round(NoStart(), OBBO(), inner=[[0.0]]), "inner must be an instance of Tensor, got [[0.0]]"),
    "outer list": (first_round(Nonlinear(), OBBO(), outer=[[0.0]]), "outer must be an instance of Tensor, got [[0.0]]"),
    "outer integer": (
        first_round(Nonlinear(), OBBO(), outer=torch.ones(2, 3, dtype=torch.long)),
        "outer must be a floating-point tensor [lanes, d], got torch.int64",
    ),
    "mixed term shape": (
        first_round(ThinMixedTerm(), OBBO()),
        "ThinMixedTerm.mixed_term must return shape (2, 3), got",
    ),
    "smoothness shape": (first_round(ColumnSmoothness(), SOBBO()), "smoothness must return shape (2,), got (2, 1)"),
    "smoothness sign": (first_round(NegativeSmoothness(), SOBBO()), "smoothness must be positive, got -1.0"),
    "no solution": (
        first_round(Proximal(), OBBO(inner=ExactSolution())),
        "inner 'ExactSolution' needs a solution, and Proximal has none",
    ),
    "no closed form": (
        first_round(Proximal(), OBBO(hypergradient=ClosedForm())),
        "hypergradient 'ClosedForm' needs a closed form, and Proximal has none",
    ),
    "no smoothness": (
        first_round(Nonlinear(), SOBBO()),
        "hypergradient.smoothness must be given for Nonlinear, which does not know its own, got None",
    ),
    "unrolled closed form": (
        first_round(Nonlinear(), OBBO(inner=ExactSolution(), hypergradient=Unrolled())),
        "hypergradient 'Unrolled' needs inner steps to go back through, got inner ExactSolution()",
    ),
    "nan start": (first_round(Nonlinear(), OBBO(), outer=toy_point() * NAN), "outer start must be finite"),
}


@pytest.mark.parametrize(("play", "message"), ROUNDS.values(), ids=ROUNDS.keys())
def test_impossible_combinations_are_refused_in_the_first_round(play, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        play()


def test_fixed_point_without_any_step_size_is_refused():
    stream = QuadraticTasks(rounds=1)
    algorithm = OBBO(inner=ExactSolution(), hypergradient=FixedPoint(3))
    with pytest.raises(ValueError, match=r"hypergradient\.lr must be given for inner ExactSolution\(\)"):
        next(online(stream.problem, algorithm, stream, stream.initial_outer()))


def test_refusals_come_before_the_first_task_is_asked_for():
    def stream():
        raise AssertionError("a task was asked for")
        yield

    with pytest.raises(ValueError, match="outer start must lie in"):
        online(Nonlinear(), OBBO(domain=L2Ball(1e-3)), stream(), toy_point())
