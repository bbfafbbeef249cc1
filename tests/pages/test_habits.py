"""What stands in several places is the same everywhere."""

import re
from pathlib import Path

import yaml

import obbo_lightning

ROOT = Path(__file__).parents[2]


def test_the_version_is_that_of_the_citation_and_of_the_changelog():
    version = obbo_lightning.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    newest = re.findall(r"^## (\d[\d.]*)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[0]
    assert newest == version


def test_the_workflow_tries_every_python_that_is_allowed_and_the_lowest_versions():
    ci = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert ci["jobs"]["tests"]["strategy"]["matrix"]["python"] == ["3.10", "3.11", "3.12", "3.13"]
    assert any(step.get("run") == "bash .ci/run" for step in ci["jobs"]["whole"]["steps"])
    assert any("lowest" in step.get("run", "") for step in ci["jobs"]["lowest"]["steps"])
    assert 'requires-python = ">=3.10"' in (ROOT / "pyproject.toml").read_text()


def test_releases_need_no_password():
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert release["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    assert "password" not in str(release["jobs"])
    assert "secrets" not in str(release["jobs"])
