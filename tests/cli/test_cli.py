"""The command line as a user meets it: mistakes in process, signals in real processes."""

import random
import signal
import time
from pathlib import Path

import pytest
import yaml
from processes import Forked

from obbo_lightning import cli
from obbo_lightning.runs.directory import RunDirectory

MISTAKES = {
    "unknown command": (
        ["fitt"],
        f"command must be one of {', '.join(cli.COMMANDS)}, got 'fitt'; did you mean 'fit'?",
    ),
    "unknown key": (
        ["fit", "--algorithm.windw", "3"],
        "unknown key 'algorithm.windw' (value 3); did you mean 'algorithm.window'?",
    ),
    "unknown top key": (["fit", "--round", "3"], "unknown key 'round' (value 3); did you mean 'rounds'?"),
    "unknown trainer key": (
        ["fit", "--trainer.max_epoch", "3"],
        "unknown key 'trainer.max_epoch' (value 3); did you mean 'trainer.max_epochs'?",
    ),
    "unknown algorithm": (
        ["fit", "--algorithm", "obo"],
        "algorithm must be one of obbo, sobbo, sobow, oagd, adam, sgdm, maml, anil, or yours as package.module.Class "
        "or file.py:Class, got 'obo'; did you mean 'obbo'?",
    ),
    "unknown geometry": (
        ["fit", "--algorithm.geometry", "euclid"],
        "algorithm.geometry must be one of adaptive_diagonal, euclidean, negative_entropy, burg, or yours",
    ),
    "unknown data": (
        ["fit", "--data", "imagenet"],
        "data must be one of synthetic, fc100, images, examples, market, quadratic, follow, sources, forgetting, ",
    ),
    "window of adam": (
        ["fit", "--algorithm", "adam", "--algorithm.window", "3"],
        "unknown key 'algorithm.window' (value 3)",
    ),
    "wrong type": (["fit", "--algorithm.window", "ten"], "algorithm.window"),
    "wrong type of a float": (["fit", "--algorithm.lr", "fast"], "algorithm.lr"),
    "bad choice": (["fit", "--logger", "mlflow"], "logger"),
    "K": (["fit", "--algorithm.inner.steps", "0"], "algorithm.inner.steps must be an integer of at least 1, got 0"),
    "w": (["fit", "--algorithm.window", "0"], "algorithm.window must be an integer of at least 1, got 0"),
    "alpha": (["fit", "--algorithm.lr", "0"], "algorithm.lr must be a positive finite number, got 0"),
    "rho": (["fit", "--algorithm.geometry.rho", "0"], "algorithm.geometry.rho must be a positive finite number, got 0"),
    "rounds": (["fit", "--rounds", "0"], "rounds must be an integer of at least 1, got 0"),
    "too many rounds": (
        ["fit", "--rounds", "30000"],
        "rounds must be at most the stream's 20000 tasks, 1 a round, got 30000",
    ),
    "other data": (["fit", "--data.path", "x"], "(data is synthetic; --data NAME chooses another)"),
    "ways": (["fit", "--data.ways", "50"], "data.ways must be at most the 20 classes of the validation split, got 50"),
    "shots": (["fit", "--data.shots", "0"], "data.shots must be an integer of at least 1, got 0"),
    "order": (["fit", "--data.order", "sorted"], "data.order must be one of iid, drift, got 'sorted'"),
    "tasks": (["fit", "--evaluation.tasks", "0"], "evaluation.tasks must be an integer of at least 1, got 0"),
    "filters": (
        ["fit", "--problem.network.filters", "0"],
        "problem.network.filters must be an integer of at least 1, got 0",
    ),
    "triple": (["fit", "--algorithm.geometry", "burg"], "is not supported; these are"),
    "start outside": (
        ["fit", "--algorithm.domain", "box", "--algorithm.domain.lower", "5", "--algorithm.domain.upper", "6"],
        "outer start must lie in Box(lower=5.0, upper=6.0)",
    ),
    "missing setting": (["fit", "--algorithm.domain", "ball"], "algorithm.domain.radius"),
    "regret window": (["fit", "--regret_window", "0"], "regret_window must be an integer of at least 1, got 0"),
    "evaluation": (["fit", "--evaluation.every", "0"], "evaluation.every must be an integer of at least 1, got 0"),
    "checkpoint": (["fit", "--checkpoint.every", "-1"], "checkpoint.every must be an integer of at least 1, got -1"),
    "no closed form": (["fit", "--algorithm.hypergradient", "closed_form"], "'ClosedForm' needs a closed form"),
    "null": (["fit", "--seed", "null"], "seed must have a value, got null"),
    "null part": (["fit", "--algorithm", "null"], "algorithm must be a name, or keys and values, got None"),
    "null output": (["fit", "--output", "null"], "output must have a value, got null"),
    "empty": (["fit", "--output="], "--output needs a value, got ''"),
    "folder": (["fit", "--experiment", "../up"], "experiment must be a plain folder name, got '../up'"),
    "not YAML": (["fit", "--algorithm.lr", "{a: 1"], "--algorithm.lr must be a YAML value, got '{a: 1'"),
    "nan": (["fit", "--algorithm.lr", "nan"], "algorithm.lr must be a positive finite number, got nan"),
    "section": (["fit", "--trainer", "3"], "trainer must be keys and values, got 3"),
    "epochs": (
        ["fit", "--trainer.max_epochs", "3"],
        "trainer.max_epochs cannot be set for an online run, got 3",
    ),
    "accelerator": (["fit", "--trainer.accelerator", "tpuu"], "trainer: "),
    "devices": (
        ["fit", "--trainer.accelerator", "cpu", "--trainer.devices", "2"],
        "tasks_per_round must be a multiple of the 2 processes, got 1",
    ),
    "callback": (["fit", "--trainer.callbacks", "[NoSuchThing]"], "trainer.callbacks"),
    "upper case": (["fit", "--algorithm", "OBBO"], "did you mean 'obbo'?"),
    "file for output": (
        ["fit", "--output", "/dev/null/x"],
        "got '/dev/null/x': Not a directory",
    ),
    "missing file": (
        ["fit", "--config", "nowhere.yaml"],
        "config file nowhere.yaml cannot be read: no such file",
    ),
    "no value": (["fit", "--rounds"], "--rounds needs a value, got none"),
    "no dashes": (["fit", "rounds", "3"], "flags begin with --, got 'rounds'"),
    "no run": (["resume", "nowhere"], "nowhere is no run directory"),
    "no directory": (["resume"], "resume: the following arguments are required: RUN_DIR"),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line_with_code_2_before_any_compute(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("obbo: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("algorithm: {windw: 3}", "unknown key 'algorithm.windw' (value 3); did you mean 'algorithm.window'?"),
        ("rounds: [3]", "rounds"),
        ("- a\n- b", "must hold keys and values, got list"),
        ("a: [", "is not valid YAML"),
        ("per_algorithm: {obbo: {windw: 1}}", "per_algorithm.obbo must be of what obbo takes"),
        ("per_algorithm: {sobwo: {lr: 1}}", "algorithm must be one of"),
        ("per_algorithm: 3", "per_algorithm must be keys and values, got 3"),
        ("a: &x [*x]", "contains itself"),
    ],
)
def test_a_mistake_in_a_file_is_one_line_too(text, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text(text)
    assert cli.main(["fit", "--config", "bad.yaml"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def printed_config(arguments, capsys):
    assert cli.main(["fit", *arguments, "--print_config"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_flags_win_over_files_and_files_over_the_default(capsys, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("rounds: 7\nalgorithm: {window: 25}\n")
    found = printed_config(["--config", str(file), "--algorithm.lr", "1e-4", "--seed=3"], capsys)
    assert (found["rounds"], found["seed"]) == (7, 3)
    assert (found["algorithm"]["window"], found["algorithm"]["lr"]) == (25, 1e-4)
    assert found["algorithm"]["geometry"]["name"] == "adaptive_diagonal"


def test_another_algorithm_keeps_the_matched_settings(capsys):
    found = printed_config(["--algorithm", "sobow", "--algorithm.window", "4"], capsys)["algorithm"]
    assert (found["name"], found["window"], found["discount"]) == ("sobow", 4, 1.0)
    assert "geometry" not in found
    assert found["inner"]["steps"] == 5
    found = printed_config(["--algorithm", "sobbo"], capsys)["algorithm"]
    assert found["hypergradient"]["name"] == "stochastic_neumann"
    assert found["inner"]["batch_size"] == 20


def test_what_print_config_prints_is_a_config(capsys, tmp_path):
    found = printed_config(["--algorithm", "oagd", "--data.order", "drift"], capsys)
    file = tmp_path / "again.yaml"
    file.write_text(yaml.safe_dump(found))
    assert printed_config(["--config", str(file)], capsys) == found


def test_an_empty_file_changes_nothing(capsys, tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    assert printed_config(["--config", str(tmp_path / "empty.yaml")], capsys) == printed_config([], capsys)


def test_small_courtesies(capsys):
    assert cli.main(["--version"]) == 0
    assert cli.main(["resume", "--help"]) == 0
    assert "--checkpoint FILE" in capsys.readouterr().out


def test_help_names_the_flags_with_their_meaning(capsys):
    assert cli.main(["--help"]) == 0
    assert "resume RUN_DIR" in capsys.readouterr().out
    assert cli.main(["fit", "--algorithm", "sobow", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for flag in (
        "--algorithm.window",
        "--algorithm.discount",
        "--algorithm.inner.steps",
        "--data.order",
        "--trainer.precision",
        "--rounds",
    ):
        assert flag in text
    assert "w, window length" in text
    assert "--algorithm.geometry.rho" not in text
    assert "(type: int, default: 200)" in text  # what this very command would use


RUN = [
    "--rounds", "120", "--problem.network.filters", "2", "--data.image_size", "16", "--evaluation.tasks", "2",
    "--checkpoint.every", "5", "--algorithm.inner.steps", "1", "--trainer.accelerator", "cpu",
]  # fmt: skip


def wait_for_round(directory, count, process):
    for _ in range(6000):
        for checkpoint in directory.glob("runs/*/*/checkpoints/round-*.ckpt"):
            if int(checkpoint.stem.partition("-")[2]) >= count:
                return checkpoint.parents[1]
        assert process.poll() is None, process.said()
        time.sleep(0.01)
    raise AssertionError("no checkpoint appeared")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed")
    assert cli.main(["fit", *RUN, "--output", str(directory)]) == 0
    (path,) = directory.glob("default/obbo-*")
    return RunDirectory(path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the fixed point of the hypergradient:RuntimeWarning")
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_stopped_process_resumes_bit_for_bit(signum, code, tmp_path, undisturbed):
    process = Forked(tmp_path, "fit", *RUN)
    path = wait_for_round(tmp_path, random.Random(int(signum)).randint(5, 100), process)
    process.send_signal(signum)
    assert process.wait() == code
    if code > 0:
        assert f"resume {path.relative_to(tmp_path)}" in process.said()
    assert not RunDirectory(path).finished
    assert cli.main(["resume", str(path)]) == 0
    assert RunDirectory(path).metrics.read_bytes() == undisturbed.metrics.read_bytes()
