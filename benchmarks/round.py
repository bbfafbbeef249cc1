"""Measure the cost of a round of few-shot adaptation.

python -m benchmarks.round [--data.root DIR]
Unit: one plain gradient of the network on 25 images. K = 20, J = 5, 64 filters, float32, 2 threads.
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable

import lightning as L
import torch
from torch.nn import Parameter, functional

from benchmarks.interleaved import medians, report
from obbo_lightning import OAGD, OBBO
from obbo_lightning.config.parse import complete_config, parse_arguments
from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.inner_solvers import GradientDescent
from obbo_lightning.core.memory import InnerState
from obbo_lightning.core.outer_step import OuterStep
from obbo_lightning.core.problem import Problem
from obbo_lightning.core.randomness import Key
from obbo_lightning.core.round import run_round
from obbo_lightning.core.validation import instance_of
from obbo_lightning.problems.few_shot import FewShot
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.runs.table import read_rounds
from obbo_lightning.streams.few_shot.fc100 import FC100Stream
from obbo_lightning.streams.few_shot.stream import FewShotStream
from obbo_lightning.streams.few_shot.synthetic import SyntheticStream
from obbo_lightning.training.run import fit, keep_freed_memory

GRADIENTS = 20  # timed together, because one alone is too short to be timed
BLOCK = 25  # rounds of `fit` that are timed together, with one checkpoint


def main() -> None:
    """Measure and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data.root", dest="root", help="folder of CIFAR-100; without it the embedded stream is used")
    parser.add_argument("--repeats", type=int, default=15, help="rounds of each kind")
    parser.add_argument("--blocks", type=int, default=5, help=f"turns of {BLOCK} rounds through Lightning")
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    keep_freed_memory()
    stream: FewShotStream = FC100Stream(asked.root) if asked.root else SyntheticStream()
    rounds(stream, asked.repeats)
    shell(asked.root, stream, asked.blocks)


def rounds(stream: FewShotStream, repeats: int) -> None:
    """Compare rounds with plain gradients and with each other."""
    problem = instance_of("problem", stream.problem(), FewShot)
    inner = GradientDescent(steps=20, lr=0.1, start="outer")
    turn, gradient = itertools.count(), plain_gradient(problem, stream)
    found = medians(
        {
            "gradients": lambda: [gradient() for _ in range(GRADIENTS)],
            "w = 10": round_runner(stream, problem, OBBO(window=10, inner=inner)),
            "w = 1": round_runner(stream, problem, OBBO(window=1, inner=inner)),
            "w = 1000": round_runner(stream, problem, OBBO(window=1000, inner=inner), fill=1000),
            "task": lambda: stream.train[next(turn)],
        },
        repeats,
    )
    unit = found["gradients"] / GRADIENTS
    # A round of OAGD costs as much as ten of the others, so fewer are run.
    windows = medians(
        {
            "obbo": round_runner(stream, problem, OBBO(window=10, inner=inner)),
            "oagd": round_runner(stream, problem, OAGD(window=10, inner=inner), warm_up=9),
        },
        max(3, repeats // 3),
    )
    report(
        f"one plain gradient: {1000 * unit:.1f} ms",
        [
            ("OBBO's round / a plain gradient", found["w = 10"] / unit, 28),
            ("w = 1000 / w = 1", found["w = 1000"] / found["w = 1"], 1.05),
            ("making the task / a round", found["task"] / found["w = 10"], 0.02),
            ("OBBO's round / OAGD's round, w = 10", windows["obbo"] / windows["oagd"], 1 / 8),
        ],
    )


def plain_gradient(problem: FewShot, stream: FewShotStream) -> Callable[[], object]:
    """Return a function that computes the gradient of an ordinary module's loss on 25 images."""
    network = problem.loaded_network(problem.initial_outer(0))
    task = stream.train[0]
    images = task["support"].contiguous(memory_format=torch.contiguous_format)

    def gradient() -> object:
        loss = functional.cross_entropy(network(images), task["support_labels"])
        return torch.autograd.grad(loss, list(network.parameters()))

    return gradient


def round_runner(
    stream: FewShotStream, problem: Problem, algorithm: Algorithm, fill: int = 0, warm_up: int = 0
) -> Callable[[], object]:
    """Return a function that runs the next round; ``fill`` is the number of noise vectors put into the window first."""
    outer = Parameter(stream.start(problem, 0))
    step = OuterStep(outer, algorithm, on_nonfinite="skip")
    for _ in range(fill):
        step.memory.merge(1e-3 * torch.randn(1, *outer.shape))
    turn = itertools.count()

    def next_round() -> object:
        t = next(turn)
        return run_round(problem, algorithm, step, stream.train[t], InnerState(), Key(0, t))

    for _ in range(warm_up):
        next_round()
    return next_round


def shell(root: str | None, stream: FewShotStream, blocks: int) -> None:
    """Compare `fit`, with Lightning, metrics.csv and checkpoints, with the plain loop of the core."""
    flags = ["--config", "configs/fc100.yaml", "--rounds", str(BLOCK), "--evaluation.tasks", "1"]
    flags += ["--data.root", root] if root else ["--data", "synthetic"]
    settings = complete_config(parse_arguments(flags)[0])
    seconds: dict[str, list[float]] = {"fit": [], "loop": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(blocks):
            clock = Clock()
            run = RunDirectory.create(folder, "cost", "obbo")
            fit(settings, run, callbacks=[clock], quiet=True)
            evaluation = read_rounds(run.timings)["evaluation_seconds"][-1]
            seconds["fit"].append(clock.seconds - evaluation)
            seconds["loop"].append(plain_loop(stream))
    middle = {name: sorted(found)[len(found) // 2] for name, found in seconds.items()}
    print()
    report(f"{BLOCK} rounds of the plain loop: {middle['loop']:.1f} s", [("fit", middle["fit"] / middle["loop"], 1.05)])


def plain_loop(stream: FewShotStream) -> float:
    """Return the seconds of the same rounds without Lightning."""
    algorithm = OBBO(window=10, inner=GradientDescent(steps=20, lr=0.1, start="outer"))
    next_round = round_runner(stream, stream.problem(), algorithm)
    began = time.perf_counter()
    for _ in range(BLOCK):
        next_round()
    return time.perf_counter() - began


class Clock(L.Callback):
    """Measure the seconds from the first round's task to the end of training."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._began = time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seconds = time.perf_counter() - self._began


if __name__ == "__main__":
    main()
