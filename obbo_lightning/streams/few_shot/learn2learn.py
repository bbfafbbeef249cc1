"""Task sets of learn2learn as a stream."""

import random
from typing import Any

import numpy as np
import torch

from obbo_lightning.core.problem import Task
from obbo_lightning.core.randomness import derive_seed
from obbo_lightning.core.validation import at_least
from obbo_lightning.networks.cnn4 import CNN4
from obbo_lightning.problems.few_shot import FewShot
from obbo_lightning.streams.few_shot.stream import NETWORK_ARGUMENTS, network_arguments, support_and_query
from obbo_lightning.streams.stream import Metric, Stream, TaskSequence


class LearnToLearnTasks(TaskSequence):
    """Task t of a learn2learn ``Taskset``, a pure function of (seed, t).

    learn2learn samples a task with Python's global generator at its first use, and caches it. Here the global
    generators are seeded for every task and restored afterwards.

    Args:
        taskset: tasks of examples ``[n, …]`` and labels, with the same number of examples of each class.
        shots: support examples per class; the others are query examples.
        length: number of tasks.
        seed: integers and words that identify the randomness of this split.
    """

    def __init__(self, taskset: Any, shots: int, length: int, seed: tuple[int | str, ...] = (0,)) -> None:
        if not hasattr(taskset, "sample_task_description"):
            raise ValueError(f"taskset must be a learn2learn.data.Taskset, got {type(taskset).__name__}")
        self.taskset = taskset
        self.shots = at_least("data.shots", shots, 1)
        self.length = at_least("data.length", length, 1)
        self.seed = seed

    def task(self, t: int) -> Task:
        # seed the global generators of Python, NumPy and torch, because transforms may use any of them
        seed, before, numpy_before = derive_seed(*self.seed, t), random.getstate(), np.random.get_state()  # noqa: NPY002
        try:
            with torch.random.fork_rng(devices=[]):
                random.seed(seed)
                np.random.seed(seed % 2**32)  # noqa: NPY002
                torch.manual_seed(seed)
                examples, labels = self.taskset.get_task(self.taskset.sample_task_description())
        finally:
            random.setstate(before)
            np.random.set_state(numpy_before)  # noqa: NPY002
        _, labels, counts = labels.unique(return_inverse=True, return_counts=True)
        if bool((counts != counts[0]).any()) or int(counts[0]) <= self.shots:
            raise ValueError(
                f"a task must have the same number of examples of each class, more than the {self.shots} to adapt on, "
                f"got {counts.tolist()}"
            )
        order = labels.argsort(stable=True)
        return support_and_query(examples[order], labels[order], int(counts[0]), self.shots)


class LearnToLearnStream(Stream):
    """Train, validation and test tasks from three task sets of learn2learn, for `FewShot` problems.

    Args:
        train: ``learn2learn.data.Taskset`` of the training tasks.
        validation: task set of the validation tasks.
        test: task set of the test tasks.
        shots: support examples per class; the others are query examples.
        lengths: number of tasks of each.
        seed: of the training tasks; the others do not depend on it.
    """

    metric = Metric("accuracy", higher_is_better=True)
    problem_type = FewShot
    network_type = CNN4
    derived_arguments = NETWORK_ARGUMENTS
    train: LearnToLearnTasks

    def __init__(
        self,
        train: Any,
        validation: Any,
        test: Any,
        shots: int,
        lengths: tuple[int, int, int] = (20_000, 600, 600),
        seed: int = 0,
    ) -> None:
        self.train = LearnToLearnTasks(train, shots, lengths[0], (seed, "train"))
        self.validation = LearnToLearnTasks(validation, shots, lengths[1], ("validation",))
        self.test = LearnToLearnTasks(test, shots, lengths[2], ("test",))

    def task_spec(self) -> dict[str, Any]:
        task = self.train[0]
        return network_arguments(int(task["support_labels"].max()) + 1, task["support"].shape[1:])
