"""The DataModule: tasks of any stream, in order, from the next round on."""

import contextlib
import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import lightning as L
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from obbo_lightning.core.distributed import tasks_of_rank
from obbo_lightning.core.problem import Task
from obbo_lightning.core.validation import at_least
from obbo_lightning.streams.stream import Stream, has_random_access


class InOrder(IterableDataset[Any]):
    """Items that a function makes of some indices, in order for any number of loader processes.

    Iterable, because Lightning would give every rank a part of any other dataset. Its length may count finished rounds
    as well: after a resume Lightning continues to count from them.
    """

    def __init__(self, make: Callable[[int], Any], indices: range, length: int) -> None:
        self.make, self.indices, self.length = make, indices, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        own = self.indices if worker is None else self.indices[worker.id :: worker.num_workers]
        return (self.make(t) for t in own)


def _tasks_of_round(tasks: Sequence[Task], tasks_per_round: int, slots: range, t: int) -> list[Task]:
    """Return this process's ``slots`` of the tasks of round t, which are tn … tn + n − 1."""
    return [tasks[t * tasks_per_round + slot] for slot in slots]


_USED: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()  # iterators that gave a task


class ArrivingRounds(IterableDataset[list[Task]]):
    """Rounds of an iterable of tasks, until there are no more tasks where ``rounds`` is None.

    An iterator with ``state_dict`` continues from its ``state`` after the ``finished`` rounds; for any other their
    tasks are skipped.
    """

    def __init__(
        self,
        tasks: Iterable[Task],
        rounds: int | None,
        tasks_per_round: int,
        slots: range,
        finished: int = 0,
        state: Any = None,
    ) -> None:
        self.tasks, self.rounds, self.tasks_per_round, self.slots = tasks, rounds, tasks_per_round, slots
        self.finished, self.state = finished, state
        self._states: deque[tuple[int, Any]] = deque(maxlen=4)  # a loader may be a round or two ahead

    def __len__(self) -> int:
        if self.rounds is None:
            raise TypeError("an arriving stream has no length")
        return self.rounds

    def __iter__(self) -> Iterator[list[Task]]:
        if get_worker_info() is not None:
            raise ValueError("workers must be 0 for a stream that arrives task by task, got more")
        arriving = iter(self.tasks)
        if self.state is not None:
            arriving.load_state_dict(self.state)  # type: ignore[attr-defined]
        elif self.finished and id(arriving) in _USED:
            raise ValueError("a stream without state_dict must be a new iterator to continue, got one that was used")
        else:
            deque(islice(arriving, self.finished * self.tasks_per_round), maxlen=0)  # finished rounds
        if arriving is self.tasks:
            with contextlib.suppress(TypeError):  # some built-in iterators cannot be referenced weakly
                _USED[id(arriving)] = arriving
        done = self.finished
        while self.rounds is None or done < self.rounds:
            tasks = list(islice(arriving, self.tasks_per_round))
            if len(tasks) < self.tasks_per_round:
                return
            done += 1
            if hasattr(arriving, "state_dict"):
                self._states.append((done, copy.deepcopy(arriving.state_dict())))
            yield [tasks[slot] for slot in self.slots]

    def state_after(self, rounds: int) -> Any:
        """Return the state of the iterator after so many rounds; None where it has none."""
        initial = self.state if rounds == self.finished else None
        return next((state for done, state in self._states if done == rounds), initial)


class StreamDataModule(L.LightningDataModule):
    """Serves the tasks of a stream in order, one batch per round, from the next round on.

    Args:
        stream: a `Stream`, or training tasks: a sequence, or any iterable, which may be endless.
        rounds: T, number of rounds; None: as many as there are tasks for.
        validation: tasks for ``validate``; those of the stream where this is None.
        test: tasks for ``test``; those of the stream where this is None.
        evaluation_tasks: how many of the validation and test tasks are used; all of them where this is None.
        workers: loader processes; any number gives the same stream.
        tasks_per_round: n, in all processes together.
        record_fingerprints: compute the fingerprints of each round's tasks, for `pop_fingerprints`.
    """

    def __init__(
        self,
        stream: Stream | Sequence[Task] | Iterable[Task],
        rounds: int | None = None,
        validation: Sequence[Task] | None = None,
        test: Sequence[Task] | None = None,
        evaluation_tasks: int | None = None,
        workers: int = 0,
        tasks_per_round: int = 1,
        record_fingerprints: bool = False,
    ) -> None:
        super().__init__()
        self.stream = stream if isinstance(stream, Stream) else None
        self.train = stream.train if isinstance(stream, Stream) else stream
        self.validation = getattr(self.stream, "validation", ()) if validation is None else validation
        self.test = getattr(self.stream, "test", ()) if test is None else test
        self.tasks_per_round = at_least("tasks_per_round", tasks_per_round, 1)
        self.rounds = rounds if rounds is None else at_least("rounds", rounds, 1)
        self.evaluation_tasks = evaluation_tasks
        self.workers = at_least("workers", workers, 0)
        self._record_fingerprints = record_fingerprints and self.stream is not None
        self._fingerprints: dict[int, str] = {}
        self._arriving: ArrivingRounds | None = None
        self._state: Any = None
        if has_random_access(self.train):
            enough = len(self.train) // tasks_per_round
            if rounds is not None and rounds > enough:
                raise ValueError(
                    f"rounds must be at most the stream's {len(self.train)} tasks, {tasks_per_round} per round, "
                    f"got {rounds}: use --rounds {enough}"
                )
            self.rounds = rounds or enough
        elif workers:
            raise ValueError(f"workers must be 0 for a stream that arrives task by task, got {workers}")

    def train_dataloader(self) -> Iterable[list[Task]]:
        """Return a loader of the remaining rounds."""
        slots = tasks_of_rank(*self._rank(), self.tasks_per_round)
        finished = self.trainer.global_step if self.trainer else 0
        dataset: IterableDataset[Any]
        if has_random_access(self.train):
            assert self.rounds is not None
            make = partial(_tasks_of_round, self.train, self.tasks_per_round, slots)
            dataset = InOrder(make, range(finished, self.rounds), self.rounds)
        else:
            dataset = self._arriving = ArrivingRounds(
                self.train, self.rounds, self.tasks_per_round, slots, finished, self._state
            )
        loader = self._loader(dataset)
        return _Fingerprinting(loader, self, finished) if self._record_fingerprints else loader

    def val_dataloader(self) -> DataLoader[Task]:
        return self._evaluation_loader(self.validation)

    def test_dataloader(self) -> DataLoader[Task]:
        return self._evaluation_loader(self.test)

    def pop_fingerprints(self, rounds: int) -> str | None:
        """Return the fingerprints of the round with this number (from 1), and forget them."""
        return self._fingerprints.pop(rounds, None)

    def state_dict(self) -> dict[str, Any]:
        finished = self.trainer.global_step if self.trainer else 0
        return {"stream": self._state if self._arriving is None else self._arriving.state_after(finished)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict["stream"]

    def _evaluation_loader(self, tasks: Sequence[Task]) -> DataLoader[Task]:
        rank, ranks = self._rank()
        count = len(tasks) if self.evaluation_tasks is None else min(self.evaluation_tasks, len(tasks))
        indices = range(rank, count, ranks)
        return self._loader(InOrder(tasks.__getitem__, indices, len(indices)))

    def _rank(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def _loader(self, dataset: IterableDataset[Any]) -> DataLoader[Any]:
        return DataLoader(dataset, batch_size=None, num_workers=self.workers)


class _Fingerprinting:
    """Loader that computes the fingerprints of what it serves, before Lightning changes device or precision."""

    def __init__(self, loader: DataLoader[Any], data: StreamDataModule, finished: int) -> None:
        self.loader, self.data, self.finished = loader, data, finished

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        assert self.data.stream is not None
        for t, tasks in enumerate(self.loader, self.finished):
            numbered = enumerate(tasks, t * self.data.tasks_per_round)
            self.data._fingerprints[t + 1] = " ".join(self.data.stream.fingerprint(i, task) for i, task in numbered)
            yield tasks
