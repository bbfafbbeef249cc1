"""Files that somebody else wrote: no code in them or named by them is run without --trust."""

import hashlib
import io
import json
import os
import pickle
import re
import shutil
import sys
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file
from small_runs import QUIET, rewrite_provenance

from obbo_lightning import cli, load_model
from obbo_lightning.config.registry import import_class, untrusted_source
from obbo_lightning.experiments.market import _read_lanes
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.runs.provenance import CheckpointError, read_checkpoint
from obbo_lightning.streams.arriving import parse_npz
from obbo_lightning.streams.few_shot.fc100 import Cifar100, load_cifar100
from obbo_lightning.training.checkpoints import ExactCheckpoints
from obbo_lightning.training.module import OnlineBilevelModule

SMALL = ["--config", "quadratic", "--rounds", "3", "--evaluation.tasks", "1", "--checkpoint.every", "1"]
OWN = """
from pathlib import Path
from obbo_lightning.streams.quadratic import QuadraticStream

Path("RAN").touch()

class Mine(QuadraticStream):
    pass
"""


class Payload:
    """Makes a file when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch EXECUTED",)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Work in an empty folder; whatever is in it, no code of it has been run after the test."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not [name for name in ("EXECUTED", "RAN") if (tmp_path / name).exists()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    assert cli.main(["fit", *SMALL, "--output", str(folder / "runs")]) == 0
    return next((folder / "runs").glob("*/*"))


@pytest.fixture
def run(finished, tmp_path):
    """Return a finished run that may be changed."""
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def poisoned(run):
    """Return a run whose newest checkpoint has a payload and the right checksum."""
    (run / "summary.json").unlink()
    file = sorted((run / "checkpoints").glob("*.ckpt"))[-1]
    content = torch.load(file, weights_only=True)
    torch.save({"extra": Payload(), **content}, file)
    file.with_suffix(".sha256").write_text(hashlib.sha256(file.read_bytes()).hexdigest() + "\n")
    return run


@pytest.mark.parametrize("variable", ["", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_WEIGHTS_ONLY_LOAD"])
@pytest.mark.parametrize("command", ["resume", "validate", "test", "export", "predict"])
def test_no_command_runs_what_a_checkpoint_holds(poisoned, tmp_path, monkeypatch, capsys, variable, command):
    if variable:
        monkeypatch.setenv(variable, "1")
    more = {"export": ["out"], "predict": ["--query", "x"]}.get(command, [])
    assert cli.main([command, str(poisoned), *more]) == 2
    error = capsys.readouterr().err
    assert "holds more than tensors and plain values" in error
    assert error.count("\n") == 1


@pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`")
def test_no_function_runs_what_a_checkpoint_holds(poisoned, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    whole, *_, file = sorted((poisoned / "checkpoints").glob("*.ckpt"))
    module = OnlineBilevelModule.load_from_checkpoint(whole)
    trainer = L.Trainer(plugins=[ExactCheckpoints()], **QUIET)
    loader = torch.utils.data.DataLoader([0], collate_fn=list)
    for read in (
        lambda: read_checkpoint(file),
        lambda: load_model(file),
        lambda: load_model(poisoned),
        lambda: OnlineBilevelModule.load_from_checkpoint(file),
        lambda: ExactCheckpoints().load_checkpoint(file, weights_only=False),
        lambda: trainer.fit(module, loader, ckpt_path=str(file), weights_only=False),
    ):
        with pytest.raises(CheckpointError, match="holds more than tensors"):
            read()
        assert not (tmp_path / "EXECUTED").exists()
    with pytest.warns(UserWarning, match="TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"):
        torch.load(file)
    (tmp_path / "EXECUTED").unlink()  # the payload works


def test_a_file_that_is_no_checkpoint_is_refused_in_one_line(poisoned, capsys):
    file = sorted((poisoned / "checkpoints").glob("*.ckpt"))[-1]
    listed = io.BytesIO()
    torch.save([1, 2], listed)
    for content in (listed.getvalue(), b"", b"PK\x03\x04 not a zip", pickle.dumps([1, 2]), os.urandom(200)):
        file.write_bytes(content)
        file.with_suffix(".sha256").write_text(hashlib.sha256(content).hexdigest() + "\n")
        assert cli.main(["resume", str(poisoned)]) == 2
        error = capsys.readouterr().err
        assert str(file) in error
        assert error.count("\n") == 1


def test_arrays_are_read_without_pickles(tmp_path, capsys):
    np.savez("evil.npz", examples=np.array([Payload()] * 40), labels=np.array([Payload()] * 40))
    np.savez("labels.npz", examples=np.zeros((40, 2)), labels=np.array([Payload()] * 40))
    np.savez("images.npz", images=np.zeros((40, 16, 16), dtype=np.uint8), labels=np.array([Payload()] * 40))
    for flags in (["--data", "examples"], ["--data", "images"], ["--data", "sources"]):
        for name in ("evil.npz", "labels.npz", "images.npz"):
            assert cli.main(["fit", *flags, "--data.path", name]) == 2
            assert capsys.readouterr().err.count("\n") == 1
    np.savez("cifar100.npz", **dict.fromkeys(Cifar100._fields, np.array([Payload()])))
    np.savez("lanes.npz", rounds=np.array([Payload()]), regret=np.array([Payload()]))
    columns = "ticker,timestamp,naive_mse,weight,regret,gradient_norm,test_mse\nA,2026-01-02,1,1,1,1,1\n"
    (tmp_path / "events.csv").write_text(columns)
    ExactCheckpoints().save_checkpoint({"global_step": 1}, tmp_path / "x.ckpt")
    for read in (
        lambda: load_cifar100.__wrapped__(tmp_path),
        lambda: parse_npz((tmp_path / "evil.npz").read_bytes()),
        lambda: _read_lanes(SimpleNamespace(directory=RunDirectory(tmp_path), label="x")),
    ):
        with pytest.raises(ValueError, match=r"npz file|damaged"):
            read()
    assert not (tmp_path / "EXECUTED").exists()


def test_yaml_constructs_no_objects(tmp_path, capsys):
    (tmp_path / "evil.yaml").write_text("rounds: !!python/object/apply:os.system ['touch EXECUTED']\n")
    assert cli.main(["fit", "--config", "evil.yaml"]) == 2
    assert cli.main(["fit", "--rounds", "!!python/object/apply:os.system ['touch EXECUTED']"]) == 2
    assert cli.main(["compare", "--config", "evil.yaml"]) == 2
    (tmp_path / "evil.yaml").rename(tmp_path / "config.yaml")
    assert cli.main(["resume", "."]) == 2
    assert capsys.readouterr().err.count("\n") == 4


def unload():
    """Unload the file, as in another process."""
    for name in [name for name in sys.modules if re.fullmatch(r"mine(_[0-9a-f]+)?", name)]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def finished_own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["fit", *SMALL, "--data", "mine.py:Mine"]) == 0
    assert (folder / "RAN").exists()  # what is typed is run
    return next((folder / "runs").glob("*/*"))


@pytest.fixture
def own(finished_own, tmp_path, monkeypatch):
    """Return a finished run of a stream in a file that is not loaded."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    shutil.copytree(finished_own, tmp_path / "run")
    unload()
    yield tmp_path / "run"
    unload()


COMMANDS = {
    "resume": ["resume", "RUN", "--rounds", "4"],
    "validate": ["validate", "RUN"],
    "test": ["test", "RUN"],
    "export": ["export", "RUN", "out"],
    "predict": ["predict", "RUN", "--query", "x"],
    "report": ["report", "RUN"],
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS.keys())
def test_a_run_does_not_run_a_file_unless_it_is_trusted(own, words, tmp_path, capsys):
    words = [str(own) if word == "RUN" else word for word in words]
    capsys.readouterr()
    if words[0] == "export":  # its checkpoint names the problem, which is ours
        assert "mine.py:Mine" in (own / "config.yaml").read_text()
        assert cli.main(words) == 0
    else:
        assert cli.main(words) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"to run it, python -m obbo_lightning {' '.join(words)} --trust" in error


def test_a_trusted_run_continues(own, tmp_path):
    assert cli.main(["resume", str(own), "--rounds", "4", "--trust"]) == 0
    (tmp_path / "RAN").unlink()  # it was run


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data", "{name: mine.Mine}"),
        ("problem", "{name: mine.Mine}"),
        ("trainer", "{callbacks: [mine.Mine]}"),
        ("trainer", "{callbacks: [{name: ModelCheckpoint, x: {class_path: mine.Mine}}]}"),
        ("trainer", "{strategy: {class_path: mine.Mine}}"),
        ("trainer", "{profiler: mine.Mine}"),
        ("trainer", "{plugins: [{class_path: mine.Mine}]}"),
    ],
)
def test_no_key_of_a_run_imports_from_the_working_directory(run, tmp_path, monkeypatch, capsys, key, value):
    monkeypatch.syspath_prepend(str(tmp_path))  # as `python -m` does
    (tmp_path / "mine.py").write_text(OWN)
    config = yaml.safe_load((run / "config.yaml").read_text())
    given = yaml.safe_load(value)
    config[key] = {**config[key], **given} if key == "trainer" else given
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    rewrite_provenance(run)
    assert cli.main(["validate", str(run)]) == 2
    error = capsys.readouterr().err
    assert "'mine.Mine' is neither a registered component nor an entry point" in error
    assert error.count("\n") == 1


def test_the_working_directory_is_searched_for_typed_names_only(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    with untrusted_source("trust it"):
        import_class("collections.OrderedDict", "data")
        assert str(tmp_path) not in sys.path
    import_class("collections.OrderedDict", "data")
    assert str(tmp_path) in sys.path


def test_entry_points_in_the_working_directory_are_not_installed_ones(run, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "mine.egg-info").mkdir()
    (tmp_path / "mine.egg-info" / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (tmp_path / "mine.egg-info" / "entry_points.txt").write_text("[obbo_lightning.data]\nlurking = mine:Mine\n")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("name: quadratic", "name: lurking"))
    rewrite_provenance(run)
    assert cli.main(["test", str(run)]) == 2
    assert "data must be one of" in capsys.readouterr().err


def test_a_checkpoint_and_an_export_do_not_run_a_file(finished, tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    file = tmp_path / "round-1.ckpt"
    content = torch.load(sorted((finished / "checkpoints").glob("*.ckpt"))[-1], weights_only=True)
    content["module"]["problem"]["component"] = f"{tmp_path}/mine.py:Mine"
    torch.save(content, file)
    (tmp_path / "export").mkdir()
    metadata = {"format": 1, "round": 1, "problem": "mine.Mine", "init_args": {}, "inputs": None, "inner": None}
    (tmp_path / "export" / "metadata.json").write_text(json.dumps(metadata))
    save_file({"x": torch.ones(1)}, tmp_path / "export" / "weights.safetensors")
    for read in (
        lambda: load_model(file),
        lambda: OnlineBilevelModule.load_from_checkpoint(file),
        lambda: load_model(tmp_path / "export"),
    ):
        with pytest.raises(ValueError, match="trust=True"):
            read()
