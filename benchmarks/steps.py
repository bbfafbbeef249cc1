"""Measure whether automatic steps help, and never hurt: python -m benchmarks.steps JOB --output FILE [options].

JOB is one of

- ``sources``: weights of five sources of labels, all good or two of them 80 % wrong, in an ordinary training on MNIST;
- ``regularizers``: weight decay and label smoothing in an ordinary training on clean MNIST labels;
- ``regression``: the weight decay of a perceptron on diabetes data with 30 columns of noise (needs scikit-learn);
- ``drift``: ten sources of labels of which six are wrong, which ones changes, in an ordinary training on MNIST;
- ``tables``: weights of past blocks of rows: Elec2, generated rows, absolute returns of three stocks;
- ``quadratic``: one noisy quadratic for each kind of parameter group and several windows;
- ``scale``: the first stake over two decades, on some of the jobs above;
- ``report``: tables of all of these from the folder of their CSV files.

Every learned run is compared with the same run without learning, paired by seed. A CSV file has one row per run; runs
that are in it already are not repeated, so a benchmark that was stopped continues. ``--data`` is the folder with
mnist.npz, elec2.csv and market/prices.parquet.
"""

import argparse
import csv
import logging
import math
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import polars as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import tuner as drift_benchmark
from obbo_lightning import (
    OBBO,
    Hyperparameters,
    Interval,
    OnlineTuner,
    OnSimplex,
    ParameterGroups,
    Positive,
    Problem,
    Real,
    online,
)
from obbo_lightning.core.parameter_groups import ParameterGroup
from obbo_lightning.hypergradients import ClosedForm, FixedPoint
from obbo_lightning.solvers import ExactSolution, GradientDescent
from obbo_lightning.streams import ForgettingStream

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
}
EXAMPLES = (50, 200, 1000)  # for validation
STARTS = ((1e-3, 0.1), (1e-4, 0.01))  # decay and smoothing
DECAYS = (1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)  # fixed ones, for the best in hindsight
WINDOWS = (1, 5, 10, 25)
STAKES = (0.01, 0.03, 0.1, 0.3, 1.0)
Row = dict[str, Any]
Run = tuple[Row, Callable[[], Row]]  # what identifies a run, and a function that makes it


class Trained(L.LightningModule):
    """A module whose training loss has hyperparameters."""

    def __init__(self, network: nn.Module, hyper: Hyperparameters, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.network, self.hyper, self.own_optimizer = network, hyper, optimizer

    def training_loss(self, batch: Any, hyper: Any) -> Tensor:
        raise NotImplementedError

    def validation_loss(self, batch: Any, hyper: Any) -> Tensor:
        return functional.cross_entropy(self.network(batch[0]), batch[1])

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.training_loss(batch, self.hyper)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.own_optimizer


def train(module: L.LightningModule, loader: Iterable[Any], epochs: int, tuner: OnlineTuner | None) -> None:
    """Train with a plain Trainer."""
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet: dict[str, Any] = dict.fromkeys(names, False)
    callbacks: list[L.Callback] = [] if tuner is None else [tuner]
    L.Trainer(accelerator="cpu", max_epochs=epochs, callbacks=callbacks, **quiet).fit(module, loader)


def learned(scale: float | None = None) -> Callable[[Any], OnlineTuner]:
    """Return a function that makes a tuner every 5 batches, with another first stake where one is given."""
    if scale is None:
        return lambda validation: OnlineTuner(validation, every=5)
    algorithm = OBBO(window=1, hypergradient=FixedPoint(2, while_contracting=True), scale=scale)
    return lambda validation: OnlineTuner(validation, every=5, algorithm=algorithm)


class Mnist:
    """The images, as numbers between 0 and 1 ``[n, 784]``, and their labels."""

    def __init__(self, path: Path) -> None:
        arrays = np.load(path)
        self.x = torch.from_numpy(arrays["images"].astype(np.float32) / 255).flatten(1)
        self.y = torch.from_numpy(arrays["labels"].astype(np.int64))
        is_test = torch.from_numpy(arrays["is_test"].astype(bool))
        self.train, self.test = (~is_test).nonzero()[:, 0], is_test.nonzero()[:, 0]

    def shuffled(self, generator: torch.Generator) -> Tensor:
        """Return the rows of training images in a random order."""
        return self.train[torch.randperm(len(self.train), generator=generator)]

    def scores(self, network: nn.Module) -> Row:
        """Return accuracy and log loss on the 10,000 test images."""
        with torch.no_grad():
            logits, y = network(self.x[self.test]), self.y[self.test]
        accuracy = (logits.argmax(-1) == y).double().mean()
        return {"accuracy": float(accuracy), "log_loss": float(functional.cross_entropy(logits, y))}


def perceptron(seed: int, *sizes: int) -> nn.Sequential:
    """Return a perceptron with one hidden layer."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.ReLU(), nn.Linear(sizes[1], sizes[2]))


def shuffling(seed: int, batch: int, *tensors: Tensor) -> DataLoader[Any]:
    """Return a loader whose order depends on the seed only."""
    return DataLoader(TensorDataset(*tensors), batch, shuffle=True, generator=torch.Generator().manual_seed(seed))


class Sources(Trained):
    """A perceptron on labels of five sources, each with its weight."""

    def training_loss(self, batch: Any, hyper: Any) -> Tensor:
        x, y, source = batch
        losses = functional.cross_entropy(self.network(x), y, reduction="none")
        return 5 * (hyper["sources"][source] * losses).mean()  # equal weights are an ordinary training


def sources(mnist: Mnist, seed: int, wrong: int, optimizer: str, examples: int, tuner: Any) -> Row:
    """Train once on 5,000 images of five sources, of which ``wrong`` have 80 % of their labels wrong."""
    generator = torch.Generator().manual_seed(seed)
    rows = mnist.shuffled(generator)
    train_rows, clean = rows[:5000], rows[5000 : 5000 + examples]
    y, source = mnist.y[train_rows], torch.arange(5000) % 5
    flipped = (torch.rand(5000, generator=generator) < 0.8) & (source < wrong)
    y = torch.where(flipped, (y + torch.randint(1, 10, y.shape, generator=generator)) % 10, y)
    network = perceptron(seed, 784, 128, 10)
    module = Sources(network, Hyperparameters(sources=OnSimplex(5)), OPTIMIZERS[optimizer](network.parameters()))
    validation = DataLoader(TensorDataset(mnist.x[clean], mnist.y[clean]), 64, shuffle=True)
    train(module, shuffling(seed, 64, mnist.x[train_rows], y, source), 5, tuner and tuner(validation))
    return mnist.scores(network) | {"learned": str([round(value, 4) for value in module.hyper["sources"].tolist()])}


def source_runs(mnist: Mnist, seeds: list[int], scales: Iterable[float | None] = (None,)) -> Iterator[Run]:
    """Yield the runs of ``sources``, and of ``scale``."""
    for seed in seeds:
        for wrong in (0, 2):
            for optimizer in OPTIMIZERS:
                shared = {"seed": seed, "wrong": wrong, "optimizer": optimizer}
                yield (
                    shared | {"examples": 0, "rule": "none"},
                    lambda s=seed, w=wrong, o=optimizer: sources(mnist, s, w, o, 50, None),  # type: ignore[misc]
                )
                for examples in EXAMPLES:
                    for scale in scales:
                        tuner = learned(scale)
                        yield (
                            shared | {"examples": examples, "rule": "auto" if scale is None else f"auto, {scale:g}"},
                            lambda s=seed, w=wrong, o=optimizer, n=examples, t=tuner: sources(mnist, s, w, o, n, t),  # type: ignore[misc]
                        )


class Regularizers(Trained):
    """A perceptron with weight decay and label smoothing."""

    def training_loss(self, batch: Any, hyper: Any) -> Tensor:
        logs = functional.log_softmax(self.network(batch[0]), -1)
        fit = (1 - hyper["smoothing"]) * functional.nll_loss(logs, batch[1]) - hyper["smoothing"] * logs.mean()
        return fit + hyper["decay"] * sum(p.square().sum() for p in self.network.parameters())


def regularizers(mnist: Mnist, seed: int, start: tuple[float, float], optimizer: str, examples: int, tuner: Any) -> Row:
    """Train once on 5,000 images with clean labels."""
    rows = mnist.shuffled(torch.Generator().manual_seed(seed))
    train_rows, clean = rows[:5000], rows[5000 : 5000 + examples]
    network = perceptron(seed, 784, 128, 10)
    hyper = Hyperparameters(decay=Positive(start[0]), smoothing=Positive(start[1], upper=0.5))
    module = Regularizers(network, hyper, OPTIMIZERS[optimizer](network.parameters()))
    validation = DataLoader(TensorDataset(mnist.x[clean], mnist.y[clean]), 64, shuffle=True)
    train(module, shuffling(seed, 64, mnist.x[train_rows], mnist.y[train_rows]), 5, tuner and tuner(validation))
    values = [float(hyper["decay"]), float(hyper["smoothing"])]
    return mnist.scores(network) | {"learned": f"[{values[0]:.2g}, {values[1]:.2g}]"}


def regularizer_runs(mnist: Mnist, seeds: list[int]) -> Iterator[Run]:
    """Yield the runs of ``regularizers``."""
    for seed in seeds:
        for start in STARTS:
            for optimizer in OPTIMIZERS:
                shared = {"seed": seed, "decay": start[0], "smoothing": start[1], "optimizer": optimizer}
                for examples in (0, *EXAMPLES):
                    tuner = learned() if examples else None
                    yield (
                        shared | {"examples": examples, "rule": "auto" if examples else "none"},
                        lambda s=seed, b=start, o=optimizer, n=examples, t=tuner: regularizers(  # type: ignore[misc]
                            mnist, s, b, o, max(n, 1), t
                        ),
                    )


class Regression(Trained):
    """A perceptron with weight decay on numbers."""

    def training_loss(self, batch: Any, hyper: Any) -> Tensor:
        weights = sum(p.square().sum() for p in self.network.parameters())
        return self.validation_loss(batch, hyper) + hyper["decay"] * weights

    def validation_loss(self, batch: Any, hyper: Any) -> Tensor:
        return (self.network(batch[0]).squeeze(-1) - batch[1]).square().mean()


def regression(seed: int, optimizer: str, decay: float, tuner: Any) -> Row:
    """Train once on 150 patients: 10 columns of measurements, 30 of noise; 100 others are for validation."""
    from sklearn.datasets import load_diabetes

    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.tensor(values, dtype=torch.float32) for values in load_diabetes(return_X_y=True))
    x, y = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()
    x = torch.cat([x, torch.randn(len(x), 30, generator=generator)], 1)
    order = torch.randperm(len(x), generator=generator)
    rows, clean, test = order[:150], order[150:250], order[250:]
    network = perceptron(seed, 40, 64, 1)
    made = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    steps = made if optimizer == "sgd" else OPTIMIZERS[optimizer](network.parameters())
    module = Regression(network, Hyperparameters(decay=Positive(decay)), steps)
    validation = DataLoader(TensorDataset(x[clean], y[clean]), 64, shuffle=True)
    train(module, shuffling(seed, 32, x[rows], y[rows]), 150, tuner and tuner(validation))
    with torch.no_grad():
        loss = float(module.validation_loss((x[test], y[test]), {}))
    return {"loss": loss, "learned": f"{float(module.hyper['decay']):.3g}"}


def regression_runs(seeds: list[int]) -> Iterator[Run]:
    """Yield the runs of ``regression``."""
    for seed in seeds:
        for optimizer in OPTIMIZERS:
            for decay in DECAYS:
                yield (
                    {"seed": seed, "optimizer": optimizer, "rule": f"fixed {decay:g}"},
                    lambda s=seed, o=optimizer, d=decay: regression(s, o, d, None),  # type: ignore[misc]
                )
            yield (
                {"seed": seed, "optimizer": optimizer, "rule": "auto"},
                lambda s=seed, o=optimizer: regression(s, o, DECAYS[0], learned()),  # type: ignore[misc]
            )


def drift_runs(path: Path, seeds: list[int]) -> Iterator[Run]:
    """Yield the runs of ``drift``."""
    for seed in seeds:
        stream, problem, fixed = drift_benchmark.sources(str(path), 500, seed)
        for kind in (*fixed, *drift_benchmark.LEARNED):
            every = drift_benchmark.LEARNED.get(kind)
            run = partial(drift_benchmark.train, stream, problem, fixed.get(kind), every, 2000)
            yield {"seed": seed, "rule": kind}, lambda r=run: {"accuracy": (one := r()).accuracy, "time": one.times}  # type: ignore[misc]


def rows_of_prices(path: Path, ticker: str, output: Path) -> Path:
    """Write absolute returns of one stock, and what they are predicted from (docs/experiments/forgetting.md)."""
    size = pl.col("close").log().diff().abs()
    prices = pl.read_parquet(path).filter(pl.col("ticker") == ticker).sort("timestamp")
    rows = prices.select(
        hour=pl.col("timestamp").dt.hour(),
        bar=size,
        day=size.rolling_mean(7),
        week=size.rolling_mean(35),
        next=size.shift(-1),
    )
    rows.drop_nulls().write_csv(output)
    return output


def table_runs(data: Path, seeds: list[int]) -> Iterator[Run]:
    """Yield the runs of ``tables``: learned weights, equal ones, and fixed α over two decades."""
    alphas = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

    def elec2() -> ForgettingStream:
        return ForgettingStream(str(data / "elec2.csv"), target="class")

    def stock(ticker: str) -> ForgettingStream:
        with tempfile.TemporaryDirectory() as folder:
            file = rows_of_prices(data / "market" / "prices.parquet", ticker, Path(folder) / "rows.csv")
            return ForgettingStream(str(file), target="next", block=35)

    streams: dict[str, Callable[[], ForgettingStream]] = {"Elec2": elec2}
    streams |= {f"generated rows, seed {seed}": lambda s=seed: ForgettingStream(seed=s) for seed in seeds}  # type: ignore[misc]
    streams |= {ticker: lambda t=ticker: stock(t) for ticker in ("AMD", "MSFT", "XOM")}  # type: ignore[misc]
    for name, make in streams.items():
        rounds = 600 if name.startswith("generated") else None
        for rule, settings in {
            "equal": {"lr": 1e-300},
            "auto": {},
            **{f"alpha {a:g}": {"lr": a} for a in alphas},
        }.items():
            yield {"table": name, "rule": rule}, lambda m=make, s=settings, r=rounds: table(m(), s, r)  # type: ignore[misc]


def table(stream: ForgettingStream, settings: dict[str, float], rounds: int | None) -> Row:
    """Return the mean prequential loss."""
    problem = stream.problem()
    algorithm = OBBO(window=1, inner=ExactSolution(), hypergradient=ClosedForm(), **settings)  # type: ignore[arg-type]
    tasks = [stream.train[t] for t in range(len(stream.train) if rounds is None else rounds)]
    losses = [float(r.loss) for r in online(problem, algorithm, tasks, stream.start(problem, 0))]
    return {"loss": statistics.fmean(losses)}


class Quadratic(Problem):
    """f_t(λ) = ½ ‖λ − target‖² + ⟨noise_t, λ⟩; the inner problem plays no role."""

    def __init__(self, group: ParameterGroup, target: list[float]) -> None:
        self.groups: ParameterGroups = ParameterGroups(x=group)
        self.target = torch.tensor([target])

    def inner_loss(self, outer: Tensor, inner: Tensor, task: Any, sample: Any = None) -> Tensor:
        return (inner - outer).square().sum(-1)

    def outer_loss(self, outer: Tensor, inner: Tensor, task: Any, sample: Any = None) -> Tensor:
        return 0.5 * (outer - self.target).square().sum(-1) + (task["noise"] * outer).sum(-1)

    def initial_inner(self, outer: Tensor, task: Any) -> Tensor:
        return torch.zeros_like(outer)


def quadratic_runs(seeds: list[int], rounds: int = 400) -> Iterator[Run]:
    """Yield the runs of ``quadratic``: from a distance of 0.7 (0.3 on the simplex), noise of deviation 0.1."""
    kinds: dict[str, tuple[Callable[[], ParameterGroup], list[float]]] = {
        "Real": (lambda: Real(0.3), [1.0]),
        "Interval(-10, 10)": (lambda: Interval(-10.0, 10.0, start=0.3), [1.0]),
        "Positive": (lambda: Positive(0.3), [1.0]),
        "OnSimplex": (lambda: OnSimplex(2), [0.8, 0.2]),
    }

    def run(make: Callable[[], ParameterGroup], target: list[float], window: int, seed: int) -> Row:
        generator, problem = torch.Generator().manual_seed(seed), Quadratic(make(), target)
        tasks = ({"noise": 0.1 * torch.randn(1, len(target), generator=generator)} for _ in range(rounds))
        algorithm = OBBO(window=window, inner=GradientDescent(steps=1))
        errors = [
            float((found.outer - problem.target).abs().max())
            for found in online(problem, algorithm, tasks, problem.groups.start())
        ]
        return {"error": statistics.fmean(errors[100:])}

    for kind, (make, target) in kinds.items():
        for window in WINDOWS:
            for seed in seeds:
                yield (
                    {"kind": kind, "window": window, "seed": seed},
                    lambda m=make, x=target, w=window, s=seed: run(m, x, w, s),  # type: ignore[misc]
                )


def scale_runs(data: Path, mnist: Mnist, seeds: list[int]) -> Iterator[Run]:
    """Yield the runs of ``scale``: sources with wrong ones, and Elec2."""
    for key, run in source_runs(mnist, seeds, STAKES):
        if key["wrong"] == 2 and key["examples"] in (0, 200):
            yield {"job": "sources", **key}, lambda r=run: {"value": r()["accuracy"]}  # type: ignore[misc]
    for scale in STAKES:
        key = {"job": "Elec2", "seed": 0, "wrong": 0, "optimizer": "", "examples": 0, "rule": f"auto, {scale:g}"}

        def elec2(scale: float = scale) -> Row:
            stream = ForgettingStream(str(data / "elec2.csv"), target="class")
            return {"value": table(stream, {"scale": scale}, None)["loss"]}

        yield key, elec2


def runs_of(job: str, data: Path, seeds: list[int]) -> Iterator[Run]:
    """Return the runs of a job."""
    if job == "sources":
        return source_runs(Mnist(data / "mnist.npz"), seeds)
    if job == "regularizers":
        return regularizer_runs(Mnist(data / "mnist.npz"), seeds)
    if job == "regression":
        return regression_runs(seeds)
    if job == "drift":
        return drift_runs(data / "mnist.npz", seeds)
    if job == "tables":
        return table_runs(data, seeds)
    if job == "scale":
        return scale_runs(data, Mnist(data / "mnist.npz"), seeds)
    return quadratic_runs(seeds)


# -- tables ------------------------------------------------------------------------------------------------------------


def mean_and_error(values: Iterable[float]) -> tuple[float, float]:
    """Return the mean and its standard error."""
    found = list(values)
    return statistics.fmean(found), statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan


def by_seed(frame: pl.DataFrame, value: str, **where: Any) -> dict[int, float]:
    """Return a column by seed, where other columns have these values."""
    for name, wanted in where.items():
        frame = frame.filter(pl.col(name) == wanted)
    return dict(zip(frame["seed"].to_list(), frame[value].to_list(), strict=True))


def report_sources(folder: Path) -> None:
    """Print what the tuner changes, in points of accuracy, and how much of the best old gain it has."""
    new, old = pl.read_csv(folder / "sources.csv"), pl.read_csv(folder / "old_rule.csv")
    old_rules = [rule for rule in old["rule"].unique(maintain_order=True).to_list() if rule != "none"]
    print("| sources | optimizer | examples | without | learned | difference, points | worst seed | of the best old |")
    print("|---|---|---|---|---|---|---|---|")
    shares, old_default, by_run = [], [], []  # by_run: gain minus 93 % of the best old one, over the best, cell by seed
    for wrong in (0, 2):
        for optimizer in OPTIMIZERS:
            plain = by_seed(new, "accuracy", wrong=wrong, optimizer=optimizer, rule="none")
            for examples in EXAMPLES:
                where = {"wrong": wrong, "optimizer": optimizer, "examples": examples}
                found = by_seed(new, "accuracy", **where, rule="auto")
                gains = {s: found[s] - plain[s] for s in found}
                mean, error = mean_and_error(100 * gain for gain in gains.values())
                cell = "all good" if not wrong else "two wrong"
                share = ""
                if wrong:
                    best = max(
                        (by_seed(old, "accuracy", **where, rule=rule) for rule in old_rules),
                        key=lambda d: sum(d.values()),
                    )
                    whole = statistics.fmean(best[s] - plain[s] for s in found)
                    missing = mean_and_error(gains[s] - 0.88 * (best[s] - plain[s]) for s in found)[1]
                    shares.append(statistics.fmean(gains.values()) / whole)
                    by_run.append([(gains[s] - 0.93 * (best[s] - plain[s])) / whole for s in found])
                    share = f"{100 * shares[-1]:.0f} ± {100 * missing / whole:.0f} %"
                    default = by_seed(old, "accuracy", **where, rule="scale 0.3")
                    old_default.append(statistics.fmean(found[s] - default[s] for s in found))
                means = [statistics.fmean(values.values()) for values in (plain, found)]
                print(
                    f"| {cell} | {optimizer} | {examples} | {means[0]:.4f} | {means[1]:.4f} "
                    f"| {mean:+.2f} ± {error:.2f} | {min(100 * gain for gain in gains.values()):+.2f} | {share} |"
                )
    if shares:
        error = mean_and_error(statistics.fmean(cells) for cells in zip(*by_run, strict=True))[1]
        print(
            f"\nmean share {100 * statistics.fmean(shares):.1f} ± {100 * error:.1f} %; above the old default by "
            f"{100 * statistics.fmean(old_default):+.2f} points"
        )


def report_regularizers(folder: Path) -> None:
    """Print differences of accuracy and log loss."""
    frame = pl.read_csv(folder / "regularizers.csv")
    print("| start (decay, smoothing) | optimizer | examples | accuracy, points | worst seed | log loss |")
    print("|---|---|---|---|---|---|")
    for decay, smoothing in STARTS:
        for optimizer in OPTIMIZERS:
            for examples in EXAMPLES:
                where = {"decay": decay, "smoothing": smoothing, "optimizer": optimizer}
                differences = {}
                for value in ("accuracy", "log_loss"):
                    plain = by_seed(frame, value, **where, examples=0)
                    found = by_seed(frame, value, **where, examples=examples)
                    differences[value] = [found[s] - plain[s] for s in found]
                points, error = mean_and_error(100 * d for d in differences["accuracy"])
                loss, loss_error = mean_and_error(differences["log_loss"])
                print(
                    f"| {decay:g}, {smoothing:g} | {optimizer} | {examples} | {points:+.2f} ± {error:.2f} "
                    f"| {100 * min(differences['accuracy']):+.2f} | {loss:+.4f} ± {loss_error:.4f} |"
                )


def report_regression(folder: Path) -> None:
    """Print the share of the gain of the best fixed decay."""
    frame = pl.read_csv(folder / "regression.csv")
    print("| optimizer | start | learned | best fixed in hindsight | share of its gain |")
    print("|---|---|---|---|---|")
    shares = []
    for optimizer in OPTIMIZERS:
        fixed = {d: by_seed(frame, "loss", optimizer=optimizer, rule=f"fixed {d:g}") for d in DECAYS}
        best = min(DECAYS, key=lambda d: sum(fixed[d].values()))
        found = by_seed(frame, "loss", optimizer=optimizer, rule="auto")
        start, learned_loss, best_loss = (statistics.fmean(v.values()) for v in (fixed[DECAYS[0]], found, fixed[best]))
        shares.append((start - learned_loss) / (start - best_loss))
        print(
            f"| {optimizer} | {start:.3f} | {learned_loss:.3f} | {best_loss:.3f} ({best:g}) "
            f"| {100 * shares[-1]:.0f} % |"
        )
    print(f"\nmean share {100 * statistics.fmean(shares):.0f} %")


def report_drift(folder: Path) -> None:
    """Print accuracies relative to the true weights."""
    frame = pl.read_csv(folder / "drift.csv")
    truth = by_seed(frame, "accuracy", rule="true weights")
    print("| weights | accuracy | of the true weights | worst seed | time / plain training |")
    print("|---|---|---|---|---|")
    for rule in frame["rule"].unique(maintain_order=True).to_list():
        found = by_seed(frame, "accuracy", rule=rule)
        shares = [found[s] / truth[s] for s in found]
        times = statistics.median(by_seed(frame, "time", rule=rule).values())
        print(
            f"| {rule} | {statistics.fmean(found.values()):.4f} | {100 * statistics.fmean(shares):.1f} % "
            f"| {100 * min(shares):.1f} % | {times:.2f} |"
        )


def report_tables(folder: Path) -> None:
    """Print the loss of equal weights, learned ones and the best fixed α."""
    frame = pl.read_csv(folder / "tables.csv")
    print("| table | equal weights | learned | best fixed α | learned − best | learned / equal |")
    print("|---|---|---|---|---|---|")
    for name in frame["table"].unique(maintain_order=True).to_list():
        rows = {r["rule"]: r["loss"] for r in frame.filter(pl.col("table") == name).to_dicts()}
        best = min((rule for rule in rows if rule.startswith("alpha")), key=rows.__getitem__)
        equal, auto = rows["equal"], rows["auto"]
        print(
            f"| {name} | {equal:.4f} | {auto:.4f} | {rows[best]:.4f} ({best[6:]}) | {auto - rows[best]:+.4f} "
            f"| {100 * (auto / equal - 1):+.2f} % |"
        )


def report_quadratic(folder: Path) -> None:
    """Print the mean distance to the optimum."""
    frame = pl.read_csv(folder / "quadratic.csv")
    print(f"| group | {' | '.join(f'window {w}' for w in WINDOWS)} |")
    print(f"|---|{'---|' * len(WINDOWS)}")
    for kind in frame["kind"].unique(maintain_order=True).to_list():
        means = [statistics.fmean(by_seed(frame, "error", kind=kind, window=w).values()) for w in WINDOWS]
        print(f"| {kind} | {' | '.join(f'{mean:.3f}' for mean in means)} |")


def report_scale(folder: Path) -> None:
    """Print the effect of the first stake."""
    frame = pl.read_csv(folder / "scale.csv")
    print(f"| first stake | {' | '.join(f'{s:g}' for s in STAKES)} |")
    print(f"|---|{'---|' * len(STAKES)}")
    for job, optimizer in (("sources", "sgd"), ("sources", "adam"), ("Elec2", "")):
        own = frame.filter(pl.col("job") == job, pl.col("optimizer").fill_null("") == optimizer)
        values = [own.filter(pl.col("rule") == f"auto, {s:g}")["value"].to_list() for s in STAKES]
        print(f"| {' '.join((job, optimizer))} | {' | '.join(f'{statistics.fmean(v):.4f}' for v in values)} |")


REPORTS = {
    "sources": report_sources,
    "regularizers": report_regularizers,
    "regression": report_regression,
    "drift": report_drift,
    "tables": report_tables,
    "quadratic": report_quadratic,
    "scale": report_scale,
}


def main() -> None:
    """Make every run that is missing in the output, or print tables of all that there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=[*REPORTS, "report"])
    parser.add_argument("--data", type=Path, default=Path(), help="folder with the data files")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument(
        "--output", type=Path, required=True, help="a CSV file, one row per run; of report: their folder"
    )
    asked = parser.parse_args()
    if asked.job == "report":
        for name, report in REPORTS.items():
            if (asked.output / f"{name}.csv").exists():
                print(f"\n{name}\n")
                report(asked.output)
        return
    make_missing(runs_of(asked.job, asked.data, asked.seeds), asked.output)


def make_missing(runs: Iterable[Run], output: Path) -> None:
    """Make every run that the output does not have, in one thread, and append its row."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for key, run in runs:
        if identify(key) in done(output, list(key)):
            continue
        row = key | run()
        exists = output.exists()
        with output.open("a", newline="") as file:
            writer = csv.DictWriter(file, row)
            if not exists:
                writer.writeheader()
            writer.writerow(row)


def identify(key: Row) -> tuple[str, ...]:
    """Return what identifies a run, as it stands in the file."""
    return tuple(str(value) for value in key.values())


def done(output: Path, names: list[str]) -> set[tuple[str, ...]]:
    """Return the runs that the output has already."""
    if not output.exists():
        return set()
    with output.open(newline="") as file:
        return {tuple(row[name] for name in names) for row in csv.DictReader(file)}


if __name__ == "__main__":
    main()
