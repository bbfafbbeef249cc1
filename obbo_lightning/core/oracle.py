"""First and second derivatives of one task's losses at one λ, with a count of evaluations."""

import torch
from torch import Tensor

from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import Key, Sample


class Oracle:
    """Losses f_t and g_t at λ_t.

    ``evaluations`` counts gradients (one backward pass each) and products (of the Hessian or the mixed term with a
    vector).

    Args:
        problem: has the losses.
        outer: λ_t ``[lanes, d]``.
        task: the data of the round.
        key: identifies the round's randomness.
        solver_state: state of the inner solver after the previous round ``[lanes, …]``; the solver replaces it.

    >>> from obbo_lightning.streams.quadratic import QuadraticTasks
    >>> oracle = QuadraticTasks().oracle()  # Oracle(problem, λ_1, first task)
    >>> oracle.inner_gradient(oracle.task["b"]).shape
    torch.Size([1, 8])
    """

    def __init__(
        self, problem: Problem, outer: Tensor, task: Task, key: Key | None = None, solver_state: Tensor | None = None
    ) -> None:
        require_outer(outer)
        if torch.is_inference_mode_enabled():
            raise RuntimeError("a task cannot be solved in torch.inference_mode, which computes no gradients")
        self.problem = problem
        self.task = task
        self._for_gradients = problem.for_gradients(task)
        self.key = key or Key()
        self.solver_state = solver_state
        self.outer = outer.detach().requires_grad_()
        self.evaluations = {"gradients": 0, "products": 0}

    def draw(self, purpose: str, index: int, size: int | None) -> Sample | None:
        """Return an independent sample of ``size`` observations; None means the whole task, without noise."""
        if size is None and not (purpose == "inner" and self.problem.is_stochastic):
            return None
        return Sample(self.key.seed_for(purpose, index), size)

    def inner_gradient(self, inner: Tensor, sample: Sample | None = None, differentiable: bool = False) -> Tensor:
        """Return ∇_β g; with ``differentiable`` it keeps the graph through λ and β."""
        with torch.enable_grad():
            outer, task = self.outer, self.task
            if not differentiable:
                outer, inner, task = outer.detach(), inner.detach().requires_grad_(), self._for_gradients
            loss = self._per_lane("inner_loss", self.problem.inner_loss(outer, inner, task, sample))
            self.evaluations["gradients"] += 1
            return _gradients(loss, [inner], differentiable)[0]

    def outer_gradients(self, inner: Tensor, sample: Sample | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return f, ∇_λ f and ∇_β f at a constant β."""
        with torch.enable_grad():
            inner = inner.detach().requires_grad_()
            loss = self._per_lane("outer_loss", self.problem.outer_loss(self.outer, inner, self._for_gradients, sample))
            self.evaluations["gradients"] += 1
            by_outer, by_inner = _gradients(loss, [self.outer, inner])
            return loss.detach(), by_outer, by_inner

    def total_outer_gradient(self, inner: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """Return F and its gradient in λ through the graph that made ``inner`` in ``steps`` differentiable steps."""
        with torch.enable_grad():
            loss = self._per_lane("outer_loss", self.problem.outer_loss(self.outer, inner, self.task))
            self.evaluations["gradients"] += 1
            # backpropagation through a step multiplies by its second derivatives once
            self.evaluations["products"] += steps
            return loss.detach(), _gradients(loss, [self.outer])[0]

    def outer_loss(self, inner: Tensor) -> Tensor:
        """Return f(λ, β) on the whole task; not counted, because nothing is differentiated."""
        with torch.no_grad():
            return self._per_lane("outer_loss", self.problem.outer_loss(self.outer, inner, self._for_gradients))

    def curvature(self, inner: Tensor, sample: Sample | None = None) -> "Curvature":
        """Return the second derivatives of g at β, through one retained graph."""
        return Curvature(self, inner, sample)

    def _per_lane(self, name: str, loss: Tensor) -> Tensor:
        return require_shape(self.problem, name, loss, self.outer.shape[:1])


class Curvature:
    """Products of ∇²_ββ g and ∇²_λβ g at one point with vectors."""

    def __init__(self, oracle: Oracle, inner: Tensor, sample: Sample | None) -> None:
        self._oracle = oracle
        self._sample = sample
        self._inner = inner.detach().requires_grad_()
        self._gradient = oracle.inner_gradient(self._inner, sample, differentiable=True)

    def hessian(self, vector: Tensor) -> Tensor:
        """Return ∇²_ββ g · v."""
        return self._product(self._inner, vector)

    def mixed(self, vector: Tensor) -> Tensor:
        """Return ∇²_λβ g · v; free where the problem has it analytically."""
        oracle = self._oracle
        analytic = oracle.problem.mixed_term(
            oracle.outer.detach(), self._inner.detach(), oracle.task, vector, self._sample
        )
        if analytic is None:
            return self._product(oracle.outer, vector)
        return require_shape(oracle.problem, "mixed_term", analytic.detach(), oracle.outer.shape)

    def _product(self, variable: Tensor, vector: Tensor) -> Tensor:
        self._oracle.evaluations["products"] += 1
        if not self._gradient.requires_grad:
            return torch.zeros_like(variable)
        return torch.autograd.grad(self._gradient, variable, vector, retain_graph=True, materialize_grads=True)[0]


def require_outer(outer: Tensor) -> None:
    """Refuse an outer variable that is not a floating-point tensor ``[lanes, d]``."""
    if outer.ndim != 2 or not outer.is_floating_point():
        raise ValueError(
            f"outer must be a floating-point tensor [lanes, d], got {outer.dtype} of shape {tuple(outer.shape)}"
        )


def require_finite(name: str, values: Tensor) -> None:
    """Refuse values that are infinite or NaN."""
    bad = int((~values.isfinite()).sum())
    if bad:
        raise ValueError(f"{name} must be finite, got {bad} values that are not")


def require_shape(problem: Problem, name: str, found: Tensor, shape: torch.Size) -> Tensor:
    """Return ``found`` if it has this shape; another shape would be broadcast silently."""
    if found.shape != shape:
        raise ValueError(f"{type(problem).__name__}.{name} must return shape {tuple(shape)}, got {tuple(found.shape)}")
    return found


def _gradients(loss: Tensor, variables: list[Tensor], create_graph: bool = False) -> tuple[Tensor, ...]:
    if not loss.requires_grad:
        return tuple(torch.zeros_like(variable) for variable in variables)
    # Lanes do not mix, so the gradient of the sum holds every lane's own gradient.
    return torch.autograd.grad(loss.sum(), variables, create_graph=create_graph, materialize_grads=True)
