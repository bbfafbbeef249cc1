"""Labelled examples in three pools, the base class of streams that train a network on them, and its baselines."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.memory import InnerState
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import Key, derive_seed
from obbo_lightning.core.validation import at_least
from obbo_lightning.problems.module import ModuleProblem
from obbo_lightning.streams.few_shot.synthetic import CLASSES, GeneratedImages
from obbo_lightning.streams.fingerprints import digest_arrays
from obbo_lightning.streams.readers import read_npz, require_file, require_images, require_numbers
from obbo_lightning.streams.stream import Stream, Tasks

POOLS = ("train", "validation", "test")
FOLDS = 4  # of the validation examples
FRACTION = 10  # every tenth example is for validation; another tenth for tests, where the file names none


@dataclass(frozen=True)
class LabelledExamples:
    """Examples with the class of each, divided into three pools."""

    examples: Tensor  # [n, …], bytes of pixels or numbers
    labels: Tensor  # class numbers [n]
    pools: dict[str, Tensor]  # row numbers by name of the pool
    mean: Tensor  # of the training examples, by channel of an image [channels, 1, 1] or by feature
    deviation: Tensor  # of the training examples, in the same shape

    @classmethod
    def from_tensors(cls, examples: Tensor, labels: Tensor, is_test: Tensor | None = None) -> "LabelledExamples":
        """Divide examples into pools, which depend on their number only, and compute the training pool's moments."""
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(derive_seed("pools")))
        if is_test is None:
            test, rest = order[: len(order) // FRACTION], order[len(order) // FRACTION :]
        else:
            test, rest = order[is_test[order]], order[~is_test[order]]
        validation, train = rest[: len(rest) // FRACTION], rest[len(rest) // FRACTION :]
        pools = dict(zip(POOLS, (train, validation, test), strict=True))
        for name, rows in pools.items():
            if not len(rows):
                raise ValueError(f"data.path must have examples for the {name} pool, got {len(labels)} in all")
        some = _numbers(examples[train[:10_000]])
        axes = (0, 2, 3) if examples.ndim == 4 else 0
        mean, deviation = some.mean(axes), some.std(axes)
        deviation = deviation.where(deviation > 1e-12, 1.0)  # of a constant
        shape = (-1, 1, 1) if examples.ndim == 4 else (-1,)
        return cls(examples, labels, pools, mean.reshape(shape), deviation.reshape(shape))

    @classmethod
    def read(cls, path: str, label: str) -> "LabelledExamples":
        """Read an npz file with ``images`` or ``examples``, an array of labels, and perhaps ``is_test``."""
        file = Path(path).expanduser()
        require_file("data.path", file, "an npz file", (".npz",))
        arrays = read_npz(file, (label,), ("images", "examples", "is_test"))
        if "images" in arrays:
            examples = torch.from_numpy(require_images(file, arrays["images"])).permute(0, 3, 1, 2).contiguous()
        elif "examples" in arrays and arrays["examples"].ndim == 2:
            examples = torch.from_numpy(require_numbers(file, arrays["examples"]).astype(np.float32))
        else:
            raise ValueError(f"{path} must hold images or examples [n, features], got {', '.join(arrays)}")
        for name in [label, "is_test"] if "is_test" in arrays else [label]:
            values, count = arrays[name], len(examples)
            if values.shape != (count,) or values.dtype.kind not in "biu" or values.min() < 0:
                raise ValueError(
                    f"{path}: {name} must be integers from 0 [{count}], got {values.dtype} {list(values.shape)}"
                )
        is_test = torch.from_numpy(arrays["is_test"].astype(bool)) if "is_test" in arrays else None
        return cls.from_tensors(examples, torch.from_numpy(arrays[label].astype(np.int64)), is_test)

    @classmethod
    def generate_clusters(cls, spread: float = 1.0) -> "LabelledExamples":
        """Generate 20,000 points of 10 normal clusters, one per class, which overlap more with a larger spread."""
        classes, features, count = 10, 20, 20_000
        generator = torch.Generator().manual_seed(derive_seed("clouds", classes, features))
        centres = torch.randn(classes, features, generator=generator)
        labels = torch.randint(classes, (count,), generator=generator)
        return cls.from_tensors(centres[labels] + spread * torch.randn(count, features, generator=generator), labels)

    @classmethod
    def generate_images(cls) -> "LabelledExamples":
        """Generate 6,000 images in 20 classes, the superclasses of the default stream."""
        count, image_size = 6_000, 16
        generator = torch.Generator().manual_seed(derive_seed("images", image_size))
        members = torch.randint(CLASSES, (count,), generator=generator)
        return cls.from_tensors(GeneratedImages(image_size).draw(members, generator), members // 5)

    def downsample(self, factor: int) -> "LabelledExamples":
        """Return the images with sides of ``factor`` times fewer pixels, each the mean of the pixels it replaces."""
        if factor == 1:
            return self
        if self.examples.ndim != 4 or min(self.shape[1:]) < factor:
            raise ValueError(f"data.shrink must be 1 for examples of the shape {list(self.shape)}, got {factor}")
        means = avg_pool2d(self.examples.float(), factor)
        if self.examples.dtype == torch.uint8:
            means = means.round().byte()
        return replace(self, examples=means)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example."""
        return tuple(self.examples.shape[1:])

    @property
    def classes(self) -> int:
        """Number of classes."""
        return int(self.labels.max()) + 1

    def digest(self) -> str:
        """Return a digest of examples, labels and pools."""
        pools = (rows.numpy() for rows in self.pools.values())
        return digest_arrays(self.examples.numpy(), self.labels.numpy(), *pools)

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the examples of these rows, standardised, and their labels."""
        return (_numbers(self.examples[rows]) - self.mean) / self.deviation, self.labels[rows]

    def task(self, **rows: Tensor) -> Task:
        """Return examples ``NAME_x`` and labels ``NAME_y`` of the rows under each name."""
        return {
            f"{name}_{k}": values
            for name, chosen in rows.items()
            for k, values in zip("xy", self.take(chosen), strict=True)
        }

    def random_rows(self, pool: str, count: int, generator: torch.Generator) -> Tensor:
        """Return random rows of a pool, with replacement."""
        rows = self.pools[pool]
        return rows[torch.randint(len(rows), (count,), generator=generator)]

    def random_rows_of(self, pool: str, classes: Tensor, generator: torch.Generator) -> Tensor:
        """Return one random row for each entry of ``classes``, with replacement."""
        rows, first, count = self._by_class[pool]
        chosen = (torch.rand(len(classes), generator=generator, dtype=torch.float64) * count[classes]).long()
        return rows[first[classes] + chosen]

    @cached_property
    def _by_class(self) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """For each pool: its rows sorted by class, the first position of each class, and the size of each class."""
        found = {}
        for pool, rows in self.pools.items():
            count = self.labels[rows].bincount(minlength=self.classes)
            if not count.all():
                missing = int(count.argmin())
                raise ValueError(f"data.path must have every class in the {pool} pool, got none of class {missing}")
            ordered = rows[self.labels[rows].argsort(stable=True)]
            found[pool] = (ordered, count.cumsum(0) - count, count)
        return found


def _numbers(examples: Tensor) -> Tensor:
    return examples.float() / 255 if examples.dtype == torch.uint8 else examples.float()


class LabelledStream(Stream):
    """Base of streams whose rounds have a training batch, a fold of the clean validation examples, new test examples.

    ``counts`` are numbers of examples, by name of the argument.
    """

    def __init__(self, data: LabelledExamples, period: int, seed: int, **counts: int) -> None:
        self.data, self.seed = data, seed
        self.period = at_least("data.period", period, 1)
        self.counts = {name: at_least(f"data.{name}", count, 1) for name, count in counts.items()}
        self.folds = min(FOLDS, self.counts["validation"])
        self.train = Tasks(self.task, length=1_000_000)

    @abstractmethod
    def task(self, t: int) -> Task:
        """Return the task of round t, counted from 0."""

    @abstractmethod
    def validation_rows(self, t: int) -> Tensor:
        """Return all validation examples of round t."""

    def fold(self, t: int) -> Tensor:
        """Return the validation examples of the fold of round t."""
        return self.validation_rows(t)[t % self.folds :: self.folds]

    def task_spec(self) -> dict[str, Any]:
        return {"ways": self.data.classes, "shape": self.data.shape}

    def source_digests(self) -> dict[str, str]:
        return {"examples": self.data.digest()}

    def generator(self, *purpose: str | int) -> torch.Generator:
        """Return a random generator for one purpose; the words decide the numbers, so they never change."""
        return torch.Generator().manual_seed(derive_seed(self.seed, *purpose))

    def train_with_fixed_outer(
        self,
        problem: Problem,
        algorithm: Algorithm,
        rounds: int,
        outer: Callable[[int], Tensor],
        change: Callable[[int, Task], Task] | None = None,
    ) -> list[list[float]]:
        """Return the metric of each round, lane by lane, for given λ_t ``[lanes, d]``, without hypergradients."""
        state, found = InnerState(), []
        for t in range(rounds):
            at, task = outer(t), self.task(t)
            task = task if change is None else change(t, task)
            oracle = Oracle(problem, at, task, Key(round=t), state.solver_state)
            inner = algorithm.inner(oracle, algorithm.inner.warm_start(oracle, state.inner))
            state = InnerState(inner if algorithm.inner.warm_starts else None, None, oracle.solver_state)
            found.append(problem.scores(at, inner, task)[self.metric.name])
        by_lane: list[list[float]] = torch.stack(found).T.tolist()
        return by_lane

    def train_on_validation_only(self, problem: Problem, algorithm: Algorithm, rounds: int) -> list[float]:
        """Return the metric of each round for a network that is trained on the validation examples only."""
        if not isinstance(problem, ModuleProblem):
            raise ValueError(f"problem must be a ModuleProblem to train on its validation loss, got {problem!r}")
        loss, start = problem.validation_loss, problem.hyper.start()
        plain = ModuleProblem(problem.network.template, problem.hyper, loss, loss, problem.score_function)

        def replace_training(t: int, task: Task) -> Task:
            others = {name: values for name, values in task.items() if not name.startswith("train_")}
            return others | self.data.task(train=self.validation_rows(t))

        return self.train_with_fixed_outer(plain, algorithm, rounds, lambda t: start, replace_training)[0]
