"""Whole runs in double precision equal the recorded ones: every number of every table."""

import csv
import json
import re

import pytest
from recorded import number, present_flags, require_recorded

from obbo_lightning import cli

FEW = "--data.image_size 16 --data.ways 3 --data.shots 2 --data.queries 2"
FEW += " --problem.network mlp --problem.network.widths [4]"
FEW += " --algorithm.inner.steps 3 --evaluation.tasks 2 --evaluation.every 2"
EVENTS = "--config market --data.subset 40 --data.subsets 9 --data.horizon 7"
PAST = "--config forgetting --data.block 8 --data.past 4"
TRUST = "--config sources --data.examples 3 --data.validation 9 --data.test 20 --data.period 2"
RARE = (
    "--config imbalance --data.batch 12 --data.validation 4 --data.test 3 --data.period 2 --problem.network.widths [5]"
    " --algorithm.hypergradient.while_contracting true"
)
DECAY = "--config regularization --data.examples 20 --data.batch 8 --data.validation 4 --data.test 9 --data.period 2"
DECAY += " --problem.network.filters 2 --algorithm.inner.batch_size 4"
QUADRATIC = "--config quadratic --algorithm.inner.steps 4"

RUNS = [
    *(f"{FEW} --algorithm {name}" for name in ("obbo", "sobow", "oagd", "adam", "sgdm")),
    f"{FEW} --algorithm sobbo --seed 1",
    f"{FEW} --tasks_per_round 2 --seed 2 --algorithm.window 3 --regret_window 2",
    f"{FEW} --problem.learn_proximity true --algorithm.hypergradient conjugate_gradient --algorithm.clip 0.01",
    f"{FEW} --algorithm.hypergradient unrolled --algorithm.geometry euclidean --algorithm.regularizer l1"
    " --algorithm.regularizer.weight 0.01",
    f"{FEW} --algorithm.inner.start previous --problem.network.norm layer --data.order drift --data.period 7",
    f"{FEW} --algorithm sobow --algorithm.discount 0.5 --algorithm.window 2 --algorithm.lr 0.1",
    f"{QUADRATIC} --algorithm obbo --algorithm.lr auto",
    "--config quadratic --algorithm.hypergradient closed_form --algorithm.inner exact --data.drift 0.3",
    f"{QUADRATIC} --algorithm sobbo --data.noise 0.2",
    f"{QUADRATIC} --algorithm oagd --algorithm.window 3 --algorithm.domain ball --algorithm.domain.radius 0.2",
    f"{EVENTS} --algorithm obbo",
    f"{EVENTS} --algorithm sobow --data.validation random",
    "--config market_entropy --data.subset 40 --data.subsets 9 --data.horizon 7",
    *(f"{PAST} --algorithm {name}" for name in ("obbo", "adam", "sobbo")),
    f"{PAST} --data.kind regression --algorithm.scale 1.0 --problem.ridge 0.1",
    *(f"{TRUST} --algorithm {name}" for name in ("obbo", "sgdm")),
    f"{TRUST} --problem.floor 0.1 --algorithm.inner adam --algorithm.inner.steps 3 --algorithm.hypergradient.lr 0.1",
    *(f"{RARE} --algorithm {name}" for name in ("obbo", "oagd")),
    *(f"{DECAY} --algorithm {name}" for name in ("obbo", "sobow")),
]
TIMES = re.compile(r"seconds|_at$|directory|commit|version|host|figure|threads|time")


def table(file):
    """A CSV file: each column as a list."""
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    names = [name for name in rows[0] if not TIMES.search(name)]
    return {name: [number(row[name]) for row in rows] for name in names}


def without_times(values):
    """A summary without what differs from run to run."""
    return {k: without_times(v) if isinstance(v, dict) else v for k, v in values.items() if not TIMES.search(k)}


def tables_of(flags, folder, capsys):
    """Every table of a run with these flags, and its summary."""
    quiet = ["--rounds", "5", "--output", str(folder), "--trainer.enable_progress_bar", "false"]
    assert cli.main(["fit", "--trainer.precision", "64-true", *flags.split(), *quiet]) == 0, capsys.readouterr().err
    (run,) = folder.glob("*/*/")
    seen = {file.name: table(file) for file in sorted(run.glob("*.csv"))}
    return {**seen, "summary": without_times(json.loads((run / "summary.json").read_text()))}


@pytest.mark.parametrize("flags", RUNS, ids=str)
def test_a_run_is_the_one_that_was_recorded(flags, tmp_path, capsys):
    require_recorded("runs", flags, tables_of(present_flags(flags), tmp_path, capsys))
