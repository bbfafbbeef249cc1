"""What `OnlineTuner` gains and costs: python -m benchmarks.tuner [--path mnist.npz] [--seeds 0 1 2 3 4] [--batches N].

A multilayer perceptron in a plain Trainer, one step of SGD with momentum a batch, on the `sources` stream: equal
weights, weights that know the truth, and weights learned every 5 and every 25 batches. They take turns, seed by seed;
mean test accuracy over the batches, and the time of each over that of plain training, as a ratio of medians.
"""

import argparse
import logging
import statistics
import time
import warnings
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from obbo_lightning import Hyperparameters, OnlineTuner, OnSimplex
from obbo_lightning.streams.sources import SourcesStream

KINDS = {"equal weights": None, "the truth": None, "every 5 batches": 5, "every 25 batches": 25}
SCORED = 10  # batches between tests


class Classifier(L.LightningModule):
    """784 (or fewer) → 128 → classes."""

    def __init__(self, stream: SourcesStream, told: bool) -> None:
        super().__init__()
        shape, sizes = stream.data.shape, stream.data.classes
        self.network = nn.Sequential(
            nn.Flatten(), nn.Linear(torch.Size(shape).numel(), 128), nn.ReLU(), nn.Linear(128, sizes)
        )
        self.hyper = Hyperparameters(sources=OnSimplex(stream.sources, floor=0.1 / stream.sources))
        self.told = told
        self.accuracy: list[float] = []

    def training_loss(self, batch: Any, hyper: Any) -> Tensor:
        """Σ_s λ_s · the mean of source s."""
        losses = functional.cross_entropy(self.network(batch["train_x"]), batch["train_y"], reduction="none")
        weights = hyper["sources"]
        return len(weights) * (weights[batch["train_source"]] * losses).mean()

    def validation_loss(self, batch: Any, hyper: Any) -> Tensor:
        """The trusted examples."""
        return functional.cross_entropy(self.network(batch["validation_x"]), batch["validation_y"])

    def training_step(self, batch: Any, index: int) -> Tensor:
        """With the weights that there are, or with the right ones."""
        if index % SCORED == SCORED - 1:
            with torch.no_grad():
                hits = self.network(batch["test_x"]).argmax(-1) == batch["test_y"]
            self.accuracy.append(float(hits.float().mean()))
        right = {"sources": batch["right"] / batch["right"].sum()}
        return self.training_loss(batch, right if self.told else self.hyper)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As anybody would."""
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


class Batches(Dataset[Any]):
    """The first so many tasks of a stream."""

    def __init__(self, stream: SourcesStream, count: int) -> None:
        self.stream, self.count = stream, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, t: int) -> Any:
        return self.stream.task(t)


def play(stream: SourcesStream, kind: str, batches: int) -> tuple[float, float]:
    """Mean test accuracy, and seconds."""
    torch.manual_seed(0)
    module, every = Classifier(stream, kind == "the truth"), KINDS[kind]
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    callbacks: list[L.Callback] = [] if every is None else [OnlineTuner(every=every)]
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=callbacks, **quiet)
    began = time.perf_counter()
    trainer.fit(module, DataLoader(Batches(stream, batches), batch_size=None))
    return statistics.fmean(module.accuracy), time.perf_counter() - began


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", help="an npz file of images and labels; drawn clouds without")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--period", type=int, default=500, help="batches until others are wrong")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for seed in asked.seeds:
        stream = SourcesStream(asked.path, period=asked.period, seed=seed)
        for kind in KINDS:
            found[kind].append(play(stream, kind, asked.batches))
            print(f"seed {seed}, {kind}: {found[kind][-1][0]:.4f} in {found[kind][-1][1]:.1f} s", flush=True)
    plain = statistics.median(seconds for _, seconds in found["equal weights"])
    print("| weights | accuracy, mean of seeds | worst seed over the truth | time over plain training |")
    print("|---|---|---|---|")
    truth = [accuracy for accuracy, _ in found["the truth"]]
    for kind, played in found.items():
        accuracies, seconds = [a for a, _ in played], statistics.median(s for _, s in played)
        worst = min(a / t for a, t in zip(accuracies, truth, strict=True))
        print(f"| {kind} | {statistics.fmean(accuracies):.4f} | {worst:.3f} | {seconds / plain:.2f} |")


if __name__ == "__main__":
    main()
