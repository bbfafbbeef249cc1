"""Every command says what it takes; files have a schema that agrees with what the commands refuse."""

import json
import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml
from obbo_lightning.cli.schema import comparison_schema

from obbo_lightning import cli
from obbo_lightning.cli.flags import COMMANDS, Flags
from obbo_lightning.config.parse import ConfigError
from obbo_lightning.experiments.grid import read_grid
from obbo_lightning.experiments.tune_request import read_tune

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("command", [name for name in cli.COMMANDS if name != "fit"])
def test_help_of_a_command_has_its_own_flags_with_meanings_and_an_example(command, capsys):
    assert cli.main([command, "--help"]) == 0
    text = capsys.readouterr().out
    for name, options in COMMANDS[command].flags.items():
        assert (name if name.startswith("--") else options["metavar"]) in text
        assert options["help"] in " ".join(text.split())
    assert text.startswith(f"usage: obbo {command} ")
    assert f"example:\n  obbo {command} " in text
    assert ("--trust" in text) == (command in cli.READING)


def test_the_examples_of_help_are_accepted():
    for command, known in COMMANDS.items():
        words = shlex.split(known.example.partition(f"obbo {command}")[2].partition(">")[0])
        Flags(command).parse_args(words)


@pytest.mark.parametrize(("data", "needed"), [("images", "path"), ("forgetting", "csv")])
def test_help_of_data_that_need_a_file_needs_none(data, needed, capsys):
    assert cli.main(["fit", "--data", data, "--rounds", "77", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"--data.{needed}" in text
    assert "default: 77" in text
    assert "example: obbo fit" in text


def test_what_is_missing_is_refused_without_help(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["fit", "--data", "images"]) == 2
    assert "data.path" in capsys.readouterr().err
    assert cli.main(["schema", "tune2"]) == 2
    assert "schema must be of one of compare, got 'tune2'" in capsys.readouterr().err


@pytest.fixture(scope="module")
def checker():
    schema = comparison_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_shipped_comparisons_fit_the_schema_that_is_printed(checker, capsys):
    assert cli.main(["schema", "compare"]) == 0
    assert json.loads(capsys.readouterr().out) == checker.schema
    files = [
        *ROOT.glob("configs/compare/*.yaml"),
        *ROOT.glob("configs/tune/*.yaml"),
        ROOT / "examples/compare_ridge.yaml",
    ]
    assert len(files) > 5
    for file in files:
        assert [e.message for e in checker.iter_errors(yaml.safe_load(file.read_text()))] == [], file
    window = checker.schema["properties"]["grid"]["properties"]["algorithm.window"]
    assert window["description"] == "w, window length."


@pytest.mark.parametrize(
    "change",
    [
        {"gird": {"seed": [0]}},
        {"compare": "a/b"},
        {"grid": {}},
        {"grid": None},
        {"grid": {"seed": []}},
        {"grid": {"algorithm.window": ["wide"]}},
        {"grid": {"rate": {}}},
        {"grid": {"algorithm": ["oboo"]}},
        {"settings": {"rounds": "many"}},
        {"settings": {"algorithm": {"lr": [1]}}},
        {"settings": {"logger": "paper"}},
        {"tune": {"search": {"algorithm.window": [1, 2]}, "budget": {"rounds": 9}}},
        {"tune": {"search": {"algorithm.lr": {"low": 1}}, "budget": {"rounds": 9}}},
        {"tune": {"search": {"algorithm.lr": [1, 2]}, "budget": {"rounds": 9, "calls": 9}}},
        {"tune": {"search": {"algorithm.lr": [1, 2]}, "budget": {"rounds": 9}, "judge": "test"}},
    ],
    ids=str,
)
def test_what_the_schema_refuses_the_command_refuses(change, checker, tmp_path):
    good = {"compare": "mine", "grid": {"seed": [0, 1]}, "settings": {"algorithm": {"name": "obbo", "lr": "1e-3"}}}
    assert checker.is_valid(good)
    file = tmp_path / "one.yaml"
    file.write_text(yaml.safe_dump(good))
    assert len(read_grid(file).cells) == 2
    file.write_text(yaml.safe_dump(good | change))
    assert not checker.is_valid(good | change)
    with pytest.raises((ConfigError, ValueError)):
        read_tune(read_grid(file).tune)
