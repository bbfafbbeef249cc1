"""Every how-to is followed from its first line to its last: files that it says to save, blocks, commands, in small."""

import glob
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch

from obbo_lightning import cli, parts

ROOT = Path(__file__).parents[2]
HOW_TOS = sorted((ROOT / "docs" / "howto").glob("*.md"))
BLOCK = re.compile(r"```(\w+)\n(.*?)```", flags=re.DOTALL)
SAVE = re.compile(r"Save this as\s`([\w.]+)`")
SMALL = ["--rounds", "3", "--evaluation.tasks", "2", "--evaluation.baselines", "false"]


@pytest.fixture
def as_a_reader(tmp_path, monkeypatch):
    """A folder with what is in examples/, where one can import what one has saved."""
    for file in (ROOT / "examples").glob("*.*"):
        shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(parts, "KINDS", {k: v._replace(names=dict(v.names)) for k, v in parts.KINDS.items()})
    yield
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


def in_small(words):
    """A command as it is written, its shell's globs and its size apart."""
    words = [match for word in words for match in (sorted(glob.glob(word)) or [word])]
    if words[0] == "fit":
        return [*words, *SMALL]
    if words[0] == "resume":
        return [*words[:-1], "4"]
    return [*words, "--dry_run"] if words[0] in ("compare", "tune") else words


@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # of Lightning's own loader
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("page", HOW_TOS, ids=lambda p: p.stem)
def test_a_how_to_works_from_its_first_line_to_its_last(page, as_a_reader, capsys):
    text = page.read_text()
    played = 0
    for match in BLOCK.finditer(text):
        language, block = match.groups()
        for name in SAVE.findall(text[: match.start()].rpartition("```")[2])[-1:]:
            Path(name).write_text(block)
        if language in ("python", "py") and "plot_comparison" not in block:  # which has runs of a whole grid to show
            torch.manual_seed(0)
            exec(compile(block, page.name, "exec"), {"__name__": "document"})
        for line in block.replace("\\\n", " ").splitlines() if language == "bash" else ():
            words = shlex.split(line.partition("obbo_lightning ")[2], comments=True)
            if not words or words[0] in (
                "report",
                "leaderboard",
            ):  # another program's, or of runs of a grid that is not played here
                continue
            assert cli.main(in_small(words)) == 0, (line, capsys.readouterr().err)
            played += 1
    assert played or page.stem == "module"


def test_there_are_five_how_tos_and_the_start_page_leads_to_each():
    assert len(HOW_TOS) == 5
    for document in ("README.md", "docs/index.md"):
        text = (ROOT / document).read_text()
        assert all(f"howto/{page.name})" in text for page in HOW_TOS), document
