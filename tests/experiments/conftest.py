"""Runs that are written by hand: a directory with some files, and what a report reads from them."""

import numpy as np
import polars as pl
import pytest

from obbo_lightning.config.registry import find_component
from obbo_lightning.experiments.runs import Run
from obbo_lightning.runs.directory import RunDirectory

COUNTS = {"gradients": 3.0, "products": 1.0}


@pytest.fixture
def make_run(tmp_path):
    """Return a function that makes a finished run; numbers in ``metrics`` are the same in every round."""

    def make(label="obbo", seed=0, rounds=4, metric="loss", stream="quadratic", metrics=None, data=None, **summary):
        directory = RunDirectory(tmp_path / f"{label}-{seed}-{rounds}-{len(list(tmp_path.iterdir()))}")
        directory.path.mkdir()
        columns = {metric: 0.5, f"test_{metric}": 1.0, f"test_{metric}_se": 0.1, **COUNTS}
        columns |= {"regret/euclidean": 2.0, "regret/exact": 3.0, "hypergradient_norm": 1.0, "residual": 0.0}
        columns |= metrics or {}
        table = {name: np.full(rounds, values) if np.isscalar(values) else values for name, values in columns.items()}
        found = {"algorithm": label, "seed": seed, "rounds": rounds, "metric": metric, "test_tasks": 4, "skipped": 0}
        found |= {f"initial_test_{metric}": 2.0, f"test_{metric}": 1.0, f"test_{metric}_se": 0.1}
        found |= {"gain": 1.0, "gain_se": 0.2, "higher_is_better": metric == "accuracy", **summary}
        config = {"algorithm": {"name": label, "lr": 0.1}, "seed": seed, "rounds": rounds, "regret_window": 10}
        config |= {"data": {"name": stream, "condition_number": 10.0, **(data or {})}, "evaluation": {"tasks": 4}}
        frame = pl.DataFrame({"round": np.arange(1.0, rounds + 1), **table})
        return Run(directory, config, found, frame, find_component("data", stream), label)

    return make


@pytest.fixture
def make_market_run(make_run):
    """Return a function that makes a finished run of market events.

    ``errors`` are the forecast errors of the events, ``regret [rounds, events]`` the regrets after ``rounds``.
    """

    def make(label="obbo", seed=0, errors=(1.0, 2.0, 3.0), naive=None, days=None, regret=None, rounds=(100, 200)):
        run, count = make_run(label, seed, stream="market"), len(errors)
        regret = np.outer(rounds, np.arange(1.0, count + 1)) if regret is None else regret
        days = range(1, count + 1) if days is None else days
        columns = {"ticker": [f"T{i}" for i in range(count)]}
        columns |= {"timestamp": [f"2021-01-{day:02d} 10:30:00" for day in days]}
        columns |= {"naive_mse": np.arange(1.0, count + 1) if naive is None else naive, "weight": np.array(errors)}
        columns |= {"regret": regret[-1], "gradient_norm": np.array(errors), "test_mse": np.array(errors)}
        pl.DataFrame(columns).write_csv(run.directory.events)
        np.savez(run.directory.lanes, rounds=np.array(rounds), regret=regret)
        return run

    return make
