"""`fit` and `resume`: configuration, help, own components, signals in real processes."""

import random
import signal
from pathlib import Path

import pytest
import yaml
from processes import Forked, wait_for

from obbo_lightning import cli
from obbo_lightning.runs.directory import RunDirectory


def printed_config(arguments, capsys):
    assert cli.main(["fit", *arguments, "--print_config"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_flags_win_over_files_and_a_printed_configuration_is_a_configuration(capsys, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("rounds: 7\nalgorithm: {window: 25}\n")
    found = printed_config(["--config", str(file), "--algorithm.lr", "1e-4", "--seed=3"], capsys)
    assert (found["rounds"], found["seed"]) == (7, 3)
    assert (found["algorithm"]["window"], found["algorithm"]["lr"]) == (25, 1e-4)
    assert found["algorithm"]["geometry"]["name"] == "adaptive_diagonal"
    file.write_text(yaml.safe_dump(found))
    assert printed_config(["--config", str(file)], capsys) == found
    file.write_text("")
    assert printed_config(["--config", str(file)], capsys) == printed_config([], capsys)


def test_help_shows_our_own_options_and_the_trainers_on_request(capsys):
    assert cli.main(["fit", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: obbo fit ")
    assert len(text.splitlines()) <= 75
    assert "--rounds 200" in text
    assert "--trainer.precision" not in text
    assert cli.main(["fit", "--trainer.help"]) == 0
    assert "--trainer.precision" in capsys.readouterr().out


# Own components

COMPONENTS = """
import torch
from torch import nn
from torch.nn import functional
from obbo_lightning import Problem, Stream, Tasks

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
SMALL = ["--rounds", "2", "--evaluation.tasks", "1", "--data.image_size", "16"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(COMPONENTS)
    return tmp_path


def test_function_may_construct_the_network(folder, capsys):
    made = ["--problem.network", "mine.py:make", "--problem.network.hidden", "3"]
    assert cli.main(["fit", *SMALL, *made]) == 0
    assert cli.main(["fit", *SMALL, *made, "--help"]) == 0
    assert "--problem.network.hidden" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:the fixed point")
def test_network_with_noise_that_cannot_be_seeded_is_refused(folder, capsys):
    assert cli.main(["fit", *SMALL, "--problem.network", "mine.py:Restless"]) == 1
    message = "problem.network must draw random numbers in modules of torch.nn such as nn.Dropout"
    assert message in capsys.readouterr().err


def test_stream_without_evaluation_tasks_cannot_be_evaluated(folder, capsys):
    clicks = ["fit", "--data", "mine.py:Clicks", "--rounds", "3"]
    assert cli.main([*clicks, "--algorithm.inner.start", "outer"]) == 2
    message = "inner.start must be previous for Two, whose inner variable has 6 coordinates"
    assert message in capsys.readouterr().err
    assert not (folder / "runs").exists()
    assert cli.main(clicks) == 0
    (run,) = (folder / "runs" / "default").iterdir()
    capsys.readouterr()
    for command, split in (("validate", "validation"), ("test", "test")):
        assert cli.main([command, str(run), "--trust"]) == 2
        assert f"{command} needs {split} tasks, and Clicks has none" in capsys.readouterr().err
        assert cli.main([command, str(run)]) == 2
        assert f"{command} {run} --trust" in capsys.readouterr().err


# Signals

RUN = [
    "--rounds", "120", "--problem.network.filters", "2", "--data.image_size", "16", "--evaluation.tasks", "2",
    "--checkpoint.every", "5", "--algorithm.inner.steps", "1", "--trainer.accelerator", "cpu",
]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed")
    assert cli.main(["fit", *RUN, "--output", str(directory)]) == 0
    (path,) = directory.glob("default/obbo-*")
    return RunDirectory(path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the fixed point of the hypergradient:RuntimeWarning")
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_stopped_process_resumes_bit_for_bit(signum, code, tmp_path, undisturbed):
    process = Forked(tmp_path, "fit", *RUN)
    chosen = random.Random(int(signum)).randint(5, 100)
    wait_for(lambda: any(file.stem >= f"round-{chosen:08d}" for file in tmp_path.glob("runs/*/*/checkpoints/*.ckpt")))
    (path,) = tmp_path.glob("runs/*/*")
    process.send_signal(signum)
    assert process.wait() == code
    if code > 0:
        assert f"resume {path.relative_to(tmp_path)}" in process.output()
    assert not RunDirectory(path).finished
    assert cli.main(["resume", str(path)]) == 0
    assert RunDirectory(path).metrics.read_bytes() == undisturbed.metrics.read_bytes()


def test_interrupt_while_waiting_for_the_first_task_ends_with_the_code_of_the_signal(monkeypatch):
    def interrupt(config):
        raise KeyboardInterrupt

    monkeypatch.setattr("obbo_lightning.training.run.build", interrupt)
    assert cli.main(["fit", "--config", "quadratic"]) == 130


def test_a_run_is_resumed_with_what_the_flags_ask_for(monkeypatch):
    asked = []
    monkeypatch.setattr("obbo_lightning.training.resume.resume", lambda *arguments: asked.append(arguments) or 143)
    assert cli.main(["resume", "a", "--checkpoint", "c.ckpt", "--devices", "2"]) == 143
    assert cli.main(["resume", "a", "--rounds", "7", "--data.path", "x", "--data.beyond=8"]) == 143
    first, second = asked
    assert first == (Path("a"), Path("c.ckpt"), 2, None, None)
    assert second == (Path("a"), None, None, 7, {"path": "x", "beyond": 8})
