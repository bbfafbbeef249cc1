"""Contract of a problem: its derivatives against automatic differentiation and central differences."""

from collections.abc import Callable

import torch
from torch import Tensor

from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import Sample

SAMPLE_SIZE, SAMPLES = 2, 500
DIFFERENCE_WEIGHTS = (4 / 5, -1 / 5, 4 / 105, -1 / 280)  # c_k


def check_problem(problem: Problem, outer: Tensor, inner: Tensor, task: Task, tolerance: float = 1e-6) -> None:
    """Raise AssertionError where a problem breaks the contract of `Problem`.

    Args:
        problem: yours.
        outer: a λ ``[lanes, d]`` in float64; take two lanes or more to have their independence checked.
        inner: a β ``[lanes, p]`` in float64.
        task: a task.
        tolerance: relative error allowed against central differences.

    >>> from obbo_lightning.streams.quadratic import QuadraticTasks
    >>> stream = QuadraticTasks(lanes=2)
    >>> check_problem(stream.problem, stream.initial_outer() + 0.1, torch.ones(2, 8, dtype=torch.float64), stream[0])
    """
    if outer.dtype != torch.float64 or inner.dtype != torch.float64:
        raise ValueError(f"outer and inner must be float64, got {outer.dtype} and {inner.dtype}")
    before = {name: value.clone() for name, value in task.items()}
    for name in ("inner_loss", "outer_loss"):
        _check_loss(problem, name, outer, inner, task)
    _check_second_derivatives(problem, outer, inner, task, tolerance)
    _check_exact_solution(problem, outer, task, tolerance)
    for name, value in task.items():
        assert torch.equal(value, before[name]), f"the task's {name!r} was changed in place"


def _check_loss(problem: Problem, name: str, outer: Tensor, inner: Tensor, task: Task) -> None:
    function, variables = getattr(problem, name), [outer.clone().requires_grad_(), inner.clone().requires_grad_()]
    loss = function(*variables, task)
    assert loss.shape == outer.shape[:1], f"{name} must have shape {tuple(outer.shape[:1])}, got {loss.shape}"
    assert bool(loss.isfinite().all()), f"{name} must be finite, got {loss}"
    for lane in range(len(outer)):
        others = torch.arange(len(outer)) != lane
        for found in torch.autograd.grad(loss[lane], variables, allow_unused=True, retain_graph=True):
            assert found is None or not bool(found[others].any()), f"{name} of lane {lane} depends on another lane"
    once, twice = (function(outer, inner, task, Sample(1, SAMPLE_SIZE)) for _ in range(2))
    assert torch.equal(once, twice), f"{name} must be the same for the same sample, got {once} and {twice}"
    estimates = torch.stack([function(outer, inner, task, Sample(seed, SAMPLE_SIZE)) for seed in range(SAMPLES)])
    error = estimates.std(0) / SAMPLES**0.5 + 1e-12 * (1 + loss.abs())
    assert bool(((estimates.mean(0) - loss).abs() <= 5 * error).all()), f"{name} of a sample is a biased estimate"


def _check_second_derivatives(problem: Problem, outer: Tensor, inner: Tensor, task: Task, tolerance: float) -> None:
    vector = torch.randn(inner.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    analytic = problem.mixed_term(outer, inner, task, vector)
    if analytic is not None:
        variables = outer.clone().requires_grad_(), inner.clone().requires_grad_()
        loss = problem.inner_loss(*variables, task).sum()
        (gradient,) = torch.autograd.grad(loss, variables[1], create_graph=True)
        (expected,) = torch.autograd.grad(gradient, variables[0], vector, materialize_grads=True)
        _assert_close("mixed_term", analytic, expected, tolerance)
    smoothness = problem.smoothness(outer, task)
    if smoothness is not None:
        hessian = torch.func.jacrev(torch.func.jacrev(lambda beta: problem.inner_loss(outer, beta, task).sum()))(inner)
        for lane, bound in enumerate(smoothness.tolist()):
            largest = float(torch.linalg.eigvalsh(hessian[lane, :, lane])[-1])
            assert bound >= largest * (1 - 1e-9), f"smoothness {bound} of lane {lane} is below the curvature {largest}"


def _check_exact_solution(problem: Problem, outer: Tensor, task: Task, tolerance: float) -> None:
    solution, known = problem.solution(outer, task), problem.hypergradient(outer, task)
    if solution is not None:
        inner = solution.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(problem.inner_loss(outer, inner, task).sum(), inner)
        largest, scale = float(gradient.abs().max()), 1 + float(solution.abs().max())
        assert largest <= tolerance * scale, f"the gradient at solution is {largest}, not 0"
    if known is None:
        return
    if solution is not None:
        _assert_close("the inner variable of hypergradient", known[1], solution, tolerance)

    def reduced(point: Tensor) -> Tensor:
        found = problem.hypergradient(point, task)
        assert found is not None
        return problem.outer_loss(point, found[1], task)

    _assert_close("hypergradient", known[0], central_difference(reduced, outer), tolerance)


def _assert_close(name: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    error = float((found - expected).abs().max())
    allowed = tolerance * (1 + float(expected.abs().max()))
    assert error <= allowed, f"{name} is off by {error:.3g}, allowed is {allowed:.3g}"


def central_difference(function: Callable[[Tensor], Tensor], point: Tensor, step: float = 1e-3) -> Tensor:
    """Return the gradient of a function ``[lanes, d] -> [lanes]`` at ``point``, in float64 to about 1e-12.

    >>> central_difference(lambda x: x.exp().sum(-1), torch.zeros(1, 1, dtype=torch.float64)).round(decimals=10)
    tensor([[1.]], dtype=torch.float64)
    """
    columns = []
    for i in range(point.shape[-1]):
        shift = torch.zeros_like(point)
        shift[:, i] = step
        # f'(x) ≈ Σ_k c_k (f(x + kh) − f(x − kh))/h with an error of order h⁸
        differences = [
            c * (function(point + k * shift) - function(point - k * shift)) for k, c in enumerate(DIFFERENCE_WEIGHTS, 1)
        ]
        columns.append(torch.stack(differences).sum(0) / step)
    return torch.stack(columns, dim=-1)
