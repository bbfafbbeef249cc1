"""Files as people have them: moments between bars, deep pixels, late fractions, half-written tasks; each by hand."""

import json
from functools import partial
from itertools import islice
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import torch
from PIL import Image

from obbo_lightning import Stream
from obbo_lightning.networks import CNN4
from obbo_lightning.streams.arriving import arrivals
from obbo_lightning.streams.few_shot import fc100
from obbo_lightning.streams.arriving.arrivals import Folder, LinesOfAFile, StandardInput
from obbo_lightning.streams.arriving.follow import FollowStream
from obbo_lightning.streams.arriving.task_files import (
    DamagedTaskError,
    UnreadableError,
    read_json,
    read_npz,
    read_parquet,
)
from obbo_lightning.streams.few_shot.classes import Division
from obbo_lightning.streams.few_shot.images import ImageFolderStream, image_bytes, read_folder
from obbo_lightning.streams.few_shot.synthetic import SyntheticStream
from obbo_lightning.streams.few_shot.vectors import ExampleStream, read_examples, read_features
from obbo_lightning.streams.fingerprints import digest_of, fingerprint_of
from obbo_lightning.streams.market.columns import find_columns
from obbo_lightning.streams.market.prices import (
    Series,
    detect_events,
    find_bar,
    read_events,
    read_prices,
    same_clock,
    series_of,
)
from obbo_lightning.streams.market.stream import MarketStream

HOUR = np.timedelta64(1, "h")
START = np.datetime64("2021-01-04T00:00:00", "us")


def series(bars=10):
    return Series(START + np.arange(bars) * HOUR, np.arange(1.0, bars + 1), None)


@pytest.mark.parametrize(
    ("minutes", "before", "after", "expected"),
    [
        (240, 5, 5, 4),  # a bar's own moment
        (299, 5, 5, 4),  # the bar before it, until the next one
        (300, 6, 4, 5),
        (0, 1, 9, 0),
        (540, 10, 0, 9),
        (240, 6, 5, "must have 6 prices up to it, and has 5"),
        (240, 5, 6, "must have 6 prices after it, and has 5"),
        (541, 1, 0, "must lie in the prices, 2021-01-04 00:00:00 to 2021-01-04 09:00:00, and does not"),
        (-1, 1, 0, "must lie in the prices, 2021-01-04 00:00:00 to 2021-01-04 09:00:00, and does not"),
    ],
)
def test_the_bar_of_an_event_is_the_last_that_is_not_later(minutes, before, after, expected):
    assert find_bar(series(), START + np.timedelta64(minutes, "m"), before, after) == expected


def jumping(tickers, bars, jumps, seed=0):
    rng = np.random.default_rng(seed)
    steps = 0.001 * rng.normal(size=(tickers, bars))
    for ticker, bar in jumps:
        steps[ticker, bar] += 0.05
    times = START + np.arange(bars) * HOUR
    tables = [
        pl.DataFrame({"ticker": f"T{i}", "timestamp": times, "close": 20 * np.exp(steps[i].cumsum())})
        for i in range(tickers)
    ]
    return pl.concat(tables).with_row_index("row", offset=1)


def test_a_jump_needs_all_its_bars_before_and_after_it_and_can_then_be_cut():
    table = jumping(4, 100, [(0, 49), (1, 50), (2, 79), (3, 80)])  # 50, 51 bars up to them; 20, 19 behind them
    places = [(0, 49), (1, 50), (2, 79), (3, 80)]
    for before, after in ((50, 20), (51, 20), (50, 19), (51, 19), (81, 19), (82, 0)):
        found = detect_events(table, 8, 20, 10, before, after).select("ticker", "timestamp").iter_rows()
        expected = [
            (f"T{i}", (START + bar * HOUR).item()) for i, bar in places if bar + 1 >= before and 99 - bar >= after
        ]
        assert sorted(found) == sorted(expected)


def test_a_gap_is_counted_from_the_last_event_and_not_from_a_jump_between():
    found = detect_events(jumping(4, 140, [(0, 60), (0, 80), (0, 100), (1, 70), (1, 99)]), 8, 20, 30)
    at = [(ticker, int((np.datetime64(when, "us") - START) / HOUR)) for _, ticker, when, _ in found.iter_rows()]
    assert at == [("T0", 60), ("T1", 70), ("T0", 100)]  # in time


def test_two_tickers_are_no_market_and_three_are():
    for tickers, found in ((2, 2), (3, 0)):  # a jump that all of them share
        events = detect_events(jumping(tickers, 100, [(i, 60) for i in range(tickers)]), 8, 20, 10)
        assert len(events.filter(pl.col("timestamp") == START + 60 * HOUR)) == found


@pytest.mark.parametrize(
    ("closes", "times", "fault"),
    [
        ([1, 0, 2, -1, 3], range(5), "p.csv, ticker A, row 12: a price must be a positive number, got 0.0"),
        ([1, 2, np.inf, np.nan, 3], range(5), "p.csv, ticker A, row 13: a price must be a positive number, got inf"),
        ([1, 2, 3, 4, 5], [0, 1, 1, 1, 2], "p.csv, ticker A, row 13: timestamps must occur once, got 2021-01-04 01:00"),
        ([1, 2, 3, 4, 5], [0, 3, 2, 1, 4], "p.csv, ticker A, row 13: timestamps must increase, got 2021-01-04 02:00"),
        ([1, 2, 3, 4, 0], [0, 3, 2, 1, 4], "p.csv, ticker A, row 15: a price must be a positive number, got 0.0"),
        ([1e-9, 2, 3, 4, 5], range(5), None),
    ],
)
def test_the_first_fault_of_a_ticker_is_named(closes, times, fault):
    moments = START + np.array(times) * HOUR
    table = pl.DataFrame({"row": range(11, 16), "ticker": "A", "timestamp": moments, "close": np.array(closes, float)})
    other = table.with_columns(ticker=pl.lit("B"), close=1.0)
    found = series_of(pl.concat([table, other]), ["A"], "p.csv")
    assert list(found) == ["A"]
    assert (found["A"].fault or "").startswith(fault or "")
    assert (found["A"].fault is None) == (fault is None)
    in_folder = series_of(table.with_columns(file=pl.lit("a.csv")), ["A"], "folder/")["A"].fault
    assert in_folder is None if fault is None else in_folder.startswith("folder/a.csv, ticker A, row 1")
    assert find_bar(found["A"], START, 1, 0) == (found["A"].fault or 0)
    assert find_bar(None, START, 1, 0) == "the ticker must be in the prices, and is not"


ZONES = {
    "2021-01-04T09:30:00Z": "2021-01-04T09:30:00",
    "2021-01-04T09:30:00-05:00": "2021-01-04T14:30:00",
    "2021-01-04 09:30:00+0530": "2021-01-04T04:00:00",
    "2021-01-04 09:30:00": "2021-01-04T09:30:00",
    "2021-01-04": "2021-01-04T00:00:00",
    " 2021-01-04T09:30:00.250000 ": "2021-01-04T09:30:00.250000",
}


@pytest.mark.parametrize("text", ZONES)
def test_a_moment_in_words_is_that_of_utc_where_it_has_a_zone(text, tmp_path):
    (tmp_path / "events.csv").write_text(f"ticker,timestamp\nA,{text}\n")
    events = read_events(tmp_path / "events.csv")
    zoned = text[10:].endswith("Z") or "+" in text or "-" in text[10:]
    assert events.schema["timestamp"] == pl.Datetime("us", "UTC" if zoned else None)
    plain, _ = same_clock(events, events)
    assert plain["timestamp"].to_numpy()[0] == np.datetime64(ZONES[text], "us")


def test_moments_of_which_only_some_have_a_zone_are_refused_and_nanoseconds_are_microseconds(tmp_path):
    (tmp_path / "events.csv").write_text("ticker,timestamp\nA,2021-01-04T09:30:00Z\nA,2021-01-05T09:30:00\n")
    with pytest.raises(ValueError, match=r"row \d: timestamp must be there and readable"):
        read_events(tmp_path / "events.csv")
    for unit in ("ns", "ms"):
        for zone, hour in ((None, 9), ("America/New_York", 14)):
            moment = pl.Series(["2021-01-04 09:30:00"]).str.to_datetime(time_unit=unit)
            table = pl.DataFrame({"timestamp": moment.dt.replace_time_zone(zone), "close": [1.5]})
            table.write_parquet(tmp_path / "A.parquet")
            found = read_prices(tmp_path / "A.parquet")
            assert found.schema["timestamp"] == pl.Datetime("us", "UTC" if zone else None)
            assert found["timestamp"].dt.hour().to_list() == [hour]


def test_hidden_files_and_files_of_other_kinds_are_no_prices(tmp_path):
    text = "Date,Close\n2021-01-04,1\n"
    for name in ("B.csv", "A.TXT", ".hidden.csv", "notes.md"):
        (tmp_path / name).write_text(text)
    found = read_prices(tmp_path)
    assert found["ticker"].to_list() == ["A", "B"]
    assert found["file"].to_list() == ["A.TXT", "B.csv"]
    assert found["row"].to_list() == [1, 1]


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        (["Date", "Datetime", "Close"], {"timestamp": "Datetime", "close": "Close"}),
        (["Time", "DATE", "close"], {"timestamp": "DATE", "close": "close"}),
        (["time", "CLOSE", "Symbol"], {"ticker": "Symbol", "timestamp": "time", "close": "CLOSE"}),
        (["Timestamp", "Datetime", "date", "ticker", "symbol"], {"ticker": "ticker", "timestamp": "Timestamp"}),
        ([" Date ", " Close"], {"timestamp": " Date ", "close": " Close"}),
        (["Adj Close", "day"], {}),
    ],
)
def test_the_first_of_the_usual_names_is_taken(there, expected, tmp_path):
    assert find_columns(there, ("ticker", "timestamp", "close"), {}, tmp_path) == expected


def test_what_a_market_stream_is_made_from_is_told_apart_by_its_past_alone(tmp_path):
    table = jumping(3, 90, [])
    events = table.filter(pl.col("timestamp") == START + 59 * HOUR).select("ticker", "timestamp")
    events.write_csv(tmp_path / "events.csv")

    def stream(name, changed=(), **settings):
        bar = pl.int_range(pl.len()).over("ticker")
        moved = pl.when((pl.col("ticker") == "T1") & bar.is_in(list(changed))).then(1.1).otherwise(1.0)
        table.drop("row").with_columns(pl.col("close") * moved).write_csv(tmp_path / f"{name}.csv")
        sizes = {"subset": 20, "subsets": 30, "horizon": 5} | settings
        return MarketStream(str(tmp_path / f"{name}.csv"), str(tmp_path / "events.csv"), **sizes)

    first = stream("first")
    assert list(first.source_digests()) == [f"T{i} 2021-01-06 11:00:00" for i in range(3)]
    for bar, differs in ((10, True), (59, True), (9, False), (60, False)):  # 50 bars up to the 60th
        other = stream("other", [bar])
        assert [
            name for name in first.source_digests() if first.source_digests()[name] != other.source_digests()[name]
        ] == (["T1 2021-01-06 11:00:00"] if differs else [])
    prints = [first.fingerprint(t, None) for t in range(30)]
    for bar in (10, 29, 30, 58, 59):
        other = stream("other", [bar])
        changed = [t for t in range(30) if other.fingerprint(t, None) != prints[t]]
        assert changed == ([max(0, bar - 29)] if bar < 59 else [])
        assert not changed or first.place(changed[0]) == (
            "one of the first 20 bars of an event" if bar < 30 else f"bar {bar - 9} of every event"
        )
    beyond = stream("beyond", beyond=4)
    assert torch.equal(beyond.train.values[:50], first.train.values[:50])
    assert len(beyond.train) == 34
    log = np.log(table["close"].to_numpy().reshape(3, 90).T)
    assert torch.allclose(beyond.train.values, torch.from_numpy(log[10:69]))
    assert torch.allclose(beyond.validation.values[:20], torch.from_numpy(log[44:64]))
    seen, ahead = log[44:64], log[64:69]
    naive = (((ahead - seen[-1]) / seen.std(0)) ** 2).mean(0)
    assert np.allclose(beyond.lanes["naive_mse"].to_numpy(), naive)


def test_pixels_of_every_mode_are_the_bytes_that_one_sees():
    ramp = np.linspace(0, 65535, 400).reshape(20, 20).astype(np.uint16)
    assert np.array_equal(image_bytes(Image.fromarray(ramp))[:, :, 0], ramp >> 8)
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    opaque = Image.merge("LA", [Image.fromarray(grey), Image.new("L", (16, 16), 255)])
    for image in (Image.fromarray(grey), opaque):
        assert np.array_equal(image_bytes(image), grey[:, :, None])
    assert image_bytes(Image.fromarray(grey > 127)).tolist() == (255 * (grey > 127))[:, :, None].tolist()
    colour = np.stack([grey, grey.T, 255 - grey], axis=2)
    clear = Image.fromarray(np.dstack([colour, np.zeros_like(grey)]))
    for image in (Image.fromarray(colour), clear):
        assert np.array_equal(image_bytes(image), colour)


def test_a_folder_of_images_is_read_in_order_without_what_is_hidden(tmp_path):
    places = {"b/2.PNG": 2, "b/1.png": 1, "a/deep/3.png": 3, ".hidden/0.png": 9, "a/notes.txt": None}
    for place, value in places.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        if value is None:
            (tmp_path / place).write_text("no image")
        else:
            Image.fromarray(np.full((16, 16), value, np.uint8)).save(tmp_path / place)
    (tmp_path / "readme.txt").write_text("no class")
    images, labels = read_folder(tmp_path, None)
    assert labels.tolist() == ["a", "b", "b"]
    assert images[:, 0, 0, 0].tolist() == [3, 1, 2]


def test_pixels_are_standardised_by_each_channel_of_the_training_classes(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (60, 16, 16, 3), dtype=np.uint8)
    images[..., 1] = 51  # a constant has no deviation
    images[..., 2] //= 4
    labels = np.repeat(np.arange(6), 10)
    images[labels == 5] = 255
    np.savez(tmp_path / "own.npz", images=images, labels=labels)
    lists = {"train_classes": [0, 1], "validation_classes": [2, 3], "test_classes": [4, 5]}
    stream = ImageFolderStream(str(tmp_path / "own.npz"), ways=2, shots=2, queries=2, **lists)
    seen = images[labels < 2] / 255
    mean, deviation = seen.mean((0, 1, 2)), seen.std((0, 1, 2))
    assert np.allclose(stream.inputs()["mean"], mean)
    assert np.allclose(stream.inputs()["deviation"], [deviation[0], 1.0, deviation[2]])
    assert stream.inputs()["trained_on"] == ["0", "1"]
    task = stream.train[3]
    expected = (images / 255 - mean) / [deviation[0], 1.0, deviation[2]]
    known = torch.from_numpy(expected).permute(0, 3, 1, 2).float()
    rows = [int((known - image).abs().amax((1, 2, 3)).argmin()) for image in task["support"]]
    assert torch.allclose(task["support"], known[rows], atol=1e-5)
    assert sorted(labels[rows]) == [0, 0, 1, 1]
    assert len({(int(label), labels[row]) for label, row in zip(task["support_labels"], rows, strict=True)}) == 2


def test_a_table_may_turn_to_fractions_late_and_hold_truths(tmp_path):
    rows = ["label,whole,flag", *(f"{i % 4:03d},{i},{str(i % 3 == 0).lower()}" for i in range(150)), "003,0.5,true"]
    (tmp_path / "own.csv").write_text("\n".join(rows) + "\n")
    examples, labels = read_examples(tmp_path / "own.csv", "label")
    assert examples.tolist() == [[float(i), float(i % 3 == 0)] for i in range(150)] + [[0.5, 1.0]]
    assert labels.tolist() == [f"{i % 4:03d}" for i in range(150)] + ["003"]
    again, _ = read_features(tmp_path / "own.csv", "label", columns=["flag", "whole"])
    assert np.array_equal(again, examples[:, ::-1])


def test_examples_are_standardised_with_the_deviation_of_all_of_them(tmp_path):
    rng = np.random.default_rng(0)
    examples, labels = rng.normal(size=(24, 2, 2)) * 3 + 1, np.repeat(list("abcdef"), 4)
    np.savez(tmp_path / "own.npz", examples=examples, labels=labels)
    lists = {"train_classes": ["a", "d"], "validation_classes": ["b", "c"], "test_classes": ["e", "f"]}
    stream = ExampleStream(str(tmp_path / "own.npz"), ways=2, shots=2, queries=2, **lists)
    seen = examples[np.isin(labels, ["a", "d"])]
    assert np.allclose(stream.train.source.examples, (examples - seen.mean(0)) / seen.std(0), atol=1e-6)
    assert stream.inputs()["trained_on"] == ["a", "d"]
    division = Division.of(labels, [1, 1, 1], list(lists.values()))
    assert division.digests(examples)["b"] == digest_of(examples[4:8]) != division.digests(examples)["c"]
    assert stream.source_digests() == division.digests(examples)


def test_fingerprints_are_of_names_kinds_shapes_and_numbers_in_any_order():
    x, y = torch.arange(6.0), torch.ones(2)
    first = fingerprint_of({"x": x, "y": y})
    assert first == fingerprint_of({"y": y, "x": x})
    others = [{"x": x, "z": y}, {"x": y, "y": x}, {"x": x.double(), "y": y}, {"x": x.reshape(2, 3), "y": y}]
    others += [{"x": x + 1, "y": y}, {"x": x}]
    assert len({first, *map(fingerprint_of, others)}) == 7


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ({"x": [[1.0, 2.0]], "y": [[3]]}, {"x": [1.0, 2.0], "y": [3]}),  # one row of lists: the lists
        ({"x": [[1.0, 2.0]], "y": [3]}, {"x": [[1.0, 2.0]], "y": [3]}),  # one row, not of lists alone
        ({"x": [1.0, 2.0]}, {"x": [1.0, 2.0]}),
    ],
)
def test_a_parquet_is_lists_in_a_row_or_columns(rows, expected, tmp_path):
    pl.DataFrame(rows).write_parquet(tmp_path / "one.parquet")
    found = read_parquet((tmp_path / "one.parquet").read_bytes())
    assert {name: values.tolist() for name, values in found.items()} == expected


@pytest.mark.parametrize(
    ("read", "content", "error", "said"),
    [
        (read_npz, b"PK", UnreadableError, "cannot be read as an npz file"),
        (read_parquet, b"PAR1", UnreadableError, "cannot be read as parquet"),
        (read_json, b'{"x": [1', UnreadableError, "cannot be read as JSON"),
        (read_json, b"[1, 2]", DamagedTaskError, "must be an object of arrays by name, got list"),
    ],
)
def test_half_a_task_is_unreadable_and_another_thing_is_damaged(read, content, error, said):
    with pytest.raises(error, match=said):
        read(content)


def npz(path, value):
    np.savez(path, x=np.full(3, float(value)))
    return path.read_bytes()


def test_a_file_that_still_grows_is_waited_for_also_when_later_ones_are_there(tmp_path):
    whole = npz(tmp_path / "1.npz", 1)
    npz(tmp_path / "2.npz", 2)
    place = Folder(tmp_path)
    for part in (100, 150, 200):
        (tmp_path / "1.npz").write_bytes(whole[:part])
        assert place.take() is None
    (tmp_path / "1.npz").write_bytes(whole)
    assert [place.take()[1]["x"][0] for _ in range(2)] == [1.0, 2.0]
    assert (place.position, place.take()) == ("2.npz", None)
    (tmp_path / "3.npz").write_bytes(whole[:100])
    assert place.take() is None
    assert place.take() is None  # the newest one may come to its end
    npz(tmp_path / "4.npz", 4)
    with pytest.raises(DamagedTaskError, match=r"3\.npz cannot be read"):
        place.take()
    (tmp_path / "3.npz").unlink()
    assert place.take() is None  # it was taken away
    assert place.take()[1]["x"][0] == 4.0
    assert [Folder(tmp_path, "2.npz").take()[0], Folder(tmp_path).take()[0]] == [
        str(tmp_path / "4.npz"),
        str(tmp_path / "1.npz"),
    ]


def test_a_name_is_late_only_where_it_was_not_there_before(tmp_path):
    for n in (1, 3):
        npz(tmp_path / f"{n}.npz", n)
    place = Folder(tmp_path, "1.npz")  # resumed behind the first one
    assert place.take()[1]["x"][0] == 3.0
    assert place.take() is None
    npz(tmp_path / "1.npz", 7)  # written again: played already
    assert place.take() is None
    npz(tmp_path / "2.npz", 2)
    with pytest.raises(DamagedTaskError, match=r"2\.npz must come before 3\.npz, which was played, and came after it"):
        place.take()


def test_lines_are_counted_with_the_empty_ones_and_read_once_they_end(tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(b'{"x": [1]}\n\n  \n{"x": [2]}\n{"x": [3]')
    place = LinesOfAFile(file)
    assert place.take()[0] == f"{file}, line 1"
    where, arrays = place.take()
    assert (where, arrays["x"].tolist()) == (f"{file}, line 4", [2])
    assert place.take() is None
    assert place.position == {"bytes": 26, "line": 4}
    again = LinesOfAFile(file, place.position)
    file.write_bytes(file.read_bytes() + b"}\n")
    for one in (place, again):
        assert one.take()[1]["x"].tolist() == [3]
    file.write_bytes(b'{"x": [1]}\n')
    with pytest.raises(DamagedTaskError, match=r"must only grow, and is shorter than the 37 bytes that were played"):
        place.take()


class Piped:
    """Standard input that brings these parts, one a read."""

    def __init__(self, monkeypatch, *parts):
        self.parts = list(parts)
        monkeypatch.setattr(arrivals.sys, "stdin", self)
        monkeypatch.setattr(arrivals.select, "select", lambda *asked: ([self] if self.parts else [], [], []))
        monkeypatch.setattr(arrivals.os, "read", lambda number, size: self.parts.pop(0))

    def fileno(self):
        return 0


def test_standard_input_is_read_line_by_line_whatever_its_parts_are(monkeypatch):
    Piped(monkeypatch, b'{"x": [1]}\n{"x"', b": [2]}", b'\n\n{"x": [3]}\n', b"")
    place = StandardInput()
    first = place.take()
    place.give_back(first)
    found = [place.take() for _ in range(3)]
    assert [(where, arrays["x"].tolist()) for where, arrays in found] == [
        ("standard input, line 1", [1]),
        ("standard input, line 2", [2]),
        ("standard input, line 4", [3]),
    ]
    assert not place.over
    assert place.take() is None
    assert place.over


def line(size=3, labels=(0, 1), queries=(0, 1), whole=False):
    rng = np.random.default_rng(size)
    draw = lambda: rng.integers(0, 9, (2, size)).tolist() if whole else rng.normal(size=(2, size)).tolist()  # noqa: E731
    task = {"support": draw(), "support_labels": labels, "query": draw(), "query_labels": queries}
    return json.dumps(task) + "\n"


def followed(path, few_shot=True, timeout=0.001):
    tasks = FollowStream(str(path), timeout).train
    tasks.few_shot = few_shot
    return tasks


@pytest.mark.parametrize("moved", [False, True])
def test_the_form_of_the_first_task_is_known_after_a_resume(moved, tmp_path, monkeypatch):
    monkeypatch.setattr("obbo_lightning.streams.arriving.follow.POLL", 0.0)
    (tmp_path / "one.jsonl").write_text(line() + line())
    first = iter(followed(tmp_path / "one.jsonl"))
    list(islice(first, 2))
    (tmp_path / "two.jsonl").write_text(line() * 2 + line(size=4))
    again = iter(followed(tmp_path / ("two.jsonl" if moved else "one.jsonl")))
    if not moved:
        (tmp_path / "one.jsonl").write_text(line() * 2 + line(size=4))
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    with pytest.raises(DamagedTaskError, match=r"line 3: 'support' must be float32 \[2, 3\] as in the first task, got"):
        next(again)
    (tmp_path / "three.jsonl").write_text(line())
    with pytest.raises(ValueError, match=r"must have the 2 tasks that were played, and .*three.jsonl has not"):
        iter(followed(tmp_path / "three.jsonl")).load_state_dict(first.state_dict())


def test_whole_numbers_are_numbers_of_examples_and_labels_stay_whole(tmp_path):
    (tmp_path / "tasks.jsonl").write_text(line(whole=True))
    (found,) = followed(tmp_path / "tasks.jsonl")
    kinds = {name: values.dtype for name, values in found.items()}
    assert kinds["support"] == kinds["query"] == torch.float32
    assert kinds["support_labels"] == kinds["query_labels"] == torch.int64
    (tmp_path / "plain.jsonl").write_text('{"x": [1, 2], "y": [0.5], "z": [true]}\n')
    tasks = followed(tmp_path / "plain.jsonl", few_shot=False)
    tasks.dtype = torch.float64
    (found,) = tasks
    assert [found[name].dtype for name in "xyz"] == [torch.int64, torch.float64, torch.bool]


@pytest.mark.parametrize(
    ("labels", "queries"),
    [((1, 2), (1, 2)), ((0, 2), (0, 2)), ((0, 1), (0, 2)), ((0, 0), (0, 1)), ((0.0, 1.0), (0, 1))],
)
def test_labels_are_the_classes_of_the_support(labels, queries, tmp_path):
    (tmp_path / "tasks.jsonl").write_text(line(labels=labels, queries=queries))
    with pytest.raises(
        DamagedTaskError, match=r"line 1: (labels must be the classes|'support_labels' must be a whole)"
    ):
        list(followed(tmp_path / "tasks.jsonl"))


def test_a_wait_is_said_again_and_again_and_ends_after_its_time(tmp_path, monkeypatch):
    clock, said = [0.0], []
    monkeypatch.setattr("obbo_lightning.streams.arriving.follow.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(LinesOfAFile, "wait", lambda self, seconds: clock.__setitem__(0, clock[0] + 1.0))
    (tmp_path / "tasks.jsonl").write_text(line())
    tasks = followed(tmp_path / "tasks.jsonl", timeout=5.0)
    tasks.on_wait = said.append
    assert len(list(tasks)) == 1
    assert said == [f"tasks in {tmp_path / 'tasks.jsonl'}"] * 5
    assert next(tasks.so_far())["query"].shape == (2, 3)  # without a wait
    assert len(said) == 5


def test_a_bad_event_is_named_with_the_file_that_it_is_from(tmp_path):
    table = jumping(4, 100, [(1, 60)]).drop("row")
    late = pl.concat([table[:195], table[194:195], table[195:]])  # a bar twice, far behind the jump
    late.write_csv(tmp_path / "prices.csv")
    sizes = {"subset": 20, "subsets": 20, "horizon": 5, "lookback": 20}
    with pytest.raises(ValueError, match=r"^\S+prices.csv, row 161, event T1 2021-01-06 12:00:00: .* must occur once"):
        MarketStream(str(tmp_path / "prices.csv"), **sizes)
    lines = ["ticker,timestamp", *("T0,2021-01-06 12:00:00", "T1,2021-01-06 12:00:00") * 3]
    (tmp_path / "events.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=r"^\S+events.csv, row 2, event T1 .* skip leaves it out\)"):
        MarketStream(str(tmp_path / "prices.csv"), str(tmp_path / "events.csv"), **sizes)
    with pytest.warns(UserWarning, match="5 of 6 events skipped"):
        stream = MarketStream(str(tmp_path / "prices.csv"), str(tmp_path / "events.csv"), on_bad_event="skip", **sizes)
    assert stream.lanes["ticker"].to_list() == ["T0"]
    assert [(bad.row, bad.ticker) for bad in stream.skipped] == [(2, "T1"), (3, "T0"), (4, "T1"), (5, "T0"), (6, "T1")]
    assert {bad.reason for bad in stream.skipped if bad.ticker == "T0"} == {"must occur once, and is in row 1 too"}
    with pytest.raises(ValueError, match=r"data.events 'auto' found no jump of 900.0 deviations in \S+prices.csv"):
        MarketStream(str(tmp_path / "prices.csv"), threshold=900.0, **sizes)


def test_only_training_tasks_drift_and_splits_have_draws_of_their_own():
    stream, other = (SyntheticStream(order="drift", period=20, image_size=16, ways=2, seed=seed) for seed in (0, 1))
    assert len(stream.train.weights(3).unique()) > 1
    for name in ("validation", "test"):
        tasks = getattr(stream, name)
        assert torch.equal(tasks.weights(3), torch.ones(20))
        assert torch.equal(tasks[3]["query"], getattr(other, name)[3]["query"])
    assert not torch.equal(stream.train[3]["query"], other.train[3]["query"])
    assert not torch.equal(stream.train[3]["query"], stream.train[4]["query"])
    assert stream.inputs()["mean"] == [0.5] * 3
    assert stream.inputs()["deviation"] == [1 / 3] * 3


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"labels": np.zeros(3, int)}, "must hold images and labels, and has no images"),
        ({"images": np.zeros((0, 4, 4), np.uint8), "labels": np.zeros(0, int)}, "images must not be empty"),
    ],
)
def test_a_file_without_images_is_refused(arrays, said, tmp_path):
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises(ValueError, match=said):
        ImageFolderStream(str(tmp_path / "own.npz"))
    np.savez(tmp_path / "own.npz", labels=np.zeros(3, int))
    with pytest.raises(ValueError, match="must hold examples and labels, and has no examples"):
        read_examples(tmp_path / "own.npz", "label")
    with pytest.raises(ValueError, match=r"data.path must hold a folder for each class, got .* without any"):
        read_folder(tmp_path, None)


def test_images_of_a_file_are_scaled_to_the_size_that_is_asked_for(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (40, 32, 48), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", images=images, labels=np.arange(40) % 10)
    stream = ImageFolderStream(str(tmp_path / "own.npz"), image_size=16, ways=2, shots=1, queries=1)
    expected = np.asarray(Image.fromarray(images[7][:, 8:40]).resize((16, 16), Image.Resampling.BILINEAR))
    inside = slice(1, 15)  # at its border Pillow looks at what lies beside the square
    assert np.array_equal(stream.train.source.examples[7, 0, :, inside].numpy(), expected[:, inside])
    square = np.ascontiguousarray(images[:, :, 8:40])
    np.savez(tmp_path / "own.npz", images=square, labels=np.arange(40) % 10)
    again = ImageFolderStream(str(tmp_path / "own.npz"), image_size=16, ways=2, shots=1, queries=1)
    assert np.array_equal(again.train.source.examples[7, 0].numpy(), expected)


def test_a_damaged_file_of_a_folder_is_named_and_an_empty_task_is_damaged(tmp_path):
    (tmp_path / "1.json").write_text('{"x": [[1], [1, 2]]}')
    with pytest.raises(DamagedTaskError, match=r"1\.json: 'x' must be an array, and its lists have different lengths"):
        Folder(tmp_path).take()
    (tmp_path / "1.json").write_text("{}")
    with pytest.raises(DamagedTaskError, match=r"1\.json: must hold arrays, and has none"):
        next(iter(followed(tmp_path, few_shot=False)))
    assert FollowStream("-").train.so_far() is None


def test_a_stream_without_a_start_of_its_own_says_so():
    class Bare(Stream):
        """Nothing is known of it."""

    problem = SimpleNamespace(initial_outer=lambda seed: torch.full((1, 2), float(seed)) if seed else None)
    assert Bare().start(problem, 3).tolist() == [[3.0, 3.0]]
    with pytest.raises(ValueError, match="Bare must say where λ starts, got none: it needs a method start"):
        Bare().start(problem, 0)
    with pytest.raises(ValueError, match="problem must be given for Bare, which has none of its own, got none"):
        Bare().problem()
    assert (Bare().task_spec(), Bare().inputs(), Bare().source_digests(), Bare().place(4)) == ({}, None, {}, "task 5")


def test_a_network_keeps_what_was_given_to_it_and_learns_the_rest_from_the_tasks():
    stream = SyntheticStream(ways=4, image_size=16)
    usual = stream.problem().network.template
    assert usual.linear.out_features == 4
    given = stream.problem(network=partial(CNN4, ways=7, filters=2)).network.template
    assert given.linear.out_features == 7
    own = CNN4(ways=3, filters=2, image_size=16)
    assert stream.problem(network=own).network.template.linear.out_features == 3


@pytest.mark.parametrize(
    ("root", "variable", "place"), [("mine", "theirs", "mine"), (None, "theirs", "theirs"), (None, None, "data")]
)
def test_the_folder_of_cifar_is_the_one_that_is_named_then_that_of_the_environment(root, variable, place, monkeypatch):
    asked = []

    def load(path):
        asked.append(str(path))
        raise ValueError("not there")

    monkeypatch.setattr(fc100, "load_cifar100", load)
    monkeypatch.delenv("OBBO_DATA", raising=False)
    if variable:
        monkeypatch.setenv("OBBO_DATA", variable)
    with pytest.raises(ValueError, match="not there"):
        fc100.FC100Stream(root)
    assert asked == [place]
