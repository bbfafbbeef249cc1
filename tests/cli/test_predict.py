"""What `predict` prints."""

import polars as pl
import pytest
from rich.console import Console

from obbo_lightning.cli.predict import print_classes
from obbo_lightning.inference.predictions import Predictions


@pytest.mark.parametrize(
    ("actual", "rows"),
    [
        (["a", "b", "b", "c", "a"], [["a", "1", "·", "1"], ["b", "1", "1", "·"], ["c", "·", "1", "·"]]),
        (None, [["a", "2"], ["b", "2"], ["c", "1"]]),
    ],
)
def test_classes_are_printed_as_confusion_matrix_or_as_counts(actual, rows, capsys):
    columns = {"predicted": ["a", "b", "a", "b", "c"]} | ({} if actual is None else {"actual": actual})
    print_classes(Console(width=100), Predictions(pl.DataFrame(columns), "title"), ["a", "b", "c"])
    printed = capsys.readouterr().out
    assert [[c.strip() for c in line.strip("│").split("│")] for line in printed.splitlines() if "│" in line] == rows
    assert ("accuracy 0.400 on 5 queries" in printed) == (actual is not None)
