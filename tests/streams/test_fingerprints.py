"""Digests of tasks, and of bytes, texts and files."""

import hashlib

import torch

from obbo_lightning.streams.fingerprints import fingerprint_of, sha256_of


def test_fingerprint_depends_on_names_dtypes_shapes_and_values_but_not_on_order():
    x, y = torch.arange(6.0), torch.ones(2)
    first = fingerprint_of({"x": x, "y": y})
    assert first == fingerprint_of({"y": y, "x": x})
    others = [{"x": x, "z": y}, {"x": y, "y": x}, {"x": x.double(), "y": y}, {"x": x.reshape(2, 3), "y": y}]
    others += [{"x": x + 1, "y": y}, {"x": x}]
    assert len({first, *map(fingerprint_of, others)}) == 7


def test_sha256_of_a_file_is_that_of_its_bytes(tmp_path):
    (tmp_path / "x").write_bytes(b"content \xff")
    assert sha256_of(tmp_path / "x") == sha256_of(b"content ", b"\xff") == hashlib.sha256(b"content \xff").hexdigest()
