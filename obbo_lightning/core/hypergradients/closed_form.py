"""Hypergradient from the problem's own closed form."""

from dataclasses import dataclass

import torch
from torch import Tensor

from obbo_lightning.core.hypergradients.base import Estimator, Hypergradient
from obbo_lightning.core.inner_solvers import InnerSolver
from obbo_lightning.core.oracle import Oracle, require_shape
from obbo_lightning.core.problem import Problem


@dataclass(frozen=True)
class ClosedForm(Estimator):
    """∇F_t(λ_t) as the problem supplies it; the inner solver is not used.

    >>> from obbo_lightning.solvers import ExactSolution
    >>> from obbo_lightning.streams.quadratic import QuadraticTasks
    >>> stream = QuadraticTasks()
    >>> oracle = Oracle(stream.problem, stream.initial_outer(), stream[0])
    >>> ClosedForm()(oracle, ExactSolution(), None, None).value.shape
    torch.Size([1, 4])
    """

    is_exact = True

    def require_compatible(self, problem: Problem, solver: InnerSolver) -> None:
        if not problem.provides("hypergradient"):
            raise ValueError(f"hypergradient 'ClosedForm' needs a closed form, and {type(problem).__name__} has none")

    def __call__(
        self, oracle: Oracle, solver: InnerSolver, inner: Tensor | None, linear_solution: Tensor | None
    ) -> Hypergradient:
        self.require_compatible(oracle.problem, solver)
        exact = oracle.problem.hypergradient(oracle.outer.detach(), oracle.task)
        assert exact is not None
        value, solution = exact
        require_shape(oracle.problem, "hypergradient", value, oracle.outer.shape)
        loss = oracle.outer_loss(solution)
        return Hypergradient(value.detach(), solution.detach(), loss, torch.zeros_like(loss))
