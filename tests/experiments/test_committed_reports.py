"""The tables in docs/experiments are what `report` makes of the CSV files beside them, byte for byte."""

import re
from pathlib import Path

import pytest

from obbo_lightning.experiments.report import write_report
from obbo_lightning.experiments.report_data import ReportData

FOLDER = Path(__file__).parents[2] / "docs" / "experiments"
REFERENCE = {"market": "obbo, window = 25"}
ROOT = FOLDER.parents[1]
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?![\w.]*\d)")
NOT_MEASURED: dict[str, tuple[str, ...]] = {"README.md": ("2.0", "3.11")}  # a licence; Python


@pytest.mark.parametrize(
    "name",
    ["first", "default", "default_tuned", "fc100", "fc100_tuned", "fc100_long", "damping", "market", "quadratic"],
)
def test_a_committed_report_is_made_again_to_the_last_byte(name, tmp_path, monkeypatch):
    for kind in ReportData.__subclasses__():
        monkeypatch.setattr(kind, "figures", lambda self, title: [])  # they take long
    write_report([FOLDER / name], tmp_path, name, reference=REFERENCE.get(name))
    files = [*FOLDER.joinpath(name).glob("*.md"), *FOLDER.joinpath(name).glob("*.csv")]
    assert {"settings.md", "table.md" if name == "first" else "paired.md"} < {path.name for path in files}
    for path in (path for path in files if path.name != "facts.csv"):  # which reports do not write any more
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path


def is_there(word, committed):
    """As it stands, in percent, or with fewer digits; either sign."""
    digits = len(word.partition(".")[2])
    return any(f"{abs(float(one)) * times:.{digits}f}" == word.lstrip("+-") for one in committed for times in (1, 100))


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_every_table_and_every_number_of_a_page_is_in_a_committed_report(page):
    text = re.sub(r"`[^`\n]*`", "", re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL))  # no code
    files = [path for path in FOLDER.glob("**/*.csv") if path.stem not in ("rounds", "timings", "events")]
    committed = {word for path in files for word in NUMBER.findall(path.read_text())}
    rows = {line for path in FOLDER.glob("*/*.md") for line in path.read_text().splitlines()}
    if page != "README.md":  # whose table is of several experiments
        assert [line for line in text.splitlines() if line.startswith("| ") and line not in rows] == []
    found = [word for word in NUMBER.findall(text) if "." in word]
    assert len(found) > 10
    assert [word for word in found if word not in NOT_MEASURED.get(page, ()) and not is_there(word, committed)] == []
