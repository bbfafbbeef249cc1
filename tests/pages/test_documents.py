"""What the documents say is executed."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from obbo_lightning import cli, parts

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def code_blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture
def beside_the_examples(tmp_path, monkeypatch):
    """An empty folder to write to, with the files of examples/ to import; and names as they were afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(parts, "KINDS", {k: v._replace(names=dict(v.names)) for k, v in parts.KINDS.items()})
    yield
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


def make_an_export():
    """What the page on predictions has made with its commands, in small."""
    from served import played, write_classes

    data = write_classes(Path("characters"), range(1, 11), 6)
    flags = ["--data", "images", "--data.path", str(data), "--data.image_size", "16", "--data.ways", "2"]
    run = played(Path(), *flags, "--data.shots", "3", "--data.queries", "3", "--problem.network.filters", "2")
    assert cli.main(["export", str(run), "export"]) == 0
    write_classes(Path("support"), (11, 12, 13), 2)
    write_classes(Path("query"), (11, 12, 13), 1)


@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint")
@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # of Lightning's own loader
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d.parent.name != "howto"], ids=lambda p: p.name)
def test_python_blocks_run(document, capsys, beside_the_examples):
    if document.name == "predicting.md":
        make_an_export()
    for block in code_blocks(document.read_text(), "python"):
        torch.manual_seed(0)
        exec(compile(block, document.name, "exec"), {"__name__": "document"})
    if document.name == "lightning.md":
        printed = capsys.readouterr().out
        assert "the best weight is" in printed
        assert "test/explained" in printed
        assert Path("best/last.sha256").is_file()
    if document.name == "predicting.md":
        assert capsys.readouterr().out.splitlines()[-1].count("stripes1") == 3


def test_pages_show_the_files_that_they_name():
    page = (ROOT / "docs" / "extending.md").read_text()
    shown = re.findall(r"<!-- (examples/\w+\.py) -->\n```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(shown) == 2
    for name, block in shown:
        assert (ROOT / name).read_text() == block, name
    (script,) = code_blocks((ROOT / "docs" / "lightning.md").read_text(), "python")
    assert (ROOT / "examples" / "with_a_trainer.py").read_text().endswith(script)
    assert len(script.splitlines()) <= 30


def test_the_library_example_does_what_the_readme_says_in_at_most_15_lines(capsys):
    _, example = code_blocks(README, "python")
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
    targets = re.findall(r"\]\(([^)#:]+)\)", document.read_text())
    assert targets or document.name != "README.md"
    for target in targets:
        assert (document.parent / target).exists(), target


def test_every_config_is_complete_and_commented():
    from obbo_lightning.settings.layers import read_layers
    from obbo_lightning.settings.schema import complete
    from obbo_lightning.training.run import build

    paths = sorted((ROOT / "configs").glob("*.yaml"))
    assert {"default", "fc100", "market", "quadratic"} <= {path.stem for path in paths}
    for path in paths:
        settings, _ = read_layers(["--config", str(path)])
        settings = complete(settings)
        if settings["data"]["name"] != "fc100":  # whose files a clone does not have
            build(settings)
        assert path.read_text().startswith("#"), path


def commands():
    """Every `fit` of the documents, with its document; how-tos are played by their own test."""
    for document in (one for one in DOCUMENTS if one.parent.name != "howto"):
        for block in code_blocks(document.read_text(), "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                if "obbo_lightning fit" in line:
                    words = shlex.split(line.partition("obbo_lightning fit")[2], comments=True)
                    yield pytest.param(words, id=f"{document.name}: {' '.join(words)[:60]}")


@pytest.mark.parametrize("words", list(commands()))
def test_a_command_of_the_documents_is_accepted(words, monkeypatch):
    """Keys, types and names, as `fit` checks them before it reads any data."""
    from obbo_lightning.settings.layers import read_layers
    from obbo_lightning.settings.schema import complete

    monkeypatch.chdir(ROOT / "examples")
    settings, switches = read_layers(words)
    complete(settings)
    assert switches <= {"help", "print_config"}


def predictions():
    """Every `predict` of a market run in the documents."""
    for block in code_blocks((ROOT / "docs" / "experiments" / "market.md").read_text(), "bash"):
        for line in block.splitlines():
            if "obbo_lightning predict" in line:
                yield shlex.split(line.partition("obbo_lightning predict")[2], comments=True)


def test_forecasts_of_the_documents_are_accepted():
    from obbo_lightning.cli.flags import Flags

    assert len(list(predictions())) == 3
    for words in predictions():
        assert Flags("predict", "market").parse_args(words).directory == "RUN_DIR"


def test_a_command_with_a_mistake_would_be_noticed():
    from obbo_lightning.settings.layers import read_layers
    from obbo_lightning.settings.schema import complete

    assert len(list(commands())) > 25
    with pytest.raises(ValueError, match=r"problem\.network\.norms"):
        complete(read_layers(["--problem.network.norms", "group"])[0])
