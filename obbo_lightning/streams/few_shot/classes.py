"""Labelled examples in memory: divided into splits by class, drawn by class."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from obbo_lightning.core.randomness import derive_seed
from obbo_lightning.streams.fingerprints import digest_of

SPLITS = ("train", "validation", "test")


class StoredClasses:
    """Examples in memory, by class; drawn without replacement within a task.

    Args:
        examples: ``[n, …]``.
        labels: class number of each.
        standardise: what makes examples as they are stored into examples as a network wants them.
        names: of the classes; their numbers where not given.
    """

    def __init__(
        self,
        examples: Tensor,
        labels: NDArray[np.integer],
        standardise: Callable[[Tensor], Tensor] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self.examples = examples
        self.names = names
        self.members = {int(c): torch.from_numpy(np.flatnonzero(labels == c)) for c in np.unique(labels)}
        self._standardise = standardise

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example."""
        return tuple(self.examples.shape[1:])

    def smallest(self, classes: Sequence[int]) -> int | None:
        """How many examples the smallest of these classes has."""
        return min(len(self.members[c]) for c in classes)

    def draw(self, classes: Tensor, generator: torch.Generator) -> Tensor:
        """One example for each entry of ``classes``; entries of one class are neighbours, and get distinct ones."""
        rows = []
        for c, count in zip(*(x.tolist() for x in classes.unique_consecutive(return_counts=True)), strict=True):
            members = self.members[c]
            rows.append(members[torch.randperm(len(members), generator=generator)[:count]])
        drawn = self.examples[torch.cat(rows)]
        return drawn if self._standardise is None else self._standardise(drawn)


@dataclass(frozen=True)
class Division:
    """Which example is of which class, and which class of which split.

    Attributes:
        names: of the classes.
        numbers: class number of each example: places in ``names``.
        splits: class numbers of train, validation and test.
    """

    names: list[str]
    numbers: NDArray[np.integer]
    splits: dict[str, list[int]]

    @classmethod
    def of(
        cls, labels: NDArray[np.generic], ratios: Sequence[float], lists: Sequence[Sequence[str | int] | None]
    ) -> "Division":
        """Classes divided as `divide` does; there must be some to train on."""
        names, numbers = np.unique(labels.astype(str), return_inverse=True)
        splits = divide(names.tolist(), ratios, lists)
        if not splits["train"]:
            raise ValueError("data.ratios and data.train_classes must leave classes to train on, got none")
        return cls(names.tolist(), numbers, splits)

    def digests(self, examples: NDArray[np.generic]) -> dict[str, str]:
        """Of each class's examples."""
        return {name: digest_of(examples[self.numbers == c]) for c, name in enumerate(self.names)}

    @property
    def trained(self) -> NDArray[np.bool_]:
        """Which examples are of training classes."""
        return np.isin(self.numbers, self.splits["train"])


def divide(
    names: Sequence[str], ratios: Sequence[float], lists: Sequence[Sequence[str | int] | None]
) -> dict[str, list[int]]:
    """Class numbers of each split: those that its list names, or its share of the classes that no list names.

    >>> divide(["ant", "bee", "cat", "dog"], [0.5, 0.25, 0.25], [None, None, ["ant"]])["test"]
    [0]
    """
    if len(ratios) != 3 or min(ratios) < 0 or sum(ratios) <= 0:
        raise ValueError(f"data.ratios must be three shares, none negative, got {list(ratios)!r}")
    chosen: dict[str, list[int]] = {}
    owner: dict[str, str] = {}
    for split, wanted in zip(SPLITS, lists, strict=True):
        for name in map(str, wanted or ()):
            if name not in names:
                near = get_close_matches(name, names, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(
                    f"data.{split}_classes must be of the {len(names)} classes there are, got {name!r}{hint}"
                )
            if name in owner:
                raise ValueError(f"data.{split}_classes must not share a class with {owner[name]}, got {name!r}")
            owner[name] = split
        chosen[split] = sorted(names.index(str(name)) for name in wanted or ())
    free = [i for i, name in enumerate(names) if name not in owner]
    generator = torch.Generator().manual_seed(derive_seed("classes"))
    free = [free[i] for i in torch.randperm(len(free), generator=generator).tolist()]
    sharing = [(split, share) for split, share, wanted in zip(SPLITS, ratios, lists, strict=True) if wanted is None]
    total, share_before, start = sum(share for _, share in sharing), 0.0, 0
    for split, share in sharing:
        share_before += share
        end = round(len(free) * share_before / total) if total else start
        chosen[split] = sorted(free[start:end])
        start = end
    return chosen
