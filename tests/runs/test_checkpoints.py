"""Checkpoints of a run are found, verified and read."""

import pytest
import torch

from obbo_lightning import ExactCheckpoints
from obbo_lightning.runs.provenance import (
    CheckpointError,
    list_checkpoints,
    newest_checkpoint,
    read_checkpoint,
    verify_checkpoint,
)


def save(folder, rounds):
    paths = [folder / f"round-{t:08d}.ckpt" for t in rounds]
    for path in paths:
        ExactCheckpoints().save_checkpoint({"file": path.name}, path)
    return paths


def flip_last_bit(path):
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_the_newest_checkpoint_is_that_of_the_last_round(tmp_path):
    paths = save(tmp_path, (9, 10))
    (tmp_path / "last.ckpt").touch()  # the user's own
    (tmp_path / "round-00000011.part").write_bytes(b"half")
    (tmp_path / "round-00000011.sha256").write_text("half")
    assert list_checkpoints(tmp_path) == paths
    assert newest_checkpoint(tmp_path) == paths[1]
    assert read_checkpoint(paths[1]) == {"file": "round-00000010.ckpt"}
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        newest_checkpoint(tmp_path / "none")


def test_a_damaged_checkpoint_is_named_with_the_newest_intact_one(tmp_path):
    paths = save(tmp_path, (5, 10, 15, 20))
    for path in paths[2:]:
        flip_last_bit(path)
        with pytest.raises(CheckpointError, match=f"{path} is damaged"):
            verify_checkpoint(path)
        with pytest.raises(CheckpointError, match=f"{path} is damaged"):
            read_checkpoint(path)
    with pytest.raises(CheckpointError, match=f"the one before it: --checkpoint {paths[1]}"):
        newest_checkpoint(tmp_path)
    for path in paths[:2]:
        path.write_bytes(b"other")
    with pytest.raises(CheckpointError, match="there is no other one: start the run again"):
        newest_checkpoint(tmp_path)


def test_a_run_needs_the_checksum_of_its_checkpoint_and_a_user_does_not(tmp_path):
    first, last = save(tmp_path, (1, 2))
    last.with_suffix(".sha256").unlink()
    assert read_checkpoint(last) == {"file": last.name}
    with pytest.raises(CheckpointError, match=r"has no checksum file round-00000002\.sha256 beside it; the one before"):
        newest_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        read_checkpoint(tmp_path / "none.ckpt")
    assert verify_checkpoint(first) == first


def test_a_checkpoint_is_read_to_a_device(tmp_path):
    torch.save({"x": torch.ones(2)}, tmp_path / "x.ckpt")
    assert read_checkpoint(tmp_path / "x.ckpt", "meta")["x"].is_meta
