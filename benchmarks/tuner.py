"""Measure gain and cost of `OnlineTuner`: python -m benchmarks.tuner [--stream sources] [--path FILE] [--seeds 0 1 2].

Trains the network of a stream in a plain Trainer, one step of SGD with momentum per batch, with a fixed λ (for
`sources` equal weights and the truth, for `regularization` a grid) and with λ learned every 5 and every 25 batches. The
variants alternate, seed by seed. Prints the mean test accuracy over the batches, and the time of training with outer
steps divided by that without. The tuner measures this ratio within each run, because the times of whole runs vary more.
"""

import argparse
import copy
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from obbo_lightning import Hyperparameters, ModuleProblem, OnlineTuner
from obbo_lightning.networks import CNN4, MLP
from obbo_lightning.problems.regularization import Regularized
from obbo_lightning.problems.sources import SourceWeights
from obbo_lightning.streams.labelled.regularization import FIXED, RegularizationStream
from obbo_lightning.streams.labelled.sources import SourcesStream
from obbo_lightning.streams.stream import Tasks

SCORED = 10  # batches between tests
LEARNED = {"every 5 batches": 5, "every 25 batches": 25}
Drifting = SourcesStream | RegularizationStream
FixedLambda = Callable[[Any], dict[str, Tensor]]  # λ as a function of the batch, where it is not learned


class Trained(L.LightningModule):
    """The network of a problem in an ordinary LightningModule."""

    def __init__(self, problem: ModuleProblem, fixed: FixedLambda | None) -> None:
        super().__init__()
        self.problem, self.fixed = problem, fixed
        self.network = copy.deepcopy(problem.network.template)
        self.hyper = Hyperparameters(problem.hyper.named)
        self.accuracy: list[float] = []
        self.loss: list[float] = []

    def training_loss(self, batch: Any, hyper: Any) -> Tensor:
        """Return g_t."""
        return self.problem.training_loss(self.network, select("train_", batch), hyper)

    def validation_loss(self, batch: Any, hyper: Any) -> Tensor:
        """Return f_t."""
        return self.problem.validation_loss(self.network, select("validation_", batch), hyper)

    def training_step(self, batch: Any, index: int) -> Tensor:
        """Return the training loss with the learned or the fixed λ; score the test examples every few batches."""
        if index % SCORED == SCORED - 1:
            with torch.no_grad():
                hits = self.network(batch["test_x"]).argmax(-1) == batch["test_y"]
                loss = self.problem.validation_loss(self.network, select("test_", batch), dict(self.hyper))
            self.accuracy.append(float(hits.float().mean()))
            self.loss.append(float(loss))
        return self.training_loss(batch, self.hyper if self.fixed is None else self.fixed(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(self.network.parameters(), lr=0.02, momentum=0.9)


def select(prefix: str, batch: Any) -> Any:
    """Return the tensors whose names have a prefix, without it."""
    return {name.removeprefix(prefix): values for name, values in batch.items() if name.startswith(prefix)}


def sources(path: str | None, period: int, seed: int) -> tuple[Drifting, ModuleProblem, dict[str, FixedLambda]]:
    """Return a stream of ten sources of labels, a perceptron, and equal and true weights."""
    stream = SourcesStream(path, period=period, seed=seed)
    network = MLP(ways=stream.data.classes, shape=stream.data.shape, widths=[128], norm="none")
    problem = SourceWeights(network, stream.sources, floor=0.1)
    equal = torch.full((stream.sources,), 1 / stream.sources)
    fixed: dict[str, FixedLambda] = {
        "equal weights": lambda batch: {"sources": equal},
        "true weights": lambda batch: {"sources": batch["right"] / batch["right"].sum()},
    }
    return stream, problem, fixed


def regularization(path: str | None, period: int, seed: int) -> tuple[Drifting, ModuleProblem, dict[str, FixedLambda]]:
    """Return a stream of training sets that are replaced, a CNN, and fixed values of decay and smoothing."""
    stream = RegularizationStream(
        path, "coarse_labels" if path else "labels", 2 if path else 1, period=period, seed=seed
    )
    network = CNN4(filters=32, norm="group", **{k: v for k, v in stream.task_spec().items() if k != "shape"})

    def constant(decay: float, smoothing: float) -> FixedLambda:
        return lambda batch: {"decay": torch.tensor(decay), "smoothing": torch.tensor(smoothing)}

    fixed = {f"decay {d:g}, smoothing {s:g}": constant(d, s) for d, s in FIXED}
    return stream, Regularized(network), fixed


class Result(NamedTuple):
    """Means over the batches, seconds, and the time relative to plain training."""

    accuracy: float
    loss: float
    seconds: float
    times: float


def train(
    stream: Drifting, problem: ModuleProblem, fixed: FixedLambda | None, every: int | None, batches: int
) -> Result:
    """Train once, from the first batch to the last."""
    torch.manual_seed(0)
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet: dict[str, Any] = dict.fromkeys(names, False)
    tuner = OnlineTuner(every=every or 1, folds=4)  # batch t has fold t mod 4, and 5 and 25 are 1 mod 4
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=[tuner] if every else [], **quiet)
    module, began = Trained(problem, fixed), time.perf_counter()
    loader: Iterable[Any] = DataLoader(Tasks(stream.task, batches), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, loader)
    seconds = time.perf_counter() - began
    times = 1 + tuner.seconds / tuner.seconds_of_training if every else 1.0
    return Result(statistics.fmean(module.accuracy), statistics.fmean(module.loss), seconds, times)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stream", choices=["sources", "regularization"], default="sources")
    parser.add_argument("--path", help="an npz file of images and labels; without it, generated examples")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--period", type=int, default=500, help="batches of a phase")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    make = {"sources": sources, "regularization": regularization}[asked.stream]
    found: dict[str, list[Result]] = {}
    for seed in asked.seeds:
        stream, problem, fixed = make(asked.path, asked.period, seed)
        for kind in (*fixed, *LEARNED):
            result = train(stream, problem, fixed.get(kind), LEARNED.get(kind), asked.batches)
            found.setdefault(kind, []).append(result)
            print(f"seed {seed}, {kind}: {result.accuracy:.4f} in {result.seconds:.1f} s", flush=True)
    best = max((kind for kind in found if kind not in LEARNED), key=lambda kind: sum(p.accuracy for p in found[kind]))
    print(f"| | accuracy, mean of seeds | worst seed / {best} | cross-entropy | time / plain training |")
    print("|---|---|---|---|---|")
    for kind, runs in found.items():
        accuracy, loss = statistics.fmean(p.accuracy for p in runs), statistics.fmean(p.loss for p in runs)
        worst = min(one.accuracy / other.accuracy for one, other in zip(runs, found[best], strict=True))
        times = statistics.median(p.times for p in runs)
        print(f"| {kind} | {accuracy:.4f} | {worst:.3f} | {loss:.3f} | {times:.2f} |")


if __name__ == "__main__":
    main()
