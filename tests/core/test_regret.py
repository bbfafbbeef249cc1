import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from obbo_lightning import LocalRegret


def by_hand(vectors, window):
    """Σ_t ‖(1/w) Σ_{i<w} x_{t−i}‖² in plain NumPy, per lane."""
    rounds, lanes, _ = vectors.shape
    total = np.zeros(lanes)
    for t in range(rounds):
        mean = vectors[max(0, t - window + 1) : t + 1].sum(0) / window
        total += (mean**2).sum(-1)
    return total


@pytest.fixture
def vectors(generator):
    return torch.randn(23, 3, 4, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("window", [1, 5, 40])
def test_regret_is_its_definition_per_lane(vectors, window):
    regret = LocalRegret(window)
    for vector in vectors:
        regret.update(vector)
    assert np.allclose(regret.compute().numpy(), by_hand(vectors.numpy(), window), rtol=1e-13)


def test_regret_updated_in_batches_is_the_same(vectors):
    single, batched, forwarded = LocalRegret(5), LocalRegret(5), LocalRegret(5)
    for vector in vectors:
        single.update(vector)
    added = [0.0]
    for batch in vectors.split([1, 7, 12, 3]):
        batched.update(batch)
        added.append(forwarded(batch))
    assert torch.equal(single.compute(), batched.compute())
    assert torch.equal(single.compute(), forwarded.compute())
    assert torch.allclose(sum(added), single.compute(), rtol=1e-13)


def test_merging_concatenates_lanes_and_goes_on(vectors):
    whole, left, right = LocalRegret(5), LocalRegret(5), LocalRegret(5)
    whole.update(vectors)
    left.update(vectors[:15, :1])
    right.update(vectors[:15, 1:])
    left.merge_state(right)
    left.update(vectors[15:])
    assert torch.allclose(left.compute(), whole.compute(), rtol=1e-13)


def test_merging_windows_of_different_rounds_is_refused(vectors):
    left, right = LocalRegret(5), LocalRegret(5)
    left.update(vectors[:3])
    right.update(vectors[:4])
    with pytest.raises(ValueError, match="agree"):
        left.merge_state(right)


def test_regret_continues_from_its_state(vectors):
    whole, first, second = LocalRegret(5), LocalRegret(5), LocalRegret(5)
    whole.update(vectors)
    first.update(vectors[:9])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    second.update(vectors[9:])
    assert torch.equal(second.compute(), whole.compute())


def test_a_loaded_state_is_computed_from_without_an_update(vectors):
    regret, other = LocalRegret(5), LocalRegret(5)
    regret.update(vectors)
    other.update(vectors[:1])
    other.compute()
    other.load_state_dict(copy.deepcopy(regret.state_dict()))
    assert torch.equal(other.compute(), regret.compute())


def test_reset_forgets_the_window_too(vectors):
    regret, fresh = LocalRegret(5), LocalRegret(5)
    regret.update(vectors)
    regret.reset()
    regret.update(vectors[:2])
    fresh.update(vectors[:2])
    assert torch.equal(regret.compute(), fresh.compute())


def test_float32_rounds_are_summed_in_float64():
    regret = LocalRegret(1)
    regret.update(torch.full((1, 1, 1), 1e4))
    regret.update(torch.full((1000, 1, 1), 1e-2))
    assert regret.compute().dtype == torch.float64
    assert abs(float(regret.compute()) - (1e8 + 0.1)) < 1e-5


def in_one_process(rank, port, vectors, window, out):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    regret = LocalRegret(window)
    mine = vectors[:, :1] if rank == 0 else vectors[:, 1:]  # lanes do not split evenly
    for batch in mine.split(6):
        regret.update(batch)
        regret.compute()  # synchronises and must leave the local state alone
    torch.save(regret.compute(), f"{out}/{rank}.pt")
    dist.destroy_process_group()


def free_port():
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_two_processes_see_the_regret_of_all_lanes(vectors, tmp_path):
    mp.start_processes(in_one_process, (free_port(), vectors, 5, str(tmp_path)), nprocs=2, start_method="fork")
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert np.allclose(found.numpy(), by_hand(vectors.numpy(), 5), rtol=1e-13)


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match=r"\[lanes, d\] or \[rounds, lanes, d\], got shape \(3,\)"):
        LocalRegret(2).update(torch.zeros(3))
