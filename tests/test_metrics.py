"""Local regret as a torchmetrics metric: batches, merging, states, and two processes."""

import copy
import socket

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from toy import normal

from obbo_lightning.core.regret import Regret
from obbo_lightning.metrics import LocalRegret

VECTORS = normal(23, 3, 4)


def regret_of(vectors, window=5):
    regret = Regret(window)
    for vector in vectors:
        total = regret.add(vector)
    return total


def test_rounds_may_be_added_one_by_one_or_in_batches():
    single, batched, forwarded = LocalRegret(5), LocalRegret(5), LocalRegret(5)
    for vector in VECTORS:
        single.update(vector)
    added = [0.0]
    for batch in VECTORS.split([1, 7, 12, 3]):
        batched.update(batch)
        added.append(forwarded(batch))
    for metric in (single, batched, forwarded):
        assert torch.equal(metric.compute(), regret_of(VECTORS))
    assert torch.allclose(sum(added), single.compute(), rtol=1e-13)


def test_merging_concatenates_lanes_and_continues():
    left, right = LocalRegret(5), LocalRegret(5)
    left.update(VECTORS[:15, :1])
    right.update(VECTORS[:15, 1:])
    left.merge_state(right)
    left.update(VECTORS[15:])
    assert torch.allclose(left.compute(), regret_of(VECTORS), rtol=1e-13)


def test_a_loaded_state_is_computed_from_continued_and_reset():
    first, second = LocalRegret(5), LocalRegret(5)
    first.update(VECTORS[:9])
    second.update(VECTORS[:1])
    second.compute()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert torch.equal(second.compute(), first.compute())  # without an update
    second.update(VECTORS[9:])
    assert torch.equal(second.compute(), regret_of(VECTORS))
    second.reset()
    second.update(VECTORS[:2])
    assert torch.equal(second.compute(), regret_of(VECTORS[:2]))


def compute_in_process(rank, port, out):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    regret = LocalRegret(5)
    lanes = VECTORS[:, :1] if rank == 0 else VECTORS[:, 1:]  # a different number of lanes in each process
    for batch in lanes.split(6):
        regret.update(batch)
        regret.compute()  # synchronises, and must leave the state of this process unchanged
    torch.save(regret.compute(), f"{out}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_see_the_regret_of_all_lanes(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.start_processes(compute_in_process, (port, str(tmp_path)), nprocs=2, start_method="fork")
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert np.allclose(found.numpy(), regret_of(VECTORS).numpy(), rtol=1e-13)


def test_wrong_shapes_and_windows_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"\[lanes, d\] or \[rounds, lanes, d\], got shape \(3,\)"):
        LocalRegret(2).update(torch.zeros(3))
    left, right = LocalRegret(5), LocalRegret(5)
    left.update(VECTORS[:3])
    right.update(VECTORS[:4])
    with pytest.raises(ValueError, match="windows must agree"):
        left.merge_state(right)
    with pytest.raises(ValueError, match="incoming_state must be a LocalRegret, got dict"):
        left.merge_state({})
