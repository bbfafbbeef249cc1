"""The files in examples/, used as a user would: in a folder of their own, by their names, with nothing changed here."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from obbo_lightning import cli
from obbo_lightning.config.registry import find_component
from obbo_lightning.testing import check_algorithm, check_geometry, check_stream

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    project = tmp_path / "project"
    shutil.copytree(EXAMPLES, project, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p and "pytest-" not in p])  # other tests' folders
    before = set(sys.modules)
    yield project
    for name in set(sys.modules) - before:
        if name.startswith(("my_", "obbo_part_")):
            del sys.modules[name]


def rows(run):
    return list(csv.DictReader((run / "metrics.csv").read_text().splitlines()))


def only(path):
    (found,) = path.iterdir()
    return found


SHORT = ["--config", "ridge.yaml", "--rounds", "20", "--evaluation.tasks", "3", "--evaluation.every", "10"]


FEW_SHOT = [
    "--config",
    "default",
    "--experiment",
    "ridge",
    "--data.image_size",
    "16",
    "--data.ways",
    "3",
    "--rounds",
    "20",
]
FEW_SHOT += [
    "--problem.network",
    "my_network.py:Residual",
    "--problem.network.width",
    "4",
    "--algorithm.inner.steps",
    "1",
]
FEW_SHOT += ["--data", "synthetic", "--algorithm.inner.start", "outer", "--algorithm.lr", "0.001"]
FEW_SHOT += ["--algorithm.geometry", "adaptive_diagonal", "--algorithm.domain", "real"]


def test_own_parts_keep_the_contracts(folder):
    sparse = find_component("algorithm", "my_algorithm.py:Sparse")
    check_algorithm(sparse, lr=1e-2)
    check_geometry(find_component("geometry", "my_geometry.py:Quartic")())
    stream = find_component("data", "my_ridge.py:DriftingRegressions")()
    check_stream(stream)
    check_stream(find_component("data", "my_sensor.py:Sensor")())
    task = {name: values.double() for name, values in stream.train[0].items()}
    problem = stream.problem()
    # The losses of a sample are not estimated from it: what SOBBO asks for is not part of this problem.
    problem.inner_loss(torch.ones(1, 1).double(), torch.ones(1, 8).double(), task)
    lines = len((folder / "my_algorithm.py").read_text().split("class Sparse")[1].splitlines())
    assert lines <= 25


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--algorithm", "my_algorithm.py:Sparse", "--algorithm.lr", "0.01", "--algorithm.discount", "0.8"],
        ["--algorithm.geometry", "my_geometry.py:Quartic", "--algorithm.lr", "0.01"],
        ["--data", "my_sensor.py:Sensor"],
        ["--problem", "my_ridge.Ridge"],
        FEW_SHOT,
    ],
    ids=["stream", "algorithm", "geometry", "iterator", "problem", "network"],
)
def test_an_own_part_is_played_and_resumed_bit_for_bit(folder, flags, monkeypatch):
    assert cli.main(["fit", *SHORT, *flags, "--checkpoint.every", "6"]) == 0
    whole = only(folder / "runs" / "ridge")
    stopped = folder / "stopped"
    shutil.copytree(whole, stopped)
    (stopped / "summary.json").unlink()
    (stopped / "checkpoints" / "round-00000020.ckpt").unlink()
    monkeypatch.chdir(folder.parent)  # the run knows where its parts are
    assert cli.main(["resume", str(stopped), "--trust"]) == 0
    assert (stopped / "metrics.csv").read_bytes() == (whole / "metrics.csv").read_bytes()
    assert len(rows(stopped)) == 20


def test_an_own_network_is_told_what_the_tasks_decide_and_follows_the_seed(folder, capsys):
    network = ["--problem.network", "my_network.py:Residual", "--problem.network.width", "4", "--data.image_size", "16"]
    few = ["--rounds", "4", "--evaluation.tasks", "2", "--data.ways", "3", "--algorithm.inner.steps", "1"]
    for seed in ("0", "0", "1"):
        assert cli.main(["fit", *network, *few, "--seed", seed, "--output", f"out{seed}"]) == 0
    assert "inductive: the prediction for a query depends on no other query" in " ".join(
        capsys.readouterr().out.replace("│", " ").split()
    )
    runs = sorted((folder / "out0" / "default").iterdir())
    assert rows(runs[0]) == rows(runs[1])
    assert rows(runs[0])[0]["loss"] != rows(only(folder / "out1" / "default"))[0]["loss"]
    assert cli.main(["fit", *network, "--problem.network.widht", "4"]) == 2
    assert "did you mean 'problem.network.width'?" in capsys.readouterr().err


def test_help_and_mistakes_come_from_the_own_class(folder, capsys):
    assert cli.main(["fit", "--config", "ridge.yaml", "--help"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "--data.period PERIOD rounds of one turn. (type: int, default: 200)" in printed
    assert cli.main(["fit", "--config", "ridge.yaml", "--data.perriod", "3"]) == 2
    assert "did you mean 'data.period'?" in capsys.readouterr().err
    assert cli.main(["fit", "--config", "ridge.yaml", "--data.period", "often"]) == 2
    assert "data.period: Expected" in capsys.readouterr().err


def test_own_parts_are_compared_and_reported(folder, capsys):
    few = ["--rounds", "12", "--evaluation.every", "6", "--evaluation.tasks", "3"]
    assert cli.main(["compare", "--config", "compare_ridge.yaml", "--jobs", "2", *few]) == 0
    cells = folder / "runs" / "compare" / "ridge"
    assert sorted(path.name for path in cells.iterdir()) == sorted(
        f"{name}-seed_{seed}" for name in ("obbo", "Sparse") for seed in (0, 1, 2)
    )
    capsys.readouterr()
    assert cli.main(["report", str(cells), "--trust"]) == 0
    table = (cells / "report" / "table.md").read_text()
    assert "stream explained, last 100" in table
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == ["obbo", "Sparse"]
    assert (cells / "report" / "test_explained.png").is_file()
    # A higher score is better, whatever it is called.
    summaries = [json.loads((cells / f"obbo-seed_{seed}" / "summary.json").read_text()) for seed in (0, 1, 2)]
    gain = sum(one["test_explained"] - one["untrained_test_explained"] for one in summaries) / 3
    assert table.splitlines()[2].split("|")[8].strip().startswith(f"{gain:.3f} ±")


@pytest.mark.slow
def test_a_run_of_own_parts_is_killed_in_a_process_of_its_own_and_resumed(folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "obbo_lightning", "fit", "--config", "ridge.yaml", "--rounds", "150"]
    command += ["--evaluation.tasks", "3", "--checkpoint.every", "10"]
    whole = subprocess.run([*command, "--output", "whole"], env=environment, cwd=folder, capture_output=True, text=True)
    assert whole.returncode == 0, whole.stderr
    process = subprocess.Popen([*command, "--output", "killed"], env=environment, cwd=folder, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(folder.glob("killed/ridge/*/checkpoints/round-*.ckpt")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    run = only(folder / "killed" / "ridge")
    assert not (run / "summary.json").exists()
    resumed = [sys.executable, "-m", "obbo_lightning", "resume", str(run), "--trust"]
    done = subprocess.run(resumed, env=environment, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (run / "metrics.csv").read_bytes() == (only(folder / "whole" / "ridge") / "metrics.csv").read_bytes()


@pytest.mark.parametrize("name", ["tune_a_module.py", "label_noise.py", "csv_with_drift.py"])
@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # of Lightning's own loader
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:the fixed point of the hypergradient:RuntimeWarning")
def test_what_drifts_is_followed(folder, name, capsys):
    """Files that a user runs as they are; each ends with an assertion of its own."""
    text = (folder / name).read_text()
    assert text.count("\n") < 80
    exec(compile(text, name, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out
