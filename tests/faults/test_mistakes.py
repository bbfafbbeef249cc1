"""Every mistake is refused in one line with exit code 2, before anything is allocated or written."""

import os
import random
import shutil
from pathlib import Path

import polars as pl
import pytest

from obbo_lightning import cli
from obbo_lightning.core import validation
from obbo_lightning.inference.inputs import ImageInputs
from obbo_lightning.inference.predictions import read_query
from obbo_lightning.streams import market

QUADRATIC = ["--config", "quadratic"]
WORDS = ["", "often", "[1, 2]", "{a: 1}", "null", "-", "!!binary aGk=", "2026-01-01", "\x1b[2J", "[[[]]]", "=1+1"]
NUMBERS = ["0", "-1", "-1000000000000000000000", "1e400", "nan", "-inf", "true", "0.5", "1e-400"]
HUGE = ["1000000000000", "99999999999999999999999999"]
# Values that a key refuses, besides words.
INVALID = {
    **dict.fromkeys(("rounds", "tasks_per_round", "regret_window", "evaluation.every"), NUMBERS[:7]),
    **dict.fromkeys(("evaluation.tasks", "algorithm.window"), NUMBERS[:7] + HUGE),
    "checkpoint.every": NUMBERS[:7],
    "workers": ["-1", "true", "0.5", *HUGE],
    "threads": ["0", "-3", "0.5"],
    "data.condition_number": ["0", "-1", "0.5"],
    "data.outer_dim": ["0", "-1", "0.5", *HUGE],
    "data.inner_dim": ["0", "-1", "0.5", *HUGE],
    "data.radius": ["0", "-1", "nan", "inf"],
    "algorithm.lr": ["0", "-1", "nan", "inf"],
    "algorithm.clip": ["0", "-1", "nan"],
    "algorithm.inner.steps": ["0", "-1", "0.5"],
    "algorithm.inner.lr": ["0", "-1", "nan", "inf"],
    "several_tasks": ["maybe", "3"],
    "on_nonfinite": ["ignore", "3"],
    "logger": ["mlflow", "3"],
    "trainer.precision": ["16-mixed", "bf16-true", "7"],
    "trainer.max_epochs": ["3"],
    "trainer.devices": ["0", "-7", "99"],
    "trainer.callbacks": ["Nothing", "[3]"],
    "experiment": ["../x", "a/b", "..", "x" * 200],
    "algorithm": ["obo", "nowhere.Class", "nowhere.py:Class", "os.system"],
    "data": ["quadratc", "nowhere.Class", "nowhere.py:Class", "os.system"],
    "algorithm.geometry": ["flat", "os.path.join"],
}
# Keys that take words.
FREE = {"experiment", "data", "algorithm", "algorithm.lr", "trainer.callbacks", "trainer.devices", "trainer.max_epochs"}
FREE |= {"algorithm.clip", "algorithm.geometry", "trainer.precision", "logger", "data.condition_number"}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def invalid_commands(count):
    """Yield command lines with one mistake each, among flags that are right."""
    rng = random.Random(0)
    cases = [(key, value) for key, values in INVALID.items() for value in values]
    cases += [(key, word) for key in INVALID if key not in FREE for word in WORDS if word != ""]
    cases += [(rng.choice(["", "algorithm.", "data.", "evaluation."]) + f"x{i}", "1") for i in range(60)]
    right = [("seed", "3"), ("rounds", "5"), ("on_nonfinite", "skip"), ("checkpoint.every", "7")]
    right += [("algorithm", "sobow")]
    for i in range(count):
        key, value = cases[i % len(cases)]
        others = [pair for pair in rng.sample(right, rng.randrange(3)) if not key.startswith(pair[0])]
        flags = [[f"--{name}", text] for name, text in [*others, (key, value)]]
        rng.shuffle(flags)
        yield [*QUADRATIC, *(word for flag in flags for word in flag)]


def require_refused(words, capsys, folder):
    before = sorted(folder.rglob("*"))
    code = cli.main(words)
    printed = capsys.readouterr()
    assert code == 2, (words, code, printed)
    assert printed.err.startswith("obbo: "), (words, printed)
    assert printed.err.count("\n") == 1, (words, printed)
    assert "\x1b" not in printed.err, words
    assert "Traceback" not in printed.err, words
    assert sorted(folder.rglob("*")) == before, words
    return printed.err


def test_500_random_mistakes_are_one_line_each(tmp_path, capsys):
    commands = list(invalid_commands(500))
    assert len({tuple(words) for words in commands}) > 300
    for words in commands:
        require_refused(["fit", *words], capsys, tmp_path)


SIZES = {
    "window": (["--algorithm.window", "1000000000"], "algorithm.window"),
    "regret window": ([*QUADRATIC, "--regret_window", "1000000000"], "regret_window"),
    "shots": (["--data.shots", "100000000"], "data.shots"),
    "image size": (["--data.image_size", "100000"], "data.image_size"),
    "tasks of a round": ([*QUADRATIC, "--tasks_per_round", "1000000000"], "tasks_per_round"),
    "evaluation": ([*QUADRATIC, "--evaluation.tasks", "1000000000"], "evaluation.tasks"),
    "scaled images": (["--data", "images", "--data.path", "x", "--data.image_size", "1000000"], "data.image_size"),
    "dimension": ([*QUADRATIC, "--data.inner_dim", "1000000"], "inner_dim"),
}


def test_the_prices_of_all_events_are_counted_before_they_are_cut(monkeypatch):
    def never(*arguments, **options):
        raise AssertionError("allocated")

    monkeypatch.setattr(validation, "available_memory", lambda: 10**7)
    for name in ("simulate_market", "_cut_events", "training_mask"):
        monkeypatch.setattr(market, name, never)
    with pytest.raises(ValueError, match=r"events × \(data\.subset .* must fit into the memory of this machine"):
        market.MarketStream(subset=4000)
    monkeypatch.setattr(market, "training_mask", lambda *given: None)
    events = pl.DataFrame({"ticker": ["A"] * 1000})
    monkeypatch.setattr(market, "read_prices", lambda *given: None)
    monkeypatch.setattr(market, "detect_events", lambda *given: events)
    monkeypatch.setattr(market, "same_clock", lambda *given: given)
    with pytest.raises(ValueError, match=r"events × \(data\.subset .* must fit into the memory of this machine"):
        market.MarketStream("prices.csv", subset=4000)


def test_a_configuration_has_a_largest_length(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("obbo_lightning.config.parse.MAX_BYTES", 10_000)
    Path("x.yaml").write_text("#" * 20_000 + "\n")
    error = require_refused(["fit", "--config", "x.yaml"], capsys, tmp_path)
    assert "must have at most 10000 bytes, got 20001" in error


@pytest.mark.parametrize(("words", "key"), SIZES.values(), ids=SIZES.keys())
def test_sizes_that_no_memory_holds_are_refused_before_they_are_allocated(words, key, tmp_path, capsys):
    error = require_refused(["fit", *words], capsys, tmp_path)
    assert key in error
    assert "must fit into the memory of this machine" in error


def test_an_alias_bomb_is_counted_and_not_expanded(tmp_path, capsys):
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 6)]  # 9⁶ values
    Path("bomb.yaml").write_text("\n".join(lines) + "\n")
    shutil.copytree(tmp_path, tmp_path / "run")
    (tmp_path / "run" / "bomb.yaml").rename(tmp_path / "run" / "config.yaml")
    assert "bomb.yaml must hold at most" in require_refused(["fit", "--config", "bomb.yaml"], capsys, tmp_path)
    assert "config.yaml cannot be read" in require_refused(["resume", "run"], capsys, tmp_path)
    for command in ("validate", "report"):
        require_refused([command, "run"], capsys, tmp_path)
    require_refused(["predict", "run", "--query", "x"], capsys, tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        ["images", "--data.path", "images"],
        ["images", "--data.path", "pipe.npz"],
        ["examples", "--data.path", "pipe.npz"],
        ["sources", "--data.path", "pipe.npz"],
        ["market", "--data.prices", "pipe.csv"],
        ["forgetting", "--data.csv", "pipe.csv", "--data.target", "y"],
    ],
)
def test_a_pipe_is_not_waited_for(words, tmp_path, capsys):
    for name in ("a", "b", "c"):
        Path("images", name).mkdir(parents=True)
        os.mkfifo(Path("images", name, "x.png"))
    Path("run").mkdir()
    for name in ("pipe.npz", "pipe.csv", "pipe.yaml", "run/config.yaml"):
        os.mkfifo(name)
    assert words[2] in require_refused(["fit", "--data", *words], capsys, tmp_path)
    require_refused(["fit", "--config", "pipe.yaml"], capsys, tmp_path)
    for name in ("pipe.yaml", "run"):
        require_refused(["resume", name], capsys, tmp_path)
    with pytest.raises(ValueError, match="--query must be a folder of images or an npz file that exists"):
        read_query(Path("pipe.npz"), object.__new__(ImageInputs), set())


def test_binary_and_unreadable_files_are_named(tmp_path, capsys):
    Path("x.yaml").write_bytes(os.urandom(100) + b"\xff\xfe")
    Path("x.npz").write_bytes(os.urandom(100))
    Path("x.csv").write_bytes(b"\xff\xfe\x00" + os.urandom(100))
    Path("run").mkdir()
    Path("run", "config.yaml").write_bytes(b"\xff\xfe")
    for words, name in (
        (["fit", "--config", "x.yaml"], "x.yaml"),
        (["fit", "--data", "images", "--data.path", "x.npz"], "x.npz"),
        (["fit", "--data", "examples", "--data.path", "x.csv"], "x.csv"),
        (["resume", "run"], "run"),
        (["compare", "--config", "x.yaml"], "x.yaml"),
    ):
        assert name in require_refused(words, capsys, tmp_path)
