"""Tables and figures of reports: the same text in every format, styles, and data that are read again."""

import csv

import polars as pl
import pytest

from obbo_lightning.experiments.comparison import Comparison
from obbo_lightning.experiments.report_data import Table, format_number, line_style, sorted_labels

TABLE = Table("t", "Regret, 50 %.", ["algorithm", "α", "a_b"], [["obbo", "0.1", "1 ± 0.2"], ["adam", "", "x | y"]])


def test_a_table_has_the_same_cells_in_every_format(tmp_path):
    assert [path.name for path in TABLE.write(tmp_path)] == ["t.md", "t.csv", "t.tex"]
    with (tmp_path / "t.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows == [TABLE.columns, *TABLE.rows]
    lines = (tmp_path / "t.md").read_text().replace(r"\|", "!").splitlines()
    found = [[cell.strip().replace("!", "|") for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]
    assert found == rows
    latex = (tmp_path / "t.tex").read_text()
    assert latex.count(r"\\") == len(rows)
    assert r"\caption{Regret, 50 \%.}\label{tab:t}" in latex
    assert [cell.strip() for cell in latex.splitlines()[7].removesuffix(r"\\").split("&")] == [
        "obbo",
        "0.1",
        r"1 $\pm$ 0.2",
    ]


def test_huge_numbers_are_short_with_either_sign():
    assert [format_number(value, 1) for value in (1e7, -1e7, -9999999.0)] == ["1e+07", "-1e+07", "-9999999.0"]


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
    row = {"label": "obbo", "seed": 1, "round": 1, "name": "=decay", "value": 0.5}
    frames["weights"] = pl.DataFrame([row], schema=Comparison.columns["weights"])
    names = {path.name for path in Comparison(**frames).write(tmp_path)}
    assert names == {"runs.csv", "rounds.csv", "timings.csv", "weights.csv"}
    assert "'=decay" in (tmp_path / "weights.csv").read_text()  # no formula for a spreadsheet
    found = Comparison.read(tmp_path)
    assert found.weights.equals(frames["weights"])
    (tmp_path / "weights.csv").unlink()
    assert Comparison.read(tmp_path).weights.is_empty()
    assert Comparison.read(tmp_path / "nowhere") is None


@pytest.mark.parametrize("content", ["label,seed\nobbo,many\n", "label,seed\nobbo,1\n", ""])
def test_a_damaged_report_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "runs.csv").write_text(content)
    with pytest.raises(ValueError, match=r"has a damaged report: [A-Z][a-zA-Z]+Error") as refusal:
        Comparison.read(tmp_path)
    assert "\n" not in str(refusal.value)
