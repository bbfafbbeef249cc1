"""The tables in docs/experiments are what `report` makes of the CSV files beside them, byte for byte."""

import re
from pathlib import Path

import pytest

from obbo_lightning.experiments.report import write_report

FOLDER = Path(__file__).parents[2] / "docs" / "experiments"
REFERENCE = {"market": "obbo, window = 25"}
# Their sign tests were made from the runs. The CSV files keep six digits, and pairs that agree in them are ties here.
COUNTED_IN_FULL = ("fc100_tuned", "market")
COUNTS = re.compile(rb"\d+ / \d+, p [=<] [\d.]+")


@pytest.mark.parametrize("name", ["default", "default_tuned", "fc100", "fc100_tuned", "market", "quadratic"])
def test_a_committed_report_is_made_again_to_the_last_byte(name, tmp_path):
    write_report([FOLDER / name], tmp_path, name, reference=REFERENCE.get(name))
    committed = [path for path in FOLDER.joinpath(name).iterdir() if path.suffix in (".md", ".csv")]
    assert {"paired.md", "paired.csv"} < {path.name for path in committed}
    for path in committed:
        found, expected = (tmp_path / path.name).read_bytes(), path.read_bytes()
        if path.stem == "paired" and name in COUNTED_IN_FULL:
            assert len(COUNTS.findall(found)) == len(COUNTS.findall(expected)) > 0
            found, expected = COUNTS.sub(b"", found), COUNTS.sub(b"", expected)
        assert found == expected, path
