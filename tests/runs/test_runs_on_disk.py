"""A run's files by themselves: what is watched, cut, verified, migrated, said."""

import fcntl
import json
import os
import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from obbo_lightning.runs.baselines import write_baselines
from rich.console import Console

from obbo_lightning.runs import figures
from obbo_lightning.runs.checkpoints import CheckpointError, list_checkpoints, newest_checkpoint, read_checkpoint
from obbo_lightning.runs.directory import RunDirectory, migrated, read_config, write_atomically
from obbo_lightning.runs.status import SIZE, RunStatus, _duration, _last_rows, describe, find_runs, read_state
from obbo_lightning.runs.summary import last_value, print_summary, title_of
from obbo_lightning.runs.table import RoundTable
from obbo_lightning.streams.stream import Metric
from obbo_lightning.training.checkpoints import ExactCheckpoints


def played(folder, rounds=300, planned=400, evaluated=()):
    """A run whose rounds took 1 s each at first and 0.25 s each in the last fifty; evaluations took 5 s each."""
    run = RunDirectory(folder)
    run.path.mkdir(parents=True)
    run.config.write_text(f"rounds: {planned}\n")
    header = "round,loss,inner_loss,test_loss,test_loss_se,regret/euclidean\n"
    run.metrics.write_text(header + "".join(f"{t},{t / 8},0,,,{2 * t}\n" for t in range(1, rounds + 1)))
    seconds = [(t, 0.25 if t > rounds - 50 else 1.0, 5.0 if t in evaluated else "") for t in range(1, rounds + 1)]
    lines = [f"{t},{spent},{more}\n" for t, spent, more in seconds]
    run.timings.write_text("round,seconds,evaluation_seconds\n" + "".join(lines))
    return run


@pytest.mark.parametrize(
    ("evaluated", "rate", "left"),
    [((), "4 rounds/s", "25 s left"), ((100,), "4 rounds/s", "25 s left"), ((260, 300), "2.22 rounds/s", "45 s left")],
)
def test_the_rate_is_that_of_the_last_fifty_rounds_with_their_evaluations(evaluated, rate, left, tmp_path):
    run = played(tmp_path / "run", evaluated=evaluated)
    state = RunStatus()
    state.open(run.state)
    state.say("playing")
    expected = f"{run.path}  playing  round 300 of 400  loss 37.5  regret 600  {rate}  {left}"
    assert describe(run) == expected
    state.close()
    assert describe(run) == expected.replace("playing", "dead (was playing)").removesuffix(f"  {left}")


def test_only_the_end_of_a_long_table_is_read_and_only_whole_rows(tmp_path, monkeypatch):
    run = played(tmp_path / "run")
    for tail in (125, 1003, 10**6):
        monkeypatch.setattr("obbo_lightning.runs.status.TAIL", tail)
        rows = _last_rows(run.timings, 5)
        assert [row["round"] for row in rows] == ["296", "297", "298", "299", "300"]
        assert all(row["seconds"] == "0.25" for row in rows)
        many = _last_rows(run.timings, 10**6)
        assert [int(row["round"]) for row in many] == list(range(301 - len(many), 301))
        assert len(many) == (300 if tail == 10**6 else len(many)) < 301
    with run.timings.open("a") as file:
        file.write("301,0.2")  # it is being written
    assert _last_rows(run.timings, 1)[0]["round"] == "300"
    assert _last_rows(tmp_path / "none.csv", 1) == []


def test_runs_below_a_folder_are_found_in_order_and_each_path_must_have_one(tmp_path):
    for name in ("b/two", "a/one"):
        played(tmp_path / "runs" / name, 1)
    found = find_runs([tmp_path / "runs", tmp_path / "runs" / "b" / "two"])
    assert [run.path.name for run in found] == ["one", "two", "two"]
    with pytest.raises(ValueError, match="is no run directory, and has none below it"):
        find_runs([tmp_path / "runs", tmp_path / "runs" / "a" / "one" / "x"])


def test_what_a_run_does_is_in_its_line(tmp_path):
    run = played(tmp_path / "run", 3, 10)
    assert "  not finished  round 3 of 10  " in describe(run)
    state = RunStatus()
    state.open(run.state)
    assert "  not finished  " in describe(run)  # it has said nothing yet
    state.say("x" * 1000)
    assert len(run.state.read_bytes()) == SIZE
    assert read_state(run.state).doing == "x" * (SIZE // 3)
    state.say("waiting for tasks")
    before = run.state.read_bytes()
    state.say("waiting for tasks")
    assert run.state.read_bytes() == before
    assert read_state(run.state) == ("waiting for tasks", True)
    assert "left" not in describe(run)
    state.say("stopped by SIGTERM after round 3")
    assert "left" not in describe(run)
    state.close()
    state.say("nothing")
    assert read_state(run.state) == ("stopped by SIGTERM after round 3", False)
    assert "  stopped by SIGTERM after round 3  round 3 of 10" in describe(run)
    run.summary.write_text('{"rounds": 3}')
    assert "  finished  round 3 of 3  " in describe(run)
    run.config.write_text("rounds: many\n")
    run.summary.unlink()
    assert "  round 3  " in describe(run)
    assert read_state(tmp_path / "none.json") is None


def test_a_file_system_without_locks_does_not_know_who_lives(tmp_path, monkeypatch):
    (tmp_path / "state.json").write_text('{"doing": "playing"}')

    def no_locks(*arguments):
        raise OSError(95, "not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert read_state(tmp_path / "state.json") == ("playing", None)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (99.4, "99 s"), (100, "2 min"), (5969, "99 min"), (5990, "1 h 40 min"), (36000, "10 h 0 min")],
)
def test_a_duration_is_said_as_people_do(seconds, words):
    assert _duration(seconds) == words


def table_of(path, every=1, rows=12):
    table = RoundTable(path, ["round", "x"], every)
    table.cut(0)
    for t in range(every, rows + 1, every):
        table.append({"round": t, "x": 0.5 * t})
    table.close()
    return table


@pytest.mark.parametrize(
    ("every", "rounds", "last"), [(1, 5, "5"), (4, 8, "8"), (4, 11, "8"), (4, 12, "12"), (1, 12, "12")]
)
def test_a_table_is_cut_behind_the_last_row_of_the_rounds_that_are_kept(every, rounds, last, tmp_path):
    table = table_of(tmp_path / "x.csv", every)
    assert table.cut(rounds) == {"round": last, "x": str(0.5 * int(last))}
    table.amend({"round": last, "x": 9})
    table.append({"round": 99, "x": None})
    table.close()
    lines = (tmp_path / "x.csv").read_text().splitlines()
    assert lines[-2:] == [f"{last},9", "99,"]
    assert len(lines) == rounds // every + 2
    assert os.listdir(tmp_path) == ["x.csv"]
    other = RoundTable(tmp_path / "x.csv", ["round", "y"], every)
    with pytest.raises(ValueError, match=rf"must hold {rounds // every} rounds to continue from, got"):
        other.cut(rounds)


def test_two_runs_of_a_second_have_two_folders_and_a_file_in_the_way_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda pattern: "20210104-093000")
    found = [RunDirectory.create(str(tmp_path), "x", "obbo").path.name for _ in range(3)]
    assert found == ["obbo-20210104-093000", "obbo-20210104-093000-2", "obbo-20210104-093000-3"]
    (tmp_path / "file").touch()
    for output, said in ((tmp_path / "file", "Not a directory|a file is there"),):
        with pytest.raises(ValueError, match=said):
            RunDirectory.create(str(output), "x", "obbo")
    with pytest.raises(ValueError, match=r"is no run directory: it has no config\.yaml"):
        RunDirectory.existing(tmp_path)


def test_a_file_is_replaced_at_once_and_nothing_is_left_beside_it(tmp_path, monkeypatch):
    write_atomically(tmp_path / "a.json", "one")
    seen, names = [], set()
    replace, fsync = os.replace, os.fsync
    synced = lambda file: (seen.append(Path(f"/proc/self/fd/{file}").resolve().name), fsync(file))  # noqa: E731
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda a, b: (seen.append(b.read_text()), names.add(a.name), replace(a, b)))
    write_atomically(tmp_path / "a.json", "two")
    (name,) = names
    assert re.fullmatch(r"\.a\.json\.[0-9a-f]{16}\.part", name)
    assert seen == [name, "one", tmp_path.name]  # the file is synced before it gets its name, the folder after
    assert (tmp_path / "a.json").read_text() == "two"
    assert os.listdir(tmp_path) == ["a.json"]
    monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "a.json", "three")
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_summary_is_whole_or_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        RunDirectory(tmp_path).write_summary({"rounds": 1})
    assert os.listdir(tmp_path) == []


def test_a_link_in_the_way_of_a_temporary_file_is_not_followed(tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda size: "known")
    (tmp_path / ".a.json.known.part").symlink_to(tmp_path / "precious")
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "a.json", "two")
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_checkpoint_has_its_checksum_before_it_has_its_name(tmp_path, monkeypatch):
    named, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (named.append(Path(b).name), replace(a, b)))
    ExactCheckpoints().save_checkpoint({"round": 1}, tmp_path / "x.ckpt")
    assert named == ["x.sha256", "x.ckpt"]
    assert read_checkpoint(tmp_path / "x.ckpt") == {"round": 1}


def test_a_checkpoint_is_read_if_it_is_what_was_written(tmp_path):
    saving, files = ExactCheckpoints(), [tmp_path / f"round-{t:08d}.ckpt" for t in (9, 10)]
    for file in files:
        saving.save_checkpoint({"file": file.name}, file)
    (tmp_path / "last.ckpt").touch()
    assert list_checkpoints(tmp_path) == files
    assert read_checkpoint(newest_checkpoint(tmp_path)) == {"file": files[1].name}
    files[1].with_suffix(".sha256").unlink()
    assert read_checkpoint(files[1]) == {"file": files[1].name}  # somebody's own
    with pytest.raises(CheckpointError, match=r"has no checksum file .* beside it; the one before it: --checkpoint"):
        newest_checkpoint(tmp_path)
    files[0].write_bytes(b"other")
    with pytest.raises(CheckpointError, match="there is no other one: start the run again"):
        newest_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is damaged"):
        read_checkpoint(files[0])
    with pytest.raises(CheckpointError, match="does not exist"):
        read_checkpoint(tmp_path / "none.ckpt")
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        newest_checkpoint(tmp_path / "none")


@pytest.mark.parametrize("name", [*STEPPING, "maml", "anil", "mine.py:Own"])
def test_settings_of_before_get_what_they_did_not_know(name):
    before = {"algorithm": {"name": name, "lr": 0.1}, "problem": {"filters": 7, "proximity": 0.2}}
    now = migrated(before)
    added = {"scale": 0.3, "blocks": None} if name in STEPPING else {}
    assert now["algorithm"] == {**added, "name": name, "lr": 0.1}
    assert now["problem"] == {"network": {"name": "cnn4", "filters": 7}, "proximity": 0.2}
    given = {"algorithm": {"name": name, "scale": 0.7, "blocks": {}}}
    assert migrated(given) == given
    assert STEPPING == ("obbo", "sobbo", "sobow", "oagd", "adam", "sgdm")


@pytest.mark.parametrize(("text", "said"), [("a: [", "cannot be read: "), ("- 1", "must hold the settings of a run")])
def test_a_configuration_that_is_none_is_refused(text, said, tmp_path):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=said):
        read_config(RunDirectory(tmp_path))


def test_baselines_are_a_column_each_and_their_means(tmp_path):
    assert write_baselines(tmp_path / "b.csv", {}) == {}
    assert not (tmp_path / "b.csv").exists()
    found = write_baselines(tmp_path / "b.csv", {"equal": [0.25, 0.75, 0.5], "truth": [1.0, 1.0, 0.25]})
    assert found == {"baselines": {"equal": 0.5, "truth": 0.75}}
    table = pl.read_csv(tmp_path / "b.csv")
    assert table.columns == ["round", "equal", "truth"]
    assert table["round"].to_list() == [1, 2, 3]
    assert table["truth"].to_list() == [1.0, 1.0, 0.25]


SETTINGS = {"algorithm": {"name": "obbo", "window": 5}, "data": {"name": "quadratic"}, "seed": 3}


def summary(**changes):
    found = {
        "metric": "accuracy",
        "higher_is_better": True,
        "test_tasks": 4,
        "rounds": 30,
        "skipped": 0,
        "seconds": 61.6,
    }
    found |= {f"{place}test_accuracy{end}": 0.5 for place in ("", "untrained_") for end in ("", "_se")}
    found |= {"test_accuracy_median": 0.25, "test_accuracy_mad": 0.125, "gain": 0.125, "gain_se": None}
    found |= {"stream_accuracy": 0.375, "stream_accuracy_last_100": 0.625}
    found |= {"regret_euclidean": 1234.5678, "regret_generalized": None, "regret_exact": None}
    return found | changes


def printed(**changes):
    console = Console(width=200, record=True, quiet=False, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        print_summary(console, SETTINGS, summary(**changes), [], None)
        lines = console.export_text().splitlines()
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")], lines


def test_a_summary_in_words_has_its_numbers():
    rows, lines = printed()
    assert lines[0].strip() == title_of(SETTINGS) == "obbo, w = 5, quadratic stream, seed 3"
    assert rows == [
        ["accuracy on 4 test tasks before learning; higher is better", "0.500 ± 0.500"],
        ["accuracy on the same after 30 rounds", "0.500 ± 0.500"],
        ["gain by learning, paired; above 0 is better", "0.125"],
        ["accuracy on the stream, last 30 rounds, each judged before it is learned from; higher is better", "0.625"],
        ["regret: squared norms of windowed hypergradients, summed over rounds; lower is better", "1235"],
        ["seconds", "62"],
    ]
    rows, _ = printed(test_tasks=0, rounds=300, skipped=2, baselines={"equal": 0.25, "truth": float("nan")})
    assert rows == [
        ["accuracy on the stream, last 100 rounds, each judged before it is learned from; higher is better", "0.625"],
        ["the same, all rounds", "0.375"],
        ["with equal", "0.250"],
        ["with truth", "not finite"],
        ["regret: squared norms of windowed hypergradients, summed over rounds; lower is better", "1235"],
        ["rounds skipped as not finite: each counts as the one before it, and regrets are lower bounds", "2"],
        ["seconds", "62"],
    ]
    rows, _ = printed(higher_is_better=False, last_value_accuracy=2.0, last_value_accuracy_median=1.5, events=9)
    assert ["its median ± median absolute deviation", "0.250 ± 0.125"] in rows
    assert ["forecast error (accuracy) of the last price as the forecast; its median", "2.000; 1.500"] in rows
    assert rows[0][0] == "forecast error (accuracy) on 9 events before learning; lower is better"


def test_the_last_value_is_of_the_lanes_that_have_one():
    lanes = pl.DataFrame({"naive_mse": [1.0, None, 4.0, 10.0]})
    assert last_value(lanes, "mse") == {"last_value_mse": 5.0, "last_value_mse_median": 4.0}
    assert last_value(lanes, "loss") == {}
    assert Metric() == ("loss", False)
    assert json.loads(json.dumps(last_value(lanes, "mse"))) == last_value(lanes, "mse")


def test_baselines_are_drawn_as_means_beside_the_stream(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(figures, "save_figure", lambda figure, axes, path: drawn.update({path.name: axes}))
    values = np.random.default_rng(0).normal(size=(2, 100))
    columns = {"round": range(1, 101), "loss": values[0], "test_loss": [None] * 100, "test_loss_se": [None] * 100}
    columns |= {"regret/euclidean": np.arange(100.0), "regret/exact": [None] * 100}
    pl.DataFrame(columns).write_csv(tmp_path / "metrics.csv")
    write_baselines(tmp_path / "b.csv", {"equal": values[1].tolist()})
    figures.draw_figures(tmp_path / "metrics.csv", tmp_path / "f", "loss", float("nan"), "t", tmp_path / "b.csv")
    lines = {line.get_label(): line.get_xydata() for line in drawn["loss.png"].lines}
    for name, row in (("stream, mean of 10 rounds", 0), ("equal", 1)):  # phases are to be seen: no more than ten
        assert np.allclose(lines[name], [(t, values[row, t - 10 : t].mean()) for t in range(10, 101)])
    assert "untrained" not in lines
    assert [line.get_label() for line in drawn["regret.png"].lines] == ["euclidean"]


def test_a_folder_above_stands_for_its_newest_run(tmp_path):
    for when, name in enumerate(("b", "a")):
        played(tmp_path / "runs" / name, 1)
        os.utime(tmp_path / "runs" / name / "config.yaml", (when, when))
    assert RunDirectory.newest(tmp_path / "runs").path.name == "a"
    assert RunDirectory.newest(tmp_path / "runs" / "b").path.name == "b"
    with pytest.raises(ValueError, match="is no run directory"):
        RunDirectory.newest(tmp_path / "nowhere")
