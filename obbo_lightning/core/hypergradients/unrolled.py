"""Iterative differentiation: back through the K inner steps."""

from dataclasses import dataclass

import torch
from torch import Tensor

from obbo_lightning.core.hypergradients.base import Estimator, Hypergradient
from obbo_lightning.core.inner import GradientDescent, InnerSolver
from obbo_lightning.core.oracle import Oracle


@dataclass(frozen=True)
class Unrolled(Estimator):
    """∂f_t(λ_t, ω^K)/∂λ in reverse mode                              (eq. analytical_backprop).

    Exactly the derivative of λ ↦ f_t(λ, ω^K(λ)). With ``inner.start: outer`` it also goes through ω⁰ = λ.
    """

    def __call__(
        self, oracle: Oracle, solver: InnerSolver, inner: Tensor | None, solve: Tensor | None
    ) -> Hypergradient:
        if not isinstance(solver, GradientDescent):
            raise ValueError(f"hypergradient 'Unrolled' needs inner steps to go back through, got inner {solver!r}")
        last = solver.descend(oracle, inner, differentiable=True)
        loss, value = oracle.total_outer_gradient(last, solver.steps)
        return Hypergradient(value, last.detach(), loss, torch.zeros_like(loss))
