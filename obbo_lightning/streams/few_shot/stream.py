"""Few-shot tasks from examples by class, and the base classes of few-shot streams."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from obbo_lightning.core.problem import Task
from obbo_lightning.core.randomness import derive_seed
from obbo_lightning.core.validation import at_least, one_of, require_memory
from obbo_lightning.networks.cnn4 import CNN4
from obbo_lightning.problems.few_shot import FewShot
from obbo_lightning.streams.stream import Metric, Stream, TaskSequence

NETWORK_ARGUMENTS = ("ways", "shape", "channels", "image_size")  # see `network_arguments`


class ExampleSource(Protocol):
    """Examples by class, of one shape."""

    shape: tuple[int, ...]

    def require(self, classes: Sequence[int], count: int) -> None:
        """Refuse classes with fewer examples than one task needs of each."""

    def draw(self, classes: Tensor, generator: torch.Generator) -> Tensor:
        """Return one random example for each entry of ``classes``, distinct ones for equal (adjacent) entries."""
        ...


@dataclass(eq=False, repr=False)
class FewShotTasks(TaskSequence):
    """Task t: some classes of one split, with support examples to adapt on and query examples to be evaluated on.

    A pure function of (seed, t). With order ``drift`` the probabilities of superclasses are a bump that passes through
    all of them every ``period`` rounds; without superclasses every class is its own.
    """

    source: ExampleSource
    classes: Tensor
    length: int
    ways: int = 5
    shots: int = 5
    queries: int = 5
    order: str = "iid"
    period: int = 1000
    seed: tuple[int | str, ...] = (0,)
    superclass: Mapping[int, int] | None = None

    def __post_init__(self) -> None:
        for name, least in (("ways", 2), ("shots", 1), ("queries", 1), ("period", 1)):
            at_least(f"data.{name}", getattr(self, name), least)
        one_of("data.order", self.order, ("iid", "drift"))
        if self.ways > len(self.classes):
            split = f"{len(self.classes)} classes of the {self.seed[-1]} split"
            raise ValueError(f"data.ways must be at most the {split}, got {self.ways}")
        self.per_class = self.shots + self.queries
        self.source.require(self.classes.tolist(), self.per_class)
        count = self.ways * self.per_class
        require_memory("data.ways × (data.shots + data.queries)", count, 4.0 * count * math.prod(self.source.shape))

    def task(self, t: int) -> Task:
        generator = torch.Generator().manual_seed(derive_seed(*self.seed, t))
        chosen = torch.multinomial(self.weights(t), self.ways, generator=generator)
        labels = torch.arange(self.ways).repeat_interleave(self.per_class)
        examples = self.source.draw(self.classes[chosen][labels], generator)
        return support_and_query(examples, labels, self.per_class, self.shots)

    def weights(self, t: int) -> Tensor:
        """Return the unnormalised probability of each class in round t."""
        if self.order == "iid":
            return torch.ones(len(self.classes))
        groups = [self.superclass[c] if self.superclass else c for c in self.classes.tolist()]
        names = sorted(set(groups))
        place = torch.tensor([names.index(group) / len(names) for group in groups])
        return torch.exp(3 * torch.cos(2 * math.pi * (place - t / self.period)))


def support_and_query(examples: Tensor, labels: Tensor, per_class: int, shots: int) -> Task:
    """Return a task whose support set has the first ``shots`` of each class; classes are adjacent, of equal size."""
    is_support = torch.arange(len(labels)) % per_class < shots
    return {
        "support": examples[is_support],
        "support_labels": labels[is_support],
        "query": examples[~is_support],
        "query_labels": labels[~is_support],
    }


@dataclass(eq=False, repr=False, kw_only=True)
class FewShotStream(Stream):
    """Train, validation and test tasks with disjoint classes; a subclass calls `make_tasks`.

    Validation and test tasks depend neither on the seed nor on the order, so that runs are compared on the same tasks.

    Args:
        ways: classes per task.
        shots: support examples per class, to adapt on.
        queries: query examples per class, to be evaluated on.
        order: ``iid``, or ``drift``: the mix of superclasses moves with the rounds.
        period: rounds of one cycle of the drift.
        seed: of the training tasks.
    """

    ways: int = 5
    shots: int = 5
    queries: int = 5
    order: str = "iid"
    period: int = 1000
    seed: int = 0
    train: FewShotTasks = field(init=False)

    metric = Metric("accuracy", higher_is_better=True)
    problem_type = FewShot
    network_type: ClassVar[type[nn.Module]] = CNN4
    derived_arguments = NETWORK_ARGUMENTS
    LENGTHS: ClassVar[dict[str, int]] = {"train": 20_000, "validation": 600, "test": 600}

    def make_tasks(
        self, source: ExampleSource, splits: Mapping[str, Sequence[int]], superclass: Mapping[int, int] | None = None
    ) -> None:
        """Set the tasks of ``train``, ``validation`` and ``test``, whose classes ``splits`` has."""
        for split in sorted(splits, key=lambda split: len(splits[split])):  # the one with fewest classes refuses first
            order, seed = (self.order, (self.seed, split)) if split == "train" else ("iid", (split,))
            counts = (self.LENGTHS[split], self.ways, self.shots, self.queries)
            classes = torch.tensor(list(splits[split]))
            tasks = FewShotTasks(source, classes, *counts, order, self.period, seed, superclass)
            setattr(self, split, tasks)

    def task_spec(self) -> dict[str, Any]:
        return network_arguments(self.ways, self.train.source.shape)


def network_arguments(ways: int, shape: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of a network that follow from few-shot tasks.

    >>> network_arguments(5, (3, 32, 32))
    {'ways': 5, 'shape': [3, 32, 32], 'channels': 3, 'image_size': 32}
    >>> network_arguments(2, [7])["channels"] is None
    True
    """
    image = len(shape) == 3 and shape[1] == shape[2]
    channels, image_size = (shape[0], shape[1]) if image else (None, None)
    return {"ways": ways, "shape": list(shape), "channels": channels, "image_size": image_size}
