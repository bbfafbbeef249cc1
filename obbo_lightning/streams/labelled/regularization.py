"""Small training sets that are replaced by others, whose classes are others and whose labels are better or worse."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import derive_seed
from obbo_lightning.core.validation import at_least, decay
from obbo_lightning.networks.cnn4 import CNN4
from obbo_lightning.problems.regularization import Regularized
from obbo_lightning.streams.labelled.baselines import fixed_outer, on_validation_alone
from obbo_lightning.streams.labelled.examples import Labelled
from obbo_lightning.streams.stream import Metric, Stream
from obbo_lightning.streams.tasks import Tasks

TURN = 4  # phases until the mix of classes is the first one again
SHARPNESS = 3.0  # of the mix: the classes in its middle are e^6 times as frequent as those at its end
FIXED = tuple(itertools.product((1e-4, 1e-3, 1e-2), (0.0, 0.3)))  # decay and smoothing that learned ones must beat


class RegularizationStream(Stream):
    """How much to regularize: a network is trained on one small set after the other, again and again within a phase.

    A phase has its own mix of classes, its own training examples, some of whose labels are wrong, and a few examples
    with right labels to validate on. The mix is a bump that goes round all classes in four phases.

    Args:
        path: an npz file that holds ``images`` (bytes), labels, and perhaps ``is_test``; None draws images.
        label: the array that has the labels, class numbers from 0.
        shrink: how many pixels a side become one, their mean: smaller images take less time.
        noise: which share of the training labels is wrong, in each phase; after the last comes the first again.
        period: rounds of a phase.
        examples: to train on, in a phase.
        batch: how many of them a round has.
        validation: examples to validate on, in a phase.
        test: examples to be judged on, a round.
        seed: of everything.
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
            raise ValueError(f"data.noise must have a number or more, got {noise!r}")
        self.noise = [decay("data.noise", value) for value in noise]
        self.period = at_least("data.period", period, 1)
        counts = {"examples": examples, "batch": batch, "validation": validation, "test": test}
        self.counts = {name: at_least(f"data.{name}", count, 1) for name, count in counts.items()}
        at_least("data.shrink", shrink, 1)
        self.data = (Labelled.drawn_images() if path is None else Labelled.read(path, label)).shrunk(shrink)
        if len(self.data.shape) != 3:
            raise ValueError(f"data.path must hold images for a CNN, got examples of the shape {list(self.data.shape)}")
        self.seed = seed
        self.train = Tasks(self.task, length=1_000_000)

    def task_spec(self) -> dict[str, Any]:
        channels, _, size = self.data.shape
        return {"ways": self.data.classes, "shape": self.data.shape, "channels": channels, "image_size": size}

    def source_digests(self) -> dict[str, str]:
        return {"examples": self.data.digest()}

    def mix(self, phase: int) -> Tensor:
        """How often each class comes in a phase."""
        places = torch.arange(self.data.classes) / self.data.classes - phase / TURN
        return (SHARPNESS * torch.cos(2 * math.pi * places)).softmax(-1)

    def task(self, t: int) -> Task:
        """The task of round t, counted from 0."""
        phase = t // self.period
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "phase", phase))
        rows = self._rows("train", "examples", phase, generator)
        wrong = torch.rand(rows.shape, generator=generator) < self.noise[phase % len(self.noise)]
        other = torch.randint(self.data.classes, rows.shape, generator=generator)
        validation_x, validation_y = self.data.take(self._rows("validation", "validation", phase, generator))
        generator.manual_seed(derive_seed(self.seed, "round", t))
        chosen = torch.randint(len(rows), (self.counts["batch"],), generator=generator)
        train_x, truth = self.data.take(rows[chosen])
        test_x, test_y = self.data.take(self._rows("test", "test", phase, generator))
        return {
            "train_x": train_x,
            "train_y": torch.where(wrong[chosen], other[chosen], truth),
            "validation_x": validation_x,
            "validation_y": validation_y,
            "test_x": test_x,
            "test_y": test_y,
        }

    def _rows(self, pool: str, count: str, phase: int, generator: torch.Generator) -> Tensor:
        classes = torch.multinomial(self.mix(phase), self.counts[count], replacement=True, generator=generator)
        return self.data.rows_of(pool, classes, generator)

    def baselines(self, problem: Problem, algorithm: Algorithm, rounds: int) -> dict[str, list[float]]:
        """Hardly any regularization, the best fixed one of a few, and other training data."""
        tasks: Sequence[Task] = Tasks(self.task, rounds)
        played = fixed_outer(problem, algorithm, tasks, lambda t: torch.tensor(FIXED))
        found = [[float(one[lane]) for one in played] for lane in range(len(FIXED))]
        return {
            "hardly any": found[0],
            "the best fixed one in hindsight": max(found, key=sum),
            "the validation examples alone": on_validation_alone(problem, algorithm, tasks),
        }
