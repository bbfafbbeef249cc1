"""Small problems whose derivatives are only known to autograd, and dense references for them."""

import torch

from obbo_lightning import Problem, names_of

F64 = torch.float64
SIX = sorted(
    set(names_of("algorithm")) - {"maml", "anil"}
)  # those of the paper; the two are for few-shot problems only


class Nonlinear(Problem):
    """A finite sum with curvature that depends on λ, β and the sample; f depends on λ directly too. Here d = p."""

    def inner_loss(self, outer, inner, task, sample=None):
        x, y = task["x"], task["y"]
        if sample is not None:
            rows = sample.indices(x.shape[1])
            x, y = x[:, rows], y[:, rows]
        margin = y * (x @ inner.unsqueeze(-1)).squeeze(-1)
        fit = torch.nn.functional.softplus(-margin).mean(-1)
        return fit + 0.5 * (outer.exp() * inner.square()).sum(-1) + 0.1 * (inner * outer.sin()).sum(-1)

    def outer_loss(self, outer, inner, task, sample=None):
        x, y = task["x_validation"], task["y_validation"]
        if sample is not None:
            rows = sample.indices(x.shape[1])
            x, y = x[:, rows], y[:, rows]
        fit = ((x @ inner.unsqueeze(-1)).squeeze(-1).tanh() - y).square().mean(-1)
        return fit + 0.05 * (outer.square() * inner.cos()).sum(-1)

    def initial_inner(self, outer, task):
        return torch.zeros_like(outer)


class Proximal(Problem):
    """Few-shot adaptation in small: g = L(β) + γ/2 ‖λ − β‖², with its analytic mixed term −γ v."""

    def __init__(self, proximity=0.5):
        self.proximity = proximity

    def inner_loss(self, outer, inner, task, sample=None):
        fit = ((task["x"] @ inner.unsqueeze(-1)).squeeze(-1).tanh() - task["y"]).square().mean(-1)
        return fit + 0.5 * self.proximity * (outer - inner).square().sum(-1)

    def outer_loss(self, outer, inner, task, sample=None):
        return (
            ((task["x_validation"] @ inner.unsqueeze(-1)).squeeze(-1).tanh() - task["y_validation"]).square().mean(-1)
        )

    def mixed_term(self, outer, inner, task, vector, sample=None):
        return -self.proximity * vector


def toy_task(lanes=2, rows=6, dim=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=F64)  # noqa: E731
    return {
        "x": draw(lanes, rows, dim),
        "y": draw(lanes, rows).sign(),
        "x_validation": draw(lanes, rows, dim),
        "y_validation": draw(lanes, rows).sign(),
    }


def toy_point(lanes=2, dim=3, seed=1, scale=0.5):
    return scale * torch.randn(lanes, dim, generator=torch.Generator().manual_seed(seed), dtype=F64)


def dense_hessian(problem, outer, inner, task):
    """∇²_ββ g and ∇²_λβ g (as d x p), lane by lane."""

    def gradient(lam, beta):
        return torch.autograd.functional.jacobian(
            lambda b: problem.inner_loss(lam, b, task).sum(), beta, create_graph=True
        )

    by_outer, by_inner = torch.autograd.functional.jacobian(gradient, (outer, inner))
    lanes = range(outer.shape[0])
    hessian = torch.stack([by_inner[i, :, i] for i in lanes])
    mixed = torch.stack([by_outer[i, :, i].mT for i in lanes])
    return hessian, mixed


def dense_outer_gradients(problem, outer, inner, task):
    return torch.autograd.functional.jacobian(lambda o, i: problem.outer_loss(o, i, task).sum(), (outer, inner))


def newton_solution(problem, outer, task, start, steps=50):
    """β̂(λ) by dense Newton steps: independent of every solver of the package."""
    inner = start
    for _ in range(steps):
        hessian, _ = dense_hessian(problem, outer, inner, task)
        gradient = torch.autograd.functional.jacobian(lambda b: problem.inner_loss(outer, b, task).sum(), inner)
        inner = inner - torch.linalg.solve(hessian, gradient)
    return inner
