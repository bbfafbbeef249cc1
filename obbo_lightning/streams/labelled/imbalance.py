"""Stream with imbalanced classes, whose frequencies change from phase to phase."""

import math

import torch
from torch import Tensor

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.validation import fraction
from obbo_lightning.networks.mlp import MLP
from obbo_lightning.problems.imbalance import VectorScaling
from obbo_lightning.problems.module import ModuleProblem
from obbo_lightning.streams.labelled.stream import LabelledExamples, LabelledStream
from obbo_lightning.streams.stream import Metric

SPREAD = 2.0  # of generated clusters: they overlap, so that frequencies matter


class ImbalanceStream(LabelledStream):
    """Rare classes: in each round's batch the frequency of class i is proportional to μ^i.

    A round has one of four folds of a few validation examples of every class; test examples are balanced, too.

    Args:
        path: an npz file that holds ``images`` (bytes) or ``examples`` (numbers), labels, and perhaps ``is_test``;
            None generates normal clusters, one per class.
        label: array that holds the labels, class numbers from 0.
        kept: μ of each phase, in (0, 1]; the phases repeat.
        period: rounds of a phase.
        batch: training examples per round.
        validation: validation examples per class; a round has one of four folds of them.
        test: test examples per class and round.
        seed: of the tasks.
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
            raise ValueError(f"data.kept must have at least one number, got {kept!r}")
        self.kept = [fraction("data.kept", value) for value in kept]
        data = LabelledExamples.generate_clusters(SPREAD) if path is None else LabelledExamples.read(path, label)
        super().__init__(data, period, seed, batch=batch, validation=validation, test=test)
        self.clean = self._balanced("validation", self.generator("trusted"))

    def frequency(self, t: int) -> Tensor:
        """Return the frequency of each class in round t: μ^i, normalised."""
        return self.adjustment(t).softmax(-1)

    def adjustment(self, t: int) -> Tensor:
        """Return the offsets of logit adjustment, i log μ, with mean 0 (a constant changes nothing)."""
        logs = math.log(self.kept[t // self.period % len(self.kept)]) * torch.arange(self.data.classes)
        return logs - logs.mean()

    def task(self, t: int) -> Task:
        generator, frequency = self.generator("round", t), self.frequency(t)
        classes = torch.multinomial(frequency, self.counts["batch"], replacement=True, generator=generator)
        train = self.data.random_rows_of("train", classes, generator)
        test = self._balanced("test", generator)
        return {"frequency": frequency, **self.data.task(train=train, validation=self.fold(t), test=test)}

    def validation_rows(self, t: int) -> Tensor:
        return self.clean

    def baselines(self, problem: Problem, algorithm: Algorithm, rounds: int) -> dict[str, list[float]]:
        """Run plain training, offsets that know the frequencies, and training on the balanced examples."""
        assert isinstance(problem, ModuleProblem)
        start = problem.hyper.start()  # offsets of 0, scales of 1

        def outer(t: int) -> Tensor:
            return torch.stack([start[0], torch.cat([self.adjustment(t).to(start), start[0, self.data.classes :]])])

        def add_validation(t: int, task: Task) -> Task:
            more = self.data.task(train=self.validation_rows(t))
            return task | {name: torch.cat([task[name], values]) for name, values in more.items()}

        plain, informed = self.train_with_fixed_outer(problem, algorithm, rounds, outer)
        (added,) = self.train_with_fixed_outer(problem, algorithm, rounds, lambda t: start, add_validation)
        return {
            "plain training": plain,
            "offsets that know the frequencies": informed,
            "the balanced examples alone": self.train_on_validation_only(problem, algorithm, rounds),
            "the balanced examples added to every batch": added,
        }

    def _balanced(self, pool: str, generator: torch.Generator) -> Tensor:
        """Return as many rows of each class as the pool's count."""
        classes = torch.arange(self.data.classes).repeat_interleave(self.counts[pool])
        return self.data.random_rows_of(pool, classes, generator)
