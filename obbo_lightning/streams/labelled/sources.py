"""Several sources of labels, some of which are wrong; which ones changes from phase to phase."""

from typing import Any

import torch
from torch import Tensor

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.validation import at_least, one_of
from obbo_lightning.networks.mlp import MLP
from obbo_lightning.problems.sources import SourceWeights
from obbo_lightning.streams.labelled.stream import LabelledExamples, LabelledStream
from obbo_lightning.streams.stream import Metric

ERRORS = ("shifted", "random", "adversarial")
POWERS = (0.0, 1.0, 2.0, 4.0, 8.0, 32.0)  # of the share of correct labels: equal weights, …, the best source only


class SourcesStream(LabelledStream):
    """Source weights: each round has labels from every source, and some of a few clean validation examples.

    Args:
        path: an npz file that holds ``images`` (bytes) or ``examples`` (numbers), labels, and perhaps ``is_test``;
            None generates normal clusters, one per class.
        label: array that holds the labels, class numbers from 0.
        sources: number of sources.
        wrong: number of sources that are wrong at a time.
        errors: labels of wrong sources: ``shifted``, the next class; ``random``, any class; ``adversarial``, correct
            for half of the classes, for the others a wrong class that all wrong sources agree on.
        change: ``abrupt``, or ``gradual``: in the first half of a phase its labels replace those of the phase before
            step by step.
        period: rounds of a phase, after which other sources are wrong.
        examples: training examples per source and round.
        validation: clean validation examples; a round has one of four folds of them.
        test: test examples per round.
        seed: of the tasks.
    """

    metric = Metric("accuracy", higher_is_better=True)
    problem_type = SourceWeights
    network_type = MLP
    derived_arguments = ("sources", "ways", "shape")

    def __init__(
        self,
        path: str | None = None,
        label: str = "labels",
        sources: int = 10,
        wrong: int = 6,
        errors: str = "shifted",
        change: str = "abrupt",
        period: int = 100,
        examples: int = 20,
        validation: int = 100,
        test: int = 200,
        seed: int = 0,
    ) -> None:
        self.sources = at_least("data.sources", sources, 2)
        if not 0 <= at_least("data.wrong", wrong, 0) < sources:
            raise ValueError(f"data.wrong must be less than the {sources} sources, got {wrong}")
        self.wrong = wrong
        self.errors = one_of("data.errors", errors, ERRORS)
        self.change = one_of("data.change", change, ("abrupt", "gradual"))
        data = LabelledExamples.generate_clusters() if path is None else LabelledExamples.read(path, label)
        super().__init__(data, period, seed, examples=examples, validation=validation, test=test)
        self.clean = data.random_rows("validation", validation, self.generator("trusted"))

    def task_spec(self) -> dict[str, Any]:
        return {"sources": self.sources, **super().task_spec()}

    def task(self, t: int) -> Task:
        generator = self.generator("round", t)
        train = self.data.random_rows("train", self.sources * self.counts["examples"], generator)
        test = self.data.random_rows("test", self.counts["test"], generator)
        task = self.data.task(train=train, validation=self.fold(t), test=test)
        source = torch.arange(self.sources).repeat_interleave(self.counts["examples"])
        given = self._given_labels(t, task["train_y"], source, generator)
        return task | {"train_y": given, "train_source": source, "right": self.right(t)}

    def validation_rows(self, t: int) -> Tensor:
        return self.clean

    def right(self, t: int) -> Tensor:
        """Return the probability that a label of each source comes from a correct one ``[sources]``."""
        phase, age = divmod(t, self.period)
        now = self._right_in(phase)
        if self.change == "abrupt" or phase == 0:
            return now
        share = min(1.0, (age + 1) / max(1.0, self.period / 2))
        return share * now + (1 - share) * self._right_in(phase - 1)

    def _right_in(self, phase: int) -> Tensor:
        right = torch.ones(self.sources)
        right[torch.randperm(self.sources, generator=self.generator("phase", phase))[: self.wrong]] = 0.0
        return right

    def _given_labels(self, t: int, truth: Tensor, source: Tensor, generator: torch.Generator) -> Tensor:
        """Return the labels that the sources give."""
        classes = self.data.classes
        if self.errors == "random":
            wrong = torch.randint(classes, truth.shape, generator=generator)
        elif self.errors == "shifted":
            wrong = (truth + 1) % classes
        else:  # a cycle through half of the classes, another one in each phase
            in_phase = self.generator("agreed", t // self.period)
            half = torch.randperm(classes, generator=in_phase)[: max(2, classes // 2)]
            agreed = torch.arange(classes)
            agreed[half] = half.roll(1)
            wrong = agreed[truth]
        correct = torch.rand(truth.shape, generator=generator) < self.right(t)[source]
        return torch.where(correct, truth, wrong)

    def baselines(self, problem: Problem, algorithm: Algorithm, rounds: int) -> dict[str, list[float]]:
        """Run equal weights, the true ones, the best fixed ones, and training without any source."""
        mean_right = torch.stack([self.right(t) for t in range(rounds)]).mean(0)
        powers = [mean_right**power for power in POWERS]

        def weights(t: int) -> Tensor:
            return torch.stack([values / values.sum() for values in (*powers, self.right(t))])

        *by_power, truth = self.train_with_fixed_outer(problem, algorithm, rounds, weights)
        return {
            "equal weights": by_power[0],
            "best fixed weights in hindsight": max(by_power, key=sum),
            "clean validation examples only": self.train_on_validation_only(problem, algorithm, rounds),
            "weights that know the truth": truth,
        }
