"""Quadratic bilevel problem: solution, hypergradient and constants in closed form."""

import torch
from torch import Tensor

from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import Sample
from obbo_lightning.core.validation import nonnegative


class Quadratic(Problem):
    """g_t(λ, β) = ½ βᵀAβ − βᵀ(Bλ + b_t), f_t(λ, β) = ½ ‖β − c_t‖² + (ridge/2) ‖λ‖².

    A and B are fixed, only b_t and c_t (the task) drift. With S = A⁻¹B: β̂_t(λ) = Sλ + A⁻¹b_t and
    ∇F_t(λ) = ridge λ + Sᵀ(β̂_t(λ) − c_t).

    Args:
        inner_matrix: A ``[lanes, p, p]``, symmetric positive definite.
        coupling: B ``[lanes, p, d]``.
        ridge: weight of ‖λ‖² in f.
        noise: standard deviation of the noise that one observation adds to each coordinate of ∇_β g and ∇_β f.

    >>> problem = Quadratic(2 * torch.eye(2).unsqueeze(0), torch.eye(2).unsqueeze(0))
    >>> problem.solution(torch.ones(1, 2), {"b": torch.ones(1, 2), "c": torch.zeros(1, 2)})  # (λ + b)/2
    tensor([[1., 1.]])
    """

    def __init__(self, inner_matrix: Tensor, coupling: Tensor, ridge: float = 0.1, noise: float = 0.0) -> None:
        lanes, inner_dim = coupling.shape[:2]
        if inner_matrix.shape != (lanes, inner_dim, inner_dim):
            wanted = f"{(lanes, inner_dim, inner_dim)} to match coupling {tuple(coupling.shape)}"
            raise ValueError(f"inner_matrix must have shape {wanted}, got {tuple(inner_matrix.shape)}")
        self.inner_matrix, self.coupling = inner_matrix, coupling
        self.ridge = nonnegative("ridge", ridge)
        self.noise = nonnegative("noise", noise)
        self._eigenvalues = torch.linalg.eigvalsh(inner_matrix)
        if not torch.allclose(inner_matrix, inner_matrix.mT) or not bool((self._eigenvalues > 0).all()):
            raise ValueError("inner_matrix must be symmetric and positive definite, got one that is not")
        self.response = torch.linalg.solve(inner_matrix, coupling)  # S = ∂β̂/∂λ

    def inner_loss(self, outer: Tensor, inner: Tensor, task: Task, sample: Sample | None = None) -> Tensor:
        # ½ βᵀAβ − βᵀ(Bλ + b_t)
        linear = _apply(self.coupling, outer) + task["b"] + self._noise(inner, sample)
        return (inner * (0.5 * _apply(self.inner_matrix, inner) - linear)).sum(-1)

    def outer_loss(self, outer: Tensor, inner: Tensor, task: Task, sample: Sample | None = None) -> Tensor:
        fit = 0.5 * (inner - task["c"]).square().sum(-1) + (inner * self._noise(inner, sample)).sum(-1)
        return fit + 0.5 * self.ridge * outer.square().sum(-1)

    def select_lanes(self, task: Task, lanes: slice) -> tuple[Problem, Task]:
        selected = Quadratic(self.inner_matrix[lanes], self.coupling[lanes], self.ridge, self.noise)
        return selected, {name: values[lanes] for name, values in task.items()}

    def initial_inner(self, outer: Tensor, task: Task) -> Tensor:
        return torch.zeros_like(task["b"])

    def solution(self, outer: Tensor, task: Task) -> Tensor:
        # β̂_t(λ) = Sλ + A⁻¹b_t
        return _apply(self.response, outer) + torch.linalg.solve(self.inner_matrix, task["b"])

    def hypergradient(self, outer: Tensor, task: Task) -> tuple[Tensor, Tensor]:
        solution = self.solution(outer, task)
        # ∇F_t(λ) = ridge λ + Sᵀ(β̂_t(λ) − c_t)
        return self.ridge * outer + _apply(self.response.mT, solution - task["c"]), solution

    def mixed_term(
        self, outer: Tensor, inner: Tensor, task: Task, vector: Tensor, sample: Sample | None = None
    ) -> Tensor:
        # ∇²_λβ g = −Bᵀ
        return -_apply(self.coupling.mT, vector)

    def smoothness(self, outer: Tensor, task: Task) -> Tensor:
        return self._eigenvalues[:, -1]

    def _noise(self, inner: Tensor, sample: Sample | None) -> Tensor:
        if sample is None or sample.size is None or self.noise == 0:
            return torch.zeros_like(inner[:1])
        # the mean of `size` independent normal vectors
        draw = torch.randn(inner.shape[-1], generator=sample.generator(), dtype=torch.float64)
        return (draw * (self.noise / sample.size**0.5)).to(inner)


def _apply(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)
