"""Runs and refusals of `fit` in a folder of their own."""

import pytest

from obbo_lightning import cli


@pytest.fixture
def fit(tmp_path):
    """Return a function that runs `fit` with some flags and returns the run directory."""

    def run(*flags, output="runs"):
        folder = tmp_path / output
        assert cli.main(["fit", *map(str, flags), "--output", str(folder), "--trainer.accelerator", "cpu"]) == 0
        (path,) = (config.parent for config in folder.glob("*/*/config.yaml"))
        return path

    return run


@pytest.fixture
def refusal(tmp_path, monkeypatch, capsys):
    """Return a function that returns the message with which `fit` refuses some flags: one line, nothing is written."""

    def refuse(*flags):
        monkeypatch.chdir(tmp_path)
        before = sorted(tmp_path.rglob("*"))
        capsys.readouterr()
        assert cli.main(["fit", *map(str, flags)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert sorted(tmp_path.rglob("*")) == before
        return error

    return refuse
