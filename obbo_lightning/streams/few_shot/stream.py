"""Few-shot tasks from any source of examples by class."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from obbo_lightning.core.problem import Task
from obbo_lightning.core.randomness import derive_seed
from obbo_lightning.core.validation import at_least, one_of, require_memory
from obbo_lightning.networks.cnn4 import CNN4
from obbo_lightning.problems.few_shot import FewShot
from obbo_lightning.streams.stream import Metric, Stream
from obbo_lightning.streams.tasks import TaskSequence

DERIVED_ARGUMENTS = ("ways", "shape", "channels", "image_size")  # of a network, see `facts_of`


class ExampleSource(Protocol):
    """Examples by class."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example."""
        ...

    def smallest(self, classes: Sequence[int]) -> int | None:
        """How many examples the smallest of these classes has; None for any number."""
        ...

    def draw(self, classes: Tensor, generator: torch.Generator) -> Tensor:
        """One example for each entry of ``classes`` ``[n, …]``, no example of a class twice."""
        ...


@dataclass(frozen=True)
class Drawing:
    """How tasks are drawn.

    Args:
        ways: classes of a task.
        shots: support examples a class.
        queries: query examples a class.
        order: ``iid``, or ``drift``: the mix of superclasses moves with the rounds.
        period: rounds of one turn of the drift.
    """

    ways: int = 5
    shots: int = 5
    queries: int = 5
    order: str = "iid"
    period: int = 1000

    def __post_init__(self) -> None:
        at_least("data.ways", self.ways, 2)
        at_least("data.shots", self.shots, 1)
        at_least("data.queries", self.queries, 1)
        one_of("data.order", self.order, ("iid", "drift"))
        at_least("data.period", self.period, 1)


class FewShotTasks(TaskSequence):
    """Task t: some classes of one split, some examples of each to adapt on and some to be judged on.

    A pure function of (seed, t). With order ``drift`` the mix of superclasses moves with t: their weights are a bump
    that goes once round all of them every ``period`` rounds.

    Args:
        source: where examples come from.
        classes: the classes of this split.
        length: how many tasks.
        drawing: how many of what.
        seed: words and numbers that name this split's randomness.
        superclass: of each class; by default every class is one of its own.
    """

    def __init__(
        self,
        source: ExampleSource,
        classes: Sequence[int],
        length: int,
        drawing: Drawing,
        seed: tuple[int | str, ...] = (0,),
        superclass: Mapping[int, int] | None = None,
    ) -> None:
        if drawing.ways > len(classes):
            split = next((word for word in seed if isinstance(word, str)), "tasks'")
            raise ValueError(
                f"data.ways must be at most the {len(classes)} classes of the {split} split, got {drawing.ways}"
            )
        most, each = source.smallest(classes), drawing.shots + drawing.queries
        if most is not None and each > most:
            raise ValueError(
                f"data.shots + data.queries must be at most {most}, all examples of {_smallest(source, classes)}, "
                f"got {each}: give it more, take it out, or lower them"
            )
        task = 4.0 * drawing.ways * each * math.prod(source.shape)
        require_memory("data.ways × (data.shots + data.queries)", drawing.ways * each, task)
        self.source = source
        self.classes = torch.tensor(list(classes))
        self.superclasses = [c if superclass is None else superclass[c] for c in classes]
        self.length = at_least("data.length", length, 1)
        self.drawing = drawing
        self.seed = seed

    def task(self, t: int) -> Task:
        """The task of round t, counted from 0."""
        generator = torch.Generator().manual_seed(derive_seed(*self.seed, t))
        ways, shots, each = self.drawing.ways, self.drawing.shots, self.drawing.shots + self.drawing.queries
        chosen = torch.multinomial(self.weights(t), ways, generator=generator)
        labels = torch.arange(ways).repeat_interleave(each)
        examples = self.source.draw(self.classes[chosen][labels], generator)
        is_support = (torch.arange(each) < shots).repeat(ways)
        return {
            "support": examples[is_support],
            "support_labels": labels[is_support],
            "query": examples[~is_support],
            "query_labels": labels[~is_support],
        }

    def weights(self, t: int) -> Tensor:
        """How likely each class of the split is in round t."""
        if self.drawing.order == "iid":
            return torch.ones(len(self.classes))
        names = sorted(set(self.superclasses))
        place = torch.tensor([names.index(s) / len(names) for s in self.superclasses])
        return torch.exp(3 * torch.cos(2 * math.pi * (place - t / self.drawing.period)))


def _smallest(source: ExampleSource, classes: Sequence[int]) -> str:
    """What the class with the fewest examples is called."""
    smallest = min(classes, key=lambda c: source.smallest([c]) or 0)
    names = getattr(source, "names", None)
    return f"class {names[smallest]!r}" if names else f"class {smallest}"


class FewShotStream(Stream):
    """Train, validation and test tasks with disjoint classes, from one source.

    Training tasks depend on the seed; validation and test tasks never do, so that runs are compared on the same ones.

    Args:
        source: where examples come from.
        splits: the classes of ``train``, ``validation`` and ``test``.
        drawing: how tasks are drawn; those of validation and test are always iid.
        seed: of the training tasks.
        superclass: of each class; by default every class is one of its own.
    """

    metric = Metric("accuracy", higher_is_better=True)
    problem_type = FewShot
    network_type: ClassVar[type[nn.Module]] = CNN4
    derived_arguments = DERIVED_ARGUMENTS
    train: FewShotTasks
    LENGTHS: ClassVar[dict[str, int]] = {"train": 20_000, "validation": 600, "test": 600}

    def __init__(
        self,
        source: ExampleSource,
        splits: Mapping[str, Sequence[int]],
        drawing: Drawing,
        seed: int = 0,
        superclass: Mapping[int, int] | None = None,
    ) -> None:
        still = replace(drawing, order="iid")

        def tasks(split: str, drawing: Drawing, *seed: int) -> FewShotTasks:
            return FewShotTasks(source, splits[split], self.LENGTHS[split], drawing, (*seed, split), superclass)

        made = {}
        for split in sorted(splits, key=lambda split: len(splits[split])):  # the one with fewest classes refuses first
            made[split] = tasks(split, drawing, seed) if split == "train" else tasks(split, still)
        self.train, self.validation, self.test = made["train"], made["validation"], made["test"]

    def task_spec(self) -> dict[str, Any]:
        return facts_of(self.train.drawing.ways, self.train.source.shape)


def facts_of(ways: int, shape: Sequence[int]) -> dict[str, Any]:
    """What few-shot tasks decide of a network.

    >>> facts_of(5, (3, 32, 32))
    {'ways': 5, 'shape': [3, 32, 32], 'channels': 3, 'image_size': 32}
    >>> facts_of(2, [7])["channels"] is None
    True
    """
    image = len(shape) == 3 and shape[1] == shape[2]
    channels, image_size = (shape[0], shape[1]) if image else (None, None)
    return {"ways": ways, "shape": list(shape), "channels": channels, "image_size": image_size}


def image_inputs(
    shape: Sequence[int], mean: Sequence[float], deviation: Sequence[float], trained_on: Sequence[str] = ()
) -> dict[str, Any]:
    """What a stream of images says of its `inputs`.

    Args:
        shape: of one image: channels, size, size.
        mean: of each channel, of pixels between 0 and 1.
        deviation: of each channel.
        trained_on: names of the training classes, where they have names.
    """
    return {
        "kind": "images",
        "shape": list(shape),
        "square": "the largest one in the middle",
        "scaled": "bilinear",
        "mean": list(mean),
        "deviation": list(deviation),
        "trained_on": list(trained_on),
    }
