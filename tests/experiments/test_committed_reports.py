"""The tables in docs/experiments are what `report` makes of the CSV files beside them, byte for byte."""

from pathlib import Path

import pytest

from obbo_lightning.experiments import report
from obbo_lightning.experiments.report import _contents as of_found, write_report

FOLDER = Path(__file__).parents[2] / "docs" / "experiments"
REFERENCE = {"market": "obbo, window = 25"}
ROOT = FOLDER.parents[1]


@pytest.mark.parametrize("name", ["default", "fc100", "fc100_tuned", "market", "quadratic"])
def test_a_committed_report_is_made_again_to_the_last_byte(name, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_contents", lambda found: (of_found(found)[0], lambda title: []))  # figures take long
    write_report([FOLDER / name], tmp_path, name, reference=REFERENCE.get(name))
    committed = [path for path in FOLDER.joinpath(name).iterdir() if path.suffix in (".md", ".csv")]
    assert {"paired.md", "paired.csv"} < {path.name for path in committed}
    for path in committed:
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path
