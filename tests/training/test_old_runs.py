"""Runs that version 0.1.0 began and was stopped in: they go on, and end as they would have ended there."""

import csv
import json
import shutil
from pathlib import Path

import pytest

from obbo_lightning import cli

RUNS = sorted((Path(__file__).parents[1] / "fixtures" / "runs_of_0.1.0").iterdir())


@pytest.mark.filterwarnings("ignore:the fixed point")  # two filters are few
@pytest.mark.parametrize("old", RUNS, ids=lambda path: path.name)
def test_a_run_of_the_version_before_is_resumed_to_the_end_it_had(old, tmp_path, capsys):
    run = tmp_path / old.name
    shutil.copytree(old, run, ignore=shutil.ignore_patterns("expected"))
    with pytest.warns(UserWarning, match=f"{old.name} has no manifest.json, being of an older version"):
        assert cli.main(["resume", str(run)]) == 0
    assert cli.main(["validate", str(run), "--tasks", "1"]) == 0  # from now on it has one
    for name in ("metrics.csv", "events.csv"):
        if not (old / "expected" / name).is_file():
            continue
        found, expected = (list(csv.DictReader((f / name).read_text().splitlines())) for f in (run, old / "expected"))
        assert len(found) == len(expected)
        for row, wanted in zip(found, expected, strict=True):
            # The first rounds are the file's own; what is played here may differ in the last digits on another CPU.
            assert numbers(row) == pytest.approx(numbers(wanted), rel=1e-4, abs=1e-9)
    summary, wanted = (json.loads((f / "summary.json").read_text()) for f in (run, old / "expected"))
    del summary["seconds"], wanted["seconds"]
    for key, value in wanted.items():
        assert summary[key] == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value), key


def numbers(row):
    return {key: float(value) if value and key not in ("ticker", "timestamp") else 0.0 for key, value in row.items()}
