"""Commands, their help, and errors as one line."""

import re
import shlex

import pytest

from obbo_lightning import cli

MISTAKES = {
    "fitt": f"command must be one of {', '.join(cli.COMMANDS)}, got 'fitt'; did you mean 'fit'?",
    "watch x --evry 3": "watch: unrecognized arguments: --evry 3",
    "watch x --ever 3": "watch: unrecognized arguments: --ever 3",
    "resume": "resume: the following arguments are required: RUN_DIR",
    "resume nowhere": "nowhere must be a run directory, got one without config.yaml",
    "resume x --rounds ten": "resume: argument --rounds: invalid int value: 'ten'",
    "fit --algorithm obo": "algorithm must be one of obbo, sobbo, sobow, oagd, adam, sgdm, maml, anil, or yours as "
    "package.module.Class or file.py:Class, got 'obo'; did you mean 'obbo'?",
    "fit --algorithm adam --algorithm.window 3": "unknown key 'algorithm.window' (value 3)",
    "fit --algorithm.inner.steps 0": "algorithm.inner.steps must be an integer of at least 1, got 0",
    "fit --algorithm.lr nan": "algorithm.lr must be a positive finite number, got nan",
    "fit --algorithm.geometry.rho 0": "algorithm.geometry.rho must be a positive finite number, got 0",
    "fit --rounds 0": "rounds must be an integer of at least 1, got 0",
    "fit --rounds 30000": "rounds must be at most the stream's 20000 tasks, 1 per round, got 30000",
    "fit --data.ways 50": "data.ways must be at most the 20 classes of the validation split, got 50",
    "fit --data.shots 0": "data.shots must be an integer of at least 1, got 0",
    "fit --data.order sorted": "data.order must be one of iid, drift, got 'sorted'",
    "fit --evaluation.tasks 0": "evaluation.tasks must be an integer of at least 1, got 0",
    "fit --algorithm.geometry burg": "is not supported; these are",
    "fit --algorithm.domain box --algorithm.domain.lower 5 --algorithm.domain.upper 6": "outer start must lie in "
    "Box(lower=5.0, upper=6.0)",
    "fit --algorithm.domain ball": "algorithm.domain.radius must be given, got none",
    "fit --data images": "data.path must be given, got none",
    "fit --evaluation.every 0": "evaluation.every must be an integer of at least 1, got 0",
    "fit --checkpoint.every -1": "checkpoint.every must be an integer of at least 1, got -1",
    "fit --algorithm.hypergradient closed_form": "'ClosedForm' needs a closed form",
    "fit --algorithm null": "algorithm must be a name, or keys and values, got None",
    "fit --trainer.accelerator tpuu": "trainer: ",
    "fit --trainer.accelerator cpu --trainer.devices 2": "tasks_per_round must be a multiple of the 2 processes, got 1",
    "fit --output /dev/null/x": "got '/dev/null/x': Not a directory",
    "fit --config nowhere.yaml": "config file nowhere.yaml cannot be read: no such file",
    "watch": "watch: the following arguments are required: RUN_DIR",
    "watch nowhere": "nowhere must be a run directory, or have one below it, got none",
    "watch nowhere --every 0": "--every must be a positive number of seconds, got 0",
    "resume a --algorithm.lr=3": "got --algorithm: the other settings of a run decide its results and stay",
    "resume a --seed 3": "got --seed: the other settings of a run decide its results and stay",
    "resume a --config x.yaml": "got --config: the other settings of a run decide its results and stay",
    "resume a --data.path": "--data.path needs a value, got none",
    "compare --jobs 2": "compare: the following arguments are required: --config",
    "dashboard --porject x": "dashboard: unrecognized arguments: --porject x",
}


@pytest.mark.parametrize(("command", "message"), MISTAKES.items(), ids=MISTAKES)
def test_mistake_is_one_line_with_code_2_and_nothing_is_written(command, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(command.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("obbo: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [name for name in cli.COMMANDS if name != "fit"])
def test_help_of_a_command_has_flags_and_an_example_that_is_accepted(command, capsys):
    assert cli.main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: obbo {command} ")
    assert ("--trust" in text) == (command in cli.READERS)
    (example,) = re.findall(rf"^example: obbo ({command} .*)$", text, re.MULTILINE)
    assert cli.make_parser().parse_args(shlex.split(example)).command == command


def test_help_lists_the_commands_and_version_is_printed(capsys):
    assert cli.main([]) == cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n    {name}" in text for name in cli.COMMANDS)
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"\d+\.\d+.*\n", capsys.readouterr().out)


class RanOutOfDiskError(Exception):
    exit_code = 1


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("a\n  b"), 2, "obbo: a b"),
        (PermissionError(13, "Permission denied", "x.npz"), 2, "obbo: x.npz: Permission denied"),
        (MemoryError(), 2, "obbo: this machine has not enough memory for it"),
        (RanOutOfDiskError("full"), 1, "obbo: full"),
        (KeyError("x"), 2, "obbo: KeyError: 'x' (--debug shows where)"),
        (KeyboardInterrupt(), 130, "obbo: stopped by SIGINT"),
        (ValueError("\x1b[31mred"), 2, "obbo: \\x1b[31mred"),
        (ValueError("x" * 3000), 2, f"obbo: {'x' * 2000}…"),
    ],
)
def test_error_becomes_one_line_and_an_exit_code(error, code, line, monkeypatch, capsys):
    def fail(arguments):
        raise error

    monkeypatch.setattr("obbo_lightning.cli.watch.run", fail)
    assert cli.main(["watch", "x"]) == code
    assert capsys.readouterr().err == f"{line}\n"
    assert cli.main(["watch", "x", "--debug"]) == code
    assert ("in fail" in capsys.readouterr().err) == isinstance(error, Exception)


def test_debug_of_fit_shows_the_traceback(capsys):
    assert cli.main(["fit", "--rounds", "0", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err
