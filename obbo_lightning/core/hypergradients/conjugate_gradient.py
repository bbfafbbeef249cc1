"""Approximate implicit differentiation by conjugate gradients."""

from dataclasses import dataclass

import torch
from torch import Tensor

from obbo_lightning.core.hypergradients.base import Hypergradient, ImplicitEstimator, relative_norm
from obbo_lightning.core.inner_solvers import InnerSolver
from obbo_lightning.core.oracle import Curvature, Oracle
from obbo_lightning.core.validation import at_least, nonnegative


@dataclass(frozen=True)
class ConjugateGradient(ImplicitEstimator):
    """∇_λ f − ∇²_λβ g · v where ∇²_ββ g · v = ∇_β f is solved by J steps of conjugate gradients, each lane its own.

    A lane that has reached ``tol`` stops; so does one that meets a direction of negative curvature, where the system
    is no minimisation. The residual is the one that the iteration updates, not a new product.

    Args:
        steps: J.
        tol: relative residual at which a lane is finished.
        warm_start: start from the v of the previous round (SOBOW).

    >>> from obbo_lightning.solvers import ExactSolution
    >>> from obbo_lightning.streams.quadratic import QuadraticTasks
    >>> stream = QuadraticTasks()
    >>> oracle = Oracle(stream.problem, stream.initial_outer(), stream[0])
    >>> found = ConjugateGradient(steps=8)(oracle, ExactSolution(), None, None)
    >>> torch.allclose(found.value, stream.problem.hypergradient(oracle.outer, stream[0])[0])
    True
    """

    steps: int = 5
    tol: float = 1e-10
    warm_start: bool = False

    def __post_init__(self) -> None:
        at_least("hypergradient.steps", self.steps, 1)
        nonnegative("hypergradient.tol", self.tol)

    def differentiate(
        self, oracle: Oracle, solver: InnerSolver, inner: Tensor, linear_solution: Tensor | None
    ) -> Hypergradient:
        loss, by_outer, by_inner = oracle.outer_gradients(inner)
        curvature = oracle.curvature(inner)
        # ∇²_ββ g · v = ∇_β f
        vector, residual = self._solve(curvature, by_inner, linear_solution if self.warm_start else None)
        # ∇_λ f − ∇²_λβ g · v
        value = by_outer - curvature.mixed(vector)
        return Hypergradient(value, inner, loss, relative_norm(residual, by_inner), vector if self.warm_start else None)

    def _solve(self, curvature: Curvature, target: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        if first is None:
            vector, residual = torch.zeros_like(target), target
        else:
            vector, residual = first, target - curvature.hessian(first)
        search = residual
        squared = residual.square().sum(-1, keepdim=True)
        goal = self.tol**2 * target.square().sum(-1, keepdim=True)
        for _ in range(self.steps):
            # with the residual r and the search direction p:  a = ⟨r, r⟩ / ⟨p, Hp⟩, v ← v + a p, r ← r − a Hp,
            # p ← r + (⟨r, r⟩ / its previous value) p
            product = curvature.hessian(search)
            bend = (search * product).sum(-1, keepdim=True)
            active = (squared > goal) & (bend > 0)
            length = torch.where(active, squared / bend.where(active, 1.0), 0.0)
            vector = vector + length * search
            residual = residual - length * product
            previous, squared = squared, residual.square().sum(-1, keepdim=True)
            ratio = squared / previous.where(active, 1.0)
            search = torch.where(active, residual + ratio * search, search)
        # A lane whose products are not finite has no solution: mark it by NaN.
        return vector.where(residual.isfinite().all(-1, keepdim=True), torch.nan), residual
