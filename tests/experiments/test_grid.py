"""Comparison files: which runs a grid has, and what is refused."""

from functools import partial
from pathlib import Path

import pytest
from small_runs import SMALL_GRID, write_grid

from obbo_lightning import cli
from obbo_lightning.config import parse
from obbo_lightning.experiments.grid import read_grid

CONFIGS = Path(__file__).parents[2] / "configs"
COMPONENTS = """
from obbo_lightning.algorithms.obbo import OBBO
from obbo_lightning.core.geometry import Euclidean

class Sparse(OBBO):
    pass

class Flat(Euclidean):
    pass
"""


@pytest.fixture
def write(tmp_path):
    return partial(write_grid, tmp_path)


def configs(path, flags=None):
    return {run.name: run.config for run in read_grid(path, flags).runs}


def test_a_grid_has_every_combination_that_algorithms_take(write):
    assert read_grid(write()).name == "small"
    found = configs(write(), {"algorithm": {"lr": 0.5}})
    variants = ["obbo-window_1", "obbo-window_3", "adam"]
    assert list(found) == [f"{name}-start_{start}" for name in variants for start in (0.1, 0.5)]
    first, *_, last = found.values()
    assert (first["algorithm"]["window"], first["data"]["start"], first["rounds"]) == (1, 0.1, 20)
    assert (last["algorithm"]["name"], last["data"]["start"]) == ("adam", 0.5)
    assert {config["algorithm"]["lr"] for config in found.values()} == {0.5}
    assert (first["data"]["subset"], first["experiment"]) == (30, "small")


def test_settings_that_change_together_are_one_axis(write):
    streams = {"short": {"rounds": 5, "algorithm.window": 2}, "long": {"rounds": 9, "algorithm.window": 3}}
    found = configs(write(grid={"algorithm": ["obbo", "adam"], "stream": streams}))
    assert list(found) == ["obbo-stream_short", "obbo-stream_long", "adam-stream_short", "adam-stream_long"]
    assert [config["rounds"] for config in found.values()] == [5, 9, 5, 9]
    assert found["obbo-stream_long"]["algorithm"]["window"] == 3
    assert "window" not in found["adam-stream_long"]["algorithm"]


def test_settings_of_all_runs_leave_each_algorithm_its_own(write):
    settings = {**SMALL_GRID["settings"], "algorithm": {"lr": 0.5}, "per_algorithm": {"adam": {"lr": 0.25}}}
    found = configs(write(settings=settings)).values()
    assert {(c["algorithm"]["name"], c["algorithm"]["lr"]) for c in found} == {("obbo", 0.5), ("adam", 0.25)}


def test_a_base_is_beside_the_file_or_a_shipped_one(write, tmp_path):
    (tmp_path / "beside.yaml").write_text("rounds: 7\n")
    (config,) = configs(write(base=["quadratic", "beside.yaml"], settings={}, grid={"seed": [0]})).values()
    assert (config["data"]["name"], config["rounds"]) == ("quadratic", 7)


def test_own_components_are_found_beside_the_file_and_have_short_names(write, tmp_path):
    for file in ("mine.py", "yours.py"):
        (tmp_path / file).write_text(COMPONENTS)
    algorithms = ["obbo_lightning.algorithms.adam.Adam", "mine.py:Sparse", "yours.py:Sparse"]
    found = configs(write(grid={"algorithm": algorithms, "algorithm.geometry": ["euclidean", "mine.py:Flat"]}))
    assert list(found) == ["Adam"] + [
        f"Sparse_{file}-geometry_{geometry}" for file in ("mine", "yours") for geometry in ("euclidean", "Flat")
    ]
    algorithm = found["Sparse_yours-geometry_Flat"]["algorithm"]
    assert algorithm["name"] == f"{tmp_path / 'yours.py'}:Sparse"
    assert algorithm["geometry"]["name"] == f"{tmp_path / 'mine.py'}:Flat"


def test_values_that_look_alike_in_the_name_of_a_folder_are_two_runs(write):
    found = configs(write(grid={"wandb.project": ["a b", "a_b", "a b"]}))
    assert list(found) == ["obbo-project_a_b", "obbo-project_a_b_2"]
    assert [config["wandb"]["project"] for config in found.values()] == ["a b", "a_b"]


def test_runs_with_the_same_components_share_their_parsers(write):
    """Making one takes longer than reading a run with it: 162 runs took 45 seconds."""
    parse._parser.cache_clear()
    grid = {"algorithm": ["obbo", "adam"], "algorithm.window": [1, 3], "seed": list(range(20))}
    assert len(configs(write(grid=grid))) == 60
    assert parse._parser.cache_info().misses < 20


@pytest.mark.slow  # the quadratic one has 162 runs
@pytest.mark.parametrize("path", sorted((CONFIGS / "compare").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_comparisons_are_found_by_name_and_complete(path, tmp_path, monkeypatch, capsys):
    found = configs(path)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["compare", "--config", path.stem, "--dry_run"]) == 0
    assert f"{len(found)} of {len(found)} runs to execute" in capsys.readouterr().out
    assert len(found) >= 6
    expected = {"obbo"} if path.stem == "damping" else {"obbo", "sobow", "oagd"}
    assert {config["algorithm"]["name"] for config in found.values()} >= expected
    assert path.read_text().startswith("#")


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        ({"grid": {}}, [], "must have a grid"),
        ({"grid": {"seed": []}}, [], "grid.seed must have values to try"),
        ({"compare": "a/b"}, [], "compare must be a plain folder name, got 'a/b'"),
        ({"grids": {}}, [], "takes compare, base, settings, grid, tune, got 'grids'"),
        ({"grid": {"algorithm": ["obo"]}}, [], "algorithm must be one of"),
        ({"grid": {"algorithm.windw": [1]}}, [], "grid.algorithm.windw must be taken by one of obbo"),
        ({"base": "nothing.yaml"}, [], "nothing.yaml cannot be read"),
        ({"base": "quadratics"}, [], "quadratic"),
        ({}, ["--config", "fc10"], "damping, default, fc100, forgetting, imbalance, market, quadratic, regularization"),
        ({"grid": {"seed": [0, "one"]}}, [], "seed"),
        ({"grid": {"stream": {"a": 3}}}, [], "grid.stream.a must have settings, got 3"),
        ({"grid": {"stream": {}}}, [], "grid.stream must have values to try"),
        ({"grid": {"stream": {"a": {"algorithm.widow": 3}}}}, [], "grid.algorithm.widow must be taken by one of obbo"),
        ({}, ["--print_config"], "compare takes configuration keys and its own flags, got --print_config"),
        ({}, ["--algorithm.clipp", "3"], "algorithm.clip"),
        ({}, ["--jobs", "0"], "--jobs must be an integer of at least 1, got 0"),
    ],
)
def test_mistakes_are_refused_in_one_line(changes, flags, message, write, tmp_path, capsys):
    command = ["compare", "--config", str(write(**changes)), "--output", str(tmp_path / "runs")]
    assert cli.main([*command, *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()
