"""Several processes that share a round, through Lightning's strategies."""

import os
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor

from obbo_lightning.core.memory import Met, Warm
from obbo_lightning.core.problem import Problem
from obbo_lightning.core.share import Share, lanes_of


def is_first() -> bool:
    """Whether this process is rank 0, which alone writes and speaks; known before there is a trainer."""
    return getattr(rank_zero_only, "rank", 0) == 0


def local_processes(devices: Any) -> int:
    """How many processes of this machine share a run, before there is a trainer: ``trainer.devices``, or torchrun's.

    >>> local_processes(2), local_processes([0, 3]), local_processes("auto")
    (2, 2, 1)
    """
    asked = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdecimal() else 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or max(1, asked)


def slots_of(rank: int, ranks: int, tasks_per_round: int) -> range:
    """Which of a round's tasks a rank solves; one task is for everybody, who then share its lanes.

    >>> [slots_of(rank, 2, 4) for rank in range(2)], slots_of(1, 2, 1)
    ([range(0, 2), range(2, 4)], range(0, 1))
    """
    each = max(1, tasks_per_round // ranks)
    return range(rank * each, (rank + 1) * each) if tasks_per_round > 1 else range(1)


def require_ranks(trainer: L.Trainer, problem: Problem, lanes: int, tasks_per_round: int) -> None:
    """Refuse processes that could not share the rounds of this run."""
    strategy, ranks = trainer.strategy, trainer.world_size
    if not isinstance(strategy, (DDPStrategy, SingleDeviceStrategy)):
        name = type(strategy).__name__
        raise ValueError(f"trainer.strategy must be auto or ddp, got {name}: an outer variable is not sharded")
    if ranks == 1:
        return
    if "MultiProcessing" in type(strategy.launcher).__name__:
        raise ValueError("trainer.strategy must be ddp, got one that spawns or forks: a run's files have one owner")
    if tasks_per_round > 1 and tasks_per_round % ranks:
        raise ValueError(f"tasks_per_round must be a multiple of the {ranks} processes, got {tasks_per_round}")
    divisible = lanes >= ranks and problem.knows("of_lanes")
    if tasks_per_round == 1 and not divisible:
        raise ValueError(f"tasks_per_round must be a multiple of the {ranks} processes, got 1")


class Ranks:
    """What a rank computes, and how ranks put together what they have.

    Args:
        trainer: knows the ranks.
        lanes: of the outer variable.
        tasks_per_round: n.
        side_by_side: see `Share`.
    """

    def __init__(self, trainer: L.Trainer, lanes: int, tasks_per_round: int, side_by_side: bool = False) -> None:
        self.rank, self.size = trainer.global_rank, trainer.world_size
        self.lanes = lanes
        self._strategy = trainer.strategy
        self.slots = slots_of(self.rank, self.size, tasks_per_round)
        self.by_lanes = self.size > 1 and tasks_per_round == 1
        self.share = Share(
            first=self.slots.start,
            tasks=tasks_per_round,
            lanes=lanes_of(self.rank, self.size, lanes) if self.by_lanes else None,
            total=self.total if self.size > 1 else None,
            side_by_side=side_by_side,
        )

    def total(self, values: Tensor) -> Tensor:
        """The sum over ranks."""
        found: Tensor = self._strategy.reduce(values.contiguous(), reduce_op="sum")
        return found

    def any(self, flag: int, device: torch.device) -> int:
        """The largest of all ranks' flags: what one is told, all are."""
        if self.size == 1:
            return flag
        flags = torch.zeros(self.size, device=device)
        flags[self.rank] = flag
        return int(self.total(flags).max())

    def own(self, slots: Sequence[Any]) -> list[Any]:
        """Of everybody's slots those of this rank."""
        return [slots[i] for i in self.slots]

    def gather_warms(self, warms: Sequence[Warm]) -> list[Warm]:
        """Every task's warm start, in the order of the tasks, with all lanes."""
        if self.size == 1:
            return list(warms)
        found = self._gather([warm.state_dict() for warm in warms])
        if self.by_lanes:
            return [Warm(**self._join([part[0] for part in found]))]
        return [Warm(**state) for part in found for state in part]

    def gather_rounds(self, rounds: list[list[Met]]) -> list[list[Met]]:
        """The same for rounds whose tasks are remembered (`Memory.exchange`)."""
        if self.size == 1:
            return rounds
        plain = [[(task, warm.state_dict()) for task, warm in met] for met in rounds]
        merged: list[list[Met]] = []
        for met in zip(*self._gather(plain), strict=True):  # one round, as each rank has it
            if self.by_lanes:
                merged.append([(met[0][0][0], Warm(**self._join([part[0][1] for part in met])))])
            else:
                merged.append([(task, Warm(**state)) for part in met for task, state in part])
        return merged

    def own_rounds(self, rounds: list[list[Met]]) -> list[list[Met]]:
        """Of remembered rounds the tasks of this rank."""
        return [self.own(met) for met in rounds]

    def _join(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """A warm start with every lane from the rank that owns it."""
        joined: dict[str, Any] = {}
        for name in states[0]:
            pieces = [s[name][lanes_of(r, self.size, self.lanes)] for r, s in enumerate(states) if s[name] is not None]
            joined[name] = torch.cat(pieces) if pieces else None
        return joined

    def _gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, _on_cpu(value))
        return found


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {k: _on_cpu(v) for k, v in value.items()}
    return type(value)(_on_cpu(v) for v in value) if isinstance(value, (list, tuple)) else value


def lost_a_rank(error: BaseException) -> bool:
    """Whether a collective failed because another process has died."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    words = ("gloo", "Connection closed", "Connection reset", "Broken pipe", "NCCL")
    return isinstance(error, distributed.DistError) or any(word in str(error) for word in words)
