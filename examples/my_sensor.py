"""Your stream from an iterator: tasks that arrive one after the other, without an end and without random access."""

import torch
from my_ridge import Ridge

from obbo_lightning import Metric, Stream


class Readings:
    """An endless iterator over a sensor's readings that returns its state and continues from it."""

    def __init__(self, dim: int, seed: int):
        self.dim, self.generator = dim, torch.Generator().manual_seed(seed)
        self.truth = torch.zeros(dim)

    def __iter__(self):
        return self

    def __next__(self):
        self.truth = 0.95 * self.truth + 0.3 * torch.randn(self.dim, generator=self.generator)  # a random walk
        task = {}
        for kind in ("", "_new"):
            x = torch.randn(20, self.dim, generator=self.generator)
            task |= {f"x{kind}": x, f"y{kind}": x @ self.truth + torch.randn(20, generator=self.generator)}
        return task

    def state_dict(self):
        return {"truth": self.truth, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.truth = state["truth"]
        self.generator.set_state(state["generator"])


class Sensor(Stream):
    """Readings of a sensor without an end; the run's ``rounds`` limit them.

    Args:
        dim: number of channels of the sensor.
        seed: of the readings.
    """

    metric = Metric("explained", higher_is_better=True)
    problem_type = Ridge

    def __init__(self, dim: int = 8, seed: int = 0):
        self.dim, self.seed = dim, seed

    @property
    def train(self):
        return Readings(self.dim, self.seed)

    def start(self, problem, seed):
        return torch.full((1, 1), 0.01)
