"""What two processes do together; started by test_ranks.py with torchrun, not by pytest."""

import json
import sys
from pathlib import Path

import torch
from torch import distributed
from torch.nn import Parameter

from obbo_lightning import OBBO, Euclidean, cli
from obbo_lightning.core.inner import GradientDescent
from obbo_lightning.core.memory import Warm
from obbo_lightning.core.outer_step import OuterStep
from obbo_lightning.core.randomness import Key
from obbo_lightning.core.rounds import play
from obbo_lightning.core.share import Share
from obbo_lightning.streams.quadratic import QuadraticStream


def total(values):
    summed = values.clone()
    distributed.all_reduce(summed)
    return summed


def meet_nan(folder):
    """Rank 1's task of the second round is not a number; every rank writes what it did."""
    rank = distributed.get_rank()
    stream = QuadraticStream(rounds=8, inner_dim=4, outer_dim=2)
    algorithm = OBBO(lr=0.01, window=2, geometry=Euclidean(), inner=GradientDescent(steps=5, lr=0.5))
    step = OuterStep(Parameter(stream.initial_outer()), algorithm, on_nonfinite="skip")
    share = Share(first=rank, tasks=2, total=total)
    warms, seen = [Warm()], []
    for t in range(4):
        task = stream[2 * t + rank]
        if t == 1 and rank == 1:
            task = {name: values * torch.nan for name, values in task.items()}
        played = play(stream.problem, algorithm, step, [task], warms, Key(0, t), share)
        warms = played.warms
        seen.append({"skipped": played.step.skipped.tolist(), "outer": played.step.outer.tolist()})
    (folder / f"nan-{rank}.json").write_text(json.dumps(seen))


def main():
    folder, jobs = Path(sys.argv[1]), json.loads(sys.argv[2])
    for arguments in jobs:
        code = cli.main(arguments)
        if code:
            raise SystemExit(code)
    meet_nan(folder)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
