"""Tables in the order of time: what is read and refused, tasks without look-ahead, and their baselines."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from obbo_lightning import OBBO
from obbo_lightning.streams import ForgettingStream
from obbo_lightning.streams.tabular import FACTORS, PastAndNext, Rows, generate_rows, read_rows, running_scales


def table(rows=60, seed=0):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(2, rows)).cumsum(axis=1)
    b[:25] = 7.0  # constant at first
    return pl.DataFrame({"a": a, "b": b, "y": a - b + rng.normal(size=rows)})


@pytest.fixture
def csv(tmp_path):
    def write(frame=None, name="rows.csv"):
        (table() if frame is None else frame).write_csv(tmp_path / name)
        return str(tmp_path / name)

    return write


def test_two_values_are_classified_and_numbers_predicted(csv):
    frame = table().with_columns(word=pl.when(pl.col("y") > 0).then(pl.lit("up")).otherwise(pl.lit("down")))
    frame = frame.with_columns(two=pl.when(pl.col("y") > 0).then(10).otherwise(9))
    path = csv(frame)
    for target in ("word", "two"):
        stream = ForgettingStream(path, target, block=5, past=3, features=["a", "b"])
        assert stream.problem().kind == "classification"
        assert np.array_equal(stream.train.target.flatten(), (frame["y"] > 0).cast(pl.Float64).to_numpy())
    assert ForgettingStream(path, "y", block=5, past=3, features=["a"]).problem().kind == "regression"
    numbers = ForgettingStream(path, "two", block=5, past=3, features=["a"], kind="regression")
    assert numbers.problem().kind == "regression"
    assert set(numbers.train.target.flatten().tolist()) == {9.0, 10.0}


def test_columns_without_numbers_are_skipped_and_listed(csv):
    days = pl.Series("day", [f"2020-01-{1 + i // 4:02d}" for i in range(60)])
    path = csv(table().with_columns(days))
    rows = read_rows(Path(path), "y")
    assert rows.names == ["a", "b"]
    with pytest.warns(UserWarning, match="columns without numbers are not used as features: 'day'"):
        stream = ForgettingStream(path, "y", block=5, past=3)
    assert stream.skipped == [{"column": "day", "reason": "it has no numbers"}]


def broken(column, row, value):
    frame = table().with_columns(pl.all().cast(pl.String))
    values = frame[column].to_list()
    values[row] = value
    return frame.with_columns(pl.Series(column, values, dtype=pl.String))


@pytest.mark.parametrize(
    ("frame", "settings", "message"),
    [
        (table(), {"target": None}, r"data\.target must be a column of .*, which are 'a', 'b', 'y', got None"),
        (table(), {"target": "z"}, r"data\.target must be a column of .*, got 'z'"),
        (table(), {"features": ["a", "z"]}, r"data\.features must name columns of .* once each, .*, got \['a', 'z'\]"),
        (table(), {"features": ["a", "y"]}, r"data\.features must .* of 'a', 'b', got \['a', 'y'\]"),
        (table(), {"features": ["a", "a"]}, r"data\.features must .*, got \['a', 'a'\]"),
        (table(), {"features": []}, r"data\.features must .*, got \[\]"),
        (table(), {"kind": "ranking"}, r"data\.kind must be one of auto, classification, regression, got 'ranking'"),
        (table(), {"kind": "classification"}, r"data\.target must have two values, or .*, got 'y' with 60 different"),
        (table(), {"block": 0}, r"data\.block must be an integer of at least 1, got 0"),
        (table(), {"past": 1}, r"data\.past must be an integer of at least 2, got 1"),
        (table(), {"clip": -1.0}, r"data\.clip must be a positive finite number, got -1\.0"),
        (table(19), {}, r"data\.csv must have at least 20 rows, data\.past 3 \+ 1 blocks of data\.block 5, got 19 in"),
        (table()[:0], {}, r"data\.csv must have rows, got .*, which has none"),
        (table().select("y"), {}, r"data\.csv must have a column of numbers besides 'y', got"),
        (broken("a", 16, "n/a"), {}, r"rows\.csv, row 17: 'a' must be a finite number, got 'n/a'"),
        (broken("b", 3, None), {}, r"rows\.csv, row 4: 'b' must be a finite number, got nothing"),
        (broken("b", 3, "inf"), {}, r"rows\.csv, row 4: 'b' must be a finite number, got 'inf'"),
        (broken("y", 3, None), {}, r"rows\.csv, row 4: 'y' must have a value \(rows without a target"),
        (broken("y", 3, "nan"), {}, r"rows\.csv, row 4: 'y' must be a finite number, got 'nan'"),
        (broken("y", 3, "up"), {}, r"rows\.csv, row 4: 'y' must be a finite number, got 'up'"),
        (table().with_columns(y=2.5), {}, r"data\.target must have two values, or .*, got 'y' with 1 different"),
        (table().with_columns(y=pl.Series(["a", "b", "c"] * 20)), {}, r"data\.target must have two values, .* 3 diff"),
    ],
)
def test_unusable_tables_and_settings_are_refused(frame, settings, message, csv):
    with pytest.raises(ValueError, match=message) as refusal:
        ForgettingStream(csv(frame), **{"target": "y", "block": 5, "past": 3} | settings)
    assert "\n" not in str(refusal.value)


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data\.csv must be a CSV file that exists, got 'nowhere\.csv'"):
        ForgettingStream("nowhere.csv", "y")
    (tmp_path / "ragged.csv").write_text("a,y\n1,2\n1,2,3,4\n")
    with pytest.raises(ValueError, match=r"ragged\.csv cannot be read as CSV: "):
        ForgettingStream(str(tmp_path / "ragged.csv"), "y")
    with pytest.raises(ValueError, match=r"data\.target and data\.features need data\.csv, got 'y' and None without"):
        ForgettingStream(target="y")
    with pytest.raises(ValueError, match=r"must have at least 93000 rows, .* got 30240 generated ones"):
        ForgettingStream(block=3000)


def test_true_coefficients_of_generated_rows_turn_at_three_speeds():
    rows = generate_rows("regression", seed=3)

    def direction(first):
        part = slice(first, first + 400)
        a, b = np.linalg.lstsq(rows.features[part], rows.target[part], rcond=None)[0][:2]
        return complex(a, b) / abs(complex(a, b))

    for first, speed in ((2000, 0.0), (6000, 0.02), (9700, 0.2), (15000, 0.0)):
        turned = direction(first + 800) / direction(first)
        assert abs(turned - np.exp(1j * speed * 800 / 48)) < 0.3  # a speed is radians in 48 rows


def test_task_has_the_past_newest_first_scaled_by_what_is_known(csv):
    """Blocks of 5 rows, three of them past: task 4 is evaluated on rows 35 to 39, counted from 0."""
    frame = table()
    task = ForgettingStream(csv(frame), "y", block=5, past=3).train[4]
    known = frame[:35]
    for place, name in enumerate(("a", "b")):
        scaled = ((frame[name] - known[name].mean()) / known[name].std(ddof=0)).clip(-3.0, 3.0).to_numpy()
        for age in range(3):
            assert np.allclose(task["x"][age, :, place], scaled[30 - 5 * age : 35 - 5 * age], rtol=1e-12)
        assert np.allclose(task["x_new"][:, place], scaled[35:40], rtol=1e-12)
    scaled = ((frame["y"] - known["y"].mean()) / known["y"].std(ddof=0)).to_numpy()
    assert np.allclose(task["y"].numpy(), scaled[20:35].reshape(3, 5)[::-1], rtol=1e-12)
    assert np.allclose(task["y_new"], scaled[35:40], rtol=1e-12)
    assert bool((task["x"][..., 2] == 1).all())
    assert bool((task["x_new"][..., 2] == 1).all())


def test_tasks_do_not_look_ahead(csv):
    """Later rows do not change a bit of earlier tasks, nor rows of the next block the past of its task."""
    frame = table()
    before = ForgettingStream(csv(frame), "y", block=5, past=3).train
    for now in (3, 7):
        changed = frame.with_columns(pl.when(pl.int_range(60) >= 5 * now).then(pl.all() * 100 + 5).otherwise(pl.all()))
        after = ForgettingStream(csv(changed, "changed.csv"), "y", block=5, past=3).train
        for t in range(now - 3):
            assert all(torch.equal(before[t][key], after[t][key]) for key in before[t])
        last = now - 3
        assert all(torch.equal(before[last][key], after[last][key]) for key in ("x", "y"))
        assert not torch.equal(before[last]["y_new"], after[last]["y_new"])


def test_features_are_clipped_and_the_target_is_not():
    features = np.zeros((20, 1))
    features[::2] = 1.0
    features[10:] = 1000.0
    rows = Rows(("a",), features, features[:, 0] + np.arange(20), "regression")
    task = PastAndNext(rows, 5, 2, clip=2.5).task(0)
    assert task["x_new"][:, 0].tolist() == [2.5] * 5
    assert float(task["y_new"].min()) > 100


def test_column_that_is_constant_so_far_is_zero_until_it_changes(csv):
    stream = ForgettingStream(csv(), "y", block=5, past=2).train
    assert bool((stream[2]["x"][..., 1] == 0).all())
    assert bool((stream[3]["x_new"][:, 1] != 0).all())
    assert all(bool(stream[t]["x"].isfinite().all()) for t in range(len(stream)))


def test_running_scales_are_those_of_all_rows_so_far_also_far_from_zero():
    blocks = np.random.default_rng(0).normal(size=(6, 4, 2)) * [1.0, 1e-3] + [0.0, 1e6]
    mean, deviation = running_scales(blocks)
    for b in range(6):
        seen = blocks[: b + 1].reshape(-1, 2)
        assert np.allclose(mean[b], seen.mean(0), rtol=1e-14)
        assert np.allclose(deviation[b], seen.std(0), rtol=1e-6)


def test_rounds_are_the_complete_blocks_after_the_first_past(csv):
    assert len(ForgettingStream(csv(table(64)), "y", block=5, past=3).train) == 9
    assert len(ForgettingStream(csv(table(15)), "y", block=5, past=2).train) == 1


def test_baselines_equal_solves_of_their_own(csv):
    """The best factor is the one with the smallest mean loss."""
    stream = ForgettingStream(csv(), "y", block=5, past=3)
    problem, rounds = stream.problem(ridge=0.1), 6
    found = stream.baselines(problem, OBBO(), rounds)

    def losses(*weights):
        outer = torch.tensor([weights], dtype=torch.float64) / sum(weights)
        tasks = [stream.train[t] for t in range(rounds)]
        return [float(problem.outer_loss(outer, problem.solution(outer, task), task)) for task in tasks]

    by_factor = {factor: losses(1.0, factor, factor**2) for factor in FACTORS}
    best = min(FACTORS, key=lambda factor: sum(by_factor[factor]))
    names = [f"best fixed forgetting ({best:g})", "equal weights", "last block only", "last value", "mean so far"]
    assert list(found) == names
    assert found[names[0]] == pytest.approx(by_factor[best])
    assert found["equal weights"] == pytest.approx(by_factor[1.0])
    assert found["last block only"] == pytest.approx(losses(1.0, 0.0, 0.0))
    y = table()["y"].to_numpy()
    for t in range(rounds):
        now, scale = y[15 + 5 * t : 20 + 5 * t], y[: 15 + 5 * t].var()
        assert found["last value"][t] == pytest.approx(((now - y[14 + 5 * t]) ** 2).mean() / scale)
        assert found["mean so far"][t] == pytest.approx(((now - y[: 15 + 5 * t].mean()) ** 2).mean() / scale)


def test_majority_class_is_predicted_with_its_frequency_so_far(csv):
    first = pl.int_range(60) < 20  # one class only
    frame = table().with_columns(
        y=pl.when(first).then(0).otherwise((pl.col("a") > pl.col("a").median()).cast(pl.Int32))
    )
    stream = ForgettingStream(csv(frame), "y", block=5, past=3)
    found = stream.baselines(stream.problem(), OBBO(), 9)["majority class"]
    y = frame["y"].to_numpy()
    for t in range(9):
        chance = np.clip(y[: 15 + 5 * t].mean(), 0.001, 0.999)
        now = y[15 + 5 * t : 20 + 5 * t]
        assert found[t] == pytest.approx(-np.log(np.where(now == 1, chance, 1 - chance)).mean())
