"""Classes with different frequencies."""

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


def test_validation_and_test_examples_are_balanced_and_all_depend_on_the_seed():
    stream, unlike = (ImbalanceStream(validation=4, test=3, seed=seed) for seed in (0, 1))
    task, other = stream.task(0), unlike.task(0)
    folds = torch.cat([stream.task(t)["validation_y"] for t in range(stream.folds)])
    assert folds.bincount().tolist() == [4] * 10
    assert task["test_y"].bincount().tolist() == [3] * 10
    assert not any(torch.equal(task[name], other[name]) for name in ("train_x", "validation_x", "test_x"))
