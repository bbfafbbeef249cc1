"""Tables and figures of reports: the same text in every format, styles, and data that are read again."""

import csv

import polars as pl
import pytest

from obbo_lightning.experiments.comparison import Comparison
from obbo_lightning.experiments.report_data import Table, format_with_error, line_style, sorted_labels

TABLE = Table("t", "Regret, 50 %.", ["algorithm", "α", "a_b"], [["obbo", "0.1", "1 ± 0.2"], ["adam", "", "x | y"]])


def test_a_table_has_the_same_cells_in_every_format(tmp_path):
    assert [path.name for path in TABLE.write(tmp_path)] == ["t.md", "t.csv"]
    with (tmp_path / "t.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows == [TABLE.columns, *TABLE.rows]
    lines = (tmp_path / "t.md").read_text().replace(r"\|", "!").splitlines()
    found = [[cell.strip().replace("!", "|") for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]
    assert found == rows


def test_huge_numbers_are_short_with_either_sign():
    shown = [format_with_error(value, 0.25, 1) for value in (1e7, -1e7, -9999999.0)]
    assert shown == ["1e+07 ± 0.2", "-1e+07 ± 0.2", "-9999999.0 ± 0.2"]


def test_variants_of_an_algorithm_and_unknown_algorithms_differ_in_their_lines():
    labels = ["obbo, lr = 1", "obbo, lr = 2", "Sparse_mine", "Sparse_yours"]
    looks = [line_style(labels, label) for label in labels]
    assert looks[0]["color"] == looks[1]["color"] != looks[2]["color"] == looks[3]["color"]
    assert looks[0]["linestyle"] != looks[1]["linestyle"]
    assert looks[2]["linestyle"] != looks[3]["linestyle"]


def test_labels_are_in_the_order_of_algorithms_and_numbers():
    ordered = ["obbo, rho = 1e-08", "obbo, rho = 0.001", "obbo, rho = 10", "sobow", "adam", "mine"]
    assert sorted_labels(sorted(ordered)) == ordered


def test_frames_without_rows_have_no_file_and_are_read_again(tmp_path):
    frames = {name: pl.DataFrame(schema=columns) for name, columns in Comparison.columns.items()}
    frames["runs"] = pl.DataFrame([{"label": "obbo"}], schema=Comparison.columns["runs"])
    row = {"name": "=decay", "seed": 1, "round": 1, "score": 0.5}
    frames["baselines"] = pl.DataFrame([row], schema=Comparison.columns["baselines"])
    names = {path.name for path in Comparison(**frames).write(tmp_path)}
    assert names == {"runs.csv", "baselines.csv"}
    assert "'=decay" in (tmp_path / "baselines.csv").read_text()  # no formula for a spreadsheet
    assert Comparison.read(tmp_path).baselines.equals(frames["baselines"])
    (tmp_path / "baselines.csv").unlink()
    assert Comparison.read(tmp_path).baselines.is_empty()
    assert Comparison.read(tmp_path / "nowhere") is None


@pytest.mark.parametrize("content", ["label,seed\nobbo,many\n", "label,seed\nobbo,1\n", ""])
def test_a_damaged_report_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "runs.csv").write_text(content)
    with pytest.raises(ValueError, match=r"has a damaged report: [A-Z][a-zA-Z]+Error") as refusal:
        Comparison.read(tmp_path)
    assert "\n" not in str(refusal.value)
