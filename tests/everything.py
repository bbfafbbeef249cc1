"""A stream whose runs have every file that a run can have, and whose rounds cost next to nothing."""

import contextlib
import csv
import io
import traceback
import warnings

import numpy as np
import polars as pl
import torch
import yaml

from obbo_lightning import ParameterGroups, Positive, Problem, Stream, Tasks, cli
from obbo_lightning.runs.checkpoints import list_checkpoints
from obbo_lightning.streams.stream import Metric

F64 = torch.float64
TINY = ["--rounds", "6", "--evaluation.tasks", "1", "--evaluation.every", "3", "--checkpoint.every", "2"]
TINY += ["--algorithm.inner.steps", "1", "--algorithm.hypergradient.steps", "1", "--algorithm.inner.start", "previous"]
TINY += ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]


class Shrunk(Problem):
    """g = ‖β − x‖² + λ ‖β‖², f = ‖β − y‖²: how much to shrink, by a block of one number."""

    names = ("weight",)
    blocks = ParameterGroups(weight=Positive(0.5, upper=10.0))

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

    def source_digests(self):
        return {"drift": str(self.drift), "seed": str(self.seed)}


def told(*arguments):
    """Exit code, and what was said on both streams; an exception is said too, with its place."""
    error, out = io.StringIO(), io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stderr(error), contextlib.redirect_stdout(out):
        warnings.simplefilter("ignore")
        try:
            code = cli.main([str(word) for word in arguments])
        except Exception:
            return 1, traceback.format_exc(), ""
    return code, error.getvalue(), out.getvalue()


def results_of_run(run):
    """Of a run that is finished: nothing of times; ``free`` is what depends on when it was evaluated, and how long."""
    rows = list(csv.DictReader(run.metrics.read_text().splitlines()))
    played = [{name: value for name, value in row.items() if not name.startswith("test_")} for row in rows[:6]]
    tables = [run.outer, run.tasks]
    found = {file.name: file.read_text().splitlines()[:7] for file in tables if file.exists()} | {"played": played}
    closing = [file.read_bytes() for file in (run.metrics, run.baselines, run.events) if file.exists()]
    with contextlib.suppress(OSError), np.load(run.lanes) as lanes:
        closing.append({name: lanes[name].tolist() for name in lanes.files})
    summary = yaml.safe_load(run.summary.read_text())
    summary.pop("seconds")
    newest = torch.load(list_checkpoints(run.checkpoints)[-1], weights_only=True)
    return {**found, "free": [*closing, summary, newest["state_dict"]["outer"].tolist()]}
