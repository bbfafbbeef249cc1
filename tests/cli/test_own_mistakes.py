"""Mistakes in parts of your own: one line, exit code 2, nothing written."""

import pytest

from obbo_lightning import cli

PARTS = """
import torch
from torch import nn
from torch.nn import functional
from obbo_lightning import Problem, Stream, Tasks
from obbo_lightning.domains import Box
from obbo_lightning.geometry import Euclidean
from obbo_lightning.solvers import InnerSolver

class Raises(Euclidean):
    def __init__(self, kind: str = "key"):
        if kind == "key":
            raise KeyError("boom")
        raise ValueError("the moon is\\nnot full")

class Untyped(Box):
    def __init__(self, lo, hi):
        super().__init__(lo, hi)

class Lacking(InnerSolver):
    def __call__(self, oracle, previous):
        return previous

def make(ways: int, shape, hidden: int = 4):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], hidden), nn.Linear(hidden, ways))

class Restless(nn.Module):
    def __init__(self, ways: int, shape):
        super().__init__()
        self.linear = nn.Linear(shape[0] * shape[1] * shape[2], ways)
    def forward(self, images):
        return self.linear(functional.dropout(images.flatten(1), 0.5, training=self.training))

class Two(Problem):
    def inner_loss(self, outer, inner, task, sample=None):
        return (inner @ task["x"].T).square().mean(-1) + outer.sum(-1)
    def outer_loss(self, outer, inner, task, sample=None):
        return self.inner_loss(outer, inner, task)
    def initial_inner(self, outer, task):
        return torch.zeros(1, 6)

class Clicks(Stream):
    problem_type = Two
    def __init__(self):
        self.train = Tasks(lambda t: {"x": torch.ones(3, 6)}, 100)
    def start(self, problem, seed):
        return torch.ones(1, 2)
"""
FEW = ["--rounds", "2", "--evaluation.tasks", "1", "--data.image_size", "16"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(PARTS)
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--algorithm.geometry", "mine.py:Raises"], "algorithm.geometry Raises cannot be made: KeyError: 'boom'"),
        (
            ["--algorithm.geometry", "mine.py:Raises", "--algorithm.geometry.kind", "value"],
            "algorithm.geometry Raises: the moon is not full",
        ),
        (["--algorithm.domain", "mine.py:Untyped"], "algorithm.domain.lo must be given, got none"),
        (["--algorithm.inner", "mine.py:Lacking"], "algorithm.inner must have the methods step_size"),
        (["--algorithm", "mine.py"], "algorithm must name a class in the file"),
        (["--problem.network.ways", "7"], "unknown key 'problem.network.ways' (value 7); the tasks decide it"),
        (
            ["--data", "mine.py:Clicks", "--rounds", "9", "--algorithm.inner.start", "outer"],
            "inner.start must be previous for Two, whose inner variable has 6 coordinates",
        ),
    ],
)
def test_a_mistake_is_one_line(folder, flags, said, capsys):
    assert cli.main(["fit", *flags]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (folder / "runs").exists()


def test_a_function_makes_a_network_too(folder, capsys):
    made = ["--problem.network", "mine.py:make", "--problem.network.hidden", "3"]
    assert cli.main(["fit", *FEW, *made]) == 0
    assert cli.main(["fit", *FEW, *made, "--help"]) == 0
    assert "--problem.network.hidden" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:the fixed point")
def test_a_network_with_noise_that_nobody_can_seed_is_refused(folder, capsys):
    assert cli.main(["fit", *FEW, "--problem.network", "mine.py:Restless"]) == 1
    assert (
        "problem.network must draw random numbers in modules of torch.nn such as nn.Dropout" in capsys.readouterr().err
    )


def test_a_stream_without_tasks_to_judge_on_says_so(folder, capsys):
    own = ["--data", "mine.py:Clicks", "--algorithm.inner.start", "previous", "--rounds", "3"]
    assert cli.main(["fit", *own]) == 0
    (run,) = (folder / "runs" / "default").iterdir()
    capsys.readouterr()
    for command in ("validate", "test"):
        assert cli.main([command, str(run)]) == 2
        assert f"{command} needs tasks to judge on, and Clicks has none" in capsys.readouterr().err


def test_a_name_that_looks_like_a_part_is_free_text_where_no_part_is_named(folder, capsys):
    assert cli.main(["fit", "--wandb.name", "train.py:run", "--print_config"]) == 0
    assert "name: train.py:run" in capsys.readouterr().out
