"""Validation batches for a tuner, one after the other, without a trace in anybody's random numbers."""

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng

from obbo_lightning.core.randomness import derive_seed


class ValidationBatches:
    """Goes round and round a loader, or asks a function.

    A pass over a loader draws from seeds of its own, so that a resumed run gets the batches that it would have got.

    Args:
        source: a ``DataLoader`` or any iterable of batches, or a function of the number of batches taken before.
        seed: of shuffling and of whatever else a loader draws.
    """

    def __init__(self, source: Iterable[Any] | Callable[[int], Any], seed: int = 0) -> None:
        if not callable(source) and not isinstance(source, Iterable):
            raise ValueError(f"validation must be a loader or a function that gives a batch, got {source!r}")
        self.source, self.seed = source, seed
        self.turn = self.taken = 0
        self._batches: Iterator[Any] | None = None

    def take(self) -> Any:
        """The next one."""
        with isolate_rng(include_cuda=False):
            if callable(self.source) and not isinstance(self.source, Iterable):
                self._seed(self.taken)
                self.taken += 1
                return self.source(self.taken - 1)
            if self._batches is None:
                self._begin_pass()
            assert self._batches is not None
            if self.taken:
                self._seed(self.taken)
            for batch in self._batches:
                self.taken += 1
                return batch
            if not self.taken:
                raise ValueError("validation must have at least one batch, got none")
            self.turn, self.taken, self._batches = self.turn + 1, 0, None
        return self.take()

    def _begin_pass(self) -> None:
        """Begin a pass, or begin it again and pass over what was taken."""
        self._seed(0)  # shuffling is drawn between here and the first batch
        self._batches = iter(self.source)  # type: ignore[arg-type]
        for place in range(self.taken):
            if place:
                self._seed(place)
            next(self._batches)

    def _seed(self, place: int) -> None:
        seed = derive_seed(self.seed, self.turn, place)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 (what transforms draw from is not ours to choose)
        torch.default_generator.manual_seed(seed)

    def state_dict(self) -> dict[str, int]:
        """Where it is."""
        return {"turn": self.turn, "taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self.turn, self.taken, self._batches = state["turn"], state["taken"], None
