"""Iterative differentiation: reverse mode through the K inner steps."""

from dataclasses import dataclass

import torch
from torch import Tensor

from obbo_lightning.core.hypergradients.base import Estimator, Hypergradient
from obbo_lightning.core.inner_solvers import InnerSolver
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.problem import Problem


@dataclass(frozen=True)
class Unrolled(Estimator):
    """∂f_t(λ_t, ω^K)/∂λ in reverse mode                              (eq. analytical_backprop).

    Exactly the derivative of λ ↦ f_t(λ, ω^K(λ)). With ``inner.start: outer`` it also differentiates through ω⁰ = λ.

    >>> from obbo_lightning.solvers import GradientDescent
    >>> from obbo_lightning.streams.quadratic import QuadraticTasks
    >>> stream = QuadraticTasks()
    >>> oracle = Oracle(stream.problem, stream.initial_outer(), stream[0])
    >>> found = Unrolled()(oracle, GradientDescent(steps=3), torch.zeros(1, 8, dtype=torch.float64), None)
    >>> found.value.shape, oracle.evaluations
    (torch.Size([1, 4]), {'gradients': 4, 'products': 3})
    """

    def require_compatible(self, problem: Problem, solver: InnerSolver) -> None:
        solver.require_differentiable()
        super().require_compatible(problem, solver)

    def __call__(
        self, oracle: Oracle, solver: InnerSolver, inner: Tensor | None, linear_solution: Tensor | None
    ) -> Hypergradient:
        last, steps = solver.unroll(oracle, inner)
        loss, value = oracle.total_outer_gradient(last, steps)
        return Hypergradient(value, last.detach(), loss, torch.zeros_like(loss))
