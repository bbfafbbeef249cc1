"""Measure the rounding error of few-shot hypergradients in float32, and the time of a round.

python -m benchmarks.precision [--data.root DIR]
5-way tasks of 25 support and 25 query images of 32x32, CNN4 with 64 filters, K = 20, J = 5, η = 0.1, γ = 0.5. An error
is ‖d − d*‖ / ‖d*‖ with d* in float64. Variants of a round:

- ours: channels_last for the inner steps, with `AccurateBatchNorm2d`
- torch's norms: the same with torch's own batch norm
- plain layout: no channels_last
- lists: written as hypertorch does it: a list of tensors, the plain layout, J products, the mixed term by autograd

Errors differ by chance, task by task: where rounding changes which pixel is the maximum of a pool or whether a ReLU is
open, everything after it differs. Hence the median, the geometric mean of ratios, and the number of tasks.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import Parameter, functional

from benchmarks.interleaved import report
from obbo_lightning import OBBO
from obbo_lightning.core.inner_solvers import GradientDescent
from obbo_lightning.core.memory import InnerState
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.outer_step import OuterStep
from obbo_lightning.core.problem import Task
from obbo_lightning.core.randomness import Key
from obbo_lightning.core.round import run_round
from obbo_lightning.hypergradients import FixedPoint
from obbo_lightning.networks import CNN4
from obbo_lightning.networks.norms import AccurateBatchNorm2d
from obbo_lightning.problems.few_shot import FewShot
from obbo_lightning.streams.few_shot.fc100 import FC100Stream
from obbo_lightning.training.run import keep_freed_memory

INNER = GradientDescent(steps=20, lr=0.1, start="outer")
ESTIMATE = FixedPoint(steps=5)
PROXIMITY = 0.5
GRADIENTS = 20  # timed together
Round = Callable[[Tensor, Task], Tensor]


class PlainLayout(FewShot):
    """Few-shot adaptation with one memory layout for all derivatives."""

    def for_gradients(self, task: Task) -> Task:
        return task


class TorchNorms(FewShot):
    """Few-shot adaptation with torch's own batch norm in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.network._quiet.modules():
            if isinstance(module, AccurateBatchNorm2d):
                module.__class__ = nn.BatchNorm2d  # type: ignore[assignment]


class RandomTasks:
    """Images of noise, a task for each number."""

    def __getitem__(self, t: int) -> Task:
        generator, labels = torch.Generator().manual_seed(t), torch.arange(25) // 5
        images = torch.randn(2, 25, 3, 32, 32, generator=generator)
        return {"support": images[0], "query": images[1], "support_labels": labels, "query_labels": labels.clone()}


def main() -> None:
    """Print a table of errors and a table of times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data.root", dest="root", help="folder of CIFAR-100; without it images of noise only")
    parser.add_argument("--tasks", type=int, default=15, help="tasks of each kind; 0 for times only")
    parser.add_argument("--training", type=int, default=100, help="rounds that make the trained λ")
    parser.add_argument("--repeats", type=int, default=15, help="rounds of each kind that are timed; 0 for errors only")
    parser.add_argument("--threads", type=int, default=1, help="1 for times, because threads that wait use CPU time")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    keep_freed_memory()
    kinds: dict[str, Sequence[Task] | RandomTasks] = {"noise": RandomTasks()}
    if asked.root:
        kinds = {"FC100": FC100Stream(asked.root).train} | kinds
    if asked.tasks:
        errors(kinds, asked.tasks, asked.training)
    if asked.repeats:
        times(next(iter(kinds.values())), asked.repeats)


def variants() -> dict[str, Round]:
    """Return the hypergradient of each variant as a function of λ and a task."""
    problems = {"ours": FewShot(), "torch's norms": TorchNorms(), "plain layout": PlainLayout()}
    rounds: dict[str, Round] = {name: hypergradient_of(problem) for name, problem in problems.items()}
    return rounds | {"lists": with_lists}


def hypergradient_of(problem: FewShot) -> Round:
    """Return d as a function of λ and a task."""
    return lambda outer, task: ESTIMATE(Oracle(problem, outer, task), INNER, InnerState()).value


def with_lists(outer: Tensor, task: Task) -> Tensor:
    """Return d as a plain implementation computes it."""
    network = CNN4().to(outer.dtype)
    names = [name for name, _ in network.named_parameters()]
    sizes = [p.numel() for p in network.parameters()]
    pieces = zip(outer[0].split(sizes), network.parameters(), strict=True)
    weights = [piece.view_as(p).clone().requires_grad_() for piece, p in pieces]

    def cross_entropy(inner: list[Tensor], kind: str) -> Tensor:
        logits = functional_call(network, dict(zip(names, inner, strict=True)), (task[kind],))
        return functional.cross_entropy(logits, task[f"{kind}_labels"])

    def step(inner: list[Tensor], create_graph: bool = False) -> list[Tensor]:
        # Φ(λ, ω) = ω − η ∇_ω g(λ, ω)
        distance = sum((one - other).square().sum() for one, other in zip(weights, inner, strict=True))
        loss = cross_entropy(inner, "support") + 0.5 * PROXIMITY * distance
        gradients = torch.autograd.grad(loss, inner, create_graph=create_graph)
        return [one - INNER.lr * gradient for one, gradient in zip(inner, gradients, strict=True)]

    inner = weights
    for _ in range(INNER.steps):
        inner = step([one.detach().requires_grad_() for one in inner])
    inner = [one.detach().requires_grad_() for one in inner]
    right_side = torch.autograd.grad(cross_entropy(inner, "query"), inner)
    last = step(inner, create_graph=True)
    vectors = [torch.zeros_like(one) for one in inner]
    for _ in range(ESTIMATE.steps):
        # v ← (∂Φ/∂ω)ᵀ v + ∇_ω f
        products = torch.autograd.grad(last, inner, vectors, retain_graph=True)
        vectors = [product + one for product, one in zip(products, right_side, strict=True)]
    found = torch.autograd.grad(last, weights, vectors)
    return torch.cat([one.flatten() for one in found]).unsqueeze(0)


def errors(kinds: dict[str, Sequence[Task] | RandomTasks], count: int, training: int) -> None:
    """Print the errors of all variants on tasks of every kind, at initial λ and at a trained one."""
    problem, rounds = FewShot(), variants()
    exact = rounds["plain layout"]
    learned = trained(problem, next(iter(kinds.values())), training)
    print("| λ | tasks | variant | median error | error / lists, geometric mean | larger |\n|---|---|---|---|---|---|")
    for kind, tasks in kinds.items():
        for start in ("initial", "trained"):
            found: dict[str, list[float]] = {name: [] for name in rounds}
            for t in range(count):
                outer, task = learned if start == "trained" else problem.initial_outer(t), tasks[10_000 + t]
                wide = {k: v.double() if v.is_floating_point() else v for k, v in task.items()}
                truth = exact(outer.double(), wide)
                for name, one in rounds.items():
                    found[name].append(float((one(outer, task) - truth).norm() / truth.norm()))
            for name, each in found.items():
                ratios = [one / other for one, other in zip(each, found["lists"], strict=True)]
                larger = sum(ratio > 1 for ratio in ratios)
                mean = statistics.geometric_mean(ratios)
                line = [start, f"{count} of {kind}", name, f"{statistics.median(each):.2g}", f"{mean:.2f}", f"{larger}"]
                print(f"| {' | '.join(line)} |", flush=True)
    print()


def trained(problem: FewShot, tasks: Sequence[Task] | RandomTasks, rounds: int) -> Tensor:
    """Return λ after rounds of OBBO."""
    outer = Parameter(problem.initial_outer(0))
    following = round_runner(problem, outer, tasks)
    for _ in range(rounds):
        following()
    return outer.detach()


def round_runner(problem: FewShot, outer: Parameter, tasks: Sequence[Task] | RandomTasks) -> Callable[[], object]:
    """Return a function that runs the next round of OBBO."""
    algorithm = OBBO(window=10, inner=INNER, hypergradient=ESTIMATE)
    step, turn = OuterStep(outer, algorithm, on_nonfinite="skip"), itertools.count()

    def following() -> object:
        t = next(turn)
        return run_round(problem, algorithm, step, tasks[t], InnerState(), Key(0, t))

    return following


def times(tasks: Sequence[Task] | RandomTasks, repeats: int) -> None:
    """Print the CPU time of each variant's hypergradient, in plain gradients; the variants alternate."""
    outer, task = FewShot().initial_outer(0), tasks[0]
    network = CNN4()

    def gradients() -> None:
        for _ in range(GRADIENTS):
            loss = functional.cross_entropy(network(task["support"]), task["support_labels"])
            torch.autograd.grad(loss, list(network.parameters()))

    def measured(one: Round) -> Callable[[], Tensor]:
        return lambda: one(outer, task)

    actions: dict[str, Callable[[], object]] = {"gradients": gradients}
    actions |= {name: measured(one) for name, one in variants().items()}
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(repeats + 1):
        for name, action in actions.items():
            began = time.process_time()
            action()
            if turn:
                seconds[name].append(time.process_time() - began)
    found = {name: statistics.median(each) for name, each in seconds.items()}
    unit = found.pop("gradients") / GRADIENTS
    rows: list[tuple[str, float, float | None]] = [
        (f"{name} / a gradient", one / unit, None) for name, one in found.items()
    ]
    rows.append(("ours / torch's norms", found["ours"] / found["torch's norms"], 1.03))
    rows.append(("ours / lists", found["ours"] / found["lists"], 1.0))
    report(f"one plain gradient: {1000 * unit:.1f} ms", rows)


if __name__ == "__main__":
    main()
