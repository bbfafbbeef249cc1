"""Data files that are damaged in any way, and streams of user code that misbehave."""

import random
import zipfile

import numpy as np
import polars as pl
import pytest
import torch
from small_runs import TINY, EveryFile, call

from obbo_lightning.streams.arriving import PARSERS
from obbo_lightning.streams.labelled.stream import LabelledExamples
from obbo_lightning.streams.market import read_events, read_prices
from obbo_lightning.streams.readers import read_examples, read_images, read_npz
from obbo_lightning.streams.tabular import read_rows

WORDS = (b"nan", b"inf", b"-", b'"', b",", b"\n", b"\x00", b"\xff", b"1e999", b"=1+1", b"", b"9" * 400, b"2026-13-01")


def damaged(content, rng):
    """Return content with bytes flipped, cut out, doubled, or replaced by words."""
    found = bytearray(content)
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(found) or 1)
        length = rng.choice((1, 2, 8, 64))
        piece = bytes(found[place : place + length])
        found[place : place + length] = rng.choice(
            (rng.choice(WORDS), bytes(byte ^ rng.randrange(1, 256) for byte in piece), b"", piece * 2, b"\x00" * length)
        )
    return bytes(found[: rng.randrange(len(found) + 1)] if rng.random() < 0.2 else found)


def write(path):
    rng, labels = np.random.default_rng(0), np.arange(12) % 3
    times = [f"2026-01-{t + 1:02d} 09:30:00" for t in range(12)]
    rows = pl.DataFrame({"ticker": ["A"] * 12, "timestamp": times, "close": np.arange(12) + 1.5, "label": labels})
    if path.suffix == ".csv":
        rows.write_csv(path)
    elif path.suffix == ".parquet":
        rows.write_parquet(path)
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


MANY = pytest.param(range(40, 3000), marks=pytest.mark.nightly)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seeds", [range(40), MANY], ids=["40 ways", "many ways"])
@pytest.mark.parametrize("name", READ)
def test_damaged_data_are_read_or_refused(name, seeds, tmp_path):
    path = tmp_path / name
    write(path)
    READ[name](path)
    content, found = path.read_bytes(), []
    for seed in seeds:
        path.write_bytes(damaged(content, random.Random(seed)))
        try:
            READ[name](path)
        except ValueError:
            continue
        except Exception as error:
            found.append((seed, type(error).__name__, str(error)[:200]))
    assert not found


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


class Faulty(EveryFile):
    """Stream that misbehaves from some task on.

    Args:
        fault: one of `FAULTS`.
        at: the first task.
        seed: of everything.
    """

    def __init__(self, fault: str = "raises", at: int = 4, seed: int = 0):
        self.fault, self.at = fault, at
        super().__init__(1.0, seed)

    def make_task(self, first):
        draw = super().make_task(first)
        return lambda t: FAULTS[self.fault](draw(t)) if t >= self.at and not first else draw(t)


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_stream_that_misbehaves_is_one_line(fault, at, tmp_path, no_figures):
    flags = ["--data", f"{__file__}:Faulty", "--data.fault", fault, "--data.at", at]
    code, error, _ = call("fit", *flags, *TINY, "--rounds", "4", "--on_nonfinite", "raise", "--output", tmp_path)
    assert error.count("\n") <= 1, error
    if (fault, at) == ("another number of lanes", 2):  # which torch repeats
        assert (code, error) == (0, "")
    else:
        assert code == 1, error
        assert error.startswith("obbo: ")


def test_an_entry_of_an_npz_file_that_is_no_array_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "mine.npz", "w") as file:
        file.writestr("examples.npy", b"no array")  # with the right checksum: NumPy hands out its bytes
    with pytest.raises(ValueError, match=r"mine\.npz cannot be read as an npz file: examples is no array"):
        read_npz(tmp_path / "mine.npz", ("examples", "labels"))
