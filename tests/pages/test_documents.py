"""The documents: their code runs, their commands are accepted, their links and versions are right."""

import glob
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
import yaml
from matplotlib.figure import Figure
from small_runs import config_of, fit_images, write_image_classes

import obbo_lightning
from obbo_lightning import cli
from obbo_lightning.config import registry
from obbo_lightning.config.parse import complete_config, parse_arguments

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
HOW_TOS = [document for document in DOCUMENTS if document.parent.name == "howto"]
OTHERS = [document for document in DOCUMENTS if document not in HOW_TOS]
BLOCK = re.compile(r"```(\w+)\n(.*?)```", flags=re.DOTALL)
SAVE = re.compile(r"Save this as\s`([\w.]+)`")
SMALL = ["--rounds", "3", "--evaluation.tasks", "2", "--evaluation.baselines", "false"]


def blocks_of(text, *languages):
    return [block for language, block in BLOCK.findall(text) if language in languages]


def commands_of(block):
    """Return the arguments of each command of the package in a block of shell code."""
    lines = block.replace("\\\n", " ").splitlines()
    found = (shlex.split(line.partition("obbo_lightning ")[2], comments=True) for line in lines)
    return [words for words in found if words]


def execute(code, name, namespace=None):
    torch.manual_seed(0)
    exec(compile(code, name, "exec"), {"__name__": "document"} if namespace is None else namespace)


@pytest.fixture
def example_folder(tmp_path, monkeypatch):
    """Work in a folder with the files of examples/; restore registered names and imported examples afterwards."""
    for file in (ROOT / "examples").glob("*.*"):
        shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "KINDS", {k: v._replace(names=dict(v.names)) for k, v in registry.KINDS.items()})
    yield
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint")
@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # of Lightning's own loader
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("document", OTHERS, ids=lambda path: path.name)
def test_python_blocks_run(document, capsys, example_folder):
    if document.name == "predicting.md":  # what the commands of the page make, from less data
        run = fit_images(Path(), write_image_classes(Path("characters"), range(1, 11), 6))
        assert cli.main(["export", str(run), "export"]) == 0
        write_image_classes(Path("support"), (11, 12, 13), 2)
        write_image_classes(Path("query"), (11, 12, 13), 1)
    for block in blocks_of(document.read_text(), "python"):
        execute(block, document.name)
    printed = capsys.readouterr().out
    if document.name == "lightning.md":
        assert "the best weight is" in printed
        assert "test/explained" in printed
        assert Path("best/last.sha256").is_file()
    if document.name == "predicting.md":
        assert printed.splitlines()[-1].count("stripes1") == 3


def make_small(words):
    """Return a command with globs expanded, made short, and as a plan only where it starts many runs."""
    words = [match for word in words for match in (sorted(glob.glob(word)) or [word])]
    if words[0] == "fit":
        return [*words, *SMALL]
    if words[0] == "resume":
        return [*words[:-1], "4"]
    return [*words, "--dry_run"] if words[0] in ("compare", "tune") else words


@pytest.mark.filterwarnings("ignore:.*LeafSpec")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("page", HOW_TOS, ids=lambda path: path.stem)
def test_how_to_works_from_first_line_to_last(page, example_folder, capsys):
    text, count = page.read_text(), 0
    for match in BLOCK.finditer(text):
        language, block = match.groups()
        for name in SAVE.findall(text[: match.start()].rpartition("```")[2])[-1:]:
            Path(name).write_text(block)
        if language in ("python", "py") and "plot_comparison" not in block:  # it would need the runs of a comparison
            execute(block, page.name)
        for words in commands_of(block) if language == "bash" else ():
            if words[0] != "report":  # it would need the runs of a comparison, too
                assert cli.main(make_small(words)) == 0, (words, capsys.readouterr().err)
                count += 1
    assert count or page.stem == "module"


def test_start_pages_link_to_every_how_to():
    for document in ("README.md", "docs/index.md"):
        assert all(f"howto/{page.name})" in (ROOT / document).read_text() for page in HOW_TOS), document


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_notebook_runs_and_is_committed_without_outputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "docs" / "tour.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names = {"__name__": "tour"}
    for cell in cells:
        assert (cell["outputs"], cell["execution_count"]) == ([], None)
        lines = [line for line in "".join(cell["source"]).splitlines() if not line.startswith("%")]
        if lines[-1].startswith("obbo.plot"):  # the notebook shows its value
            assert isinstance(eval("\n".join(lines), names), Figure)
        else:
            execute("\n".join(lines), "tour.ipynb", names)
    plt.close("all")
    assert names["paths"]["multiplies"][-1] > 10 * names["paths"]["adds"][-1]


def test_pages_show_the_files_that_they_name():
    page = (ROOT / "docs" / "extending.md").read_text()
    shown = re.findall(r"<!-- (examples/\w+\.py) -->\n```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(shown) == 2
    for name, block in shown:
        assert (ROOT / name).read_text() == block, name
    (script,) = blocks_of((ROOT / "docs" / "lightning.md").read_text(), "python")
    assert (ROOT / "examples" / "with_a_trainer.py").read_text().endswith(script)
    assert len(script.splitlines()) <= 30


def test_example_of_the_readme_learns_in_at_most_16_lines(capsys):
    _, example = blocks_of(README, "python")
    assert len(example.splitlines()) <= 16
    execute(example, "README.md")
    weights = [float(w) for w in re.findall(r"weight ([\d.]+)", capsys.readouterr().out)]
    assert len(weights) == 50
    assert weights[-1] > 2 * weights[0]
    commands = "".join(blocks_of(README, "bash"))
    assert "pip install -e . && python -m obbo_lightning fit\n" in commands
    assert "pip install -e '.[dev]' && python -m pytest\n" in commands  # .ci/run takes it from here


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_point_to_files(document):
    targets = re.findall(r"\]\(([^)#:]+)\)", document.read_text())
    assert targets or document.name != "README.md"
    for target in targets:
        assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", OTHERS, ids=lambda path: path.name)
def test_fit_commands_are_accepted(document, monkeypatch):
    monkeypatch.chdir(ROOT / "examples")
    for block in blocks_of(document.read_text(), "bash"):
        for words in (words[1:] for words in commands_of(block) if words[0] == "fit"):
            config, switches = parse_arguments(words)
            complete_config(config)
            assert switches <= {"help", "print_config"}, words


def test_shipped_configs_can_be_built_and_have_a_comment():
    from obbo_lightning.training.run import build

    paths = sorted((ROOT / "configs").glob("*.yaml"))
    assert {"default", "fc100", "market", "quadratic"} <= {path.stem for path in paths}
    for path in paths:
        config = config_of("--config", path)
        if config["data"]["name"] != "fc100":  # its data files are not in the repository
            build(config)
        assert path.read_text().startswith("#"), path


def test_version_is_that_of_citation_and_changelog():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    newest = re.findall(r"^## (\d[\w.]*)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[0]
    assert citation == newest == obbo_lightning.__version__
