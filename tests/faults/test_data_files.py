"""Data that somebody else wrote, damaged in any way, and streams of user code that do what they should not."""

import random
import zipfile
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from everything import TINY, Everything, told

from obbo_lightning.streams.arriving import PARSERS
from obbo_lightning.streams.labelled.stream import LabelledExamples
from obbo_lightning.streams.market import read_events, read_prices
from obbo_lightning.streams.readers import read_examples, read_images, read_npz
from obbo_lightning.streams.tabular import read_rows

WORDS = (b"nan", b"inf", b"-", b'"', b",", b"\n", b"\x00", b"\xff", b"1e999", b"=1+1", b"", b"9" * 400, b"2026-13-01")


def damaged(content, rng):
    """Bytes flipped, cut out, doubled, or replaced by words."""
    found = bytearray(content)
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(found) or 1)
        length = rng.choice((1, 2, 8, 64))
        piece = bytes(found[place : place + length])
        found[place : place + length] = rng.choice(
            (rng.choice(WORDS), bytes(byte ^ rng.randrange(1, 256) for byte in piece), b"", piece * 2, b"\x00" * length)
        )
    return bytes(found[: rng.randrange(len(found) + 1)] if rng.random() < 0.2 else found)


def rows(count=12):
    table = pl.DataFrame({"ticker": "A", "timestamp": [f"2026-01-{t + 1:02d} 09:30:00" for t in range(count)]})
    return table.with_columns(close=pl.Series(np.arange(count) + 1.5), label=pl.Series(np.arange(count) % 3))


def write(path):
    rng, labels = np.random.default_rng(0), np.arange(12) % 3
    if path.suffix == ".csv":
        rows().write_csv(path)
    elif path.suffix == ".parquet":
        rows().write_parquet(path)
    elif path.suffix == ".json":
        path.write_text('{"support": [[1.0, 2.0], [3, 4]], "support_labels": [0, 1]}')
    elif path.stem == "images":
        np.savez(path, images=rng.integers(0, 256, (12, 4, 4), dtype=np.uint8), labels=labels)
    else:
        np.savez_compressed(path, examples=rng.normal(size=(12, 2)), labels=labels, support=np.ones((2, 2)))


READ = {
    "examples.csv": lambda path: read_examples(path, "label", "data.path", ["close"]),
    "examples.parquet": lambda path: read_examples(path, "label", "data.path", ["close"]),
    "examples.npz": lambda path: read_examples(path, "label", "data.path", None),
    "images.npz": read_images,
    "labelled.npz": lambda path: LabelledExamples.read(str(path), "labels"),
    "prices.csv": read_prices,
    "prices.parquet": read_prices,
    "events.csv": read_events,
    "rows.csv": lambda path: read_rows(path, "label", ["close"], "auto"),
    **{f"task{suffix}": lambda path: PARSERS[path.suffix](path.read_bytes()) for suffix in PARSERS},
}


def wrong(name, folder, seeds):
    """Whatever is no refusal, by its seed."""
    path = Path(folder) / name
    write(path)
    READ[name](path)  # as it is, it can be read
    content, found = path.read_bytes(), []
    for seed in seeds:
        path.write_bytes(damaged(content, random.Random(seed)))
        try:
            READ[name](path)
        except ValueError:
            continue
        except Exception as error:
            found.append((seed, type(error).__name__, str(error)[:200]))
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READ)
def test_damaged_data_are_read_or_refused(name, tmp_path):
    assert not wrong(name, tmp_path, range(40))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READ)
def test_data_damaged_in_many_ways_are_read_or_refused(name, tmp_path):
    assert not wrong(name, tmp_path, range(40, 3000))


def raising(task):
    raise RuntimeError("the disk\nof the user is gone")


FAULTS = {
    "raises": raising,
    "another shape": lambda task: {name: value[:, :2] for name, value in task.items()},
    "another number of lanes": lambda task: {name: value[:1] for name, value in task.items()},
    "no tensors": lambda task: {name: value.tolist() for name, value in task.items()},
    "arrays": lambda task: {name: value.numpy() for name, value in task.items()},
    "a name too few": lambda task: {"x": task["x"]},
    "nothing": lambda task: None,
    "a word": lambda task: "task",
    "integers": lambda task: {name: value.long() for name, value in task.items()},
    "NaN": lambda task: {name: value * torch.nan for name, value in task.items()},
    "infinity": lambda task: {name: value / 0 for name, value in task.items()},
}


class Odd(Everything):
    """A stream that does what it should not, from its fifth task on.

    Args:
        fault: what.
        at: the task.
        seed: of everything.
    """

    def __init__(self, fault: str = "raises", at: int = 4, seed: int = 0):
        self.fault, self.at = fault, at
        super().__init__(1.0, seed)

    def drawn(self, first):
        draw = super().drawn(first)
        return lambda t: FAULTS[self.fault](draw(t)) if t >= self.at and not first else draw(t)


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_stream_that_does_what_it_should_not_is_one_line(fault, at, tmp_path, monkeypatch):
    monkeypatch.setattr("obbo_lightning.training.run.draw_figures", lambda *given: [])
    flags = ["--data", "test_data_files.Odd", "--data.fault", fault, "--data.at", at]
    code, said, _ = told("fit", *flags, *TINY, "--rounds", "4", "--on_nonfinite", "raise", "--output", tmp_path)
    assert said.count("\n") <= 1, said
    harmless = {"integers", "another number of lanes"}  # which torch converts, and repeats
    assert (code in (1, 2) and said.startswith("obbo: ")) or ((code, said) == (0, "") and fault in harmless), (
        code,
        said,
    )


def test_what_does_not_begin_like_an_array_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "mine.npz", "w") as file:
        file.writestr("examples.npy", b"no array")  # with the right checksum: NumPy hands out its bytes
    with pytest.raises(ValueError, match=r"mine\.npz cannot be read as an npz file: examples is no array"):
        read_npz(tmp_path / "mine.npz", ("examples", "labels"))
