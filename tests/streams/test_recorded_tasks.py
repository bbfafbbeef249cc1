"""Tasks of every stream, as they were recorded: a change of what is drawn is a change of every result."""

import pytest
import torch
from recorded import digest, present_flags, require_recorded

from obbo_lightning.config.build import build_stream
from obbo_lightning.config.parse import complete_config, parse_arguments

IMAGES = "--data.image_size 16"
STREAMS = [
    IMAGES,
    f"{IMAGES} --data.order drift --data.period 20 --seed 3",
    f"{IMAGES} --data.ways 3 --data.shots 1 --data.queries 4 --data.channels 1 --data.noise 0.3",
    "--config quadratic",
    "--config quadratic --data.condition_number 3 --data.outer_dim 2 --data.inner_dim 3 --data.drift 0.5 --seed 2",
    "--config quadratic --data.noise 0.3 --data.radius 2",
    "--config market",
    "--config market --data.validation random --data.transform none --data.subsets 50 --data.horizon 30",
    "--config market --data.stride 7 --data.offset 3 --data.subset 300 --data.start 0.3 --data.gap 200 --seed 1",
    "--config forgetting",
    "--config forgetting --data.kind regression --data.block 10 --data.past 5 --data.clip 1.0 --seed 4",
    "--config sources",
    "--config sources --data.errors random --data.sources 6 --data.wrong 2 --data.period 3 --seed 1",
    "--config sources --data.errors adversarial --data.change gradual --data.period 8 --data.examples 5",
    "--config imbalance",
    "--config imbalance --data.kept [0.9,0.5] --data.period 2 --data.batch 20 --data.validation 2 --data.test 3",
    "--config regularization",
    "--config regularization --data.noise [0.3,0.1] --data.period 3 --data.examples 30 --data.shrink 2 --seed 6",
]


@pytest.mark.parametrize("flags", STREAMS)
def test_tasks_are_those_that_were_recorded(flags):
    require_recorded("tasks", flags, tasks_of(present_flags(flags)))


def tasks_of(flags):
    """What a stream with these flags serves."""
    stream = build_stream(complete_config(parse_arguments(flags.split())[0]))
    seen = {"task_spec": digest(stream.task_spec()), "metric": list(stream.metric)}
    for name in ("train", "validation", "test"):
        tasks = getattr(stream, name)
        seen[name] = {"length": len(tasks)}
        seen[name] |= {str(t): digest(tasks[t]) for t in (0, 1, 7, 41) if t < len(tasks)}
    return seen


def test_a_digest_tells_orders_apart():
    values = torch.arange(5.0)
    assert digest(values) != digest(values.flip(0))
    assert digest(values) != digest(values.double())
