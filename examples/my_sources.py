"""Your hyperparameters as parameter groups: weights of sources, of which one at a time is correct, and of a ridge."""

import torch

from obbo_lightning import OnSimplex, ParameterGroups, Positive, Problem, Stream, Tasks


class WeightedRidge(Problem):
    """Ridge regression on several sources; f is the error on clean validation examples.

    Args:
        sources: number of sources.
    """

    def __init__(self, sources: int = 4):
        self.sources = sources

    @property
    def groups(self):  # λ [lanes, 1 + sources], by name
        return ParameterGroups(ridge=Positive(0.1, upper=2.0), sources=OnSimplex(self.sources))

    def inner_loss(self, outer, inner, task, sample=None):
        hyper = self.groups.split(outer)
        errors = (torch.einsum("snd,ld->lsn", task["x"], inner) - task["y"]).square().mean(-1)
        return (hyper["sources"] * errors).sum(-1) + hyper["ridge"][:, 0] * inner.square().sum(-1)

    def outer_loss(self, outer, inner, task, sample=None):
        return (inner @ task["x_new"].T - task["y_new"]).square().mean(-1)

    def initial_inner(self, outer, task):
        return torch.zeros(len(outer), task["x"].shape[-1], dtype=outer.dtype)


class ChangingSources(Stream):
    """The labels of one source are correct, those of the others have the opposite sign; the correct one changes.

    Args:
        sources: number of sources.
        period: rounds until another source is correct.
        seed: of all random numbers.
    """

    problem_type = WeightedRidge
    derived_arguments = ("sources",)

    def __init__(self, sources: int = 4, period: int = 100, seed: int = 0):
        self.sources, self.period, self.seed = sources, period, seed
        self.train = Tasks(self.make_task, length=100_000)

    def task_spec(self):
        return {"sources": self.sources}

    def make_task(self, t):
        """Return task t, a function of (seed, t) only."""
        generator = torch.Generator().manual_seed(1_000_000 * self.seed + t)
        x, x_new = (torch.randn(*shape, 3, generator=generator) for shape in ((self.sources, 20), (20,)))
        truth = torch.tensor([1.0, -1.0, 0.5])
        sign = torch.where(torch.arange(self.sources) == t // self.period % self.sources, 1.0, -1.0)
        noise = 0.3 * torch.randn(self.sources, 20, generator=generator)
        return {"x": x, "y": sign.unsqueeze(-1) * (x @ truth) + noise, "x_new": x_new, "y_new": x_new @ truth}
