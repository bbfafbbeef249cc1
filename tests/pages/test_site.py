"""The site: it builds without a warning, and loads nothing from elsewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def pages(nav):
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from pages(value) if isinstance(value, list) else [value]


def test_every_page_of_the_menu_is_there():
    text = (ROOT / "mkdocs.yml").read_text()
    named = list(pages(yaml.safe_load(text)["nav"]))
    assert len(named) == len(set(named)) > 35
    made = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
    for page in named:
        assert (ROOT / made[page] if page in made else ROOT / "docs" / page).is_file(), page


@pytest.mark.slow
def test_the_site_builds_strict_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r"""<(?:script|link|img|iframe)[^>]+(?:src|href)=["'](https?://[^"']+)""", page.read_text())
        assert not loaded, (page, loaded)
