"""Classes with different frequencies."""

import csv
import json

import numpy as np
import pytest
import torch

from obbo_lightning.streams import ImbalanceStream


def test_frequencies_are_powers_of_the_number_of_their_phase():
    stream = ImbalanceStream(kept=[0.5, 1.0], period=100, test=1)
    for first, kept in ((0, 0.5), (100, 1.0), (200, 0.5)):
        expected = np.array([kept**i for i in range(10)])
        expected /= expected.sum()
        assert stream.frequency(first).numpy() == pytest.approx(expected, rel=1e-5)
        tasks = [stream.task(t) for t in range(first, first + 100)]
        counts = torch.cat([task["train_y"] for task in tasks]).bincount(minlength=10).numpy()
        deviation = np.sqrt(6400 * expected * (1 - expected))
        assert (np.abs(counts - 6400 * expected) < 5 * deviation).all(), counts
        assert torch.equal(tasks[0]["frequency"], stream.frequency(first))


def test_validation_and_test_examples_are_balanced_and_of_their_pools():
    stream = ImbalanceStream(validation=2, test=3)
    task = stream.task(0)
    assert task["validation_y"].bincount().tolist() == [2] * 10
    assert task["test_y"].bincount().tolist() == [3] * 10
    for kind in ("train", "validation", "test"):
        x, y = stream.data.take(stream.data.pools[kind])
        equal = (task[f"{kind}_x"][:, None] == x).all(-1)
        assert equal.any(-1).all(), kind
        assert torch.equal(y[equal.int().argmax(-1)], task[f"{kind}_y"])
    later = stream.task(1)
    assert torch.equal(task["validation_x"], later["validation_x"])
    assert not torch.equal(task["test_x"], later["test_x"])


def test_run_is_scored_by_balanced_accuracy(fit):
    run = fit("--config", "imbalance", "--rounds", 2, "--evaluation.baselines", "false")
    assert json.loads((run / "summary.json").read_text())["metric"] == "balanced_accuracy"
    first = next(csv.DictReader((run / "metrics.csv").read_text().splitlines()))
    assert 0 < float(first["accuracy"]) != float(first["balanced_accuracy"]) > 0
