"""Classes that come with different frequencies, which change from phase to phase."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import derive_seed
from obbo_lightning.core.validation import at_least, fraction
from obbo_lightning.networks.mlp import MLP
from obbo_lightning.problems.imbalance import VectorScaling
from obbo_lightning.problems.module import ModuleProblem
from obbo_lightning.streams.labelled.baselines import fixed_outer, on_validation_alone, with_validation
from obbo_lightning.streams.labelled.examples import Labelled
from obbo_lightning.streams.stream import Metric, Stream
from obbo_lightning.streams.tasks import Tasks

SPREAD = 2.0  # of the clouds that are drawn where there is no file: they overlap, so that frequencies matter


class ImbalanceStream(Stream):
    """Rare classes: each round has a batch in which class i comes with a frequency proportional to μ^i.

    A few examples of every class were put aside to validate on, once and for all; a round is judged on as many of each.

    Args:
        path: an npz file that holds ``images`` (bytes) or ``examples`` (numbers), labels, and perhaps ``is_test``; None
            draws normal clouds, one a class.
        label: the array that has the labels, class numbers from 0.
        kept: μ of each phase, in (0, 1]; after the last comes the first again.
        period: rounds of a phase.
        batch: training examples, a round.
        validation: examples of each class to validate on, the same in every round.
        test: examples of each class to be judged on, a round.
        seed: of everything.
    """

    metric = Metric("balanced_accuracy", higher_is_better=True)
    extra_metrics = ("accuracy",)
    problem_type = VectorScaling
    network_type = MLP
    derived_arguments = ("ways", "shape")

    def __init__(
        self,
        path: str | None = None,
        label: str = "labels",
        kept: list[float] = [0.4, 0.6, 0.8, 1.0],  # noqa: B006 never changed
        period: int = 100,
        batch: int = 64,
        validation: int = 10,
        test: int = 20,
        seed: int = 0,
    ) -> None:
        if not kept:
            raise ValueError(f"data.kept must have a number or more, got {kept!r}")
        self.kept = [fraction("data.kept", value) for value in kept]
        self.period = at_least("data.period", period, 1)
        counts = {"batch": batch, "validation": validation, "test": test}
        self.counts = {name: at_least(f"data.{name}", count, 1) for name, count in counts.items()}
        self.data = Labelled.drawn(spread=SPREAD) if path is None else Labelled.read(path, label)
        self.seed = seed
        generator = torch.Generator().manual_seed(derive_seed(seed, "trusted"))
        self.trusted = self.data.draw_of("validation", self._balanced(validation), generator)
        self.train = Tasks(self.task, length=1_000_000)

    def task_spec(self) -> dict[str, Any]:
        return {"ways": self.data.classes, "shape": self.data.shape}

    def source_digests(self) -> dict[str, str]:
        return {"examples": self.data.digest()}

    def frequency(self, t: int) -> Tensor:
        """How often each class comes in round t: μ^i, summing to 1."""
        return self.adjustment(t).softmax(-1)

    def adjustment(self, t: int) -> Tensor:
        """The offsets of logit adjustment, i log μ; a constant changes nothing, so their mean is 0."""
        logs = math.log(self.kept[t // self.period % len(self.kept)]) * torch.arange(self.data.classes)
        return logs - logs.mean()

    def task(self, t: int) -> Task:
        """The task of round t, counted from 0."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "round", t))
        frequency = self.frequency(t)
        classes = torch.multinomial(frequency, self.counts["batch"], replacement=True, generator=generator)
        train_x, train_y = self.data.draw_of("train", classes, generator)
        test_x, test_y = self.data.draw_of("test", self._balanced(self.counts["test"]), generator)
        task = {"train_x": train_x, "train_y": train_y, "frequency": frequency, "test_x": test_x, "test_y": test_y}
        return task | {"validation_x": self.trusted[0].clone(), "validation_y": self.trusted[1].clone()}

    def baselines(self, problem: Problem, algorithm: Algorithm, rounds: int) -> dict[str, list[float]]:
        """No offsets, those that know the frequencies, and the balanced examples as training data."""
        assert isinstance(problem, ModuleProblem)
        tasks: Sequence[Task] = Tasks(self.task, rounds)
        metric, plain = self.metric.name, problem.hyper.start()  # offsets of 0, scales of 1

        def outer(t: int) -> Tensor:
            return torch.stack([plain[0], torch.cat([self.adjustment(t).to(plain), plain[0, self.data.classes :]])])

        both = fixed_outer(problem, algorithm, tasks, outer, metric)
        added = fixed_outer(problem, algorithm, with_validation(tasks), lambda t: plain, metric)
        return {
            "plain training": [float(one[0]) for one in both],
            "offsets that know the frequencies": [float(one[1]) for one in both],
            "the balanced examples alone": on_validation_alone(problem, algorithm, tasks, metric),
            "the balanced examples added to every batch": [float(one) for one in added],
        }

    def _balanced(self, count: int) -> Tensor:
        return torch.arange(self.data.classes).repeat_interleave(count)
