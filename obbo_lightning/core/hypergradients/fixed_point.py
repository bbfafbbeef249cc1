"""Approximate implicit differentiation by the fixed-point method."""

from dataclasses import dataclass

from torch import Tensor

from obbo_lightning.core.hypergradients.base import Hypergradient, ImplicitEstimator, relative_norm
from obbo_lightning.core.inner_solvers import InnerSolver
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.problem import Problem
from obbo_lightning.core.validation import at_least, positive


@dataclass(frozen=True)
class FixedPoint(ImplicitEstimator):
    """∇_λ f − η ∇²_λβ g · v_J with v_1 = ∇_β f, v_{j+1} = (I − η ∇²_ββ g) v_j + ∇_β f.

    The first iterate costs nothing: J iterations are J − 1 Hessian-vector products through one retained graph. The
    iteration contracts while η ‖∇²_ββ g‖ < 2; the residual is ‖v_J − v_{J−1}‖ / ‖v_1‖.

    Reference: Grazzi, Franceschi, Pontil, Salzo, "On the Iteration Complexity of Hypergradient Computation", 2020.

    Args:
        steps: J.
        lr: η of the iteration; None takes the inner solver's.

    >>> from obbo_lightning.solvers import ExactSolution
    >>> from obbo_lightning.streams.quadratic import QuadraticTasks
    >>> stream = QuadraticTasks()
    >>> oracle = Oracle(stream.problem, stream.initial_outer(), stream[0])
    >>> found = FixedPoint(steps=200, lr=1.0)(oracle, ExactSolution(), None, None)
    >>> bool((found.value - stream.problem.hypergradient(oracle.outer, stream[0])[0]).norm() < 1e-6)
    True
    """

    steps: int = 5
    lr: float | None = None

    contracts = True

    def __post_init__(self) -> None:
        at_least("hypergradient.steps", self.steps, 1)
        if self.lr is not None:
            positive("hypergradient.lr", self.lr)

    def require_compatible(self, problem: Problem, solver: InnerSolver) -> None:
        super().require_compatible(problem, solver)
        self._step_size(solver)

    def _step_size(self, solver: InnerSolver) -> float:
        lr = self.lr if self.lr is not None else solver.step_size
        if lr is None:
            raise ValueError(f"hypergradient.lr must be given for inner {solver!r}, which has no step size, got None")
        return lr

    def differentiate(
        self, oracle: Oracle, solver: InnerSolver, inner: Tensor, linear_solution: Tensor | None
    ) -> Hypergradient:
        lr = self._step_size(solver)
        loss, by_outer, by_inner = oracle.outer_gradients(inner)
        curvature = oracle.curvature(inner)
        vector = change = by_inner
        for _ in range(self.steps - 1):
            # v_{j+1} − v_j = ∇_β f − η ∇²_ββ g · v_j
            change = by_inner - lr * curvature.hessian(vector)
            vector = vector + change
        # ∇_λ f − η ∇²_λβ g · v_J
        value = by_outer - lr * curvature.mixed(vector)
        return Hypergradient(value, inner, loss, relative_norm(change, by_inner))
