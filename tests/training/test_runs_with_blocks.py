"""A stream whose λ has blocks, from the command line: nobody repeats what the blocks know."""

import csv
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml

from obbo_lightning import OnlineBilevelModule, cli
from obbo_lightning.testing import check_problem, check_stream
from obbo_lightning.training.checkpoints import list_checkpoints

EXAMPLES = Path(__file__).parents[2] / "examples"
QUIET = ["--trainer.enable_progress_bar", "false", "--rounds", "8", "--checkpoint.every", "4"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    for name in ("my_sources.py", "sources.yaml"):
        shutil.copy(EXAMPLES / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith(("my_", "obbo_part_")):
            del sys.modules[name]


def fit(folder, *flags):
    known = set((folder / "runs").glob("*/*"))
    config = [] if "--config" in flags else ["--config", "sources.yaml"]
    assert cli.main(["fit", *config, *QUIET, *flags]) == 0
    (run,) = set((folder / "runs").glob("*/*")) - known
    return run


def table(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def outer_of(run):
    module = OnlineBilevelModule.load_from_checkpoint(list_checkpoints(run / "checkpoints")[-1])
    return module, module.outer.detach()


def test_a_run_writes_lambda_by_name_and_numbers_of_each_block_and_is_resumed_exactly(folder):
    run = fit(folder)
    rows, named = table(run / "metrics.csv"), table(run / "outer.csv")
    assert [row["round"] for row in named] == [str(t) for t in range(1, 9)]
    assert list(named[0]) == ["round", "ridge", *(f"trust[{i}]" for i in range(4))]
    module, outer = outer_of(run)
    assert [float(named[-1][name]) for name in list(named[0])[1:]] == outer[0].tolist()
    assert module.problem.blocks.split(outer)["trust"].sum() == pytest.approx(1)
    for row in rows:
        for kind in ("euclidean", "generalized"):
            total = float(row[f"regret/{kind}/ridge"]) + float(row[f"regret/{kind}/trust"])
            assert total == pytest.approx(float(row[f"regret/{kind}"]), rel=1e-9)
        assert row["regret/exact/trust"] == ""
        assert float(row["lr/trust"]) > 0
    settings = yaml.safe_load((run / "config.yaml").read_text())["algorithm"]
    assert (settings["lr"], settings["scale"]) == (None, 0.3)
    assert not {"geometry", "regularizer", "domain"} & set(settings)
    again = folder / "again"
    shutil.copytree(run, again)
    (again / "summary.json").unlink()
    middle = list_checkpoints(again / "checkpoints")[0]
    assert cli.main(["resume", str(again), "--checkpoint", str(middle)]) == 0
    for name in ("metrics.csv", "outer.csv"):
        assert (again / name).read_bytes() == (run / name).read_bytes()


@pytest.mark.parametrize("algorithm", ["sobow", "adam"])
def test_other_algorithms_play_it_without_a_word_about_blocks(folder, algorithm):
    run = fit(folder, "--algorithm", algorithm)
    module, outer = outer_of(run)
    trust = module.problem.blocks.split(outer)["trust"]
    assert trust.sum() == pytest.approx(1)
    assert (trust != 0.25).any()
    assert (table(run / "metrics.csv")[-1]["regret/generalized/trust"] == "") == (algorithm == "adam")


def test_flags_are_for_all_blocks_or_for_one(folder):
    run = fit(folder, "--algorithm.geometry", "euclidean", "--algorithm.blocks.trust.lr", "0.5")
    optimizer = outer_of(run)[0].configure_optimizers()
    assert [(type(b.geometry).__name__, b.lr) for b in optimizer.blocks] == [("Euclidean", "auto"), ("Euclidean", 0.5)]
    header = list(table(run / "metrics.csv")[0])
    assert "lr/ridge" in header
    assert "lr/trust" not in header
    run = fit(folder, "--algorithm.lr", "0.1", "--algorithm.blocks.trust.geometry.name", "adaptive_diagonal")
    optimizer = outer_of(run)[0].configure_optimizers()
    assert [b.lr for b in optimizer.blocks] == [0.1, 0.1]
    assert [type(b.geometry).__name__ for b in optimizer.blocks] == ["NegativeEntropy", "AdaptiveDiagonal"]


def test_many_coordinates_are_written_with_the_evaluations_only(folder):
    run = fit(folder, "--data.sources", "101", "--evaluation.every", "3")
    assert [row["round"] for row in table(run / "outer.csv")] == ["3", "6"]
    again = folder / "again"
    shutil.copytree(run, again)
    (again / "summary.json").unlink()
    assert cli.main(["resume", str(again), "--checkpoint", str(list_checkpoints(again / "checkpoints")[0])]) == 0
    assert (again / "outer.csv").read_bytes() == (run / "outer.csv").read_bytes()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--algorithm.blocks.nobody.lr", "1"], "algorithm.blocks must be of ridge, trust, got 'nobody'"),
        (
            ["--algorithm.blocks.trust.window", "3"],
            "algorithm.blocks.trust must be of lr, scale, geometry,",
        ),
        (["--algorithm.blocks.trust.geometry", "round"], "algorithm.blocks.trust.geometry must be one of"),
        (["--algorithm.blocks.trust.lr", "-1"], "algorithm.blocks.trust.lr must be a positive finite number, got -1"),
        (["--algorithm.geometry", "burg"], "algorithm.blocks.trust.geometry Burg() with"),
        (["--algorithm.lr", "fast"], "algorithm.lr"),
        (["--algorithm.scale", "0"], "algorithm.scale must be a positive finite number, got 0"),
        (["--algorithm.geometry.decay", "0.5"], "algorithm.geometry.decay"),
        (["--data", "quadratic", "--algorithm.blocks.trust.lr", "1"], "algorithm.blocks must be none for a problem"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_written(folder, capsys, flags, message):
    assert cli.main(["fit", "--config", "sources.yaml", *QUIET, *flags]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1 or "these are" in said
    assert not (folder / "runs").exists()


def test_auto_is_logged_where_it_is_asked_for_and_nowhere_else(folder):
    plain = fit(folder, "--config", "quadratic", "--rounds", "3")
    auto = fit(folder, "--config", "quadratic", "--rounds", "3", "--algorithm.lr", "auto", "--algorithm.scale", "0.1")
    before, after = (list(table(run / "metrics.csv")[0]) for run in (plain, auto))
    assert after == [*before[:-1], "lr", before[-1]]
    assert before[-2:] == ["skipped", "regret/geometry"]
    assert all(float(row["lr"]) > 0 for row in table(auto / "metrics.csv"))
    assert not (plain / "outer.csv").exists()
    settings = yaml.safe_load((plain / "config.yaml").read_text())["algorithm"]
    assert settings["geometry"]["name"] == "adaptive_diagonal"  # the default's, for a λ without blocks


def test_the_example_keeps_the_contracts_of_streams_and_problems():
    sys.path.insert(0, ".")
    from my_sources import MovingTruth

    sys.path.pop(0)
    stream = MovingTruth(sources=3)
    check_stream(stream)
    problem = stream.problem()
    task = {name: value.double() for name, value in stream.draw(0).items()}
    outer = problem.blocks.start(lanes=2, dtype=torch.float64)
    check_problem(problem, outer, torch.ones(2, 3, dtype=torch.float64), task)
