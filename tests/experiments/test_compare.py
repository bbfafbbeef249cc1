"""`compare`: grids, and what becomes of them when they are disturbed."""

import os
import random
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from jsonargparse import ArgumentParser
from processes import Forked

from obbo_lightning import cli
from obbo_lightning.config import schema
from obbo_lightning.experiments.compare import prepare
from obbo_lightning.experiments.grid import Grid, read_grid
from obbo_lightning.runs.directory import read_config

CONFIGS = Path(__file__).parents[2] / "configs"
GRID = {
    "compare": "small",
    "base": str(CONFIGS / "market.yaml"),
    "settings": {
        "rounds": 20,
        "data": {"subset": 30, "subsets": 20, "horizon": 10},
        "checkpoint": {"every": 5},
        "evaluation": {"every": 10},
    },
    "grid": {"algorithm": ["obbo", "adam"], "algorithm.window": [1, 3], "data.start": [0.1, 0.5]},
}


def write(path, **changes):
    path.write_text(yaml.safe_dump({**GRID, **changes}, sort_keys=False))
    return str(path)


def test_a_grid_is_every_combination_that_makes_sense(tmp_path):
    grid = read_grid(Path(write(tmp_path / "grid.yaml")), {"algorithm": {"lr": 0.5}})
    assert grid.name == "small"
    assert [cell.name for cell in grid.cells] == [
        "obbo-window_1-start_0.1",
        "obbo-window_1-start_0.5",
        "obbo-window_3-start_0.1",
        "obbo-window_3-start_0.5",
        "adam-start_0.1",
        "adam-start_0.5",
    ]
    first, last = grid.cells[0].settings, grid.cells[-1].settings
    assert (first["algorithm"]["window"], first["data"]["start"], first["rounds"]) == (1, 0.1, 20)
    assert (last["algorithm"]["name"], last["data"]["start"]) == ("adam", 0.5)
    assert {cell.settings["algorithm"]["lr"] for cell in grid.cells} == {0.5}
    assert first["data"]["subset"] == 30
    assert first["experiment"] == "small"


def test_settings_that_change_together_are_one_axis(tmp_path):
    streams = {"short": {"rounds": 5, "algorithm.window": 2}, "long": {"rounds": 9, "algorithm.window": 3}}
    path = write(tmp_path / "grid.yaml", grid={"algorithm": ["obbo", "adam"], "stream": streams})
    cells = {cell.name: cell.settings for cell in read_grid(Path(path)).cells}
    assert list(cells) == ["obbo-stream_short", "obbo-stream_long", "adam-stream_short", "adam-stream_long"]
    assert [cell["rounds"] for cell in cells.values()] == [5, 9, 5, 9]
    assert cells["obbo-stream_long"]["algorithm"]["window"] == 3
    assert "window" not in cells["adam-stream_long"]["algorithm"]


def test_settings_of_all_cells_leave_each_algorithm_its_own(tmp_path):
    settings = {**GRID["settings"], "algorithm": {"lr": 0.5}, "per_algorithm": {"adam": {"lr": 0.25}}}
    cells = read_grid(Path(write(tmp_path / "grid.yaml", settings=settings))).cells
    assert {(c.settings["algorithm"]["name"], c.settings["algorithm"]["lr"]) for c in cells} == {
        ("obbo", 0.5),
        ("adam", 0.25),
    }


def test_a_base_is_beside_the_file_or_one_of_ours(tmp_path):
    (tmp_path / "beside.yaml").write_text("rounds: 7\n")
    path = Path(write(tmp_path / "grid.yaml", base=["quadratic", "beside.yaml"], settings={}, grid={"seed": [0]}))
    (cell,) = read_grid(path).cells
    assert (cell.settings["data"]["name"], cell.settings["rounds"]) == ("quadratic", 7)


MINE = """
from obbo_lightning.algorithms.obbo import OBBO
from obbo_lightning.core.geometry import Euclidean

class Sparse(OBBO):
    pass

class Flat(Euclidean):
    pass
"""


def test_your_parts_are_found_beside_the_file_and_have_short_names_in_cells(tmp_path):
    for file in ("mine.py", "yours.py"):
        (tmp_path / file).write_text(MINE)
    ours = ["obbo_lightning.algorithms.adam.Adam", "mine.py:Sparse", "yours.py:Sparse"]
    grid = {"algorithm": ours, "algorithm.geometry": ["euclidean", "mine.py:Flat"]}
    cells = {cell.name: cell.settings for cell in read_grid(Path(write(tmp_path / "grid.yaml", grid=grid))).cells}
    assert list(cells) == ["Adam"] + [
        f"Sparse_{file}-geometry_{geometry}" for file in ("mine", "yours") for geometry in ("euclidean", "Flat")
    ]
    assert cells["Sparse_yours-geometry_Flat"]["algorithm"]["name"] == f"{tmp_path / 'yours.py'}:Sparse"
    assert cells["Sparse_yours-geometry_Flat"]["algorithm"]["geometry"]["name"] == f"{tmp_path / 'mine.py'}:Flat"


def test_values_that_look_alike_in_a_folder_name_are_two_cells(tmp_path):
    grid = {"wandb.project": ["a b", "a_b", "a b"]}
    cells = read_grid(Path(write(tmp_path / "grid.yaml", grid=grid))).cells
    assert [cell.name for cell in cells] == ["obbo-project_a_b", "obbo-project_a_b_2"]
    assert [cell.settings["wandb"]["project"] for cell in cells] == ["a b", "a_b"]


def test_a_comparison_that_we_ship_is_found_by_its_name(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    read = []
    monkeypatch.setattr("obbo_lightning.cli.compare.read_grid", lambda path, flags: read.append(path) or Grid("x", []))
    assert cli.main(["compare", "--config", "fc100", "--dry_run"]) == 0
    assert read[0].samefile(CONFIGS / "compare" / "fc100.yaml")
    assert cli.main(["compare", "--config", "fc10"]) == 2
    names = "damping, default, fc100, forgetting, imbalance, market, quadratic, regularization, sources"
    assert f"{names}; got 'fc10'" in capsys.readouterr().err


@pytest.mark.slow  # the quadratic one has 162 cells
@pytest.mark.parametrize("path", sorted((CONFIGS / "compare").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_comparisons_that_we_ship_are_complete(path):
    grid = read_grid(path)
    assert len(grid.cells) >= 6
    all_of_them = {"obbo"} if path.stem == "damping" else {"obbo", "sobow", "oagd"}
    assert {cell.settings["algorithm"]["name"] for cell in grid.cells} >= all_of_them
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
        ({}, ["--print_config"], "compare takes settings and its own flags, got --print_config"),
        ({}, ["--algorithm.clipp", "3"], "algorithm.clip"),
        ({}, ["--measure"], "--measure needs --dry_run"),
        ({"grid": {"seed": [0, "one"]}}, [], "seed"),
        ({}, ["--jobs", "0"], "--jobs must be an integer of at least 1, got 0"),
        ({}, ["--jobs"], "argument --jobs: expected one argument"),
        ({}, ["--jobs", "two"], "argument --jobs: invalid int value: 'two'"),
        ({"grid": {"stream": {"a": 3}}}, [], "grid.stream.a must have settings, got 3"),
        ({"grid": {"stream": {}}}, [], "grid.stream must have values to try"),
        ({"grid": {"stream": {"a": {"algorithm.widow": 3}}}}, [], "grid.algorithm.widow must be taken by one of obbo"),
    ],
)
def test_mistakes_are_one_line(changes, flags, message, tmp_path, capsys):
    path = write(tmp_path / "grid.yaml", **changes)
    output = ["--output", str(tmp_path / "runs")]
    assert cli.main(["compare", "--config", path, *output, *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_compare_needs_its_config(capsys):
    assert cli.main(["compare", "--jobs", "2"]) == 2
    assert "the following arguments are required: --config" in capsys.readouterr().err


def test_a_plan_is_printed_without_data_and_nothing_is_made(tmp_path, capsys):
    data = {"prices": str(tmp_path / "nowhere.csv"), "events": str(tmp_path / "nothing.csv")}
    path = write(tmp_path / "grid.yaml", settings={**GRID["settings"], "data": {**GRID["settings"]["data"], **data}})
    assert cli.main(["compare", "--config", path, "--dry_run", "--output", str(tmp_path / "runs")]) == 0
    output = capsys.readouterr().out
    assert "obbo-window_3-start_0.5: 20 rounds" in output
    assert "6 of 6 cells to play, 120 rounds; --measure" in output
    assert not (tmp_path / "runs").exists()


def test_the_time_of_a_plan_is_measured_where_that_is_asked_for(tmp_path, capsys):
    path = write(tmp_path / "grid.yaml")
    plan = ["compare", "--config", path, "--dry_run", "--measure", "--jobs", "2", "--output", str(tmp_path / "runs")]
    assert cli.main(plan) == 0
    assert re.search(r"6 of 6 cells to play, 120 rounds, about \d+\.\d minutes with --jobs 2", capsys.readouterr().out)
    assert not (tmp_path / "runs").exists()


def test_a_plan_of_many_cells_makes_the_parser_of_its_parts_once(tmp_path, monkeypatch):
    """Making one takes longer than reading a cell with it: 162 cells took 45 seconds."""
    made = []
    monkeypatch.setattr(schema, "ArgumentParser", lambda **kw: made.append(kw) or ArgumentParser(**kw))
    schema._parser_of.cache_clear()
    grid = {"algorithm": ["obbo", "adam"], "algorithm.window": [1, 3], "seed": list(range(20))}
    assert len(read_grid(Path(write(tmp_path / "grid.yaml", grid=grid))).cells) == 60
    assert len(made) == 2


def test_a_cell_that_was_begun_keeps_its_threads(tmp_path):
    grid = read_grid(Path(write(tmp_path / "grid.yaml", grid={"seed": [0]})))
    (run,) = prepare(grid, tmp_path / "runs")
    begun = {**read_config(run), "threads": 7}
    run.config.write_text(yaml.safe_dump(begun))
    prepare(grid, tmp_path / "runs")
    assert read_config(run)["threads"] == 7
    asked = read_grid(tmp_path / "grid.yaml", {"threads": 3})
    with pytest.raises(ValueError, match="begun with other settings"):
        prepare(asked, tmp_path / "runs")


def tables(root):
    return {p.relative_to(root): p.read_bytes() for p in sorted(root.rglob("*.csv")) if p.name != "timings.csv"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("compare")
    path = write(root / "grid.yaml")
    assert cli.main(["compare", "--config", path, "--jobs", "2", "--output", str(root / "runs")]) == 0
    return root


def test_cells_are_run_directories_that_report_reads(finished, capsys):
    cells = sorted(p.name for p in (finished / "runs" / "small").iterdir())
    assert len(cells) == 6
    assert cli.main(["report", str(finished / "runs" / "small"), "--output", str(finished / "out")]) == 0
    assert "obbo, window = 3, start = 0.5" in (finished / "out" / "table.md").read_text()


def test_finished_cells_are_not_played_again_and_other_settings_are_refused(finished, capsys):
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("summary.json")}
    path = str(finished / "grid.yaml")
    assert cli.main(["compare", "--config", path, "--output", str(finished / "runs")]) == 0
    assert {p: p.stat().st_mtime_ns for p in finished.rglob("summary.json")} == before
    flags = ["--output", str(finished / "runs"), "--algorithm.lr", "0.3"]
    assert cli.main(["compare", "--config", path, *flags]) == 2
    assert "was begun with other settings" in capsys.readouterr().err


def test_a_failed_cell_is_named_and_does_not_stop_the_others(tmp_path, capsys):
    path = write(tmp_path / "grid.yaml", grid={"algorithm": ["adam"], "seed": [0, 1, 2]})
    root = tmp_path / "runs" / "small"
    broken = root / "adam-seed_1"
    (broken / "checkpoints").mkdir(parents=True)
    (broken / "checkpoints" / "round-00000005.ckpt").write_bytes(b"half a checkpoint")
    assert cli.main(["compare", "--config", path, "--output", str(tmp_path / "runs")]) == 1
    error = capsys.readouterr().err
    assert "cell adam-seed_1 failed: " in error
    assert "round-00000005.ckpt has no checksum file" in error
    assert error.count("\n") == 1
    assert all((root / f"adam-seed_{seed}" / "summary.json").exists() for seed in (0, 2))
    for seed in (0, 1, 2):
        said = (root / f"adam-seed_{seed}" / "log.txt").read_text()
        assert ("has no checksum file" in said) == (seed == 1)


def wait_for(happened, seconds=120):
    for _ in range(seconds * 20):
        if happened():
            return
        time.sleep(0.05)
    pytest.fail(f"not after {seconds} seconds")


def rounds_played(root):
    return sum(max(0, path.read_text().count("\n") - 1) for path in root.rglob("metrics.csv"))


@pytest.mark.slow
def test_killed_twice_the_tables_are_those_of_an_undisturbed_comparison(finished, tmp_path):
    command = ["compare", "--config", str(finished / "grid.yaml"), "--jobs", "2", "--output", str(tmp_path / "runs")]
    rng = random.Random(0)
    for _ in range(2):
        process = Forked(tmp_path, *command)
        enough = rounds_played(tmp_path) + rng.randint(5, 45)
        wait_for(lambda enough=enough: rounds_played(tmp_path) >= enough)
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in (*workers, process.pid):  # compare and its cells, all at once
            os.kill(int(pid), signal.SIGKILL)
        process.wait()
    assert cli.main(command) == 0
    assert tables(tmp_path / "runs") == tables(finished / "runs")
    for root, output in ((tmp_path / "runs", "disturbed"), (finished / "runs", "undisturbed")):
        assert cli.main(["report", str(root / "small"), "--output", str(tmp_path / output)]) == 0
    disturbed, undisturbed = tables(tmp_path / "disturbed"), tables(tmp_path / "undisturbed")
    assert {Path("table.csv"), Path("paired.csv"), Path("events.csv")} <= set(disturbed)
    assert disturbed == undisturbed


@pytest.mark.slow
def test_a_signal_stops_the_cells_and_the_same_command_goes_on(finished, tmp_path):
    command = ["compare", "--config", str(finished / "grid.yaml"), "--jobs", "1", "--output", str(tmp_path / "runs")]
    process = Forked(tmp_path, *command)
    wait_for(lambda: rounds_played(tmp_path) > 3)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert "the same command goes on" in process.said()
    assert 0 < len(list((tmp_path / "runs").rglob("checkpoints/*.ckpt"))) < 6 * 4
    assert cli.main(command) == 0
    assert tables(tmp_path / "runs") == tables(finished / "runs")


def test_cells_that_fail_for_one_reason_are_one_line_and_no_report_is_offered_where_none_finished(monkeypatch, capsys):
    from obbo_lightning.cli import compare as command
    from obbo_lightning.experiments.compare import Failure

    runs = ["a", "b", "c", "d"]
    monkeypatch.setattr(command.compare, "prepare", lambda grid, root: runs)
    failed = [
        Failure("a", "no such file"),
        Failure("b", "killed"),
        Failure("c", "no such file"),
        Failure("d", "killed"),
    ]
    monkeypatch.setattr(command.compare, "run_cells", lambda *arguments: failed)
    assert command.play_cells(SimpleNamespace(cells=[]), Path("here"), None, command.PlainConsole()) == 1
    said = capsys.readouterr()
    assert said.err == (
        "obbo: cell a failed: no such file, and 1 more as it did\nobbo: cell b failed: killed, and 1 more as it did\n"
    )
    assert said.out == "0 of 4 cells finished\n"
    failed[1:] = []
    command.play_cells(SimpleNamespace(cells=[]), Path("here"), None, command.PlainConsole())
    said = capsys.readouterr()
    assert said.err == "obbo: cell a failed: no such file\n"
    assert said.out == "3 of 4 cells finished; next: python -m obbo_lightning report here\n"
