"""What `OnlineTuner` gains and costs: python -m benchmarks.tuner [--stream sources] [--path FILE] [--seeds 0 1 2 3 4].

The network of a stream in a plain Trainer, one step of SGD with momentum a batch: a λ that is not learned (for
`sources` equal weights and the truth, for `regularization` a grid), and λ learned every 5 and every 25 batches. They
take turns, seed by seed; mean test accuracy over the batches, and how many times as long training took with the outer
steps as without them, by the tuner's own clock within each run: whole runs differ by more from one to the next.
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
Told = Callable[[Any], dict[str, Tensor]]  # λ, where it is not learned, from a batch


class Trained(L.LightningModule):
    """The network of a problem, trained as anybody would."""

    def __init__(self, problem: ModuleProblem, told: Told | None) -> None:
        super().__init__()
        self.problem, self.told = problem, told
        self.network = copy.deepcopy(problem.network.template)
        self.hyper = Hyperparameters(problem.hyper.named)
        self.accuracy: list[float] = []
        self.loss: list[float] = []

    def training_loss(self, batch: Any, hyper: Any) -> Tensor:
        """g_t."""
        return self.problem.training_loss(self.network, part("train_", batch), hyper)

    def validation_loss(self, batch: Any, hyper: Any) -> Tensor:
        """f_t."""
        return self.problem.validation_loss(self.network, part("validation_", batch), hyper)

    def training_step(self, batch: Any, index: int) -> Tensor:
        """With the λ that there is, or with the one that is told."""
        if index % SCORED == SCORED - 1:
            with torch.no_grad():
                hits = self.network(batch["test_x"]).argmax(-1) == batch["test_y"]
                loss = self.problem.validation_loss(self.network, part("test_", batch), dict(self.hyper))
            self.accuracy.append(float(hits.float().mean()))
            self.loss.append(float(loss))
        return self.training_loss(batch, self.hyper if self.told is None else self.told(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The usual one."""
        return torch.optim.SGD(self.network.parameters(), lr=0.02, momentum=0.9)


def part(kind: str, batch: Any) -> Any:
    """The tensors of one kind, without its name."""
    return {name.removeprefix(kind): values for name, values in batch.items() if name.startswith(kind)}


def sources(path: str | None, period: int, seed: int) -> tuple[Drifting, ModuleProblem, dict[str, Told]]:
    """Ten sources of labels, a perceptron, and weights between equal ones and the truth."""
    stream = SourcesStream(path, period=period, seed=seed)
    network = MLP(ways=stream.data.classes, shape=stream.data.shape, widths=[128], norm="none")
    problem = SourceWeights(network, stream.sources, floor=0.1)
    equal = torch.full((stream.sources,), 1 / stream.sources)
    told: dict[str, Told] = {
        "equal weights": lambda batch: {"sources": equal},
        "the truth": lambda batch: {"sources": batch["right"] / batch["right"].sum()},
    }
    return stream, problem, told


def regularization(path: str | None, period: int, seed: int) -> tuple[Drifting, ModuleProblem, dict[str, Told]]:
    """Training sets that are replaced, a CNN, and fixed values of decay and smoothing."""
    stream = RegularizationStream(
        path, "coarse_labels" if path else "labels", 2 if path else 1, period=period, seed=seed
    )
    network = CNN4(filters=32, norm="group", **{k: v for k, v in stream.task_spec().items() if k != "shape"})

    def fixed(decay: float, smoothing: float) -> Told:
        return lambda batch: {"decay": torch.tensor(decay), "smoothing": torch.tensor(smoothing)}

    told = {f"decay {d:g}, smoothing {s:g}": fixed(d, s) for d, s in FIXED}
    return stream, Regularized(network), told


class Played(NamedTuple):
    """Means over the batches, and how long it took."""

    accuracy: float
    loss: float
    seconds: float
    times: float


def play(stream: Drifting, problem: ModuleProblem, told: Told | None, every: int | None, batches: int) -> Played:
    """One training from the first batch to the last."""
    torch.manual_seed(0)
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet: dict[str, Any] = dict.fromkeys(names, False)
    tuner = OnlineTuner(every=every or 1)
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=[tuner] if every else [], **quiet)
    module, began = Trained(problem, told), time.perf_counter()
    loader: Iterable[Any] = DataLoader(Tasks(stream.task, batches), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, loader)
    seconds = time.perf_counter() - began
    times = 1 + tuner.seconds / tuner.seconds_of_training if every else 1.0
    return Played(statistics.fmean(module.accuracy), statistics.fmean(module.loss), seconds, times)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stream", choices=["sources", "regularization"], default="sources")
    parser.add_argument("--path", help="an npz file of images and labels; drawn examples without")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--period", type=int, default=500, help="batches of a phase")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    made = {"sources": sources, "regularization": regularization}[asked.stream]
    found: dict[str, list[Played]] = {}
    for seed in asked.seeds:
        stream, problem, told = made(asked.path, asked.period, seed)
        for kind in (*told, *LEARNED):
            played = play(stream, problem, told.get(kind), LEARNED.get(kind), asked.batches)
            found.setdefault(kind, []).append(played)
            print(f"seed {seed}, {kind}: {played.accuracy:.4f} in {played.seconds:.1f} s", flush=True)
    best = max((kind for kind in found if kind not in LEARNED), key=lambda kind: sum(p.accuracy for p in found[kind]))
    print(f"| | accuracy, mean of seeds | worst seed over {best} | cross-entropy | time over plain training |")
    print("|---|---|---|---|---|")
    for kind, runs in found.items():
        accuracy, loss = statistics.fmean(p.accuracy for p in runs), statistics.fmean(p.loss for p in runs)
        worst = min(one.accuracy / other.accuracy for one, other in zip(runs, found[best], strict=True))
        times = statistics.median(p.times for p in runs)
        print(f"| {kind} | {accuracy:.4f} | {worst:.3f} | {loss:.3f} | {times:.2f} |")


if __name__ == "__main__":
    main()
