"""A stream whose runs have every file that a run can have, and whose rounds cost next to nothing."""

import polars as pl
import torch

from obbo_lightning import Blocks, Positive, Problem, Stream, Tasks
from obbo_lightning.streams.stream import Metric

F64 = torch.float64


class Shrunk(Problem):
    """g = ‖β − x‖² + λ ‖β‖², f = ‖β − y‖²: how much to shrink, by a block of one number."""

    names = ("weight",)
    blocks = Blocks(weight=Positive(0.5, upper=10.0))

    def inner_loss(self, outer, inner, task, sample=None):
        return (inner - task["x"]).square().sum(-1) + outer[:, 0] * inner.square().sum(-1)

    def outer_loss(self, outer, inner, task, sample=None):
        return (inner - task["y"]).square().sum(-1)

    def initial_inner(self, outer, task):
        return torch.zeros_like(task["x"])

    def scores(self, outer, inner, task):
        return {"mse": (inner - task["y"]).square().mean(-1)}


class Everything(Stream):
    """Two lanes with names, validation and test tasks, baselines, sources, and an event that was left out.

    Args:
        drift: of the tasks.
        seed: of everything.
    """

    metric = Metric("mse")
    problem_type = Shrunk

    def __init__(self, drift: float = 1.0, seed: int = 0):
        self.drift, self.seed = drift, seed
        self.train, self.validation, self.test = (Tasks(self.drawn(n), 100) for n in (0, 1000, 2000))
        self.lanes = pl.DataFrame({"ticker": ["=A", "B"], "timestamp": ["2026-01-02"] * 2, "naive_mse": [1.0, 2.0]})
        self.skipped = [{"ticker": "=C", "reason": "too short"}]

    def drawn(self, first):
        def draw(t):
            generator = torch.Generator().manual_seed(10_000 * self.seed + first + t)
            x, y = torch.randn(2, 2, 3, generator=generator, dtype=F64)
            return {"x": x + self.drift, "y": y + self.drift / 2}

        return draw

    def start(self, problem, seed):
        return torch.full((2, 1), 0.5, dtype=F64)

    def baselines(self, problem, algorithm, rounds):
        return {"zero": [float(self.train[t]["y"].square().mean()) for t in range(rounds)]}

    def origins(self):
        return {"drift": str(self.drift), "seed": str(self.seed)}
