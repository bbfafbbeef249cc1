"""Which tasks may see what: classes are divided, and a market's forecast is for its test alone."""

import pytest
import torch

from obbo_lightning.streams.few_shot.synthetic import SyntheticStream
from obbo_lightning.streams.market.stream import MarketStream


class Numbered:
    """Draws the number of its class in place of an image."""

    def smallest(self, classes):
        return None

    def draw(self, classes, generator):
        return classes.float().reshape(-1, 1, 1, 1).expand(-1, 3, 16, 16)


@pytest.mark.parametrize("order", ["iid", "drift"])
def test_train_validation_and_test_tasks_have_classes_of_their_own_split(order):
    stream = SyntheticStream(order=order, image_size=16)
    seen = {}
    for split in ("train", "validation", "test"):
        tasks = getattr(stream, split)
        tasks.source = Numbered()
        seen[split] = {int(c) for t in range(40) for c in tasks[t]["query"][:, 0, 0, 0].tolist()}
    # outline 1 of five tests, outline 3 validates
    assert {c // 5 % 5 for c in seen["test"]} == {1}
    assert {c // 5 % 5 for c in seen["validation"]} == {3}
    assert {c // 5 % 5 for c in seen["train"]} == {0, 2, 4}


def test_a_markets_validation_ends_with_its_event():
    stream = MarketStream(subset=40, subsets=20, horizon=5, stride=4)
    (validation,), (test,) = list(stream.validation), list(stream.test)
    assert float(validation["validation_sites"].max()) < 40
    assert float(validation["sites"].max()) < 40
    assert test["validation_sites"].tolist() == [40.0, 41.0, 42.0, 43.0, 44.0]
    # the last round's subset begins one observation before the validation's
    last = stream.train[19]
    assert not torch.equal(last["values"], validation["values"])
