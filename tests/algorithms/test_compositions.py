"""What each algorithm is composed of, by its paper, and that it passes on whatever it is given."""

import pytest
import torch

from obbo_lightning import (
    L1,
    AdaptiveDiagonal,
    Box,
    ClosedForm,
    ConjugateGradient,
    Euclidean,
    ExactSolution,
    FixedPoint,
    GradientDescent,
    HypergradientWindow,
    NoMemory,
    RealSpace,
    StochasticNeumann,
    TaskWindow,
    part,
)

# inner solver, estimator, memory with its window (and discount), geometry
DEFAULTS = {
    "obbo": (GradientDescent(20, 0.1), FixedPoint(5), (HypergradientWindow, 10, 1.0), AdaptiveDiagonal(0.9, 1e-8)),
    "sobbo": (
        GradientDescent(20, 0.1, batch_size=10),
        StochasticNeumann(10),
        (HypergradientWindow, 10, 1.0),
        AdaptiveDiagonal(0.9, 1e-8),
    ),
    "sobow": (
        GradientDescent(1, 0.1),
        ConjugateGradient(5, warm_start=True),
        (HypergradientWindow, 10, 0.9),
        Euclidean(),
    ),
    "oagd": (GradientDescent(20, 0.1), FixedPoint(5), (TaskWindow, 10, None), Euclidean()),
    "adam": (GradientDescent(20, 0.1), FixedPoint(5), (NoMemory, None, None), None),
    "sgdm": (GradientDescent(20, 0.1), FixedPoint(5), (NoMemory, None, None), None),
}


def memory_of(algorithm):
    memory = algorithm.memory()
    return type(memory), getattr(memory, "window", None), getattr(memory, "discount", None)


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_the_papers(name):
    inner, hypergradient, memory, geometry = DEFAULTS[name]
    algorithm = part("algorithm", name)()
    assert algorithm.inner == inner
    assert algorithm.hypergradient == hypergradient
    assert memory_of(algorithm) == memory
    assert algorithm.clip is None
    optimizer = algorithm.optimizer(torch.nn.Parameter(torch.zeros(1, 2)))
    assert optimizer.param_groups[0]["lr"] == 1e-4
    if geometry is not None:
        (step,) = optimizer.blocks
        assert repr(step.geometry) == repr(geometry)
        assert (step.regularizer.l1, step.regularizer.l2, step.domain) == (0, 0, RealSpace())
    elif name == "adam":
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    else:
        assert optimizer.param_groups[0]["momentum"] == 0.9


@pytest.mark.parametrize("name", DEFAULTS)
def test_what_is_given_is_passed_on(name):
    given = {"lr": 0.25, "inner": ExactSolution(), "hypergradient": ClosedForm(), "domain": Box(0.0, 1.0), "clip": 3.0}
    windowed = name not in ("adam", "sgdm")
    if windowed:
        given |= {"window": 3, "regularizer": L1(0.5)}
    algorithm = part("algorithm", name)(**given)
    assert (algorithm.inner, algorithm.hypergradient, algorithm.clip) == (ExactSolution(), ClosedForm(), 3.0)
    outer = torch.nn.Parameter(torch.full((1, 2), 0.5))
    optimizer = algorithm.optimizer(outer)
    assert optimizer.param_groups[0]["lr"] == 0.25
    if windowed:
        assert memory_of(algorithm)[1] == 3
        (step,) = optimizer.blocks
        assert (step.regularizer.l1, step.domain) == (0.5, Box(0.0, 1.0))
    outer.grad = torch.tensor([[100.0, -100.0]])
    for _ in range(10):
        optimizer.step()
    assert outer.tolist() == [[0.0, 1.0]]
