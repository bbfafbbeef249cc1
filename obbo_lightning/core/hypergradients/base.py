"""Interface of hypergradient estimators."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from obbo_lightning.core.configurable import Configurable
from obbo_lightning.core.inner_solvers import InnerSolver
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.problem import Problem


class Hypergradient(NamedTuple):
    """Result of an estimator.

    Attributes:
        value: d_t ``[lanes, d]``.
        inner: ω^K = β_{t+1} ``[lanes, p]``, detached.
        loss: f_t(λ_t, ω^K) on the whole task ``[lanes]``.
        residual: of the linear system, relative to its right-hand side ``[lanes]``; 0 for estimators that solve none.
        linear_solution: solution of the linear system, for a warm start.
    """

    value: Tensor
    inner: Tensor
    loss: Tensor
    residual: Tensor
    linear_solution: Tensor | None = None


class Estimator(Configurable, ABC):
    """Solver of the inner problem that also estimates ∇F_t(λ_t)."""

    contracts = False
    """Whether a residual above 1 means that the iteration diverges."""

    is_exact = False
    """Whether the estimate is ∇F_t(λ_t) itself."""

    is_stochastic = False
    """Whether it draws random numbers."""

    supports_lanes = True
    """Whether it works for any number of lanes."""

    def require_compatible(self, problem: Problem, solver: InnerSolver) -> None:
        """Refuse, before the first round, a problem or an inner solver that lacks what this estimator needs."""
        solver.require_compatible(problem)

    @abstractmethod
    def __call__(
        self, oracle: Oracle, solver: InnerSolver, inner: Tensor | None, linear_solution: Tensor | None
    ) -> Hypergradient:
        """Return d_t from β_t (``inner``) and the last linear solution, either of which may be None."""


class ImplicitEstimator(Estimator):
    """Estimator of ∇F_t(λ_t) that depends on the inner variable but not on the steps that led to it."""

    def __call__(
        self, oracle: Oracle, solver: InnerSolver, inner: Tensor | None, linear_solution: Tensor | None
    ) -> Hypergradient:
        return self.differentiate(oracle, solver, solver(oracle, inner), linear_solution)

    @abstractmethod
    def differentiate(
        self, oracle: Oracle, solver: InnerSolver, inner: Tensor, linear_solution: Tensor | None
    ) -> Hypergradient:
        """Return d_t at a given inner variable."""


def relative_norm(vector: Tensor, reference: Tensor) -> Tensor:
    """Return ‖vector‖ / ‖reference‖ per lane, 0 where both vanish, infinite where only the vector has overflowed."""
    norm, scale = vector.norm(dim=-1), reference.norm(dim=-1)
    norm = norm.where(~norm.isnan() | scale.isnan(), torch.inf)
    return norm / scale.where(scale > 0, norm.where(norm > 0, 1.0))
