"""The site builds without warnings and loads nothing from elsewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    # --quiet would hide the warnings from --strict
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r"""<(?:script|link|img|iframe)[^>]+(?:src|href)=["'](https?://[^"']+)""", page.read_text())
        assert not loaded, (page, loaded)
