"""Seeds derived from (seed, round, purpose): resuming needs one integer, and the order of draws never matters."""

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


def derive_seed(*words: int | str) -> int:
    """Return a 63-bit seed from integers and words, the same in every process and on every machine.

    >>> derive_seed(0, 1, "inner") == derive_seed(0, 1, "inner") != derive_seed(0, 2, "inner")
    True
    """
    digest = hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Key(NamedTuple):
    """Identifier of the randomness of one task in one round.

    Attributes:
        seed: of the run.
        round: number of rounds before this one.
        age: how many rounds ago the task arrived (0: in this round).
        slot: index of the task within its round.

    >>> Key(seed=0, round=3).seed_for("inner", 1) == derive_seed(0, 3, 0, "inner", 1)
    True
    """

    seed: int = 0
    round: int = 0
    age: int = 0
    slot: int = 0

    def seed_for(self, purpose: str, index: int = 0) -> int:
        """Return the seed of one draw."""
        # Slot 0 is left out, so the first of several tasks has the same seeds as the only task of a round.
        task = (self.age, *((f"slot {self.slot}",) if self.slot else ()))
        return derive_seed(self.seed, self.round, *task, purpose, index)


@dataclass(frozen=True)
class Sample:
    """One draw of ζ (or ε): ``size`` independent observations that a stochastic loss averages over.

    Where ``size`` is None the loss uses all observations, and the sample seeds the problem's own noise (dropout).

    A loss that gets the same `Sample` twice must return the same value, so a sample holds a seed and no state. Draws
    come from the CPU generator, the same on every device, and all lanes share them: a lane's result does not depend
    on its neighbours.

    >>> Sample(seed=1, size=3).indices(10).shape
    torch.Size([3])
    """

    seed: int
    size: int | None

    def generator(self) -> torch.Generator:
        """Return a new generator at the start of this draw."""
        return torch.Generator().manual_seed(self.seed)

    def indices(self, count: int, device: torch.device | None = None) -> Tensor:
        """Return ``size`` indices, uniform on 0..count−1, with replacement; all in order where ``size`` is None."""
        if self.size is None:
            return torch.arange(count, device=device or "cpu")
        return torch.randint(count, (self.size,), generator=self.generator()).to(device or "cpu")
