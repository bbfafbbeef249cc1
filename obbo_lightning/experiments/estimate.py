"""How long a grid will take, measured before it is played."""

import time
from collections.abc import Callable, Sequence
from itertools import islice

import torch
import yaml

from obbo_lightning.config.parse import Config
from obbo_lightning.core.memory import InnerState, Memory, TaskEntry
from obbo_lightning.core.outer_step import OuterStep
from obbo_lightning.core.randomness import Key
from obbo_lightning.core.round import run_round
from obbo_lightning.experiments.grid import Cell
from obbo_lightning.threads import share_of_cores
from obbo_lightning.training.evaluation import evaluate
from obbo_lightning.training.run import build


def estimate_seconds(cells: Sequence[Cell], jobs: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """How long the cells will take: one round and one evaluation of each kind are measured now and counted up."""
    before = torch.get_num_threads()
    share = {"threads": share_of_cores(jobs)}
    known: dict[str, float] = {}
    total = 0.0
    for cell in cells:
        kind = yaml.safe_dump({k: v for k, v in cell.settings.items() if k != "seed"})
        if kind not in known:
            known[kind] = _measure({**cell.settings, **(share if cell.settings["threads"] == "auto" else {})}, clock)
        total += known[kind]
    torch.set_num_threads(before)
    return total / jobs


def _measure(settings: Config, clock: Callable[[], float]) -> float:
    module, data, stream, validation = build(settings)
    rounds: int = settings["rounds"]
    tasks = list(islice(iter(stream.train), settings["tasks_per_round"]))
    seconds = 0.0
    for _ in range(2):  # the first time a round is played much is made that stays
        step = OuterStep(module.outer, module.algorithm, on_nonfinite="skip", groups=module.problem.groups)
        began = clock()
        run_round(module.problem, module.algorithm, step, tasks, [InnerState()] * len(tasks), Key())
        seconds = clock() - began
    seconds *= rounds * _recalled(step.memory, [TaskEntry(task, InnerState()) for task in tasks], rounds)
    for judged in filter(len, (data.test, validation)):
        began = clock()
        evaluate(module.problem, module.algorithm, module.outer.detach(), judged[0], InnerState())
        evaluations = 1 + rounds // settings["evaluation"]["every"]
        seconds += evaluations * min(len(judged), settings["evaluation"]["tasks"]) * (clock() - began)
    return seconds


def _recalled(memory: Memory, met: list[TaskEntry], rounds: int) -> int:
    """How many rounds' tasks are solved in a round, once the memory is full."""
    recalled = memory.recall(met)
    for _ in range(rounds):
        memory.keep(recalled)
        before, recalled = recalled, memory.recall(met)
        if len(recalled) == len(before):
            break
    return len(recalled)
