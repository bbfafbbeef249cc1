"""ExactCheckpoints: complete or absent, with a checksum, and without code."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from obbo_lightning import ExactCheckpoints
from obbo_lightning.runs.provenance import CheckpointError
from obbo_lightning.training.checkpoints import save_checkpoint


def test_a_checkpoint_has_its_checksum_before_it_has_its_name(tmp_path, monkeypatch):
    names, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (names.append(Path(b).name), replace(a, b)))
    ExactCheckpoints().save_checkpoint({"round": 1}, tmp_path / "new" / "x.ckpt")
    assert names == ["x.sha256", "x.ckpt"]
    assert ExactCheckpoints().load_checkpoint(tmp_path / "new" / "x.ckpt") == {"round": 1}


def test_a_checkpoint_is_verified_and_read_to_a_device(tmp_path):
    path = tmp_path / "x.ckpt"
    ExactCheckpoints().save_checkpoint({"x": torch.ones(2)}, path)
    assert ExactCheckpoints().load_checkpoint(path, "meta")["x"].is_meta
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="damaged"):
        ExactCheckpoints().load_checkpoint(path, weights_only=False)


@pytest.mark.parametrize("value", [np.float64(1.0), np.ones(2), object(), {"a": [np.int64(3)]}, ({1: print},)])
def test_a_value_that_could_not_be_loaded_is_not_saved(value, tmp_path):
    with pytest.raises(CheckpointError, match=r"checkpoint\.mine.* must hold tensors and plain values"):
        ExactCheckpoints().save_checkpoint({"mine": value}, tmp_path / "x.ckpt")
    assert os.listdir(tmp_path) == []
    plain = {"mine": [1, 2.0, "x", None, True, {"y": (torch.ones(1), torch.float32, torch.Size([1]))}]}
    ExactCheckpoints().save_checkpoint(plain, tmp_path / "x.ckpt")
    assert ExactCheckpoints().load_checkpoint(tmp_path / "x.ckpt") == plain


@pytest.mark.parametrize(("rank_zero", "kept"), [(True, (20, 100)), (False, (3, 20, 100))])
def test_rank_0_keeps_two_checkpoints_with_their_checksums(rank_zero, kept, tmp_path):
    plugin = ExactCheckpoints()
    trainer = SimpleNamespace(is_global_zero=rank_zero, strategy=plugin)
    trainer.save_checkpoint = lambda path: plugin.save_checkpoint({"round": trainer.global_step}, path)
    for trainer.global_step in (3, 20, 100):
        save_checkpoint(trainer, tmp_path)
    names = [f"round-{t:08d}.{kind}" for t in kept for kind in ("ckpt", "sha256")]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
