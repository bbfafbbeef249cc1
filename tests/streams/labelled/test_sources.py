"""Labels from several sources: which are wrong, and how."""

import pytest
import torch

from obbo_lightning.streams import SourcesStream


def small(**settings):
    usual = {"sources": 4, "wrong": 2, "period": 10, "examples": 50, "validation": 8, "test": 9}
    return SourcesStream(**usual | settings)


def test_other_sources_are_wrong_from_phase_to_phase():
    stream, other = small(), small(seed=1)
    for t in (0, 9, 10, 35):
        right = stream.right(t)
        assert sorted(right.tolist()) == [0.0, 0.0, 1.0, 1.0]
        assert torch.equal(right, stream.right(t // 10 * 10))
    assert len({tuple(stream.right(10 * p).tolist()) for p in range(12)}) > 3
    assert any(not torch.equal(stream.right(10 * p), other.right(10 * p)) for p in range(6))
    gradual = small(change="gradual")
    for t in range(30):
        before, now = (stream.right(10 * max(0, phase)) for phase in (t // 10 - 1, t // 10))
        share = 1.0 if t < 10 else min(1.0, (t % 10 + 1) / 5)  # nothing is before the first phase
        assert torch.allclose(gradual.right(t), share * now + (1 - share) * before)


@pytest.mark.parametrize("errors", ["shifted", "random", "adversarial"])
def test_wrong_sources_give_labels_of_their_kind(errors):
    stream = small(errors=errors)
    classes = stream.data.classes
    pool = zip(*stream.data.take(stream.data.pools["train"]), strict=True)
    known, agreed_in = {tuple(x.tolist()): int(y) for x, y in pool}, {}
    for t in (0, 5, 10):
        task = stream.task(t)
        truth = torch.tensor([known[tuple(x.tolist())] for x in task["train_x"]])
        assert task["train_source"].tolist() == [s for s in range(4) for _ in range(50)]
        correct = task["right"][task["train_source"]] == 1
        assert torch.equal(task["train_y"][correct], truth[correct])
        expected, given = truth[~correct], task["train_y"][~correct]
        if errors == "shifted":
            assert torch.equal(given, (expected + 1) % classes)
        elif errors == "random":
            assert 0.02 < float((given == expected).float().mean()) < 0.25
            assert len(given.unique()) == classes
        else:
            agreed = dict(zip(expected.tolist(), given.tolist(), strict=True))
            assert [agreed[c] for c in expected.tolist()] == given.tolist()  # all sources agree
            assert sum(c != s for c, s in agreed.items()) == classes // 2
            agreed_in[t] = agreed
    if errors == "adversarial":
        assert agreed_in[0] == agreed_in[5] != agreed_in[10]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"wrong": 4}, r"data\.wrong must be less than the 4 sources, got 4"),
        ({"wrong": -1}, r"data\.wrong must be an integer of at least 0"),
        ({"errors": "rude"}, r"data\.errors must be one of"),
        ({"sources": 1, "wrong": 0}, r"data\.sources must be an integer of at least 2"),
        ({"test": 0}, r"data\.test must be an integer of at least 1"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        small(**settings)
