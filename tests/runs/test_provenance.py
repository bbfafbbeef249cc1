"""Provenance and checkpoints of a run: what is refused before a run is read or continued."""

import contextlib
import hashlib
import shutil

import pytest
import torch
import yaml
from small_runs import edit_saved_provenance

from obbo_lightning import ExactCheckpoints, Stream, Tasks, cli
from obbo_lightning.runs.directory import RunDirectory, write_atomically
from obbo_lightning.runs.provenance import (
    MAY_CHANGE,
    CheckpointError,
    Provenance,
    ProvenanceError,
    decisive_keys,
    list_checkpoints,
    newest_checkpoint,
    open_checkpoint,
    read_checkpoint,
    read_provenance,
    require_config,
    require_intact,
    require_resumable,
    require_same_data,
    restore_tables,
    verify_checkpoint,
)
from obbo_lightning.runs.table import RoundTable
from obbo_lightning.streams.fingerprints import fingerprint_of

TINY = ["--config", "quadratic", "--rounds", "8", "--evaluation.tasks", "2", "--evaluation.every", "4"]
TINY += ["--checkpoint.every", "3", "--algorithm.inner.steps", "2", "--trainer.accelerator", "cpu"]
pytestmark = pytest.mark.filterwarnings("ignore:the fixed point of the hypergradient:RuntimeWarning")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of eight rounds, with the checkpoints of rounds 6 and 8."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("obbo_lightning.training.run.draw_figures", lambda *arguments: [])
        assert cli.main(["fit", *TINY, "--output", str(folder)]) == 0
    return next((folder / "quadratic").iterdir())


@pytest.fixture
def run(finished, tmp_path, no_figures):
    return RunDirectory(shutil.copytree(finished, tmp_path / "run"))


def edit(run, key, value):
    config = inside = yaml.safe_load(run.config.read_text())
    *path, last = key.split(".")
    for word in path:
        inside = inside[word]
    inside[last] = value
    run.config.write_text(yaml.safe_dump(config))


def refusal(capsys, *arguments):
    """Return the one line with which a command is refused."""
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
def test_an_edited_key_is_refused_with_both_values(key, values, run, tmp_path, capsys):
    edit(run, key, values[1])
    expected = f"{key} must stay {values[0]!r}, with which {run.path} was run, got {values[1]!r} in config.yaml"
    for command in (
        ["resume", run.path, "--rounds", 9],
        ["validate", run.path],
        ["export", run.path, tmp_path / "x"],
        ["report", run.path],
        ["predict", run.path, "--query", "x"],
    ):
        assert expected in refusal(capsys, *command)


def test_keys_that_decide_nothing_may_change_and_rounds_only_upward(run, capsys):
    for key, value in {"workers": 1, "output": "elsewhere", "wandb.project": "x", "checkpoint.every": 2}.items():
        edit(run, key, value)
        assert key.partition(".")[0] in MAY_CHANGE
    edit(run, "algorithm.domain.radius", 10)  # the same number
    require_intact(run)
    edit(run, "rounds", 7)
    assert "rounds must be at least 8" in refusal(capsys, "resume", run.path)
    edit(run, "rounds", 9)
    edit(run, "workers", 0)
    assert cli.main(["resume", str(run.path)]) == 0
    assert read_provenance(run).planned == read_provenance(run).rounds == 9


def test_a_key_that_is_new_or_of_another_type_is_refused(run, capsys):
    edit(run, "algorithm.momentum", 0.9)
    assert "algorithm.momentum must stay 'nothing'" in refusal(capsys, "test", run.path)
    edit(run, "tasks_per_round", True)  # which Python takes for 1
    run.config.write_text(run.config.read_text().replace("  momentum: 0.9\n", ""))
    assert "tasks_per_round must stay 1, with which" in refusal(capsys, "test", run.path)


def test_arguments_of_callbacks_decide_results_but_not_where_they_write():
    config = {"trainer": {"callbacks": [{"name": "EarlyStopping", "patience": 1, "dirpath": "x"}]}}
    assert decisive_keys(config) == {"trainer.callbacks.0.name": "EarlyStopping", "trainer.callbacks.0.patience": 1}


def test_a_table_that_differs_before_the_checkpoint_is_refused_by_its_name(run, capsys):
    for name in ("metrics.csv", "fingerprints.csv"):
        file = run.path / name
        whole = file.read_text()
        lines = whole.splitlines(keepends=True)
        for damaged in (
            [*lines[:3], *lines[4:]], [*lines[:4], *lines[3:]], [*lines[:3], lines[4], lines[3], *lines[5:]],
            [*lines[:3], lines[3].replace("3,", "3,1", 1), *lines[4:]], lines[:5], [],
        ):  # fmt: skip
            file.write_text("".join(damaged))
            for command in (["resume", run.path, "--rounds", 9], ["test", run.path], ["report", run.path]):
                assert f"{file} is damaged" in refusal(capsys, *command)
        file.write_text(whole)
    assert require_intact(run).rounds == 8


@pytest.mark.filterwarnings("ignore:no rounds are left")
def test_a_lost_last_row_and_lost_timings_are_written_again(run):
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


def test_a_deleted_provenance_is_read_from_the_checkpoint_and_an_edited_one_is_refused(run, capsys):
    text = run.provenance.read_text()
    run.provenance.write_text(text.replace('"seed": 0', '"seed": 1'))
    assert f"{run.provenance} is damaged (its checksum differs); delete it" in refusal(capsys, "resume", run.path)
    run.provenance.unlink()
    edit(run, "seed", 1)
    assert "seed must stay 0" in refusal(capsys, "validate", run.path)
    assert "seed must stay 0" in refusal(capsys, "resume", run.path, "--rounds", 9)


def test_another_format_is_refused_by_its_number_and_version(run, capsys):
    read_provenance(run)._replace(format=99).write(run)
    assert "must have a provenance of format 2, got 99, of obbo_lightning" in refusal(capsys, "validate", run.path)


def test_other_versions_and_another_number_of_threads_are_a_warning(run):
    known = read_provenance(run)
    known._replace(versions={**known.versions, "torch": "1.0", "threads": 7}).write(run)
    message = r"the run used torch 1\.0 \(now .*\), threads 7 \(now 1\): its last digits may differ"
    with pytest.warns(UserWarning, match=message):
        assert cli.main(["resume", str(run.path), "--rounds", "9"]) == 0


def test_a_finished_run_has_its_last_row_and_its_closing_files(run, capsys):
    whole, summary = run.metrics.read_text(), run.summary.read_text()
    for damaged in (whole + "9,1\n", whole.replace("\n8,", "\n8,1")):
        run.metrics.write_text(damaged)
        assert f"{run.metrics} is damaged: it does not end with the last round" in refusal(capsys, "test", run.path)
    run.metrics.write_text(whole)
    run.summary.write_text(summary.replace("8", "7"))
    assert f"{run.summary} is damaged" in refusal(capsys, "test", run.path)
    run.summary.write_text(summary)
    read_provenance(run)._replace(closing={"events.csv": "of a run of events"}).write(run)
    assert "events.csv is damaged: it is not what the run wrote at its end" in refusal(capsys, "test", run.path)


def test_a_checkpoint_of_a_run_with_another_configuration_is_refused(run, tmp_path, capsys):
    edit_saved_provenance(list_checkpoints(run.checkpoints)[-1], config={**read_provenance(run).config, "seed": 1})
    for words in (["resume", run.path, "--rounds", 9], ["validate", run.path], ["export", run.path, tmp_path / "x"]):
        assert "seed must stay 1, with which" in refusal(capsys, *words)


def test_a_finished_run_uses_its_last_checkpoint(run, tmp_path, capsys):
    older, newest = list_checkpoints(run.checkpoints)
    for suffix in (".ckpt", ".sha256"):
        shutil.copy(older.with_suffix(suffix), newest.with_suffix(suffix))
    assert f"{newest} must be of the round in its name, got one of round 6" in refusal(capsys, "test", run.path)
    newest.unlink()
    for words in (["test", run.path], ["export", run.path, tmp_path / "x"]):
        expected = "must have the checkpoint of the last round, 8, got one of round 6"
        assert expected in refusal(capsys, *words)
    assert cli.main(["test", str(run.path), "--checkpoint", str(older)]) == 0
    older.with_suffix(".sha256").unlink()
    for command in ("resume", "test"):
        assert "has no checksum file" in refusal(capsys, command, run.path, "--checkpoint", older)


def test_rows_after_an_older_checkpoint_are_not_compared(run):
    *_, saved = open_checkpoint(run, list_checkpoints(run.checkpoints)[0])
    run.metrics.write_text(run.metrics.read_text().replace("\n7,", "\n7,1"))
    require_resumable(run, saved)  # rows after round 6 are written again
    with pytest.raises(ValueError, match="is damaged: its first 8 rounds"):
        require_resumable(run, read_provenance(run))


def test_a_row_after_the_checkpoint_of_a_users_callback_is_compared_and_kept(run):
    known, lines = read_provenance(run), run.metrics.read_text().splitlines(keepends=True)
    mark = {"rows": 7, "sha256": hashlib.sha256("".join(lines[:7]).encode()).hexdigest(), "last": lines[7]}
    saved = known._replace(tables={"metrics.csv": mark})  # before RunWriter wrote the row of round 8
    require_resumable(run, saved)
    restore_tables(run, 8, saved.tables)
    assert run.metrics.read_text() == "".join(lines)
    run.metrics.write_text("".join([*lines[:7], lines[7].replace("7,", "7,1", 1), lines[8]]))
    with pytest.raises(ValueError, match="is damaged: its first 8 rounds"):
        require_resumable(run, saved)


def test_a_run_without_provenance_cannot_be_read(run, tmp_path):
    run.provenance.unlink()
    shutil.rmtree(run.checkpoints)
    with pytest.raises(ProvenanceError, match=r"must have a provenance\.json to be read, got none"):
        require_intact(run)
    run.metrics.unlink()
    assert require_intact(run) is None  # it has not started
    ExactCheckpoints().save_checkpoint({}, tmp_path / "x.ckpt")
    with pytest.raises(ProvenanceError, match=r"x\.ckpt must be one of a run, got one without a provenance"):
        open_checkpoint(run, tmp_path / "x.ckpt")


def test_both_configurations_agree_with_the_provenance_until_the_new_one_is_written(run):
    before, config = read_provenance(run), yaml.safe_load(run.config.read_text())
    changed = {**config, "rounds": 9, "threads": 2, "data": {**config["data"], "drift": 2.0}}
    started = Provenance.start(run, changed, {"prices": "1"})
    assert started == read_provenance(run)
    assert (started.planned, started.replaced, started.rounds) == (8, {"data.drift": 1.0}, 8)
    assert (started.tables, started.closing) == (before.tables, {})
    assert (started.versions["threads"], started.sources) == (2, {"prices": "1"})
    require_config(run, started)  # killed here: config.yaml is the old one
    run.config.write_text(yaml.safe_dump(changed))
    require_config(run, started)


def test_every_closing_file_has_its_hash(tmp_path, monkeypatch):
    run, written = RunDirectory(tmp_path), []
    monkeypatch.setattr(
        "obbo_lightning.runs.provenance.write_atomically",
        lambda path, text: (written.append(path.name), write_atomically(path, text)),
    )
    files = (run.baselines, run.test_scores, run.events, run.lanes)
    for file in files:
        file.write_text(file.name)
    table = RoundTable(run.metrics, ["round"])
    table.open(0)
    started = Provenance.start(run, {"threads": 1, "rounds": 3}, {})
    started.finish(run, [table], {"rounds": 3})
    finished = read_provenance(run)
    table.close()
    contents = {file.name: file.read_bytes() for file in files} | {"summary.json": b'{\n  "rounds": 3\n}\n'}
    assert finished.closing == {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    assert finished.tables == {"metrics.csv": table.mark()}
    assert run.summary.read_bytes() == contents["summary.json"]
    assert written[1:] == ["provenance.json", "summary.json"]  # a run with a summary is finished


class Numbered(Stream):
    """Tasks that hold their numbers, but for those that have changed."""

    def __init__(self, length=12, changed=(), source="1", iterable=False):
        tasks = [{"n": torch.tensor([float(-t if t in changed else t)])} for t in range(length)]
        self.train = iter(tasks) if iterable else Tasks(lambda t: tasks[t], length)
        self.source = source

    def source_digests(self):
        return {"numbers": self.source}


def write_fingerprints(folder, each=1, known=True):
    """Return a run whose five finished rounds had ``each`` tasks."""
    run, stream = RunDirectory(folder), Numbered()
    table = RoundTable(run.fingerprints, ["round", "tasks"])
    table.open(0)
    for t in range(5):
        prints = " ".join(fingerprint_of(stream.train[t * each + i]) for i in range(each))
        table.append({"round": t + 1, "tasks": prints if known else None})
    table.close()
    return run


SOURCES = {"numbers": "1"}


@pytest.mark.parametrize("iterable", [False, True])
@pytest.mark.parametrize(
    ("each", "rounds", "changed", "message"),
    [
        (1, 4, [4], None),  # a round after the checkpoint is run again
        (1, 4, [3], "but they differ from task 4, in round 4 on: 'numbers' has changed"),
        (1, 4, [1], "but they differ from task 2, in round 2 on: 'numbers' has changed"),
        (2, 2, [4], None),
        (2, 2, [3], "but they differ from task 4, in round 2 on"),
        (2, 2, [2], "but they differ from task 3, in round 2 on"),
        (1, 0, [1], None),
    ],
)
def test_the_tasks_of_finished_rounds_must_be_the_same(each, rounds, changed, message, iterable, tmp_path):
    def refused(message):
        return contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message)

    run = write_fingerprints(tmp_path, each)
    other = Numbered(changed=changed, source="2", iterable=iterable)
    with refused(message):
        require_same_data(run, other, rounds, each, SOURCES, changed=False)
    same = Numbered(changed=changed, iterable=iterable)  # equal digests and configuration: no task is made again
    require_same_data(run, same, rounds, each, SOURCES, changed=False)
    for known, configured in ((SOURCES, True), ({}, False)):  # digests that are lost prove nothing
        again = Numbered(changed=changed, iterable=iterable)
        with refused(message and message.partition(":")[0]):
            require_same_data(run, again, rounds, each, known, changed=configured)


def test_a_stream_that_ends_too_early_is_refused_and_unknown_rounds_are_not_compared(tmp_path):
    run = write_fingerprints(tmp_path)
    require_same_data(run, Numbered(length=4), 4, 1, SOURCES, changed=True)
    with pytest.raises(ValueError, match=r"data must have the 5 rounds of .*, and end before task 5"):
        require_same_data(run, Numbered(length=4), 5, 1, SOURCES, changed=True)
    unknown = write_fingerprints(tmp_path, known=False)
    require_same_data(unknown, Numbered(changed=[2]), 5, 1, SOURCES, changed=True)
    unknown.fingerprints.unlink()
    require_same_data(unknown, Numbered(changed=[2]), 5, 1, SOURCES, changed=True)


def test_tasks_that_arrive_are_compared_as_far_as_they_have_arrived(tmp_path):
    class Arriving:
        def __init__(self, tasks):
            self.tasks = tasks

        def so_far(self):
            return iter(self.tasks)

        def __iter__(self):
            raise AssertionError("would wait for more")

    run, stream = write_fingerprints(tmp_path), Numbered()
    stream.train = Arriving([stream.train[t] for t in range(3)])
    require_same_data(run, stream, 3, 1, SOURCES, changed=True)
    stream.train.tasks.pop()
    with pytest.raises(ValueError, match="end before task 3"):
        require_same_data(run, stream, 3, 1, SOURCES, changed=True)


# Checkpoints.


def save(folder, rounds):
    paths = [folder / f"round-{t:08d}.ckpt" for t in rounds]
    for path in paths:
        ExactCheckpoints().save_checkpoint({"file": path.name}, path)
    return paths


def flip_last_bit(path):
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_the_newest_checkpoint_is_that_of_the_last_round(tmp_path):
    paths = save(tmp_path, (9, 10))
    (tmp_path / "last.ckpt").touch()  # the user's own
    (tmp_path / "round-00000011.part").write_bytes(b"half")
    (tmp_path / "round-00000011.sha256").write_text("half")
    assert list_checkpoints(tmp_path) == paths
    assert newest_checkpoint(tmp_path) == paths[1]
    assert read_checkpoint(paths[1]) == {"file": "round-00000010.ckpt"}
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        newest_checkpoint(tmp_path / "none")


def test_a_damaged_checkpoint_is_named_with_the_newest_intact_one(tmp_path):
    paths = save(tmp_path, (5, 10, 15, 20))
    for path in paths[2:]:
        flip_last_bit(path)
        with pytest.raises(CheckpointError, match=f"{path} is damaged"):
            verify_checkpoint(path)
        with pytest.raises(CheckpointError, match=f"{path} is damaged"):
            read_checkpoint(path)
    with pytest.raises(CheckpointError, match=f"the one before it: --checkpoint {paths[1]}"):
        newest_checkpoint(tmp_path)
    for path in paths[:2]:
        path.write_bytes(b"other")
    with pytest.raises(CheckpointError, match="there is no other one: start the run again"):
        newest_checkpoint(tmp_path)


def test_a_run_needs_the_checksum_of_its_checkpoint_and_a_user_does_not(tmp_path):
    first, last = save(tmp_path, (1, 2))
    last.with_suffix(".sha256").unlink()
    assert read_checkpoint(last) == {"file": last.name}
    with pytest.raises(CheckpointError, match=r"has no checksum file round-00000002\.sha256 beside it; the one before"):
        newest_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        read_checkpoint(tmp_path / "none.ckpt")
    assert verify_checkpoint(first) == first
