"""Derivatives of one task's losses: counted evaluations, mixed terms, samples, and memory layouts."""

import pytest
import torch
from toy import F64, FromLosses, Nonlinear, Proximal, toy_point, toy_task

from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.randomness import Key, Sample
from obbo_lightning.hypergradients import FixedPoint, InnerState
from obbo_lightning.solvers import GradientDescent


def test_an_analytic_mixed_term_is_free_and_all_products_use_one_graph():
    class CountedLosses(Proximal):
        losses = 0

        def inner_loss(self, *args, **kwargs):
            self.losses += 1
            return super().inner_loss(*args, **kwargs)

    solver, problem, without = GradientDescent(steps=4, lr=0.3, start="outer"), CountedLosses(), Proximal()
    without.mixed_term = lambda *_: None
    oracles = [Oracle(p, toy_point(), toy_task()) for p in (problem, without)]
    analytic, automatic = (FixedPoint(5)(oracle, solver, InnerState()).value for oracle in oracles)
    assert problem.losses == 4 + 1
    assert oracles[0].evaluations == {"gradients": 4 + 1 + 1, "products": 4}
    assert oracles[1].evaluations == {"gradients": 4 + 1 + 1, "products": 5}
    assert torch.allclose(analytic, automatic, rtol=1e-13, atol=1e-15)


def test_derivatives_of_what_a_loss_does_not_depend_on_are_zero():
    outer, inner = toy_point(), toy_point(dim=4)
    problem = FromLosses(lambda outer, inner: inner.sum(-1), lambda outer, inner: torch.ones(len(outer), dtype=F64))
    oracle = Oracle(problem, outer, {})
    loss, by_outer, by_inner = oracle.outer_gradients(inner)
    assert loss.tolist() == [1.0, 1.0]
    assert torch.equal(by_outer, torch.zeros_like(outer))
    assert torch.equal(by_inner, torch.zeros_like(inner))
    curvature = oracle.curvature(inner)  # g is linear in β
    assert torch.equal(curvature.hessian(inner), torch.zeros_like(inner))
    assert torch.equal(curvature.mixed(inner), torch.zeros_like(outer))


def test_the_noise_of_a_problem_is_in_inner_steps_and_left_out_of_hypergradients():
    problem = Nonlinear()
    problem.is_stochastic = True
    oracle = Oracle(problem, toy_point(), toy_task(), Key(3))
    assert oracle.draw("inner", 2, None) == Sample(Key(3).seed_for("inner", 2), None)
    assert oracle.draw("zeta", 2, None) is None
    assert oracle.draw("zeta", 2, 5) == Sample(Key(3).seed_for("zeta", 2), 5)
    assert Oracle(Nonlinear(), toy_point(), toy_task()).draw("inner", 2, None) is None


def test_inference_mode_is_refused():
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"cannot be solved in torch\.inference_mode"):
        Oracle(Nonlinear(), toy_point(), toy_task())


def test_only_first_derivatives_use_their_own_memory_layout():
    layouts = []

    class TwoLayouts(Nonlinear):
        def for_gradients(self, task):
            return {**task, "for_gradients": torch.ones(())}

        def inner_loss(self, outer, inner, task, sample=None):
            layouts.append("for_gradients" in task)
            return super().inner_loss(outer, inner, task, sample)

        def outer_loss(self, outer, inner, task, sample=None):
            layouts.append("for_gradients" in task)
            return super().outer_loss(outer, inner, task, sample)

    problem, inner = TwoLayouts(), toy_point(seed=2)
    oracle = Oracle(problem, toy_point(), toy_task())
    oracle.inner_gradient(inner)
    oracle.outer_gradients(inner)
    oracle.outer_loss(inner)
    oracle.curvature(inner)
    oracle.total_outer_gradient(oracle.outer.clone(), steps=1)
    assert layouts == [True, True, True, False, False]
