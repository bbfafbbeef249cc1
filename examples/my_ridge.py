"""Your problem and your stream: a ridge weight that is learned online while the regressions drift."""

import torch

from obbo_lightning import Metric, Problem, Stream, Tasks


class Ridge(Problem):
    """g(λ, β) = mean squared error on 20 observations + λ ‖β‖², f the error on 20 new ones."""

    def inner_loss(self, outer, inner, task, sample=None):  # one number per lane
        return (inner @ task["x"].T - task["y"]).square().mean(-1) + outer[:, 0] * inner.square().sum(-1)

    def outer_loss(self, outer, inner, task, sample=None):
        return (inner @ task["x_new"].T - task["y_new"]).square().mean(-1)

    def initial_outer(self, seed):  # λ_1
        return torch.full((1, 1), 0.01)

    def initial_inner(self, outer, task):  # β_1
        return torch.zeros(len(outer), task["x"].shape[1], dtype=outer.dtype)

    def scores(self, outer, inner, task):  # further scores: the explained share of the variance
        return {"explained": 1 - self.outer_loss(outer, inner, task) / task["y_new"].var()}


class DriftingRegressions(Stream):
    """Noisy linear regressions whose coefficients change slowly and periodically.

    Args:
        dim: number of coefficients.
        noise: standard deviation of the noise.
        period: rounds after which the coefficients repeat.
        seed: of all random numbers.
    """

    metric = Metric("explained", higher_is_better=True)
    problem_type = Ridge

    def __init__(self, dim: int = 8, noise: float = 1.0, period: int = 200, seed: int = 0):
        self.dim, self.noise, self.period, self.seed = dim, noise, period, seed
        self.train = Tasks(self.make_task, length=10_000)
        self.validation = Tasks(lambda t: self.make_task(20_000 + 7 * t), length=50)
        self.test = Tasks(lambda t: self.make_task(30_000 + 7 * t), length=50)

    def make_task(self, t):
        """Return task t, a function of (seed, t) only."""
        generator = torch.Generator().manual_seed(1_000_000 * self.seed + t)
        truth = 0.3 * torch.cos(2 * torch.pi * t / self.period + torch.arange(self.dim))
        task = {}
        for kind in ("", "_new"):
            x = torch.randn(20, self.dim, generator=generator)
            task |= {f"x{kind}": x, f"y{kind}": x @ truth + self.noise * torch.randn(20, generator=generator)}
        return task
