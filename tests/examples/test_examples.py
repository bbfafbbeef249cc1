"""The files in examples/ as a user runs them: copied to another folder, trained, resumed, compared and reported."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from obbo_lightning import cli
from obbo_lightning.config.registry import find_component
from obbo_lightning.testing import check_algorithm, check_geometry, check_stream

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = "--config ridge.yaml --evaluation.tasks 3 --evaluation.every 10"
FEW_SHOT = (
    "--config default --experiment ridge --data synthetic --data.image_size 16 --data.ways 3 "
    "--problem.network my_network.py:Residual --problem.network.width 4 --algorithm.inner.steps 1 "
    "--algorithm.inner.start outer --algorithm.lr 0.001 --algorithm.geometry adaptive_diagonal --algorithm.domain real"
)
COMPONENTS = {
    "stream": "",
    "algorithm": "--algorithm my_algorithm.py:Sparse --algorithm.lr 0.01 --algorithm.discount 0.8",
    "geometry": "--algorithm.geometry my_geometry.py:Quartic --algorithm.lr 0.01",
    "iterator": "--data my_sensor.py:Sensor",
    "problem": "--problem my_ridge.Ridge",
    "parameter groups": "--config sources.yaml --experiment ridge",
    "network": FEW_SHOT,
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    project = tmp_path / "project"
    shutil.copytree(EXAMPLES, project, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p and "pytest-" not in p])  # other tests' folders
    before = set(sys.modules)
    yield project
    for name in set(sys.modules) - before:
        if name.startswith("my_"):
            del sys.modules[name]


def run_command(line):
    return cli.main(line.split())


def only(path):
    (found,) = path.iterdir()
    return found


def test_the_components_keep_their_contracts(folder):
    check_algorithm(find_component("algorithm", "my_algorithm.py:Sparse"), lr=1e-2)
    check_geometry(find_component("geometry", "my_geometry.py:Quartic")())
    for name in ("my_ridge.py:DriftingRegressions", "my_sensor.py:Sensor", "my_sources.py:ChangingSources"):
        check_stream(find_component("data", name)())


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_run_is_resumed_bit_for_bit_from_another_folder(folder, name, monkeypatch, capsys):
    assert run_command(f"fit {SHORT} {COMPONENTS[name]} --rounds 20 --checkpoint.every 6") == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert ("inductive: the prediction for a query depends on no other query" in printed) == (name == "network")
    whole = only(folder / "runs" / "ridge")
    stopped = folder / "stopped"
    shutil.copytree(whole, stopped)
    (stopped / "summary.json").unlink()
    (stopped / "checkpoints" / "round-00000020.ckpt").unlink()
    monkeypatch.chdir(folder.parent)
    assert run_command(f"resume {stopped} --trust") == 0
    assert (stopped / "metrics.csv").read_bytes() == (whole / "metrics.csv").read_bytes()
    assert (stopped / "metrics.csv").read_text().count("\n") == 21


def test_help_and_refusals_come_from_the_users_class(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert run_command("fit --config ridge.yaml --help") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "--data.period 200 rounds after which the coefficients repeat" in printed
    assert run_command("fit --config ridge.yaml --data.perriod 3") == 2
    assert "did you mean 'data.period'?" in capsys.readouterr().err
    assert run_command("fit --problem.network my_network.py:Residual --problem.network.widht 4") == 2
    assert "did you mean 'problem.network.width'?" in capsys.readouterr().err
    assert run_command("fit --config ridge.yaml --data.period often") == 2
    assert "data.period must be an integer, got 'often'" in capsys.readouterr().err


def test_runs_of_users_components_are_compared_and_reported(folder, capsys):
    few = "--rounds 12 --evaluation.every 6 --evaluation.tasks 3"
    assert run_command(f"compare --config compare_ridge.yaml --jobs 2 {few}") == 0
    runs = folder / "runs" / "compare" / "ridge"
    assert sorted(path.name for path in runs.iterdir()) == sorted(
        f"{name}-seed_{seed}" for name in ("obbo", "Sparse") for seed in (0, 1, 2)
    )
    capsys.readouterr()
    assert run_command(f"report {runs} --trust") == 0
    table = (runs / "report" / "table.md").read_text()
    assert "explained, last 100" in table
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == ["obbo", "Sparse"]
    assert (runs / "report" / "test_explained.png").is_file()
    # a higher score is better, whatever its name
    summaries = [json.loads((runs / f"obbo-seed_{seed}" / "summary.json").read_text()) for seed in (0, 1, 2)]
    gain = sum(one["test_explained"] - one["initial_test_explained"] for one in summaries) / 3
    assert any(cell.strip().startswith(f"{gain:.3f} ±") for cell in table.splitlines()[2].split("|"))


@pytest.mark.parametrize("name", ["tune_a_module.py", "label_noise.py", "csv_with_drift.py", "with_a_trainer.py"])
@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # of Lightning's own loader
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:The `srun` command is available")  # where Slurm is installed
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.filterwarnings("ignore:the fixed point of the hypergradient:RuntimeWarning")
def test_scripts_run_as_they_are(folder, name, monkeypatch, capsys):
    """Three of them end with an assertion of their own."""
    monkeypatch.syspath_prepend(str(folder))  # as ``python NAME`` does
    text = (folder / name).read_text()
    assert text.count("\n") < 80
    exec(compile(text, name, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out
