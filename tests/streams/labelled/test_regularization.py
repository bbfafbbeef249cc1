"""Small training sets, one after the other."""

import numpy as np
import pytest
import torch

from obbo_lightning.streams import RegularizationStream


@pytest.fixture(scope="module")
def stream():
    return RegularizationStream(noise=[0.0, 0.5], period=4, examples=300, batch=200, validation=50, test=80)


def test_each_phase_has_its_own_training_set(stream):
    sets = [
        torch.cat([stream.task(t)["train_x"] for t in range(first, first + 4)]).flatten(1).unique(dim=0)
        for first in (0, 4)
    ]
    assert [len(one) for one in sets] == pytest.approx([280, 280], abs=20)  # 800 of 300 with replacement
    assert len(torch.cat(sets).unique(dim=0)) > 1.9 * 270
    assert torch.equal(stream.validation_rows(0), stream.validation_rows(3))
    assert not torch.equal(stream.validation_rows(3), stream.validation_rows(4))


def test_training_labels_of_noisy_phases_are_wrong(stream):
    x, y = stream.data.take(stream.data.pools["train"])
    for t, noise in ((0, 0.0), (4, 0.5), (8, 0.0)):
        task = stream.task(t)
        where = (task["train_x"].flatten(1)[:, None, ::48] == x.flatten(1)[:, ::48]).all(-1)  # no two are alike
        wrong = float((y[where.int().argmax(-1)] != task["train_y"]).float().mean())
        assert wrong == pytest.approx(noise * 19 / 20, abs=0.12 * (noise > 0))


def test_mix_of_classes_repeats_after_four_phases(stream):
    angles = 2 * np.pi * np.arange(20) / 20
    for phase in range(5):
        wanted = np.exp(3 * np.cos(angles - phase * np.pi / 2))
        assert stream.mix(phase).numpy() == pytest.approx(wanted / wanted.sum(), rel=1e-4)
    counts = torch.cat([stream.task(t)["test_y"] for t in range(4, 8)]).bincount(minlength=20)
    assert int(counts.argmax()) in (4, 5, 6)
    assert counts[13:18].sum() < 0.05 * counts.sum()
