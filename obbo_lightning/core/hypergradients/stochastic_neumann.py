"""The stochastic estimator of SOBBO: a Neumann series of random length."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from obbo_lightning.core.hypergradients.base import Hypergradient, ImplicitEstimator, relative_norm
from obbo_lightning.core.inner_solvers import InnerSolver
from obbo_lightning.core.oracle import Oracle, require_shape
from obbo_lightning.core.problem import Problem
from obbo_lightning.core.validation import at_least, positive


@dataclass(frozen=True)
class StochasticNeumann(ImplicitEstimator):
    """∇_λ f(ε) − ∇²_λβ g(ζ⁰) · (m/ℓ) ∏_{j=1}^{m̃} (I − ∇²_ββ g(ζ^j)/ℓ) ∇_β f(ε)     (eq. stochastic_gradient_sample).

    m̃ is uniform on 0..m−1 and shared by all lanes; every factor has its own fresh sample. On the whole task the mean
    over m̃ is ``FixedPoint(steps=m, lr=1/ℓ)``.

    Args:
        max_terms: m.
        smoothness: ℓ_{g,1}; None: the problem's own.
        batch_size: observations in each of ε, ζ⁰, ζ¹, …; None for the whole task.

    >>> from obbo_lightning.solvers import ExactSolution
    >>> from obbo_lightning.streams.quadratic import QuadraticTasks
    >>> stream = QuadraticTasks()
    >>> oracle = Oracle(stream.problem, stream.initial_outer(), stream[0])
    >>> StochasticNeumann(max_terms=5)(oracle, ExactSolution(), None, None).value.shape
    torch.Size([1, 4])
    """

    is_stochastic = True

    max_terms: int = 10
    smoothness: float | None = None
    batch_size: int | None = 1

    def __post_init__(self) -> None:
        at_least("hypergradient.max_terms", self.max_terms, 1)
        if self.smoothness is not None:
            positive("hypergradient.smoothness", self.smoothness)
        if self.batch_size is not None:
            at_least("hypergradient.batch_size", self.batch_size, 1)

    def require_compatible(self, problem: Problem, solver: InnerSolver) -> None:
        super().require_compatible(problem, solver)
        self._require_smoothness(problem)

    def _require_smoothness(self, problem: Problem) -> None:
        if self.smoothness is None and not problem.provides("smoothness"):
            name = type(problem).__name__
            raise ValueError(f"hypergradient.smoothness must be given for {name}, which has none of its own, got None")

    def differentiate(
        self, oracle: Oracle, solver: InnerSolver, inner: Tensor, linear_solution: Tensor | None
    ) -> Hypergradient:
        smoothness = self._smoothness(oracle)
        terms = random.Random(oracle.key.seed_for("terms")).randrange(self.max_terms)  # noqa: S311 a sample, no secret
        _, by_outer, by_inner = oracle.outer_gradients(inner, oracle.draw("epsilon", 0, self.batch_size))
        curvature = oracle.curvature(inner, oracle.draw("zeta", 0, self.batch_size))
        vector = by_inner
        for j in range(1, terms + 1):
            # v ← (I − ∇²_ββ g(ζ^j)/ℓ) v; on the whole task all factors are the same and share one graph
            factor = curvature
            if self.batch_size is not None:
                factor = oracle.curvature(inner, oracle.draw("zeta", j, self.batch_size))
            vector = vector - factor.hessian(vector) / smoothness
        # ∇_λ f(ε) − ∇²_λβ g(ζ⁰) · (m/ℓ) v
        value = by_outer - curvature.mixed(vector * (self.max_terms / smoothness))
        return Hypergradient(value, inner, oracle.outer_loss(inner), relative_norm(vector, by_inner))

    def _smoothness(self, oracle: Oracle) -> Tensor:
        if self.smoothness is not None:
            return torch.full_like(oracle.outer[:, :1], self.smoothness)
        self._require_smoothness(oracle.problem)
        smoothness = oracle.problem.smoothness(oracle.outer.detach(), oracle.task)
        assert smoothness is not None
        require_shape(oracle.problem, "smoothness", smoothness, oracle.outer.shape[:1])
        if not bool((smoothness > 0).all()):
            raise ValueError(
                f"{type(oracle.problem).__name__}.smoothness must be positive, got {float(smoothness.min())!r}"
            )
        return smoothness.unsqueeze(-1)
