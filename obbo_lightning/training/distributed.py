"""Several processes that share a round, through Lightning's strategies."""

import os
from collections.abc import Sequence
from itertools import chain
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor

from obbo_lightning.config.parse import ConfigError
from obbo_lightning.core.distributed import Shard, lanes_of_rank, tasks_of_rank
from obbo_lightning.core.memory import InnerState, TaskEntry
from obbo_lightning.core.problem import Problem


def is_rank_zero() -> bool:
    """Return whether this process is rank 0, which alone writes and prints; known before there is a trainer."""
    return getattr(rank_zero_only, "rank", 0) == 0


def local_processes(devices: Any) -> int:
    """Return how many processes of this machine share a run: ``trainer.devices``, or what torchrun started.

    >>> local_processes(2), local_processes([0, 3]), local_processes("auto")
    (2, 2, 1)
    """
    requested = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdecimal() else 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or max(1, requested)


def require_strategy(trainer: L.Trainer, problem: Problem, lanes: int, tasks_per_round: int) -> None:
    """Refuse strategies and numbers of processes that cannot share the rounds of this run."""
    strategy, ranks = trainer.strategy, trainer.world_size
    if not isinstance(strategy, (DDPStrategy, SingleDeviceStrategy)):
        name = type(strategy).__name__
        raise ConfigError(f"trainer.strategy must be auto or ddp, got {name}: an outer variable is not sharded")
    if ranks == 1:
        return
    if "MultiProcessing" in type(strategy.launcher).__name__:
        raise ConfigError("trainer.strategy must be ddp, got one that spawns or forks: a run's files have one owner")
    divides_tasks = tasks_per_round > 1 and tasks_per_round % ranks == 0
    divides_lanes = tasks_per_round == 1 and lanes >= ranks and problem.provides("select_lanes")
    if not (divides_tasks or divides_lanes):
        raise ConfigError(f"tasks_per_round must be a multiple of the {ranks} processes, got {tasks_per_round}")


class Processes:
    """What this rank computes of a round, and how all ranks combine what they have."""

    def __init__(self, trainer: L.Trainer, lanes: int, tasks_per_round: int, vmap: bool = False) -> None:
        self.rank, self.size = trainer.global_rank, trainer.world_size
        self._strategy, self._lanes = trainer.strategy, lanes
        self._tasks = tasks_of_rank(self.rank, self.size, tasks_per_round)
        self._divides_lanes = self.size > 1 and tasks_per_round == 1
        self.shard = Shard(
            first=self._tasks.start,
            tasks=tasks_per_round,
            lanes=lanes_of_rank(self.rank, self.size, lanes) if self._divides_lanes else None,
            all_reduce=self.all_reduce if self.size > 1 else None,
            vmap=vmap,
        )

    def all_reduce(self, values: Tensor) -> Tensor:
        """Return the sum over ranks."""
        reduced: Tensor = self._strategy.reduce(values.contiguous(), reduce_op="sum")
        return reduced

    def largest(self, flag: int, device: torch.device) -> int:
        """Return the largest of all ranks' flags, so that all ranks react to what one of them was told."""
        if self.size == 1:
            return flag
        return int(self._strategy.reduce(torch.tensor(float(flag), device=device), reduce_op="max"))

    def select(self, values: Sequence[Any]) -> list[Any]:
        """Return this rank's part of one value per task of the round."""
        return [values[i] for i in self._tasks]

    def select_entries(self, rounds: list[list[TaskEntry]]) -> list[list[TaskEntry]]:
        """Return this rank's part of the tasks of past rounds (`Memory.exchange`)."""
        return [self.select(entries) for entries in rounds]

    def gather_entries(self, rounds: list[list[TaskEntry]]) -> list[list[TaskEntry]]:
        """Return the tasks of past rounds over all ranks, in their order and with all lanes (`Memory.exchange`)."""
        if self.size == 1:
            return rounds
        cpu = torch.device("cpu")
        own = [[TaskEntry(move_data_to_device(task, cpu), state.to(cpu)) for task, state in part] for part in rounds]
        gathered: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(gathered, own)
        found: list[list[TaskEntry]] = []
        for parts in zip(*gathered, strict=True):  # one round, as each rank has it
            if self._divides_lanes:
                states = [part[0].state.lanes(lanes_of_rank(i, self.size, self._lanes)) for i, part in enumerate(parts)]
                found.append([TaskEntry(parts[0][0].task, InnerState.join(states))])
            else:
                found.append(list(chain(*parts)))
        return found

    def gather_states(self, states: Sequence[InnerState]) -> list[InnerState]:
        """Return the inner state of every task of the round, in the order of the tasks, with all lanes."""
        (entries,) = self.gather_entries([[TaskEntry({}, state) for state in states]])
        return [entry.state for entry in entries]


def lost_rank(error: BaseException) -> bool:
    """Return whether a collective failed because another process has died."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    words = ("gloo", "Connection closed", "Connection reset", "Broken pipe", "NCCL")
    return isinstance(error, distributed.DistError) or any(word in str(error) for word in words)
