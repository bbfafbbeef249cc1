"""Estimators of the hypergradient ∇F_t(λ_t): each runs the inner solver and differentiates at its result."""

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from obbo_lightning.core.configurable import Configurable
from obbo_lightning.core.inner_solvers import GradientDescent, InnerSolver
from obbo_lightning.core.memory import InnerState
from obbo_lightning.core.oracle import Oracle, require_shape
from obbo_lightning.core.problem import Problem
from obbo_lightning.core.step_map import StepMap
from obbo_lightning.core.validation import at_least, nonnegative, positive


@dataclass(frozen=True, eq=False)
class Hypergradient:
    """Hypergradient of one task at λ_t, and what came with it.

    Attributes:
        value: d_t ``[lanes, d]``.
        inner: ω^K = β_{t+1} ``[lanes, p]``, detached.
        loss: f_t(λ_t, ω^K) on the whole task ``[lanes]``, before λ has learned from it.
        residual: of the linear system, relative to its right-hand side ``[lanes]``; 0 for estimators that solve none.
        state: where the task's next solve starts; an estimator sets the linear solution only.
        evaluations: numbers of gradients and of second-derivative products; `estimate_hypergradient` sets them.
    """

    value: Tensor
    inner: Tensor
    loss: Tensor
    residual: Tensor
    state: InnerState = field(default_factory=InnerState)
    evaluations: dict[str, int] = field(default_factory=dict)


class Estimator(Configurable, ABC):
    """Solver of the inner problem that also estimates ∇F_t(λ_t).

    Attributes:
        contracts: whether a residual above 1 means that the iteration diverges.
        is_exact: whether the estimate is ∇F_t(λ_t) itself.
        is_stochastic: whether it draws random numbers.
        supports_lanes: whether it works for any number of lanes.
    """

    contracts = False
    is_exact = False
    is_stochastic = False
    supports_lanes = True

    def require_compatible(self, problem: Problem, solver: InnerSolver) -> None:
        """Refuse, before the first round, a problem or an inner solver that lacks what this estimator needs."""
        solver.require_compatible(problem)

    @abstractmethod
    def __call__(self, oracle: Oracle, solver: InnerSolver, state: InnerState) -> Hypergradient:
        """Return d_t from ``state``: β_t and the last linear solution, either of which may be None."""


@dataclass(frozen=True)
class ClosedForm(Estimator):
    """∇F_t(λ_t) as the problem supplies it; the inner solver is not used.

    >>> from obbo_lightning.solvers import ExactSolution
    >>> from obbo_lightning.streams.quadratic import QuadraticTasks
    >>> ClosedForm()(QuadraticTasks().oracle(), ExactSolution(), InnerState()).value.shape
    torch.Size([1, 4])
    """

    is_exact = True

    def require_compatible(self, problem: Problem, solver: InnerSolver) -> None:
        if not problem.provides("hypergradient"):
            raise ValueError(f"hypergradient 'ClosedForm' needs a closed form, and {type(problem).__name__} has none")

    def __call__(self, oracle: Oracle, solver: InnerSolver, state: InnerState) -> Hypergradient:
        self.require_compatible(oracle.problem, solver)
        exact = oracle.problem.hypergradient(oracle.outer.detach(), oracle.task)
        assert exact is not None
        value, solution = exact
        require_shape(oracle.problem, "hypergradient", value, oracle.outer.shape)
        loss = oracle.outer_loss(solution)
        return Hypergradient(value.detach(), solution.detach(), loss, torch.zeros_like(loss))


@dataclass(frozen=True)
class FixedPoint(Estimator):
    """∇_λ f − η ∇²_λβ g · v_J with v_1 = ∇_β f, v_{j+1} = (I − η ∇²_ββ g) v_j + ∇_β f.

    The first iterate costs nothing: J iterations are J − 1 Hessian-vector products through one retained graph. The
    iteration contracts while η ‖∇²_ββ g‖ < 2; the residual is ‖v_J − v_{J−1}‖ / ‖v_1‖. For an inner solver whose step
    is preconditioned, η is η P⁻¹ (`StepMap`).

    Reference: Grazzi, Franceschi, Pontil, Salzo, "On the Iteration Complexity of Hypergradient Computation", 2020.

    Args:
        steps: J, number of iterations for the linear system.
        lr: η, step size of the iteration; None takes the inner solver's.
        while_contracting: stop, each lane its own, before an iterate that is farther from the last one than that was
            from the one before, or not finite; its residual is then that of the iterate that was not taken.

    >>> from obbo_lightning.solvers import ExactSolution
    >>> from obbo_lightning.streams.quadratic import QuadraticTasks
    >>> oracle = QuadraticTasks().oracle()
    >>> found = FixedPoint(steps=200, lr=1.0)(oracle, ExactSolution(), InnerState())
    >>> bool((found.value - oracle.problem.hypergradient(oracle.outer, oracle.task)[0]).norm() < 1e-6)
    True
    """

    steps: int = 5
    lr: float | None = None
    while_contracting: bool = False

    def __post_init__(self) -> None:
        at_least("hypergradient.steps", self.steps, 1)
        if self.lr is not None:
            positive("hypergradient.lr", self.lr)

    @property
    def contracts(self) -> bool:  # type: ignore[override]
        return not self.while_contracting

    def require_compatible(self, problem: Problem, solver: InnerSolver) -> None:
        super().require_compatible(problem, solver)
        self._step_map(solver)

    def _step_map(self, solver: InnerSolver) -> StepMap:
        found = solver.step_map if self.lr is None else StepMap(self.lr)
        if found is None:
            raise ValueError(f"hypergradient.lr must be given for inner {solver!r}, which has no step size, got None")
        return found

    def __call__(self, oracle: Oracle, solver: InnerSolver, state: InnerState) -> Hypergradient:
        inner = solver(oracle, state.inner)
        step_map = self._step_map(solver)
        loss, by_outer, by_inner = oracle.outer_gradients(inner)
        curvature = oracle.curvature(inner)
        vector = change = by_inner
        contracting = torch.ones_like(by_inner[..., :1], dtype=torch.bool)
        for _ in range(self.steps - 1):
            # v_{j+1} − v_j = ∇_β f − η ∇²_ββ g · v_j
            previous, change = change, by_inner - step_map.curvature(curvature.hessian, vector)
            if self.while_contracting:
                contracting &= change.norm(dim=-1, keepdim=True) <= previous.norm(dim=-1, keepdim=True)
                vector = vector + change.where(contracting, 0.0)
            else:
                vector = vector + change
        # ∇_λ f − η ∇²_λβ g · v_J
        value = by_outer - step_map.scaled(curvature.mixed, vector)
        return Hypergradient(value, inner, loss, relative_norm(change, by_inner))


@dataclass(frozen=True)
class ConjugateGradient(Estimator):
    """∇_λ f − ∇²_λβ g · v where ∇²_ββ g · v = ∇_β f is solved by J steps of conjugate gradients, each lane its own.

    A lane that has reached ``tol`` stops; so does one that meets a direction of negative curvature, where the system
    is no minimisation. The residual is the one that the iteration updates, not a new product. For an inner solver with
    weight decay of its own, which is no part of g, the Hessian is that of g and the decay (`StepMap.stationarity`).

    Args:
        steps: J, number of iterations for the linear system.
        tol: relative residual at which a lane is finished.
        warm_start: start from the v of the previous round (SOBOW).

    >>> from obbo_lightning.solvers import ExactSolution
    >>> from obbo_lightning.streams.quadratic import QuadraticTasks
    >>> oracle = QuadraticTasks().oracle()
    >>> found = ConjugateGradient(steps=8)(oracle, ExactSolution(), InnerState())
    >>> torch.allclose(found.value, oracle.problem.hypergradient(oracle.outer, oracle.task)[0])
    True
    """

    steps: int = 5
    tol: float = 1e-10
    warm_start: bool = False

    def __post_init__(self) -> None:
        at_least("hypergradient.steps", self.steps, 1)
        nonnegative("hypergradient.tol", self.tol)

    def __call__(self, oracle: Oracle, solver: InnerSolver, state: InnerState) -> Hypergradient:
        inner = solver(oracle, state.inner)
        step_map = getattr(solver, "step_map", None) or StepMap(1.0)
        if step_map.maximizes:
            raise ValueError("hypergradient 'ConjugateGradient' needs an optimizer that minimizes, got maximize=True")
        loss, by_outer, by_inner = oracle.outer_gradients(inner)
        by_inner = step_map.trained(by_inner)
        curvature = oracle.curvature(inner)

        def hessian(vector: Tensor) -> Tensor:
            return step_map.stationarity(curvature.hessian, vector)

        # ∇²_ββ g · v = ∇_β f
        if self.warm_start and state.linear_solution is not None:
            vector = step_map.trained(state.linear_solution)
            residual = by_inner - hessian(vector)
        else:
            vector, residual = torch.zeros_like(by_inner), by_inner
        search = residual
        squared = residual.square().sum(-1, keepdim=True)
        goal = self.tol**2 * by_inner.square().sum(-1, keepdim=True)
        for _ in range(self.steps):
            # with the residual r and the search direction p:  a = ⟨r, r⟩ / ⟨p, Hp⟩, v ← v + a p, r ← r − a Hp,
            # p ← r + (⟨r, r⟩ / its previous value) p
            product = hessian(search)
            bend = (search * product).sum(-1, keepdim=True)
            active = (squared > goal) & (bend > 0)
            length = torch.where(active, squared / bend.where(active, 1.0), 0.0)
            vector = vector + length * search
            residual = residual - length * product
            previous, squared = squared, residual.square().sum(-1, keepdim=True)
            ratio = squared / previous.where(active, 1.0)
            search = torch.where(active, residual + ratio * search, search)
        # A lane whose products are not finite has no solution: mark it by NaN.
        vector = vector.where(residual.isfinite().all(-1, keepdim=True), torch.nan)
        # ∇_λ f − ∇²_λβ g · v
        value = by_outer - curvature.mixed(vector)
        after = InnerState(linear_solution=vector if self.warm_start else None)
        return Hypergradient(value, inner, loss, relative_norm(residual, by_inner), after)


@dataclass(frozen=True)
class StochasticNeumann(Estimator):
    """∇_λ f(ε) − ∇²_λβ g(ζ⁰) · (m/ℓ) ∏_{j=1}^{m̃} (I − ∇²_ββ g(ζ^j)/ℓ) ∇_β f(ε)     (eq. stochastic_gradient_sample).

    m̃ is uniform on 0..m−1 and shared by all lanes; every factor has its own fresh sample. On the whole task the mean
    over m̃ is ``FixedPoint(steps=m, lr=1/ℓ)``.

    Args:
        max_terms: m.
        smoothness: ℓ_{g,1}; None: the problem's own.
        batch_size: observations in each of ε, ζ⁰, ζ¹, …; None for the whole task.

    >>> from obbo_lightning.solvers import ExactSolution
    >>> from obbo_lightning.streams.quadratic import QuadraticTasks
    >>> StochasticNeumann(max_terms=5)(QuadraticTasks().oracle(), ExactSolution(), InnerState()).value.shape
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

    def __call__(self, oracle: Oracle, solver: InnerSolver, state: InnerState) -> Hypergradient:
        inner = solver(oracle, state.inner)
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
        problem, outer = oracle.problem, oracle.outer.detach()
        if self.smoothness is not None:
            return torch.full_like(outer[:, :1], self.smoothness)
        self._require_smoothness(problem)
        smoothness = problem.smoothness(outer, oracle.task)
        assert smoothness is not None
        require_shape(problem, "smoothness", smoothness, outer.shape[:1])
        if not bool((smoothness > 0).all()):
            raise ValueError(f"{type(problem).__name__}.smoothness must be positive, got {float(smoothness.min())!r}")
        return smoothness.unsqueeze(-1)


@dataclass(frozen=True)
class Unrolled(Estimator):
    """∂f_t(λ_t, ω^K)/∂λ in reverse mode                              (eq. analytical_backprop).

    Exactly the derivative of λ ↦ f_t(λ, ω^K(λ)). With ``inner.start: outer`` it also differentiates through ω⁰ = λ.

    >>> from obbo_lightning.streams.quadratic import QuadraticTasks
    >>> oracle = QuadraticTasks().oracle()
    >>> found = Unrolled()(oracle, GradientDescent(steps=3), InnerState(torch.zeros(1, 8, dtype=torch.float64)))
    >>> found.value.shape, oracle.evaluations
    (torch.Size([1, 4]), {'gradients': 4, 'products': 3})
    """

    def require_compatible(self, problem: Problem, solver: InnerSolver) -> None:
        if not isinstance(solver, GradientDescent):
            raise ValueError(f"hypergradient 'Unrolled' needs steps of GradientDescent as inner, got inner {solver!r}")
        if solver.precision != "full":
            raise ValueError(f"inner.precision must be full for hypergradient 'Unrolled', got {solver.precision!r}")

    def __call__(self, oracle: Oracle, solver: InnerSolver, state: InnerState) -> Hypergradient:
        self.require_compatible(oracle.problem, solver)
        assert isinstance(solver, GradientDescent)
        last = solver(oracle, state.inner, differentiable=True)
        loss, value = oracle.total_outer_gradient(last, solver.steps)
        return Hypergradient(value, last.detach(), loss, torch.zeros_like(loss))


def relative_norm(vector: Tensor, reference: Tensor) -> Tensor:
    """Return ‖vector‖ / ‖reference‖ per lane, 0 where both vanish, infinite where only the vector has overflowed."""
    norm, scale = vector.norm(dim=-1), reference.norm(dim=-1)
    norm = norm.where(~norm.isnan() | scale.isnan(), torch.inf)
    return norm / scale.where(scale > 0, norm.where(norm > 0, 1.0))
