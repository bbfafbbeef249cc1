"""Few-shot tasks from any source of images by class."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from obbo_lightning.core.problem import Task
from obbo_lightning.core.randomness import derive_seed
from obbo_lightning.core.validation import at_least, one_of
from obbo_lightning.problems.few_shot import FewShot
from obbo_lightning.streams.tasks import TaskSequence


class ImageSource(Protocol):
    """Images by class."""

    def smallest(self, classes: Sequence[int]) -> int | None:
        """How many images the smallest of these classes has; None for any number."""
        ...

    def draw(self, classes: Tensor, generator: torch.Generator) -> Tensor:
        """One image for each entry of ``classes`` ``[n, channels, size, size]``, no image of a class twice."""
        ...


class FewShotTasks(TaskSequence):
    """Task t: ``ways`` classes of one split, ``shots`` images of each to adapt on and ``queries`` to be judged on.

    A pure function of (seed, t). With order ``drift`` the mix of superclasses moves with t: their weights are a bump
    that goes once round all of them every ``period`` rounds.

    Args:
        source: where images come from.
        classes: the classes of this split.
        superclasses: the superclass of each of them.
        length: how many tasks.
        ways: classes of a task.
        shots: support images a class.
        queries: query images a class.
        order: ``iid`` or ``drift``.
        period: rounds of one turn of the drift.
        seed: words and numbers that name this split's randomness.
    """

    def __init__(
        self,
        source: ImageSource,
        classes: Sequence[int],
        superclasses: Sequence[int],
        length: int,
        ways: int = 5,
        shots: int = 5,
        queries: int = 5,
        order: str = "iid",
        period: int = 1000,
        seed: tuple[int | str, ...] = (0,),
    ) -> None:
        at_least("data.ways", ways, 2)
        if ways > len(classes):
            split = next((word for word in seed if isinstance(word, str)), "tasks'")
            raise ValueError(f"data.ways must be at most the {len(classes)} classes of the {split} split, got {ways}")
        self.source = source
        self.classes = torch.tensor(list(classes))
        self.superclasses = list(superclasses)
        self.length = at_least("data.length", length, 1)
        self.ways = ways
        self.shots = at_least("data.shots", shots, 1)
        self.queries = at_least("data.queries", queries, 1)
        most = source.smallest(classes)
        if most is not None and shots + queries > most:
            raise ValueError(f"data.shots + data.queries must be at most {most} images a class, got {shots + queries}")
        self.order = one_of("data.order", order, ("iid", "drift"))
        self.period = at_least("data.period", period, 1)
        self.seed = seed

    def task(self, t: int) -> Task:
        """The task of round t, counted from 0."""
        generator = torch.Generator().manual_seed(derive_seed(*self.seed, t))
        chosen = torch.multinomial(self.weights(t), self.ways, generator=generator)
        each = self.shots + self.queries
        labels = torch.arange(self.ways).repeat_interleave(each)
        images = self.source.draw(self.classes[chosen][labels], generator)
        is_support = (torch.arange(each) < self.shots).repeat(self.ways)
        return {
            "support": images[is_support],
            "support_labels": labels[is_support],
            "query": images[~is_support],
            "query_labels": labels[~is_support],
        }

    def weights(self, t: int) -> Tensor:
        """How likely each class of the split is in round t."""
        if self.order == "iid":
            return torch.ones(len(self.classes))
        names = sorted(set(self.superclasses))
        place = torch.tensor([names.index(s) / len(names) for s in self.superclasses])
        return torch.exp(3 * torch.cos(2 * math.pi * (place - t / self.period)))


class FewShotStream:
    """Train, validation and test tasks with disjoint classes, from one source.

    Training tasks depend on the seed; validation and test tasks never do, so that runs are compared on the same ones.
    """

    problem_type: ClassVar[type[FewShot]] = FewShot
    metric: ClassVar[str] = "accuracy"
    LENGTHS: ClassVar[dict[str, int]] = {"train": 20_000, "validation": 600, "test": 600}

    def __init__(
        self,
        source: ImageSource,
        splits: dict[str, list[int]],
        superclass: Sequence[int],
        channels: int,
        image_size: int,
        ways: int,
        shots: int,
        queries: int,
        order: str,
        period: int,
        seed: int,
    ) -> None:
        self.channels, self.image_size, self.ways = channels, image_size, ways

        def tasks(split: str) -> FewShotTasks:
            classes = splits[split]
            return FewShotTasks(
                source,
                classes,
                [superclass[c] for c in classes],
                self.LENGTHS[split],
                ways,
                shots,
                queries,
                order if split == "train" else "iid",
                period,
                seed=(seed, split) if split == "train" else (split,),
            )

        self.train, self.validation, self.test = (tasks(split) for split in ("train", "validation", "test"))

    def problem(self, **settings: Any) -> FewShot:
        """The problem that these tasks belong to."""
        return FewShot(self.ways, self.channels, self.image_size, **settings)

    def initial_outer(self, problem: FewShot, seed: int) -> Tensor:
        """λ_1."""
        return problem.initial_outer(seed)
