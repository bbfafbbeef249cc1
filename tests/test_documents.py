"""What the documents say is executed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from obbo_lightning import ALGORITHMS, cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def code_blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_python_blocks_run(document, capsys, monkeypatch):
    monkeypatch.setattr("obbo_lightning.algorithms.registry.ALGORITHMS", dict(ALGORITHMS))
    for block in code_blocks(document.read_text(), "python"):
        torch.manual_seed(0)
        exec(compile(block, document.name, "exec"), {"__name__": "document"})


def test_the_library_example_does_what_the_readme_says_in_at_most_15_lines(capsys):
    (example,) = code_blocks(README, "python")
    assert len(example.splitlines()) <= 15
    torch.manual_seed(0)
    exec(compile(example, "README.md", "exec"), {"__name__": "document"})
    weights = [float(w) for w in re.findall(r"weight ([\d.]+)", capsys.readouterr().out)]
    assert len(weights) == 50
    assert weights[-1] > 2 * weights[0]


def test_the_readme_shows_the_two_commands():
    commands = "".join(code_blocks(README, "bash"))
    assert "pip install -e . && python -m obbo_lightning fit\n" in commands
    assert "pip install -e '.[dev]' && python -m pytest\n" in commands


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
        assert (document.parent / target).exists(), target


def test_fit_prints_a_row_for_every_algorithm(capsys):
    assert cli.main(["fit", "--rounds", "3", "--window", "2"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ALGORITHMS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "--rounds", "0"], "rounds must be an integer of at least 1, got 0"),
        (["fit", "--window", "0"], "window must be an integer of at least 1, got 0"),
        (["fit", "--condition_number", "0.5"], "condition_number must be at least 1"),
        (["fit", "--round", "3"], "unrecognized arguments: --round"),
        ([], "required: command"),
    ],
)
def test_mistakes_end_with_code_2_and_no_traceback(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_the_module_is_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "obbo_lightning", "fit", "--rounds", "2", "--window", "1"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "exact" in done.stdout
    assert done.stderr == ""


def test_the_core_imports_nothing_that_the_design_forbids():
    forbidden = re.compile(r"^\s*(import|from) (lightning|wandb|logging|rich)", flags=re.MULTILINE)
    for part in ("core", "algorithms", "problems", "streams"):
        for source in (ROOT / "obbo_lightning" / part).rglob("*.py"):
            assert not forbidden.search(source.read_text()), source
