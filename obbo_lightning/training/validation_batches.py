"""Validation batches of `OnlineTuner`: disjoint folds of a loader's examples, used in turn."""

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, Literal, cast

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from obbo_lightning.core.randomness import derive_seed
from obbo_lightning.core.validation import at_least

FOLDS = 4
FEW = 20  # examples, of which there are two folds only
Source = Iterable[Any] | Callable[[int], Any]


class ValidationBatches:
    """Batches of fold 0, 1, …, K − 1, 0, …; each fold is cycled indefinitely and has its own place in its examples.

    A DataLoader with a map-style dataset is split into folds: K loaders with its batch size, collate function, workers
    and order. Of any other source the caller says how many folds its batches come from, in turn. Batches leave no trace
    in the global random numbers, and every pass over a loader has its own seeds, so that a resumed run gets the same
    batches; workers are therefore started anew for every pass.

    Attributes:
        folds: K.
        held_out: whether a step can be tested on examples that did not produce it.

    Args:
        source: a loader, any other iterable over batches, a function of the number of batches taken before, or None:
            batches are those of training.
        folds: K, where the source is not split: batch i of every pass, or of a function, has examples of fold i mod K.
            ``new``: every batch has new examples. None: 4 folds of a loader (2 of less than 20 examples), 1 of
            anything else, with a warning.
        seed: of folds and batches.
        labels: class of every example, so that folds have the same shares of classes.

    >>> batches = ValidationBatches(DataLoader(range(6), batch_size=2), folds=3)
    >>> folds, taken = zip(*[batches.take(step) for step in range(3)])
    >>> folds, sorted(torch.cat(taken).tolist())
    ((0, 1, 2), [0, 1, 2, 3, 4, 5])
    """

    def __init__(
        self,
        source: Source | None,
        folds: int | Literal["new"] | None = None,
        seed: int = 0,
        labels: Sequence[int] | Tensor | None = None,
    ) -> None:
        if source is not None and not callable(source) and not isinstance(source, Iterable):
            raise ValueError(f"validation must be a loader or a function that returns a batch, got {source!r}")
        if folds is not None and folds != "new":
            at_least("folds", folds, 1)
        loader = source if isinstance(source, DataLoader) and folds != "new" and can_be_split(source) else None
        count = 0 if loader is None else len(cast(Sized, loader.dataset))
        if labels is not None and (loader is None or len(labels) != count):
            raise ValueError(f"labels must be given for each example of a loader that is split, got {len(labels)}")
        if folds is None:
            folds = max(1, min(count, FOLDS if count >= FEW else 2))
            if folds == 1:
                remedy = (
                    "use a DataLoader with a map-style dataset and its usual sampler, or say folds=K (batch i is of "
                    "fold i mod K) or folds='new' (every batch has new examples)"
                    if loader is None
                    else f"use at least 2 examples, got {count}"
                )
                warnings.warn(
                    "validation examples are not divided into folds, so an outer step is tested on the examples that "
                    f"produced it and may follow their noise: {remedy}",
                    stacklevel=3,
                )
        self.folds = 1 if folds == "new" else folds
        self.held_out = folds == "new" or self.folds > 1
        sources: list[Source | None] = [source]
        if loader is not None and self.folds > 1:
            if self.folds > count:
                raise ValueError(f"folds must be at most the number of examples, {count}, got {self.folds}")
            sources = [loader_of(loader, rows) for rows in split_into_folds(count, self.folds, seed, labels)]
        self._cycles = [Cycle(one, derive_seed(seed, "fold", k)) for k, one in enumerate(sources) if one is not None]

    def take(self, step: int) -> tuple[int, Any]:
        """Return the next fold and a batch of it, None where there are no batches of its own."""
        if len(self._cycles) == self.folds:
            return step % self.folds, self._cycles[step % self.folds].take()
        if not self._cycles:
            return step % self.folds, None
        (cycle,) = self._cycles
        batch = cycle.take()
        return (cycle.taken - 1) % self.folds, batch

    def state_dict(self) -> dict[str, Any]:
        """Return K and the place in each fold."""
        return {"folds": self.folds, "cursors": [[cycle.passes, cycle.taken] for cycle in self._cycles]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        if (state["folds"], len(state["cursors"])) != (self.folds, len(self._cycles)):
            raise ValueError(
                f"validation must have {state['folds']} folds of {len(state['cursors'])} sources to continue from this "
                f"state, got {self.folds} folds of {len(self._cycles)}"
            )
        for cycle, (passes, taken) in zip(self._cycles, state["cursors"], strict=True):
            cycle.move_to(passes, taken)


class Cycle:
    """Batches of one source, cycled indefinitely."""

    def __init__(self, source: Source, seed: int) -> None:
        self.source, self.seed = source, seed
        self.passes = self.taken = 0
        self._batches: Iterator[Any] | None = None

    def take(self) -> Any:
        """Return the next batch."""
        with isolate_rng(include_cuda=False):
            if not isinstance(self.source, Iterable):
                self._seed(self.taken)
                self.taken += 1
                return self.source(self.taken - 1)
            if self._batches is None:
                self._seed(0)  # shuffling is drawn between here and the first batch
                self._batches = iter(self.source)
                for index in range(self.taken):  # a pass that is resumed
                    if index:
                        self._seed(index)
                    next(self._batches)
            if self.taken:
                self._seed(self.taken)
            for batch in self._batches:
                self.taken += 1
                return batch
            if not self.taken:
                where = f" in pass {self.passes + 1}: an iterator has only one" if self.passes else ""
                raise ValueError(f"validation must have at least one batch, got none{where}")
            self.move_to(self.passes + 1, 0)
        return self.take()

    def move_to(self, passes: int, taken: int) -> None:
        """Continue after so many passes, and so many batches of the next one."""
        self.passes, self.taken, self._batches = passes, taken, None

    def _seed(self, index: int) -> None:
        seed = derive_seed(self.seed, self.passes, index)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 (transforms draw from the global generator)
        torch.default_generator.manual_seed(seed)


def can_be_split(loader: DataLoader[Any]) -> bool:
    """Return whether the examples of a loader can be divided: map-style, all of them in order or shuffled."""
    dataset, sampler = loader.dataset, loader.sampler
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        return False
    if type(loader).__iter__ is not DataLoader.__iter__:
        return False
    if type(loader.batch_sampler) not in (BatchSampler, type(None)):
        return False
    if loader.batch_sampler is not None and loader.batch_size is None:  # it was given: its batch size is not ours
        return False
    if not (type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)):
        return False
    return len(sampler) == len(dataset)


def split_into_folds(
    count: int, folds: int, seed: int = 0, labels: Sequence[int] | Tensor | None = None
) -> list[list[int]]:
    """Return disjoint folds of row numbers: a function of the seed, the number of rows and of folds.

    >>> [len(rows) for rows in split_into_folds(10, 4)]
    [3, 3, 2, 2]
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "folds", count, folds))
    order = torch.randperm(count, generator=generator)
    if labels is not None:
        order = order[torch.as_tensor(labels).cpu()[order].argsort(stable=True)]
    return [order[k::folds].tolist() for k in range(folds)]


def loader_of(loader: DataLoader[Any], rows: list[int]) -> DataLoader[Any]:
    """Return a loader of some rows, with the batch size, collate function and workers of another."""
    kept = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    settings = {name: getattr(loader, name) for name in (*kept, "prefetch_factor")}
    shuffle = isinstance(loader.sampler, RandomSampler)
    drop_last = loader.drop_last and len(rows) >= (loader.batch_size or 1)  # a fold always has a batch
    return DataLoader(Subset(loader.dataset, rows), loader.batch_size, shuffle=shuffle, drop_last=drop_last, **settings)
