"""The problem's own closed form."""

from dataclasses import dataclass

import torch
from torch import Tensor

from obbo_lightning.core.hypergradients.base import Estimator, Hypergradient
from obbo_lightning.core.inner import InnerSolver
from obbo_lightning.core.oracle import Oracle, require_shape


@dataclass(frozen=True)
class ClosedForm(Estimator):
    """∇F_t(λ_t) as the problem supplies it; the inner solver is not used."""

    exact = True

    def __call__(
        self, oracle: Oracle, solver: InnerSolver, inner: Tensor | None, solve: Tensor | None
    ) -> Hypergradient:
        exact = oracle.problem.hypergradient(oracle.outer.detach(), oracle.task)
        if exact is None:
            raise ValueError(
                f"hypergradient 'ClosedForm' needs a closed form, and {type(oracle.problem).__name__} has none"
            )
        value, solution = exact
        require_shape(oracle.problem, "hypergradient", value, oracle.outer.shape)
        loss = oracle.outer_loss(solution)
        return Hypergradient(value.detach(), solution.detach(), loss, torch.zeros_like(loss))
