"""Stream for learning weight decay and label smoothing: class frequencies and label noise change between phases."""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.validation import at_least, decay
from obbo_lightning.networks.cnn4 import CNN4
from obbo_lightning.problems.regularization import Regularized
from obbo_lightning.streams.labelled.stream import LabelledExamples, LabelledStream
from obbo_lightning.streams.stream import Metric

CYCLE = 4  # phases until the mix of classes repeats
SHARPNESS = 3.0  # of the mix: the most frequent class is e^6 times as frequent as the rarest
FIXED = tuple(itertools.product((1e-4, 1e-3, 1e-2), (0.0, 0.3)))  # decay and smoothing of the fixed baselines


class RegularizationStream(LabelledStream):
    """Regularization: a network is trained on one small training set after the other, several rounds on each.

    A phase has its own mix of classes, its own training examples, some of whose labels are wrong, and a few clean
    validation examples. The mix is a bump that passes through all classes in four phases.

    Args:
        path: an npz file that holds ``images`` (bytes), labels, and perhaps ``is_test``; None generates images.
        label: array that holds the labels, class numbers from 0.
        shrink: side of the square of pixels that become one, their mean; smaller images take less time.
        noise: share of wrong training labels in each phase; the phases repeat.
        period: rounds of a phase.
        examples: training examples of a phase.
        batch: training examples of a round, sampled from those of its phase.
        validation: clean validation examples of a phase; a round has one of four folds of them.
        test: test examples per round.
        seed: of the tasks.
    """

    metric = Metric("accuracy", higher_is_better=True)
    extra_metrics = ("cross_entropy",)
    problem_type = Regularized
    network_type = CNN4
    derived_arguments = ("ways", "shape", "channels", "image_size")

    def __init__(
        self,
        path: str | None = None,
        label: str = "labels",
        shrink: int = 1,
        noise: list[float] = [0.0, 0.5],  # noqa: B006 never changed
        period: int = 50,
        examples: int = 500,
        batch: int = 128,
        validation: int = 100,
        test: int = 200,
        seed: int = 0,
    ) -> None:
        if not noise:
            raise ValueError(f"data.noise must have at least one number, got {noise!r}")
        self.noise = [decay("data.noise", value) for value in noise]
        at_least("data.shrink", shrink, 1)
        data = LabelledExamples.generate_images() if path is None else LabelledExamples.read(path, label)
        data = data.downsample(shrink)
        if len(data.shape) != 3:
            raise ValueError(f"data.path must hold images for a CNN, got examples of the shape {list(data.shape)}")
        super().__init__(data, period, seed, examples=examples, batch=batch, validation=validation, test=test)

    def task_spec(self) -> dict[str, Any]:
        return {**super().task_spec(), "channels": self.data.shape[0], "image_size": self.data.shape[2]}

    def mix(self, phase: int) -> Tensor:
        """Return the frequency of each class in a phase."""
        places = torch.arange(self.data.classes) / self.data.classes - phase / CYCLE
        return (SHARPNESS * torch.cos(2 * math.pi * places)).softmax(-1)

    def task(self, t: int) -> Task:
        phase = t // self.period
        rows, wrong, other, _ = self._examples(phase)
        generator = self.generator("round", t)
        chosen = torch.randint(len(rows), (self.counts["batch"],), generator=generator)
        test = self._random_rows("test", "test", phase, generator)
        task = self.data.task(train=rows[chosen], validation=self.fold(t), test=test)
        return task | {"train_y": torch.where(wrong[chosen], other[chosen], task["train_y"])}

    def validation_rows(self, t: int) -> Tensor:
        return self._examples(t // self.period)[-1]

    def _examples(self, phase: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return training rows of a phase, which labels are wrong, the wrong labels, and validation rows."""
        generator = self.generator("phase", phase)
        rows = self._random_rows("train", "examples", phase, generator)
        wrong = torch.rand(rows.shape, generator=generator) < self.noise[phase % len(self.noise)]
        other = torch.randint(self.data.classes, rows.shape, generator=generator)
        return rows, wrong, other, self._random_rows("validation", "validation", phase, generator)

    def _random_rows(self, pool: str, count: str, phase: int, generator: torch.Generator) -> Tensor:
        classes = torch.multinomial(self.mix(phase), self.counts[count], replacement=True, generator=generator)
        return self.data.random_rows_of(pool, classes, generator)

    def baselines(self, problem: Problem, algorithm: Algorithm, rounds: int) -> dict[str, list[float]]:
        """Run hardly any regularization, the best fixed one of a few, and training on the validation examples."""
        fixed = self.train_with_fixed_outer(problem, algorithm, rounds, lambda t: torch.tensor(FIXED))
        return {
            "hardly any regularization": fixed[0],
            "best fixed regularization in hindsight": max(fixed, key=sum),
            "validation examples only": self.train_on_validation_only(problem, algorithm, rounds),
        }
