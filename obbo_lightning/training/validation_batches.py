"""Validation batches for a tuner, one after the other, without a trace in anybody's random numbers."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import lightning as L
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
        with isolate_rng():
            L.seed_everything(derive_seed(self.seed, self.turn, self.taken) % 2**32, verbose=False)
            if callable(self.source) and not isinstance(self.source, Iterable):
                self.taken += 1
                return self.source(self.taken - 1)
            if self._batches is None:
                self._batches = self._resumed()
            for batch in self._batches:
                self.taken += 1
                return batch
            if not self.taken:
                raise ValueError("validation must have at least one batch, got none")
            self.turn, self.taken, self._batches = self.turn + 1, 0, None
        return self.take()

    def _resumed(self) -> Iterator[Any]:
        """A pass without those of its batches that were taken before."""
        passed, self.taken = self.taken, 0
        batches = iter(self.source)  # type: ignore[arg-type]
        for _ in itertools.repeat(None, passed):
            L.seed_everything(derive_seed(self.seed, self.turn, self.taken) % 2**32, verbose=False)
            next(batches)
            self.taken += 1
        if passed:
            L.seed_everything(derive_seed(self.seed, self.turn, self.taken) % 2**32, verbose=False)
        return batches

    def state_dict(self) -> dict[str, int]:
        """Where it is."""
        return {"turn": self.turn, "taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self.turn, self.taken, self._batches = state["turn"], state["taken"], None
