"""What the documents say is executed."""

import re
from pathlib import Path

import pytest
import torch

from obbo_lightning import ALGORITHMS

ROOT = Path(__file__).parents[2]
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


def test_the_core_imports_nothing_that_the_design_forbids():
    forbidden = re.compile(r"^\s*(import|from) (lightning|wandb|logging|rich)", flags=re.MULTILINE)
    for part in ("core", "algorithms", "problems", "streams"):
        for source in (ROOT / "obbo_lightning" / part).rglob("*.py"):
            assert not forbidden.search(source.read_text()), source


def test_every_config_is_complete_and_commented():
    from obbo_lightning.settings.layers import read_layers
    from obbo_lightning.training.run import build, complete

    for path in sorted(set((ROOT / "configs").glob("*.yaml")) - {ROOT / "configs" / "slurm.yaml"}):
        settings, _ = read_layers(["--config", str(path)])
        settings = complete(settings)
        if settings["data"]["name"] != "fc100":  # whose files a clone does not have
            build(settings)
        assert path.read_text().startswith("#"), path


def test_flags_in_documents_exist():
    from obbo_lightning.settings.layers import read_layers
    from obbo_lightning.settings.schema import make_parser

    for document in DOCUMENTS:
        for line in document.read_text().splitlines():
            if "obbo_lightning fit" in line:
                flags = line.partition("obbo_lightning fit")[2].split("#")[0].strip("`| ").split()
                settings, switches = read_layers(flags)
                assert make_parser(settings) is not None
                assert switches <= {"help", "print_config"}
