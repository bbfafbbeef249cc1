"""The tables in docs/experiments are what `report` makes of the CSV files beside them, byte for byte."""

from pathlib import Path

import pytest

from obbo_lightning.experiments.report import write_report

FOLDER = Path(__file__).parents[2] / "docs" / "experiments"
REFERENCE = {"market": "obbo, window = 25"}
# Made from the runs themselves: two test accuracies differ in the seventh digit, and are a tie in runs.csv.
FROM_RUNS = {"fc100_tuned": {"paired.md", "paired.csv"}}


@pytest.mark.parametrize("name", ["default", "fc100", "fc100_tuned", "market", "quadratic"])
def test_a_committed_report_is_made_again_to_the_last_byte(name, tmp_path):
    write_report([FOLDER / name], tmp_path, name, reference=REFERENCE.get(name))
    committed = {path.name for path in FOLDER.joinpath(name).iterdir() if path.suffix in (".md", ".csv")}
    assert {"paired.md", "paired.csv"} < committed
    for file in sorted(committed - FROM_RUNS.get(name, set())):
        assert (tmp_path / file).read_bytes() == (FOLDER / name / file).read_bytes(), file
