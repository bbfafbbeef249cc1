"""Measure the speedup of a second process: tasks per second of rounds with 2 tasks, in one process and divided by two.

python -m benchmarks.scaling [--data.root DIR]
One thread per process, gloo, float32, the shapes of FC100 (K = 20, J = 5, 64 filters). The variants alternate.
"""

import argparse
import itertools
import os
import socket
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, distributed
from torch.multiprocessing.spawn import spawn
from torch.nn import Parameter

from benchmarks.interleaved import report
from obbo_lightning import OBBO
from obbo_lightning.core.distributed import Shard
from obbo_lightning.core.inner_solvers import GradientDescent
from obbo_lightning.core.memory import InnerState
from obbo_lightning.core.outer_step import OuterStep
from obbo_lightning.core.randomness import Key
from obbo_lightning.core.round import run_round
from obbo_lightning.streams.few_shot.fc100 import FC100Stream
from obbo_lightning.streams.few_shot.stream import FewShotStream
from obbo_lightning.streams.few_shot.synthetic import SyntheticStream
from obbo_lightning.training.run import keep_freed_memory


def main() -> None:
    """Start both processes and print what rank 0 measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data.root", dest="root", help="folder of CIFAR-100; without it the embedded stream is used")
    parser.add_argument("--turns", type=int, default=6, help="rounds of each kind")
    asked = parser.parse_args()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    spawn(measure, (port, asked.root, asked.turns), nprocs=2)


def measure(rank: int, port: int, root: str | None, turns: int) -> None:
    """Time the variants on both ranks; rank 0 also runs rounds alone while the other one waits."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    keep_freed_memory()
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    stream: FewShotStream = FC100Stream(root) if root else SyntheticStream()
    reduced = torch.zeros(1, 1, stream.start(stream.problem(), 0).shape[1])
    actions: dict[str, Callable[[], object]] = {
        "alone": round_runner(stream, [0, 1], Shard(tasks=2)),
        "shared": round_runner(stream, [rank], Shard(first=rank, tasks=2, all_reduce=total)),
        "vmap": round_runner(stream, [0, 1], Shard(tasks=2, vmap=True)),
        "all-reduce": lambda: total(reduced),
    }
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(turns + 1):
        for name, act in actions.items():
            distributed.barrier()
            began = time.perf_counter()
            if rank == 0 or name in ("shared", "all-reduce"):
                act()
            distributed.barrier()
            seconds[name].append(time.perf_counter() - began)
    middle = {name: statistics.median(found[1:]) for name, found in seconds.items()}  # the first is a warm-up
    if rank == 0:
        size = 4 * reduced.numel() / 2**10
        report(
            f"tasks per second: one process {2 / middle['alone']:.2f}, two {2 / middle['shared']:.2f}",
            [
                ("tasks per second of two processes / of one", middle["alone"] / middle["shared"], None),
                ("vmap / the loop, on the CPU", middle["vmap"] / middle["alone"], None),
                (f"all-reduce of {size:.0f} KiB / a divided round", middle["all-reduce"] / middle["shared"], None),
            ],
        )
    distributed.destroy_process_group()


def round_runner(stream: FewShotStream, slots: list[int], shard: Shard) -> Callable[[], object]:
    """Return a function that runs the next round."""
    problem = stream.problem()
    algorithm = OBBO(window=10, inner=GradientDescent(steps=20, lr=0.1, start="outer"))
    step = OuterStep(Parameter(stream.start(problem, 0)), algorithm, on_nonfinite="skip")
    turn = itertools.count()

    def next_round() -> object:
        t = next(turn)
        tasks = [stream.train[2 * t + slot] for slot in slots]
        return run_round(problem, algorithm, step, tasks, InnerState(), Key(0, t), shard)

    return next_round


def total(values: Tensor) -> Tensor:
    """Return the sum over both processes."""
    summed = values.clone()
    distributed.all_reduce(summed)
    return summed


if __name__ == "__main__":
    main()
