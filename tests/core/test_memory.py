import math
from collections import deque

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from toy import F64

from obbo_lightning import HypergradientWindow, NoMemory, TaskWindow, Warm


def naive(values, window, discount):
    """q_t straight from its definition, with d_s = 0 for s ≤ 0."""
    weight = sum(discount**i for i in range(window))
    return [
        sum((discount**i * values[t - i] for i in range(window) if t - i >= 0), torch.zeros_like(values[0])) / weight
        for t in range(len(values))
    ]


@given(window=st.integers(1, 9), discount=st.sampled_from([1.0, 0.9, 0.3]), rounds=st.integers(1, 40))
def test_window_is_its_definition(window, discount, rounds):
    values = list(torch.randn(rounds, 2, 3, generator=torch.Generator().manual_seed(rounds), dtype=F64))
    memory = HypergradientWindow(window, discount)
    for t, (value, expected) in enumerate(zip(values, naive(values, window, discount), strict=True)):
        assert torch.allclose(memory.push(value), expected, rtol=1e-13, atol=1e-15)
        assert memory.fill == min(t + 1, window)


def test_window_divides_by_w_before_it_is_full():
    memory = HypergradientWindow(4)
    assert memory.merge(torch.full((1, 1, 1), 8.0)).tolist() == [[2.0]]


def test_window_of_one_is_the_hypergradient_itself(generator):
    memory = HypergradientWindow(1)
    for value in torch.randn(5, 2, 3, generator=generator):
        assert torch.equal(memory.push(value), value)


def test_window_does_not_drift_in_a_hundred_thousand_rounds():
    window, recent = HypergradientWindow(50), deque(maxlen=50)
    values = torch.randn(100_000, 1, 2, generator=torch.Generator().manual_seed(0))  # float32
    values[::997] *= 1e6  # what blows up leaves no trace once it is out of the window
    for value in values:
        mean = window.push(value)
        recent.append(value)
    past = torch.stack(list(recent)).double()
    exact = torch.tensor([math.fsum(past[:, 0, i].tolist()) / 50 for i in range(2)], dtype=F64)
    scale = past.abs().sum(0)[0] / 50
    assert ((mean[0].double() - exact).abs() <= 50 * torch.finfo(torch.float32).eps * scale).all()


class CountedElements(TorchDispatchMode):
    """How many numbers the tensor operations inside write."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_view = func in (torch.ops.aten.select.int, torch.ops.aten.slice.Tensor, torch.ops.aten.detach.default)
        if isinstance(result, torch.Tensor) and not is_view:
            self.total += result.numel()
        return result


def test_work_a_round_does_not_grow_with_the_window():
    def work(window, dim=100):
        memory = HypergradientWindow(window)
        value = torch.ones(1, dim)
        for _ in range(window):  # the buffers are there, the window is full
            memory.push(value)
        with CountedElements() as counted:
            for _ in range(2 * window):
                memory.push(value)
        return counted.total / (2 * window * dim)

    assert work(500) <= 8
    assert work(500) <= 1.2 * work(10)


@pytest.mark.parametrize("discount", [1.0, 0.8])
def test_window_continues_from_its_state(discount, generator):
    values = torch.randn(30, 2, 3, generator=generator, dtype=F64)
    whole, first, second = (HypergradientWindow(4, discount) for _ in range(3))
    expected = [whole.push(v) for v in values]
    for v in values[:13]:
        first.push(v)
    state = first.state_dict()
    for v in values[13:]:
        first.push(v)  # the snapshot does not move with it
    second.load_state_dict(state)
    assert all(torch.equal(second.push(v), q) for v, q in zip(values[13:], expected[13:], strict=True))


def test_window_refuses_another_shape_and_another_length():
    memory = HypergradientWindow(3)
    memory.push(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"shape \(2, 3\), got \(2, 4\)"):
        memory.push(torch.zeros(2, 4))
    with pytest.raises(ValueError, match="window must be 3 to continue from this state, got 4"):
        HypergradientWindow(4).load_state_dict(memory.state_dict())


def tasks(count):
    return [{"number": torch.tensor([float(i)])} for i in range(count)]


def test_task_window_recalls_the_last_w_tasks_in_order_with_their_own_warm_starts():
    memory = TaskWindow(3)
    for i, task in enumerate(tasks(5)):
        recalled = [met[0] for met in memory.recall([(task, Warm(torch.tensor([[100.0 + i]])))])]
        numbers = [int(t["number"]) for t, _ in recalled]
        assert numbers == list(range(max(0, i - 2), i + 1))
        # the new task starts from what was handed in, the others from where they ended in the last round
        starts = [float(w.inner) for _, w in recalled]
        assert starts == [*(10.0 * (i - 1) + n for n in numbers[:-1]), 100.0 + i]
        assert memory.fill == min(i, 3)  # looking changes nothing
        memory.keep([[(t, Warm(torch.tensor([[10.0 * i + float(t["number"])]])))] for t, _ in recalled])


def test_task_window_divides_by_w_before_it_is_full():
    assert TaskWindow(4).merge(torch.tensor([[[2.0]], [[6.0]]])).tolist() == [[2.0]]


def test_task_window_continues_from_its_state():
    memory, other = TaskWindow(3), TaskWindow(3)
    memory.keep([[(t, Warm(torch.ones(1, 1)))] for t in tasks(2)])
    other.load_state_dict(memory.state_dict())
    new = tasks(3)[2]
    recalled = other.recall([(new, Warm())])
    assert [int(t["number"]) for ((t, _),) in recalled] == [0, 1, 2]
    assert recalled[0][0][1].inner.tolist() == [[1.0]]


def test_no_memory_takes_the_newest():
    assert NoMemory().merge(torch.tensor([[[1.0]], [[2.0]]])).tolist() == [[2.0]]


def test_remembered_tasks_are_restored_with_all_of_their_warm_starts():
    warm = Warm(torch.ones(1, 2), torch.full((1, 2), 2.0), torch.full((1, 4), 3.0))
    memory, again = TaskWindow(3), TaskWindow(3)
    memory.keep([[({"x": torch.zeros(1)}, warm)]])
    again.load_state_dict(memory.state_dict())
    ((_, found),), _ = again.recall([])
    for name, value in warm.state_dict().items():
        assert torch.equal(getattr(found, name), value), name


def test_a_warm_start_goes_on_with_all_three_and_one_of_an_older_version_with_two():
    first, second = Warm(*(torch.full((1, 2), float(n)) for n in range(3))), Warm()
    second.load_state_dict(first.state_dict())
    assert second.inner is first.inner
    assert second.solve is first.solve
    assert second.solver is first.solver
    second.load_state_dict({"inner": first.solve, "solve": None})
    assert (second.inner is first.solve, second.solve, second.solver) == (True, None, None)
    halves = first.lanes(slice(0, 1)).map(lambda value: value / 2)
    assert [float(value[0, 0]) for value in halves.state_dict().values()] == [0.0, 0.5, 1.0]
