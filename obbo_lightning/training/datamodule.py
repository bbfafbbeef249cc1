"""Tasks one after another, from any stream."""

from collections.abc import Iterator, Sequence
from typing import Any

import lightning as L
from torch.utils.data import DataLoader, Dataset, Sampler

from obbo_lightning.core.problem import Task
from obbo_lightning.core.validation import at_least
from obbo_lightning.training.ranks import slots_of


class TaskDataset(Dataset[Task]):
    """A sequence of tasks as torch wants it."""

    def __init__(self, tasks: Sequence[Task], length: int) -> None:
        self.tasks = tasks
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, t: int) -> Task:
        return self.tasks[t]


class RoundDataset(Dataset[list[Task]]):
    """Round t has the tasks tn … tn + n − 1 of the stream, whoever computes them; here are those of ``slots``."""

    def __init__(self, tasks: Sequence[Task], rounds: int, tasks_per_round: int, slots: range) -> None:
        self.tasks, self.rounds, self.tasks_per_round, self.slots = tasks, rounds, tasks_per_round, slots

    def __len__(self) -> int:
        return self.rounds

    def __getitem__(self, t: int) -> list[Task]:
        return [self.tasks[t * self.tasks_per_round + slot] for slot in self.slots]


class RoundSampler(Sampler[int]):
    """Rounds t, t+1, … T−1 where t is how many the trainer has played; its length stays T.

    After a resume Lightning counts on from batch t but would be served task 0 again by an ordinary sampler.
    """

    def __init__(self, module: "StreamDataModule", rounds: int) -> None:
        self.module = module
        self.rounds = rounds

    def __len__(self) -> int:
        return self.rounds

    def __iter__(self) -> Iterator[int]:
        trainer = self.module.trainer
        return iter(range(0 if trainer is None else trainer.global_step, self.rounds))


class StreamDataModule(L.LightningDataModule):
    """Serves the tasks of a stream, those of one round a batch; task i is a function of (seed, i) alone.

    Args:
        train: the stream's training tasks.
        rounds: T, how many rounds are played.
        validation: tasks for ``validate``.
        test: tasks for ``test``.
        judged: how many of the validation and test tasks are used; all of them where this is None.
        workers: loader processes; any number gives the same stream.
        tasks_per_round: n, in all processes together.
    """

    def __init__(
        self,
        train: Sequence[Task],
        rounds: int,
        validation: Sequence[Task] = (),
        test: Sequence[Task] = (),
        judged: int | None = None,
        workers: int = 0,
        tasks_per_round: int = 1,
    ) -> None:
        super().__init__()
        at_least("rounds", rounds, 1)
        self.tasks_per_round = at_least("tasks_per_round", tasks_per_round, 1)
        if rounds * tasks_per_round > len(train):
            raise ValueError(
                f"rounds must be at most the stream's {len(train)} tasks, {tasks_per_round} a round, got {rounds}"
            )
        self.train, self.rounds, self.validation, self.test = train, rounds, validation, test
        self.judged = judged
        self.workers = at_least("workers", workers, 0)

    def train_dataloader(self) -> DataLoader[list[Task]]:
        """The rounds that are still to be played."""
        rank, ranks = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        slots = slots_of(rank, ranks, self.tasks_per_round)
        rounds = RoundDataset(self.train, self.rounds, self.tasks_per_round, slots)
        return self._loader(rounds, sampler=RoundSampler(self, self.rounds))

    def val_dataloader(self) -> DataLoader[Task]:
        """Validation tasks."""
        return self._loader(TaskDataset(self.validation, self._judged(self.validation)))

    def test_dataloader(self) -> DataLoader[Task]:
        """Test tasks."""
        return self._loader(TaskDataset(self.test, self._judged(self.test)))

    def _judged(self, tasks: Sequence[Task]) -> int:
        return len(tasks) if self.judged is None else min(self.judged, len(tasks))

    def _loader(self, dataset: Dataset[Any], **options: Any) -> DataLoader[Any]:
        return DataLoader(dataset, batch_size=None, num_workers=self.workers, **options)
