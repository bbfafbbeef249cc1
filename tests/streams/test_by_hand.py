"""What a task is drawn from, written out: the mix of a drift, the square of an image, distinct examples, shares."""

import numpy as np
import polars as pl
import pytest
import torch
from PIL import Image

from obbo_lightning.streams.few_shot.classes import StoredClasses, divide
from obbo_lightning.streams.few_shot.images import read_folder
from obbo_lightning.streams.few_shot.stream import Drawing, FewShotTasks
from obbo_lightning.streams.few_shot.synthetic import DrawnClasses
from obbo_lightning.streams.market.prices import detect_events
from obbo_lightning.streams.market.stream import MarketStream, training_mask
from obbo_lightning.streams.quadratic import QuadraticTasks


def test_a_drift_is_a_bump_over_superclasses_that_goes_round_once_a_period():
    classes, superclass = [3, 8, 9, 20, 21], {3: 7, 8: 7, 9: 2, 20: 11, 21: 2}
    tasks = FewShotTasks(DrawnClasses(16), classes, 5, Drawing(ways=2, order="drift", period=40), (0,), superclass)
    place = np.array([1, 1, 0, 2, 0]) / 3  # superclasses 2, 7 and 11 on a circle
    for t in (0, 10, 33):
        expected = np.exp(3 * np.cos(2 * np.pi * (place - t / 40)))
        assert np.allclose(tasks.weights(t), expected, rtol=1e-5)


def test_an_image_is_the_square_in_its_middle(tmp_path):
    wide = np.zeros((16, 40, 3), np.uint8)
    wide[:, 12:28] = 200
    tall = wide.transpose(1, 0, 2).copy()
    for name, pixels in (("a", wide), ("b", tall)):
        (tmp_path / name).mkdir()
        Image.fromarray(pixels).save(tmp_path / name / "x.png")
    images, labels = read_folder(tmp_path, 16)
    assert labels.tolist() == ["a", "b"]
    assert (images == 200).all()


def test_no_example_is_drawn_twice_in_a_task():
    source = StoredClasses(torch.arange(12.0).reshape(12, 1), np.repeat([0, 1], 6))
    for seed in range(20):
        drawn = source.draw(torch.tensor([1] * 6 + [0] * 3), torch.Generator().manual_seed(seed)).flatten().tolist()
        assert sorted(drawn[:6]) == [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]
        assert len(set(drawn[6:])) == 3
        assert max(drawn[6:]) < 6


@pytest.mark.parametrize(
    ("count", "ratios", "sizes"),
    [(8, [0.6, 0.2, 0.2], [5, 1, 2]), (11, [0.6, 0.2, 0.2], [7, 2, 2]), (4, [1, 1, 2], [1, 1, 2])],
)
def test_shares_are_rounded_where_they_end(count, ratios, sizes):
    names = [f"class{i:02d}" for i in range(count)]
    found = divide(names, ratios, (None, None, None))
    assert [len(found[split]) for split in ("train", "validation", "test")] == sizes
    assert sorted(c for split in found.values() for c in split) == list(range(count))


def test_lanes_of_a_quadratic_stream_drift_each_in_its_own_direction():
    stream = QuadraticTasks(lanes=3, drift=0.5)
    still = QuadraticTasks(lanes=3, drift=0.0)
    for name in ("b", "c"):
        moved = (stream[3][name] - still[3][name]) / (0.5 / 4**0.5)  # a unit vector a lane
        assert torch.allclose(moved.norm(dim=-1), torch.ones(3, dtype=torch.float64))
        for vectors in (moved, still[3][name]):
            cosines = vectors @ vectors.T
            assert float((cosines - torch.eye(3, dtype=torch.float64)).abs().max()) < 0.99


def test_a_random_validation_never_has_the_ends():
    for seed in range(30):
        training = training_mask(8, "random", 2, 0, seed)
        assert training[[0, -1]].all()
        assert int((~training).sum()) == 4


def test_the_naive_forecast_is_the_last_price_in_the_units_of_the_fit():
    stream = MarketStream(subset=40, subsets=20, horizon=5)
    for lane, naive in enumerate(stream.lanes["naive_mse"].to_list()[:5]):
        prices = stream.train.values[20:65, lane].numpy()
        seen, ahead = prices[:40], prices[40:]
        assert naive == pytest.approx((((ahead - seen[-1]) / seen.std()) ** 2).mean(), rel=1e-10)


def test_jumps_are_those_of_a_loop_over_bars_and_a_gap_is_at_least_so_many():
    rng = np.random.default_rng(0)
    bars, lookback, gap = 160, 20, 30
    steps = 0.001 * rng.normal(size=(4, bars))
    steps[0, [60, 90, 119]] += 0.03  # 30 bars on, and 29
    steps[2, [10, 100]] -= 0.02  # the first has too few bars before it
    times = np.datetime64("2021-01-04", "us") + np.arange(bars) * np.timedelta64(1, "h")
    closes = 50 * np.exp(steps.cumsum(1))
    tables = [pl.DataFrame({"ticker": f"T{i}", "timestamp": times, "close": close}) for i, close in enumerate(closes)]
    returns = np.diff(np.log(closes), axis=1, prepend=np.nan)
    sizes = np.abs(returns - np.median(returns, axis=0))
    expected = []
    for i in range(4):
        last = -np.inf
        for bar in range(lookback + 1, bars):
            score = sizes[i, bar] / (1.4826 * np.median(sizes[i, bar - lookback : bar]))
            if score >= 8 and bar - last >= gap:
                expected.append((times[bar].astype(object), f"T{i}", score))
                last = bar
    found = detect_events(pl.concat(tables).with_row_index("row", offset=1), 8, lookback, gap)
    rows = list(found.select("timestamp", "ticker", "score").iter_rows())
    assert [row[:2] for row in rows] == [row[:2] for row in sorted(expected)]
    assert [row[2] for row in rows] == pytest.approx([row[2] for row in sorted(expected)])
    assert [np.flatnonzero(times == np.datetime64(when))[0] for when, name, _ in rows if name == "T0"] == [60, 90]
