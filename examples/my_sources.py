"""Your hyperparameters as named blocks: whom to trust, and how much to shrink, while the truth moves."""

import torch

from obbo_lightning import OnSimplex, ParameterGroups, Positive, Problem, Stream, Tasks


class TrustedRidge(Problem):
    """A ridge regression on several sources: their weights and the ridge are learned, judged on clean observations.

    Args:
        sources: how many there are.
    """

    def __init__(self, sources: int = 4):
        self.sources = sources

    @property
    def blocks(self):  # λ [lanes, 1 + sources], by name
        return ParameterGroups(ridge=Positive(0.1, upper=2.0), trust=OnSimplex(self.sources))

    def inner_loss(self, outer, inner, task, sample=None):
        hyper = self.blocks.split(outer)
        errors = (torch.einsum("snd,ld->lsn", task["x"], inner) - task["y"]).square().mean(-1)
        return (hyper["trust"] * errors).sum(-1) + hyper["ridge"][:, 0] * inner.square().sum(-1)

    def outer_loss(self, outer, inner, task, sample=None):
        return (inner @ task["x_new"].T - task["y_new"]).square().mean(-1)

    def initial_inner(self, outer, task):
        return torch.zeros(len(outer), task["x"].shape[-1], dtype=outer.dtype)


class MovingTruth(Stream):
    """One source tells the truth, the others its opposite; every ``period`` rounds it is another one.

    Args:
        sources: how many there are.
        period: rounds until another one is right.
        seed: of everything.
    """

    problem_type = TrustedRidge
    derived_arguments = ("sources",)

    def __init__(self, sources: int = 4, period: int = 100, seed: int = 0):
        self.sources, self.period, self.seed = sources, period, seed
        self.train = Tasks(self.draw, length=100_000)

    def task_spec(self):
        return {"sources": self.sources}

    def draw(self, t):
        """Task t, a function of (seed, t) and of nothing else."""
        generator = torch.Generator().manual_seed(1_000_000 * self.seed + t)
        x, x_new = (torch.randn(*shape, 3, generator=generator) for shape in ((self.sources, 20), (20,)))
        truth = torch.tensor([1.0, -1.0, 0.5])
        says = torch.where(torch.arange(self.sources) == t // self.period % self.sources, 1.0, -1.0)
        noise = 0.3 * torch.randn(self.sources, 20, generator=generator)
        return {"x": x, "y": says.unsqueeze(-1) * (x @ truth) + noise, "x_new": x_new, "y_new": x_new @ truth}
