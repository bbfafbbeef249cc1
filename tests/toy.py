"""Small problems whose derivatives only autograd has, networks, tasks and points."""

import torch
from torch import nn

from obbo_lightning import Interval, OnSimplex, ParameterGroups, Positive, Problem, Real
from obbo_lightning.config.registry import component_names

F64 = torch.float64
# The algorithms of the paper; MAML and ANIL are for few-shot problems only.
SIX = sorted(set(component_names("algorithm")) - {"maml", "anil"})


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def double(task):
    """Return a task in double precision."""
    return {name: value.double() if value.is_floating_point() else value for name, value in task.items()}


class Nonlinear(Problem):
    """A finite sum with curvature that depends on λ, β and the sample; f depends on λ directly, too. Here d = p."""

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


class FromLosses(Problem):
    """A problem from the functions g(λ, β) and f(λ, β), the same for every task."""

    def __init__(self, inner_loss, outer_loss):
        self.losses = inner_loss, outer_loss

    def inner_loss(self, outer, inner, task, sample=None):
        return self.losses[0](outer, inner)

    def outer_loss(self, outer, inner, task, sample=None):
        return self.losses[1](outer, inner)


class Proximal(Problem):
    """A small few-shot adaptation: g = L(β) + γ/2 ‖λ − β‖², with its analytic mixed term −γ v."""

    def __init__(self, proximity=0.5):
        self.proximity = proximity

    def inner_loss(self, outer, inner, task, sample=None):
        fit = ((task["x"] @ inner.unsqueeze(-1)).squeeze(-1).tanh() - task["y"]).square().mean(-1)
        return fit + 0.5 * self.proximity * (outer - inner).square().sum(-1)

    def outer_loss(self, outer, inner, task, sample=None):
        fitted = (task["x_validation"] @ inner.unsqueeze(-1)).squeeze(-1).tanh()
        return (fitted - task["y_validation"]).square().mean(-1)

    def mixed_term(self, outer, inner, task, vector, sample=None):
        return -self.proximity * vector


class OwnNetwork(nn.Module):
    """A user's network: a parameter of its own, a frozen layer, a buffer that it writes to, norms and dropout."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.group, self.norm = nn.GroupNorm(2, 4), nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.dropout, self.last = nn.Dropout(dropout), nn.Linear(4, 3)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        x = self.frozen(self.norm(self.group(x))).tanh() * self.scale
        return self.last(self.dropout(x))


OWN_SIZE = 4 + 2 * 4 + 2 * 4 + 4 * 3 + 3


def own_network(mode="train", dropout=0.0):
    """Return a network with running statistics that differ from their start, in training or evaluation mode."""
    torch.manual_seed(3)
    network = OwnNetwork(dropout)
    with torch.no_grad():
        for _ in range(5):
            network(3 * torch.randn(20, 4) + 1)
    return getattr(network, mode)()


def example_groups():
    return ParameterGroups(
        decay=Positive(1e-2), sources=OnSimplex(3), smoothing=Interval(0.0, 0.3), init=Real([0.5, -0.5])
    )


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
    return scale * normal(lanes, dim, seed=seed)
