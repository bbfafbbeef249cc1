"""Measure whether the tuner's steps help, and never hurt: python -m benchmarks.steps JOB [options].

JOB is one of

- ``sources``: weights of five sources of labels, all good or two of them 80 % wrong, in an ordinary training on MNIST.

Every learned run is compared with the same training without the tuner, paired by seed. ``--output`` writes one row
per run as a CSV file; runs that are in it already are not repeated, so a benchmark that was stopped continues.
"""

import argparse
import csv
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from obbo_lightning import Hyperparameters, OnlineTuner, OnSimplex

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
}
OLD_SCALES = (0.03, 0.1, 0.3, 1.0)
Row = dict[str, Any]


class Trained(L.LightningModule):
    """A module whose training loss has hyperparameters."""

    def __init__(self, network: nn.Module, hyper: Hyperparameters, optimizer: str) -> None:
        super().__init__()
        self.network, self.hyper, self.optimizer_name = network, hyper, optimizer

    def training_loss(self, batch: Any, hyper: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.training_loss(batch, self.hyper)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer_name](self.network.parameters())


def train(module: L.LightningModule, loader: DataLoader[Any], epochs: int, tuner: OnlineTuner | None) -> None:
    """Train with a plain Trainer."""
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet: dict[str, Any] = dict.fromkeys(names, False)
    callbacks: list[L.Callback] = [] if tuner is None else [tuner]
    L.Trainer(accelerator="cpu", max_epochs=epochs, callbacks=callbacks, **quiet).fit(module, loader)


class Sources(Trained):
    """A perceptron on labels of five sources, each with its weight."""

    def training_loss(self, batch: Any, hyper: Any) -> Tensor:
        x, y, source = batch
        losses = functional.cross_entropy(self.network(x), y, reduction="none")
        return 5 * (hyper["sources"][source] * losses).mean()  # equal weights are an ordinary training

    def validation_loss(self, batch: Any, hyper: Any) -> Tensor:
        return functional.cross_entropy(self.network(batch[0]), batch[1])


class Mnist:
    """The images, as numbers between 0 and 1 ``[n, 784]``, and their labels."""

    def __init__(self, path: str) -> None:
        arrays = np.load(path)
        self.x = torch.from_numpy(arrays["images"].astype(np.float32) / 255).flatten(1)
        self.y = torch.from_numpy(arrays["labels"].astype(np.int64))
        is_test = torch.from_numpy(arrays["is_test"].astype(bool))
        self.train, self.test = (~is_test).nonzero()[:, 0], is_test.nonzero()[:, 0]

    def accuracy(self, network: nn.Module) -> float:
        """Return the accuracy on the 10,000 test images."""
        with torch.no_grad():
            hits = network(self.x[self.test]).argmax(-1) == self.y[self.test]
        return float(hits.double().mean())


def sources(
    mnist: Mnist, seed: int, wrong: int, optimizer: str, examples: int, tuner: Callable[[Any], OnlineTuner] | None
) -> Row:
    """Train once on 5,000 images of five sources, of which ``wrong`` have 80 % of their labels wrong."""
    generator = torch.Generator().manual_seed(seed)
    rows = mnist.train[torch.randperm(len(mnist.train), generator=generator)]
    train_rows, clean = rows[:5000], rows[5000 : 5000 + examples]
    y, source = mnist.y[train_rows], torch.arange(5000) % 5
    flipped = (torch.rand(5000, generator=generator) < 0.8) & (source < wrong)
    y = torch.where(flipped, (y + torch.randint(1, 10, y.shape, generator=generator)) % 10, y)
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    module = Sources(network, Hyperparameters(sources=OnSimplex(5)), optimizer)
    order = torch.Generator().manual_seed(seed)
    loader = DataLoader(TensorDataset(mnist.x[train_rows], y, source), 64, shuffle=True, generator=order)
    validation = DataLoader(TensorDataset(mnist.x[clean], mnist.y[clean]), 64, shuffle=True)
    train(module, loader, 5, None if tuner is None else tuner(validation))
    return {"accuracy": mnist.accuracy(network), "weights": str(module.hyper["sources"].tolist())}


def source_runs(mnist: Mnist, seeds: list[int], scales: tuple[float, ...]) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """Yield what identifies each run, and a function that makes it."""
    for seed in seeds:
        for wrong in (0, 2):
            for optimizer in OPTIMIZERS:
                yield (
                    {"seed": seed, "wrong": wrong, "optimizer": optimizer, "examples": 0, "rule": "none"},
                    lambda s=seed, w=wrong, o=optimizer: sources(mnist, s, w, o, 50, None),  # type: ignore[misc]
                )
                for examples in (50, 200, 1000):
                    for scale in scales:
                        tuner = lambda validation, s=scale: OnlineTuner(validation, every=5, scale=s)  # noqa: E731
                        yield (
                            {
                                "seed": seed,
                                "wrong": wrong,
                                "optimizer": optimizer,
                                "examples": examples,
                                "rule": f"scale {scale:g}",
                            },
                            lambda s=seed, w=wrong, o=optimizer, n=examples, t=tuner: sources(mnist, s, w, o, n, t),  # type: ignore[misc]
                        )


def main() -> None:
    """Make every run that is missing in the output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=["sources"])
    parser.add_argument("--path", required=True, help="an npz file of images, labels and is_test: MNIST")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path, required=True, help="a CSV file, one row per run")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for key, run in source_runs(Mnist(asked.path), asked.seeds, OLD_SCALES):
        if key_of(key) in done(asked.output):
            continue
        row = key | run()
        exists = asked.output.exists()
        with asked.output.open("a", newline="") as file:
            writer = csv.DictWriter(file, row)
            if not exists:
                writer.writeheader()
            writer.writerow(row)


def key_of(row: Row) -> tuple[str, ...]:
    """Return what identifies a run."""
    return tuple(str(row[name]) for name in ("seed", "wrong", "optimizer", "examples", "rule"))


def done(output: Path) -> set[tuple[str, ...]]:
    """Return the runs that the output has already."""
    if not output.exists():
        return set()
    with output.open(newline="") as file:
        return {key_of(row) for row in csv.DictReader(file)}


if __name__ == "__main__":
    main()
