"""Readers of images, tables and npz files."""

import os

import numpy as np
import polars as pl
import pytest
from PIL import Image

from obbo_lightning.streams.readers import image_bytes, read_class_folders, read_examples, read_images, read_table


def test_pixels_of_every_mode_become_the_bytes_that_one_sees():
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


def test_class_folders_are_read_in_order_without_hidden_files(tmp_path):
    values = {"b/2.PNG": 2, "b/1.png": 1, "a/deep/3.png": 3, ".hidden/0.png": 9, "a/.hidden.png": 8}
    for name, value in values.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((16, 16), value, np.uint8)).save(tmp_path / name)
    for name in ("a/notes.txt", "readme.txt"):
        (tmp_path / name).write_text("no image")
    images, labels = read_class_folders(tmp_path, None)
    assert labels.tolist() == ["a", "b", "b"]
    assert images[:, 0, 0, 0].tolist() == [3, 1, 2]


def test_resized_image_is_the_square_in_the_middle(tmp_path):
    wide = np.zeros((16, 40, 3), np.uint8)
    wide[:, 12:28] = 200
    for name, pixels in (("a", wide), ("b", wide.transpose(1, 0, 2).copy())):
        (tmp_path / name).mkdir()
        Image.fromarray(pixels).save(tmp_path / name / "x.png")
    images, labels = read_class_folders(tmp_path, 16)
    assert labels.tolist() == ["a", "b"]
    assert (images == 200).all()


def test_columns_of_a_table_may_hold_booleans_and_begin_with_integers(tmp_path):
    rows = ["label,whole,flag", *(f"{i % 4:03d},{i},{str(i % 3 == 0).lower()}" for i in range(150)), "003,0.5,true"]
    (tmp_path / "own.csv").write_text("\n".join(rows) + "\n")
    values, labels, columns = read_examples(tmp_path / "own.csv", "label")
    assert values.tolist() == [[float(i), float(i % 3 == 0)] for i in range(150)] + [[0.5, 1.0]]
    assert labels.tolist() == [f"{i % 4:03d}" for i in range(150)] + ["003"]
    assert columns == ["whole", "flag"]
    again = read_examples(tmp_path / "own.csv", "label", columns=["flag", "whole"])
    assert np.array_equal(again[0], values[:, ::-1])


def test_files_without_examples_are_refused(tmp_path):
    np.savez(tmp_path / "own.npz", labels=np.zeros(3, int))
    with pytest.raises(ValueError, match="must hold images, got labels"):
        read_images(tmp_path / "own.npz")
    with pytest.raises(ValueError, match="must hold examples, got labels"):
        read_examples(tmp_path / "own.npz", "label")
    np.savez(tmp_path / "own.npz", images=np.zeros((0, 4, 4), np.uint8), labels=np.zeros(0, int))
    with pytest.raises(ValueError, match=r"at least one, got uint8 \[0, 4, 4\]"):
        read_images(tmp_path / "own.npz")
    with pytest.raises(ValueError, match=r"data.path must hold one folder per class, got .* without any"):
        read_class_folders(tmp_path, None)


def test_the_backtrace_of_a_panic_in_polars_is_not_printed(tmp_path, monkeypatch, capfd):
    def panic(path):
        os.write(2, b"thread panicked: stack backtrace")
        raise pl.exceptions.PanicException("called unwrap\nin a thread")

    monkeypatch.setattr(pl, "read_parquet", panic)
    with pytest.raises(ValueError, match=r"x\.parquet cannot be read as parquet: called unwrap$"):
        read_table(tmp_path / "x.parquet", is_csv=False)
    assert capfd.readouterr().err == ""
