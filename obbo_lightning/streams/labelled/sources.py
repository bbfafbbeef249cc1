"""Several sources of labels, some of which are wrong, others from phase to phase."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import derive_seed
from obbo_lightning.core.validation import at_least, one_of
from obbo_lightning.networks.mlp import MLP
from obbo_lightning.problems.sources import SourceWeights
from obbo_lightning.streams.labelled.baselines import fixed_outer, on_validation_alone
from obbo_lightning.streams.labelled.examples import Labelled
from obbo_lightning.streams.stream import Metric, Stream
from obbo_lightning.streams.tasks import Tasks

ERRORS = ("shifted", "random", "adversarial")
POWERS = (0.0, 1.0, 2.0, 4.0, 8.0, 32.0)  # of how often a source is right: equal weights, …, the best one alone


class SourcesStream(Stream):
    """Whom to trust: each round has labels from every source; a few examples were checked by hand, once and for all.

    Args:
        path: an npz file that holds ``images`` (bytes) or ``examples`` (numbers), labels, and perhaps ``is_test``; None
            draws normal clouds, one a class.
        label: the array that has the labels, class numbers from 0.
        sources: how many there are.
        wrong: how many of them are wrong at a time.
        errors: what a wrong source says: ``shifted``, the next class; ``random``, any class; ``adversarial``, for half
            of the classes the truth, for the others what all wrong sources have agreed upon.
        change: ``abrupt``, or ``gradual``: over the first half of a phase more and more of its labels are as in it.
        period: rounds of a phase, after which others are wrong.
        examples: of each source, a round.
        validation: trusted examples, the same in every round.
        test: examples to be judged on, a round.
        seed: of everything.
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
        self.period = at_least("data.period", period, 1)
        counts = {"examples": examples, "validation": validation, "test": test}
        self.counts = {name: at_least(f"data.{name}", count, 1) for name, count in counts.items()}
        self.data = Labelled.drawn() if path is None else Labelled.read(path, label)
        self.seed = seed
        generator = torch.Generator().manual_seed(derive_seed(seed, "trusted"))
        self.trusted = self.data.draw("validation", validation, generator)
        self.train = Tasks(self.task, length=1_000_000)

    def task_spec(self) -> dict[str, Any]:
        return {"sources": self.sources, "ways": self.data.classes, "shape": self.data.shape}

    def source_digests(self) -> dict[str, str]:
        return {"examples": self.data.digest()}

    def task(self, t: int) -> Task:
        """The task of round t, counted from 0."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "round", t))
        x, truth = self.data.draw("train", self.sources * self.counts["examples"], generator)
        source = torch.arange(self.sources).repeat_interleave(self.counts["examples"])
        test_x, test_y = self.data.draw("test", self.counts["test"], generator)
        said = self._said(t, truth, source, generator)
        task = {"train_x": x, "train_y": said, "train_source": source, "right": self.right(t)}
        validation_x, validation_y = (part.clone() for part in self.trusted)  # a task is whoever's that draws it
        return task | {"validation_x": validation_x, "validation_y": validation_y, "test_x": test_x, "test_y": test_y}

    def right(self, t: int) -> Tensor:
        """Which share of each source's labels is of a right source ``[sources]``."""
        phase, age = divmod(t, self.period)
        now = self._right_in(phase)
        if self.change == "abrupt" or phase == 0:
            return now
        share = min(1.0, (age + 1) / max(1.0, self.period / 2))
        return share * now + (1 - share) * self._right_in(phase - 1)

    def _right_in(self, phase: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "phase", phase))
        right = torch.ones(self.sources)
        right[torch.randperm(self.sources, generator=generator)[: self.wrong]] = 0.0
        return right

    def _said(self, t: int, truth: Tensor, source: Tensor, generator: torch.Generator) -> Tensor:
        classes = self.data.classes
        if self.errors == "random":
            wrong = torch.randint(classes, truth.shape, generator=generator)
        elif self.errors == "shifted":
            wrong = (truth + 1) % classes
        else:  # a cycle through half of the classes, another one in each phase
            chosen = torch.Generator().manual_seed(derive_seed(self.seed, "agreed", t // self.period))
            half = torch.randperm(classes, generator=chosen)[: max(2, classes // 2)]
            agreed = torch.arange(classes)
            agreed[half] = half.roll(1)
            wrong = agreed[truth]
        honest = torch.rand(truth.shape, generator=generator) < self.right(t)[source]
        return torch.where(honest, truth, wrong)

    def baselines(self, problem: Problem, algorithm: Algorithm, rounds: int) -> dict[str, list[float]]:
        """Equal weights, those that know the truth, the best fixed ones, and no sources at all."""
        tasks: Sequence[Task] = Tasks(self.task, rounds)
        often = torch.stack([self.right(t) for t in range(rounds)]).mean(0)
        fixed = torch.stack([_shares(often**power) for power in POWERS])
        played = fixed_outer(problem, algorithm, tasks, lambda t: torch.cat([fixed, _shares(self.right(t))[None]]))
        found = {key: [float(one[key]) for one in played] for key in range(len(POWERS) + 1)}
        best = max(range(len(POWERS)), key=lambda key: sum(found[key]))
        alone = on_validation_alone(problem, algorithm, tasks)
        return {
            "equal weights": found[0],
            "best fixed weights in hindsight": found[best],
            "the trusted examples alone": alone,
            "weights that know the truth": found[len(POWERS)],
        }


def _shares(values: Tensor) -> Tensor:
    return values / values.sum()
