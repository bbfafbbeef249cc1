"""The base class of streams, and sequences of tasks."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from obbo_lightning import FewShot, Metric, Stream, Tasks
from obbo_lightning.networks import CNN4, MLP
from obbo_lightning.streams import SyntheticStream


@pytest.fixture(scope="module")
def stream():
    return SyntheticStream(image_size=16, ways=3, shots=2, queries=3)


class Bare(Stream):
    """Stream that defines nothing."""


def test_stream_without_problem_or_start_is_refused_when_they_are_needed():
    problem = SimpleNamespace(initial_outer=lambda seed: torch.full((1, 2), float(seed)) if seed else None)
    assert Bare().start(problem, 3).tolist() == [[3.0, 3.0]]
    with pytest.raises(ValueError, match="Bare must define where λ starts, got none: it needs a method start"):
        Bare().start(problem, 0)
    with pytest.raises(ValueError, match="problem must be given for Bare, which has none of its own, got none"):
        Bare().problem()
    assert (Bare().task_spec(), Bare().inputs(), Bare().source_digests()) == ({}, None, {})
    assert Bare().describe(4) == "task 5"


def test_network_gets_the_arguments_that_follow_from_the_tasks(stream):
    assert stream.task_spec() == {"ways": 3, "shape": [3, 16, 16], "channels": 3, "image_size": 16}
    assert tuple(stream.task_spec()) == stream.derived_arguments
    assert stream.metric == Metric("accuracy", higher_is_better=True)
    template = stream.problem().network.template
    assert isinstance(template, CNN4)
    assert (template.linear.in_features, template.linear.out_features) == (64, 3)
    small = stream.problem(network=partial(MLP, widths=[4]), proximity=0.1)
    assert (small.network.template.blocks[1][0].in_features, small.proximity) == (3 * 16 * 16, 0.1)
    own = stream.problem(network=lambda ways: nn.Sequential(nn.Flatten(), nn.Linear(768, 7 * ways)))
    assert own.network.template[1].out_features == 21
    assert torch.equal(stream.start(small, 4), small.initial_outer(4))


def test_given_arguments_networks_and_problems_are_kept(stream):
    class Scored(FewShot):
        pass

    assert type(stream.problem(Scored)) is Scored
    given = stream.problem(network=partial(CNN4, ways=7, filters=2)).network.template
    assert given.linear.out_features == 7
    own = nn.Sequential(nn.Flatten(), nn.Linear(768, 3))
    assert torch.equal(stream.problem(network=own).initial_outer(0)[0, -3:], own[1].bias.detach())


def test_tasks_are_indexed_like_a_list():
    tasks = Tasks(lambda t: {"t": torch.tensor(t)}, length=12)
    assert len(list(tasks)) == len(tasks) == 12
    assert tasks[-1] == tasks[11]
    assert [int(task["t"]) for task in tasks[2:5]] == [2, 3, 4]
    with pytest.raises(IndexError, match=r"0\.\.11, got 12"):
        tasks[12]
    with pytest.raises(ValueError, match="length must be an integer of at least 1, got 0"):
        Tasks(lambda t: {}, length=0)
