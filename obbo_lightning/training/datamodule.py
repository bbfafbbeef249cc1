"""Tasks one after another, from any stream."""

import contextlib
import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import lightning as L
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from obbo_lightning.core.problem import Task
from obbo_lightning.core.validation import at_least
from obbo_lightning.streams.stream import Stream
from obbo_lightning.streams.tasks import has_random_access
from obbo_lightning.training.ranks import slots_of


class InOrder(IterableDataset[Any]):
    """Some items of a sequence, in order for any number of loader processes.

    Lightning leaves an iterable dataset as it is: it would give every rank a part of anything else.

    Args:
        items: random access.
        places: which of them, in order.
        length: what `len` says; after a resume Lightning counts on from the rounds that were played.
    """

    def __init__(self, items: Any, places: range, length: int) -> None:
        self.items, self.places, self.length = items, places, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        mine = self.places if worker is None else self.places[worker.id :: worker.num_workers]
        return (self.items[t] for t in mine)


class Rounds:
    """Round t has the tasks tn … tn + n − 1 of a sequence, whoever computes them; here are those of ``slots``."""

    def __init__(self, tasks: Sequence[Task], tasks_per_round: int, slots: range) -> None:
        self.tasks, self.tasks_per_round, self.slots = tasks, tasks_per_round, slots

    def __getitem__(self, t: int) -> list[Task]:
        return [self.tasks[t * self.tasks_per_round + slot] for slot in self.slots]


_BEGUN: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()  # iterators that were drawn from


class ArrivingRounds(IterableDataset[list[Task]]):
    """Rounds of tasks that arrive one after the other: an iterable of tasks, which may be endless.

    An iterator with ``state_dict`` says where it is; otherwise the tasks of rounds that were played are passed over.

    Args:
        tasks: makes the iterator.
        rounds: how many are played; None: until there are no more.
        tasks_per_round: n.
        slots: which of a round's tasks this process computes.
        played: rounds that were played before.
        state: of the iterator after them, where it had one.
    """

    def __init__(
        self,
        tasks: Iterable[Task],
        rounds: int | None,
        tasks_per_round: int,
        slots: range,
        played: int = 0,
        state: Any = None,
    ) -> None:
        self.tasks, self.rounds, self.tasks_per_round, self.slots = tasks, rounds, tasks_per_round, slots
        self.played, self.state = played, state
        self._states: deque[tuple[int, Any]] = deque(maxlen=4)  # loaders may be a round or two ahead

    def __len__(self) -> int:
        if self.rounds is None:
            raise TypeError("a stream that arrives has no length")
        return self.rounds

    def __iter__(self) -> Iterator[list[Task]]:
        if get_worker_info() is not None:
            raise ValueError("workers must be 0 for a stream that arrives task by task, got more")
        arriving = iter(self.tasks)
        if self.state is not None:
            arriving.load_state_dict(self.state)  # type: ignore[attr-defined]
        elif self.played and id(arriving) in _BEGUN:
            raise ValueError("a stream without state_dict must be made anew to go on with it, got one that was used")
        else:
            deque(islice(arriving, self.played * self.tasks_per_round), maxlen=0)  # played already
        if arriving is self.tasks:
            with contextlib.suppress(TypeError):  # some of Python's own cannot be watched
                _BEGUN[id(arriving)] = arriving
        done = self.played
        while self.rounds is None or done < self.rounds:
            tasks = list(islice(arriving, self.tasks_per_round))
            if len(tasks) < self.tasks_per_round:
                return
            done += 1
            if hasattr(arriving, "state_dict"):
                self._states.append((done, copy.deepcopy(arriving.state_dict())))
            yield [tasks[slot] for slot in self.slots]

    def state_after(self, rounds: int) -> Any:
        """Where the iterator was after so many rounds; None where it cannot say."""
        begun_with = self.state if rounds == self.played else None
        return next((state for done, state in self._states if done == rounds), begun_with)


class Seen(DataLoader[Any]):
    """A loader that shows what it serves, in the order of the rounds and before any of it is changed.

    Args:
        dataset: the rounds.
        first: number of the first one.
        show: is called with the number of a round and its tasks.
        options: of the loader.
    """

    def __init__(self, dataset: IterableDataset[Any], first: int, show: Callable[..., None], **options: Any) -> None:
        super().__init__(dataset, **options)
        self.first, self.show = first, show

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for t, tasks in enumerate(super().__iter__(), self.first):
            self.show(t, tasks)
            yield tasks


class StreamDataModule(L.LightningDataModule):
    """Serves the tasks of a stream, those of one round a batch, in order, from the round that is next.

    Args:
        stream: a `Stream`, or training tasks: a sequence, or any iterable, which may be endless.
        rounds: T, how many rounds are played; None: as many as there are tasks for.
        validation: tasks for ``validate``; those of the stream where this is None.
        test: tasks for ``test``; those of the stream where this is None.
        judged: how many of the validation and test tasks are used; all of them where this is None.
        workers: loader processes; any number gives the same stream.
        tasks_per_round: n, in all processes together.
    """

    def __init__(
        self,
        stream: Stream | Sequence[Task] | Iterable[Task],
        rounds: int | None = None,
        validation: Sequence[Task] | None = None,
        test: Sequence[Task] | None = None,
        judged: int | None = None,
        workers: int = 0,
        tasks_per_round: int = 1,
    ) -> None:
        super().__init__()
        self.stream = stream if isinstance(stream, Stream) else None
        self.train = stream.train if isinstance(stream, Stream) else stream
        self.validation = getattr(self.stream, "validation", ()) if validation is None else validation
        self.test = getattr(self.stream, "test", ()) if test is None else test
        self.tasks_per_round = at_least("tasks_per_round", tasks_per_round, 1)
        self.rounds = rounds if rounds is None else at_least("rounds", rounds, 1)
        self.judged = judged
        self.workers = at_least("workers", workers, 0)
        self.show: Callable[[int, list[Task]], None] = lambda t, tasks: None  # every round's tasks, before it is played
        self._arriving: ArrivingRounds | None = None
        self._state: Any = None
        if has_random_access(self.train):
            enough = len(self.train) // tasks_per_round
            if rounds is not None and rounds > enough:
                raise ValueError(
                    f"rounds must be at most the stream's {len(self.train)} tasks, {tasks_per_round} a round, "
                    f"got {rounds}: say --rounds {enough}"
                )
            self.rounds = rounds or enough
        elif workers:
            raise ValueError(f"workers must be 0 for a stream that arrives task by task, got {workers}")

    def train_dataloader(self) -> DataLoader[list[Task]]:
        """The rounds that are still to be played."""
        slots = slots_of(*self._rank(), self.tasks_per_round)
        played = self.trainer.global_step if self.trainer else 0
        if has_random_access(self.train):
            assert self.rounds is not None
            rounds = Rounds(self.train, self.tasks_per_round, slots)
            return self._seen(InOrder(rounds, range(played, self.rounds), self.rounds), played)
        self._arriving = ArrivingRounds(self.train, self.rounds, self.tasks_per_round, slots, played, self._state)
        return self._seen(self._arriving, played)

    def val_dataloader(self) -> DataLoader[Task]:
        """Validation tasks."""
        return self._judging(self.validation)

    def test_dataloader(self) -> DataLoader[Task]:
        """Test tasks."""
        return self._judging(self.test)

    def state_dict(self) -> dict[str, Any]:
        """Where an arriving stream is after the rounds that were played."""
        played = self.trainer.global_step if self.trainer else 0
        return {"stream": self._state if self._arriving is None else self._arriving.state_after(played)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self._state = state_dict["stream"]

    def _judging(self, tasks: Sequence[Task]) -> DataLoader[Task]:
        """Each rank judges some of them."""
        rank, ranks = self._rank()
        count = len(tasks) if self.judged is None else min(self.judged, len(tasks))
        places = range(rank, count, ranks)
        return self._loader(InOrder(tasks, places, len(places)))

    def _rank(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def _seen(self, dataset: IterableDataset[Any], first: int) -> DataLoader[Any]:
        return Seen(dataset, first, self.show, batch_size=None, num_workers=self.workers)

    def _loader(self, dataset: IterableDataset[Any]) -> DataLoader[Any]:
        return DataLoader(dataset, batch_size=None, num_workers=self.workers)
