"""What every estimator of ∇F_t(λ_t) takes and gives."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from obbo_lightning.core.inner import InnerSolver
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.problem import Problem
from obbo_lightning.core.recipes import Part


class Hypergradient(NamedTuple):
    """What an estimator found.

    Attributes:
        value: d_t ``[lanes, d]``.
        inner: ω^K = β_{t+1} ``[lanes, p]``, detached.
        loss: f_t(λ_t, ω^K) on the whole task ``[lanes]``.
        residual: what is left of the linear system, relative to its right-hand side ``[lanes]``; 0 for estimators that
            solve none.
        solve: the solution of the linear system, for a warm start.
    """

    value: Tensor
    inner: Tensor
    loss: Tensor
    residual: Tensor
    solve: Tensor | None = None


class Estimator(Part, ABC):
    """Solves the inner problem and estimates ∇F_t(λ_t)."""

    contracts = False
    """Whether a residual above 1 means that the iteration diverges."""

    exact = False
    """Whether what it finds is ∇F_t(λ_t) itself."""

    samples = False
    """Whether it is random."""

    takes_lanes = True
    """Whether it works for any number of lanes."""

    def require_fit(self, problem: Problem, solver: InnerSolver) -> None:
        """Refuse, before the first round, a problem or an inner solver that lacks what this estimator asks for."""
        solver.require_fit(problem)

    @abstractmethod
    def __call__(
        self, oracle: Oracle, solver: InnerSolver, inner: Tensor | None, solve: Tensor | None
    ) -> Hypergradient:
        """d_t from β_t (``inner``) and the last linear solution (``solve``), either of which may be None."""


class ImplicitEstimator(Estimator):
    """Estimates ∇F_t(λ_t) at the inner variable that the solver found, whatever led to it."""

    def __call__(
        self, oracle: Oracle, solver: InnerSolver, inner: Tensor | None, solve: Tensor | None
    ) -> Hypergradient:
        return self.differentiate(oracle, solver, solver(oracle, inner), solve)

    @abstractmethod
    def differentiate(self, oracle: Oracle, solver: InnerSolver, inner: Tensor, solve: Tensor | None) -> Hypergradient:
        """d_t at a given inner variable."""


def relative_norm(vector: Tensor, reference: Tensor) -> Tensor:
    """‖vector‖ / ‖reference‖ a lane, 0 where both vanish, infinite where only the vector has overflowed."""
    norm, scale = vector.norm(dim=-1), reference.norm(dim=-1)
    norm = norm.where(~norm.isnan() | scale.isnan(), torch.inf)
    return norm / scale.where(scale > 0, norm.where(norm > 0, 1.0))
