"""The contract of a problem: sound problems pass, each broken rule is noticed."""

import pytest
import torch
from toy import F64, Nonlinear, Proximal, toy_point, toy_task

from obbo_lightning.problems.quadratic import Quadratic
from obbo_lightning.streams import QuadraticTasks
from obbo_lightning.testing import central_difference, check_problem

STREAM = QuadraticTasks(condition_number=[2.0, 20.0], lanes=2, noise=0.1)
GOOD = STREAM.problem


def check_quadratic(**methods):
    """Check a quadratic problem with other methods; each gets the value of the correct one first."""

    def replaced(name, method):
        return lambda self, *arguments: method(getattr(Quadratic, name)(self, *arguments), *arguments)

    changed = {name: replaced(name, method) for name, method in methods.items()}
    problem = type("Changed", (Quadratic,), changed)(GOOD.inner_matrix, GOOD.coupling, GOOD.ridge, GOOD.noise)
    check_problem(problem, toy_point(dim=4), toy_point(dim=8), STREAM[3])


def test_sound_problems_pass():
    check_quadratic()
    check_problem(Nonlinear(), toy_point(), toy_point(seed=2), toy_task())
    check_problem(Proximal(), toy_point(), toy_point(seed=2), toy_task())


def add_half_a_standard_deviation(loss, outer, inner, task, sample=None):
    """Return a biased loss of a sample, which only many samples show."""
    return loss if sample is None else loss + 0.5 * GOOD.noise / sample.size**0.5 * inner.norm(dim=-1)


@pytest.mark.parametrize(
    ("message", "name", "method"),
    [
        ("mixed_term is off", "mixed_term", lambda value, *_: -value),
        ("the gradient at solution", "solution", lambda value, *_: value + 1e-3),
        ("hypergradient is off", "hypergradient", lambda value, *_: (1.001 * value[0], value[1])),
        ("below the curvature", "smoothness", lambda value, *_: 0.9 * value),
        ("outer_loss of lane 0 depends on another lane", "outer_loss", lambda value, *_: value.flip(0) + value),
        ("inner_loss of lane 1 depends on another lane", "inner_loss", lambda value, *_: value.cumsum(0)),
        ("must have shape", "inner_loss", lambda value, *_: value.mean()),
        ("same for the same sample", "inner_loss", lambda value, *a: value + (torch.rand(()) if a[3:] else 0)),
        ("outer_loss of a sample is a biased estimate", "outer_loss", add_half_a_standard_deviation),
    ],
)
def test_broken_problems_are_noticed(message, name, method):
    with pytest.raises(AssertionError, match=message):
        check_quadratic(**{name: method})


def test_central_differences_are_exact_for_polynomials_of_degree_eight():
    point = torch.tensor([[0.5, -1.0], [2.0, 0.25]], dtype=F64)
    powers = torch.arange(1.0, 9.0, dtype=F64)
    found = central_difference(lambda x: (x.unsqueeze(-1) ** powers).sum((-1, -2)), point, step=0.5)
    expected = (powers * point.unsqueeze(-1) ** (powers - 1)).sum(-1)
    assert torch.allclose(found, expected, rtol=1e-12)
