"""Run directories, and files that are replaced in one step."""

import os
import re
from pathlib import Path

import pytest

from obbo_lightning.runs.directory import RunDirectory, read_config, replacing, write_atomically


def make_run(path):
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("rounds: 1\n")


def test_runs_that_start_in_one_second_have_their_own_folders(tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda pattern: "20210104-093000")
    names = [RunDirectory.create(str(tmp_path), "x", "obbo").path.name for _ in range(3)]
    assert names == ["obbo-20210104-093000", "obbo-20210104-093000-2", "obbo-20210104-093000-3"]


def test_an_output_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"output must be a directory that can be (made|written), got '.*file'"):
        RunDirectory.create(str(tmp_path / "file"), "x", "obbo")


def test_a_folder_without_a_configuration_is_no_run(tmp_path):
    with pytest.raises(ValueError, match=r"must be a run directory, got one without config\.yaml"):
        RunDirectory.existing(tmp_path)


@pytest.mark.parametrize("name", ["summary.json", "metrics.csv", "checkpoints/round-00000006.sha256"])
def test_a_folder_in_the_place_of_a_file_is_refused(name, tmp_path):
    make_run(tmp_path / "run")
    (tmp_path / "run" / name).mkdir(parents=True)
    with pytest.raises(ValueError, match=f"{name} must be a file, and is not"):
        RunDirectory.existing(tmp_path / "run")


def test_a_folder_of_runs_stands_for_its_newest_run(tmp_path):
    for when, name in enumerate(("b", "a")):
        make_run(tmp_path / "runs" / name)
        os.utime(tmp_path / "runs" / name / "config.yaml", (when, when))
    assert RunDirectory.newest(tmp_path / "runs").path.name == "a"
    assert RunDirectory.newest(tmp_path / "runs" / "b").path.name == "b"
    with pytest.raises(ValueError, match="must be a run directory"):
        RunDirectory.newest(tmp_path / "nowhere")


def test_a_directory_in_which_nothing_was_started_is_removed_with_the_folders_made_for_it(tmp_path):
    (tmp_path / "here").mkdir()
    started, *refused = (RunDirectory.create(str(tmp_path / o), "x", "obbo") for o in ("runs", "new", "here"))
    started.config.write_text("rounds: 1\n")
    for run in (started, *refused):
        run.discard()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "runs"]
    assert not list((tmp_path / "here").iterdir())
    assert started.config.exists()


@pytest.mark.parametrize(
    ("text", "message"), [("a: [", "cannot be read: "), ("- 1", "must hold the configuration of a run, got")]
)
def test_a_file_that_is_no_configuration_is_refused(text, message, tmp_path):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_config(RunDirectory(tmp_path))


def test_a_file_is_replaced_in_one_step_and_nothing_is_left_beside_it(tmp_path, monkeypatch):
    write_atomically(tmp_path / "a.json", "one")
    events, names = [], set()
    replace, fsync = os.replace, os.fsync
    synced = lambda file: (events.append(Path(f"/proc/self/fd/{file}").resolve().name), fsync(file))  # noqa: E731
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append(b.read_text()), names.add(a.name), replace(a, b)))
    write_atomically(tmp_path / "a.json", "two")
    (name,) = names
    assert re.fullmatch(r"\.a\.json\.[0-9a-f]{16}\.part", name)
    assert events == [name, "one", tmp_path.name]  # the file is synced before it gets its name, the folder after
    assert (tmp_path / "a.json").read_text() == "two"
    events.clear()
    with replacing(tmp_path / "a.json", durable=False) as aside:
        aside.write_text("three")
    assert events == ["two"]  # nothing is synced
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("operation", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(operation, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    file = tmp_path / "a.json"
    write_atomically(file, "one")
    monkeypatch.setattr(os, operation, full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(file, "two")
    assert os.listdir(tmp_path) == ["a.json"]
    assert file.read_text() == "one"


def test_a_link_in_the_place_of_a_temporary_file_is_not_followed(tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda size: "known")
    (tmp_path / ".a.json.known.part").symlink_to(tmp_path / "precious")
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "a.json", "two")
    assert (tmp_path / "precious").read_text() == "mine"
