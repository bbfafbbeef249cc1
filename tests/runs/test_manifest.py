"""What a run knows of itself, and what it refuses to go on with."""

import hashlib
import json
import shutil
from types import SimpleNamespace

import pytest
import yaml
from as_played import as_if_saved
from obbo_lightning.training.keeping import Keeper

from obbo_lightning import cli
from obbo_lightning.runs.checkpoints import list_checkpoints
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.runs.provenance import (
    MAY_CHANGE,
    Provenance,
    decisive,
    read_provenance,
    require_continuable,
    require_intact,
    require_settings,
    write_provenance,
)
from obbo_lightning.training import run as runs

TINY = ["--config", "quadratic", "--rounds", "8", "--evaluation.tasks", "2", "--evaluation.every", "4"]
TINY += ["--checkpoint.every", "3", "--algorithm.inner.steps", "2", "--trainer.accelerator", "cpu"]
pytestmark = pytest.mark.filterwarnings("ignore:the fixed point of the hypergradient:RuntimeWarning")


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A run of eight rounds that is finished, with the checkpoints of rounds 6 and 8."""
    folder = tmp_path_factory.mktemp("played")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runs, "draw_figures", lambda *arguments: [])
        assert cli.main(["fit", *TINY, "--output", str(folder)]) == 0
    return next((folder / "quadratic").iterdir())


@pytest.fixture
def run(played, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "draw_figures", lambda *arguments: [])
    shutil.copytree(played, tmp_path / "run")
    return RunDirectory(tmp_path / "run")


def edit(run, key, value):
    settings = yaml.safe_load(run.config.read_text())
    *path, last = key.split(".")
    inside = settings
    for word in path:
        inside = inside[word]
    inside[last] = value
    run.config.write_text(yaml.safe_dump(settings))


def refused(capsys, *arguments):
    capsys.readouterr()
    assert cli.main([str(word) for word in arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


EDITS = {
    "seed": (0, 1), "algorithm.inner.steps": (2, 3), "algorithm.clip": (None, 1.0), "algorithm.lr": (0.01, 0.02),
    "algorithm.geometry.decay": (0.9, 0.8), "data.drift": (1.0, 2.0), "tasks_per_round": (1, 2),
}  # fmt: skip


@pytest.mark.parametrize(("key", "values"), EDITS.items(), ids=EDITS)
def test_an_edited_setting_is_refused_by_its_key_with_both_values(key, values, run, tmp_path, capsys):
    edit(run, key, values[1])
    expected = f"{key} must stay {values[0]!r}, with which {run.path} was played, got {values[1]!r} in config.yaml"
    for command in (["resume", run.path, "--rounds", 9], ["validate", run.path], ["export", run.path, tmp_path / "x"]):
        assert expected in refused(capsys, *command)
    assert expected in refused(capsys, "report", run.path)
    assert expected in refused(capsys, "predict", run.path)


def test_settings_that_decide_nothing_may_change_and_rounds_only_upward(run, capsys):
    for key, value in {"workers": 1, "output": "elsewhere", "wandb.project": "x", "checkpoint.every": 2}.items():
        edit(run, key, value)
        assert key.partition(".")[0] in MAY_CHANGE
    edit(run, "algorithm.domain.radius", 10)  # the same number
    require_intact(run)
    edit(run, "rounds", 7)
    assert "rounds must be at least 8" in refused(capsys, "resume", run.path)
    edit(run, "rounds", 9)
    edit(run, "workers", 0)
    assert cli.main(["resume", str(run.path)]) == 0
    assert read_provenance(run).planned == read_provenance(run).rounds == 9


def test_a_table_that_differs_before_the_checkpoint_is_refused_by_its_name(run, capsys):
    for name in ("metrics.csv", "tasks.csv"):
        file = run.path / name
        whole = file.read_text()
        lines = whole.splitlines(keepends=True)
        for damaged in (
            [*lines[:3], *lines[4:]], [*lines[:4], *lines[3:]], [*lines[:3], lines[4], lines[3], *lines[5:]],
            [*lines[:3], lines[3].replace("3,", "3,1", 1), *lines[4:]], lines[:5], [],
        ):  # fmt: skip
            file.write_text("".join(damaged))
            for command in (["resume", run.path, "--rounds", 9], ["test", run.path], ["report", run.path]):
                assert f"{file} is damaged" in refused(capsys, *command)
        file.write_text(whole)
    assert require_intact(run).rounds == 8


@pytest.mark.filterwarnings("ignore:nothing is left to play")
def test_a_last_row_and_times_that_are_lost_are_written_again(run):
    whole = run.metrics.read_bytes()
    run.summary.unlink()
    run.metrics.write_bytes(whole[: whole.rindex(b"\n8,") + 3])
    run.timings.write_text("nothing")
    left = [run.path / ".metrics.csv.0123.part", run.checkpoints / ".round-00000009.ckpt.0123.part"]
    for file in left:  # of the process that was killed
        file.touch()
    assert cli.main(["resume", str(run.path)]) == 0
    assert run.metrics.read_bytes() == whole
    assert not any(file.exists() for file in left)
    assert run.timings.read_text().splitlines()[:2] == ["round,seconds,evaluation_seconds", "1,nan,"]


def test_a_manifest_that_is_gone_is_read_from_the_checkpoint_and_a_damaged_one_is_refused(run, capsys):
    text = run.provenance.read_text()
    run.provenance.write_text(text.replace('"seed": 0', '"seed": 1'))
    assert f"{run.provenance} is damaged (its checksum differs); delete it" in refused(capsys, "resume", run.path)
    run.provenance.unlink()
    edit(run, "seed", 1)
    assert "seed must stay 0" in refused(capsys, "validate", run.path)
    assert "seed must stay 0" in refused(capsys, "resume", run.path, "--rounds", 9)


def test_a_format_that_is_not_known_is_refused_by_name(run, capsys, monkeypatch):
    with monkeypatch.context() as later:
        later.setattr("obbo_lightning.runs.provenance.FORMAT", 2)
        write_provenance(run, read_manifest_of(json.loads(run.provenance.read_text())))
    assert "must have a manifest of format 1, got 2, of obbo_lightning" in refused(capsys, "validate", run.path)


def read_manifest_of(content):
    from obbo_lightning.runs.provenance import Provenance

    return Provenance(**{name: content[name] for name in Provenance._fields})


def test_other_versions_are_said_when_a_run_goes_on(run):
    known = read_provenance(run)
    write_provenance(run, known._replace(versions={**known.versions, "torch": "1.0"}))
    with pytest.warns(UserWarning, match=r"the run was played with torch 1\.0 \(now "):
        assert cli.main(["resume", str(run.path), "--rounds", "9"]) == 0


def test_closing_files_are_those_that_were_written(run, capsys):
    run.summary.write_text(run.summary.read_text().replace("8", "7"))
    assert f"{run.summary} is damaged" in refused(capsys, "test", run.path)


def test_a_finished_run_has_its_last_row_its_closing_files_and_nothing_behind_them(run, capsys):
    whole = run.metrics.read_text()
    for damaged in (whole + "9,1\n", whole.replace("\n8,", "\n8,1")):
        run.metrics.write_text(damaged)
        assert f"{run.metrics} is damaged: it does not end with the last round" in refused(capsys, "test", run.path)
    run.metrics.write_text(whole)
    write_provenance(run, read_provenance(run)._replace(closing={"events.csv": "of a run of events"}))
    assert "events.csv is damaged: it is not what the run wrote at its end" in refused(capsys, "test", run.path)


def test_a_setting_that_is_new_or_of_another_kind_is_refused(run, capsys):
    edit(run, "algorithm.momentum", 0.9)
    assert "algorithm.momentum must stay 'nothing'" in refused(capsys, "test", run.path)
    edit(run, "tasks_per_round", True)  # which Python takes for 1
    run.config.write_text(run.config.read_text().replace("  momentum: 0.9\n", ""))
    assert "tasks_per_round must stay 1, with which" in refused(capsys, "test", run.path)


def test_a_checkpoint_of_a_run_with_other_settings_is_refused(run, tmp_path, capsys):
    as_if_saved(list_checkpoints(run.checkpoints)[-1], {**read_provenance(run).settings, "seed": 1})
    for command in ("resume", "validate", "export"):
        words = [command, run.path, *([tmp_path / "x"] if command == "export" else [])]
        words += ["--rounds", 9] if command == "resume" else []
        assert "seed must stay 1, with which" in refused(capsys, *words)


def test_the_last_checkpoint_of_a_finished_run_is_the_one_that_is_used(run, tmp_path, capsys):
    older, newest = list_checkpoints(run.checkpoints)
    for suffix in (".ckpt", ".sha256"):
        shutil.copy(older.with_suffix(suffix), newest.with_suffix(suffix))
    assert f"{newest} must be of the round in its name, and is of round 6" in refused(capsys, "test", run.path)
    newest.unlink()
    for words in (["test", run.path], ["export", run.path, tmp_path / "x"]):
        assert "must have the checkpoint of the last round, 8, and its newest one is of round 6" in refused(
            capsys, *words
        )
    assert cli.main(["test", str(run.path), "--checkpoint", str(older)]) == 0


def test_a_row_behind_the_checkpoint_of_a_callback_is_compared_with_the_manifest(run):
    known, lines = read_provenance(run), run.metrics.read_text().splitlines(keepends=True)
    mark = {"rows": 7, "sha256": hashlib.sha256("".join(lines[:7]).encode()).hexdigest(), "last": lines[7]}
    saved = known._replace(tables={"metrics.csv": mark})  # before the recorder wrote the row of round 8
    require_continuable(run, 8, saved)
    run.metrics.write_text("".join([*lines[:7], lines[7].replace("7,", "7,1", 1), lines[8]]))
    with pytest.raises(ValueError, match="is damaged: its first 8 rounds"):
        require_continuable(run, 8, saved)


def test_a_run_that_cannot_be_checked_says_so(run):
    run.provenance.unlink()
    shutil.rmtree(run.checkpoints)
    for look in (require_intact, lambda run: require_continuable(run, 8, None)):
        with pytest.warns(UserWarning, match="being of an older version: whether it is as it was played cannot be"):
            look(run)


def test_both_settings_are_true_until_config_yaml_has_the_new_ones(run):
    keeper, known = Keeper(run, list), read_provenance(run)
    settings = yaml.safe_load(run.config.read_text())
    keeper.begin({**settings, "rounds": 9, "data": {**settings["data"], "drift": 2.0}})
    assert (read_provenance(run).planned, read_provenance(run).before) == (8, {"data.drift": 1.0})
    require_settings(run, read_provenance(run))  # killed here, config.yaml is as it was
    assert read_provenance(run).tables == known.tables
    keeper.on_train_start(SimpleNamespace(global_step=6), None)  # from an older checkpoint: later rows are cut away
    assert (read_provenance(run).rounds, read_provenance(run).tables) == (6, {})


@pytest.mark.parametrize("name", ["summary.json", "checkpoints/round-00000006.sha256"])
def test_a_folder_in_the_place_of_a_file_is_refused(name, run, capsys):
    (run.path / name).unlink()
    (run.path / name).mkdir()
    for command in ("resume", "test"):
        assert f"{run.path / name} must be a file, and is not" in refused(capsys, command, run.path)


def test_another_number_of_threads_is_said_when_a_run_goes_on(run):
    file = list_checkpoints(run.checkpoints)[-1]
    as_if_saved(file, read_provenance(run).settings, threads=7)
    with pytest.warns(UserWarning, match=r"the run was played with 7 threads \(now 1\): its last digits may differ"):
        assert cli.main(["resume", str(run.path), "--rounds", "9"]) == 0


def test_a_checkpoint_that_is_asked_for_has_its_checksum(run, capsys):
    older = list_checkpoints(run.checkpoints)[0]
    older.with_suffix(".sha256").unlink()
    for command in ("resume", "test"):
        assert "has no checksum file" in refused(capsys, command, run.path, "--checkpoint", older)


def test_lists_of_callbacks_decide_but_not_where_they_write():
    settings = {"trainer": {"callbacks": [{"name": "EarlyStopping", "patience": 1, "dirpath": "x"}]}}
    assert decisive(settings) == {"trainer.callbacks.0.name": "EarlyStopping", "trainer.callbacks.0.patience": 1}


def test_a_checkpoint_says_how_many_rounds_there_are_to_be_and_what_was_changed_before_is_history(tmp_path):
    run, saved = RunDirectory(tmp_path), {}
    settings = {"rounds": 8, "threads": 2, "seed": 1, "data": {"drift": 1.0}}
    keepers = [Keeper(run, lambda: [SimpleNamespace(path=tmp_path / "x.csv", mark=lambda: {"rows": 3})]) for _ in "ab"]
    keepers[0].begin(settings)
    keepers[0].on_save_checkpoint(SimpleNamespace(global_step=6), None, saved)
    assert saved["manifest"] == read_provenance(run).as_dict()
    assert (saved["manifest"]["rounds"], saved["manifest"]["planned"]) == (6, 8)
    assert saved["manifest"]["tables"] == {"x.csv": {"rows": 3}}
    keepers[1].begin({**settings, "rounds": 12, "data": {"drift": 2.0}})
    assert (read_provenance(run).planned, read_provenance(run).before) == (8, {"data.drift": 1.0})
    keepers[1].on_train_start(SimpleNamespace(global_step=6), None)  # from the newest checkpoint: nothing is cut away
    assert read_provenance(run).tables == {"x.csv": {"rows": 3}}
    keepers[1].on_save_checkpoint(SimpleNamespace(global_step=9), None, saved)
    now = read_provenance(run)
    assert (now.rounds, now.planned, now.before, now.settings["data.drift"]) == (9, 12, {}, 2.0)
    Keeper(run, list).on_save_checkpoint(SimpleNamespace(global_step=1), None, other := {})  # of another rank
    assert other == {}


def test_every_file_that_a_run_ends_with_has_its_hash(tmp_path):
    run = RunDirectory(tmp_path)
    keeper = Keeper(run, list)
    keeper.manifest = Provenance({}, 1, 3, 3, {}, {}, {}, {})
    for file in (run.baselines, run.tests, run.events, run.lanes):
        file.write_text(file.name)
    keeper.conclude({"rounds": 3})
    contents = {file.name: file.read_bytes() for file in (run.baselines, run.tests, run.events, run.lanes)}
    contents["summary.json"] = b'{\n  "rounds": 3\n}\n'
    assert keeper.manifest.closing == {n: hashlib.sha256(content).hexdigest() for n, content in contents.items()}
