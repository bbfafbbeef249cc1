"""Tasks one after another, from any stream."""

from collections.abc import Iterator, Sequence
from typing import Any

import lightning as L
from torch.utils.data import DataLoader, Dataset, Sampler

from obbo_lightning.core.problem import Task
from obbo_lightning.core.validation import at_least


class TaskDataset(Dataset[Task]):
    """A sequence of tasks as torch wants it."""

    def __init__(self, tasks: Sequence[Task], length: int) -> None:
        self.tasks = tasks
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, t: int) -> Task:
        return self.tasks[t]


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
    """Serves task t = f(seed, t) of a stream, one a batch.

    Args:
        train: the stream's training tasks.
        rounds: T, how many of them are played.
        validation: tasks for ``validate``.
        test: tasks for ``test``.
        judged: how many of the validation and test tasks are used; all of them where this is None.
        workers: loader processes; any number gives the same stream.
    """

    def __init__(
        self,
        train: Sequence[Task],
        rounds: int,
        validation: Sequence[Task] = (),
        test: Sequence[Task] = (),
        judged: int | None = None,
        workers: int = 0,
    ) -> None:
        super().__init__()
        at_least("rounds", rounds, 1)
        if rounds > len(train):
            raise ValueError(f"rounds must be at most the stream's {len(train)} tasks, got {rounds}")
        self.train, self.rounds, self.validation, self.test = train, rounds, validation, test
        self.judged = judged
        self.workers = at_least("workers", workers, 0)

    def train_dataloader(self) -> DataLoader[Task]:
        """The rounds that are still to be played."""
        return self._loader(self.train, self.rounds, sampler=RoundSampler(self, self.rounds))

    def val_dataloader(self) -> DataLoader[Task]:
        """Validation tasks."""
        return self._loader(self.validation, self._judged(self.validation))

    def test_dataloader(self) -> DataLoader[Task]:
        """Test tasks."""
        return self._loader(self.test, self._judged(self.test))

    def _judged(self, tasks: Sequence[Task]) -> int:
        return len(tasks) if self.judged is None else min(self.judged, len(tasks))

    def _loader(self, tasks: Sequence[Task], length: int, **options: Any) -> DataLoader[Task]:
        return DataLoader(TaskDataset(tasks, length), batch_size=None, num_workers=self.workers, **options)
