"""Windows of hypergradients and tasks against their definitions, and inner states."""

import math
from collections import deque

import torch
from hypothesis import given, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from toy import F64, normal

from obbo_lightning.core.memory import HypergradientWindow, InnerState, TaskEntry, TaskWindow


def window_from_definition(values, window, discount):
    """Return every q_t = Σ_{i<w} ν^i d_{t−i} / Σ_{i<w} ν^i, with d_s = 0 for s ≤ 0."""
    weight = sum(discount**i for i in range(window))
    return [
        sum((discount**i * values[t - i] for i in range(window) if t - i >= 0), torch.zeros_like(values[0])) / weight
        for t in range(len(values))
    ]


@given(window=st.integers(1, 9), discount=st.sampled_from([1.0, 0.9, 0.3]), rounds=st.integers(1, 40))
def test_window_is_its_definition(window, discount, rounds):
    values = list(normal(rounds, 2, 3, seed=rounds))
    memory = HypergradientWindow(window, discount)
    assert memory.newest is None
    for t, (value, expected) in enumerate(zip(values, window_from_definition(values, window, discount), strict=True)):
        given = value.clone()
        assert torch.allclose(memory.push(given), expected, rtol=1e-13, atol=1e-15)
        given.fill_(9.0)  # the window has a copy
        assert memory.fill == min(t + 1, window)
        assert torch.equal(memory.newest, value)


def test_window_does_not_drift_in_a_hundred_thousand_rounds():
    window, recent = HypergradientWindow(50), deque(maxlen=50)
    values = torch.randn(100_000, 1, 2, generator=torch.Generator().manual_seed(0))  # float32
    values[::997] *= 1e6  # an overflow must leave no error behind once it has left the window
    for value in values:
        mean = window.push(value)
        recent.append(value)
    past = torch.stack(list(recent)).double()
    exact = torch.tensor([math.fsum(past[:, 0, i].tolist()) / 50 for i in range(2)], dtype=F64)
    scale = past.abs().sum(0)[0] / 50
    assert ((mean[0].double() - exact).abs() <= 50 * torch.finfo(torch.float32).eps * scale).all()


class WrittenElements(TorchDispatchMode):
    """Count the elements that tensor operations write."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_view = func in (torch.ops.aten.select.int, torch.ops.aten.slice.Tensor, torch.ops.aten.detach.default)
        if isinstance(result, torch.Tensor) and not is_view:
            self.total += result.numel()
        return result


def test_work_per_round_does_not_grow_with_the_window():
    def work(window, dim=100):
        memory = HypergradientWindow(window)
        value = torch.ones(1, dim)
        for _ in range(window):  # allocate the buffers and fill the window
            memory.push(value)
        with WrittenElements() as written:
            for _ in range(2 * window):
                memory.push(value)
        return written.total / (2 * window * dim)

    assert work(500) <= 8
    assert work(500) <= 1.2 * work(10)


def test_task_window_recalls_the_last_w_tasks_in_order_with_their_own_inner_states():
    memory = TaskWindow(3)
    for i in range(5):
        task = {"number": torch.tensor([float(i)])}
        start = InnerState(torch.tensor([[100.0 + i]]))
        recalled = [entries[0] for entries in memory.recall([TaskEntry(task, start)])]
        numbers = [int(entry.task["number"]) for entry in recalled]
        assert numbers == list(range(max(0, i - 2), i + 1))
        # the new task starts from the given state, the others from where they ended in the previous round
        starts = [float(entry.state.inner) for entry in recalled]
        assert starts == [*(10.0 * (i - 1) + n for n in numbers[:-1]), 100.0 + i]
        assert memory.fill == min(i, 3)  # recalling changes nothing
        ends = [InnerState(torch.tensor([[10.0 * i + n]])) for n in numbers]
        memory.keep([[TaskEntry(entry.task, end)] for entry, end in zip(recalled, ends, strict=True)])


def test_inner_states_are_mapped_selected_and_joined_by_lane():
    state = InnerState(*(torch.tensor([[n], [n + 10.0]]) for n in range(2)))
    second = state.map(lambda value: value / 2).lanes(slice(1, 2))
    assert [second.inner.tolist(), second.linear_solution.tolist(), second.solver_state] == [[[5.0]], [[5.5]], None]
    assert InnerState(**state.state_dict()) == state
    states = [InnerState(torch.full((1, 2), float(n)), None if n == 1 else torch.ones(1, 2)) for n in range(3)]
    joined = InnerState.join(states)
    assert joined.inner.tolist() == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    assert joined.linear_solution is None  # one of the three has none
    assert joined.solver_state is None
    assert InnerState.join([states[0], states[2]]).linear_solution.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert torch.equal(joined.lanes(slice(1, 2)).inner, states[1].inner)
