"""Measure which hyperparameters are worth tuning: python -m benchmarks.tunable JOB --output FILE [options].

JOB is one of

- ``classes``: class weights, where some classes are rare in training and the validation examples are balanced;
- ``auxiliary``: the weight of an auxiliary loss which helps, harms or does neither;
- ``augmentation``: the strength of noise and shifts, where test images have them or not;
- ``smoothing``: label smoothing, with clean labels and with 40 % wrong ones;
- ``decays``: one weight decay for all weights, one per layer, one per input (needs scikit-learn);
- ``length``: source weights, two of five sources 80 % wrong, in trainings of 30 to 1,000 batches;
- ``forgetting``: the best fixed forgetting factor in hindsight, which ``benchmarks.steps tables`` is compared with;
- ``report``: the tables of docs/tunable.md from the folder of these CSV files, and from that of ``benchmarks.steps``.

Every run is paired by seed with the same run at the start value, and with fixed values of a grid: the best in
hindsight, and the one that a grid search on 200 validation examples (100 of ``decays``) chooses. A CSV file has one row
per run; runs that are in it already are not repeated. ``--data`` is the folder with mnist.npz, elec2.csv and
market/prices.parquet.
"""

import argparse
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.steps import (
    DECAYS,
    EXAMPLES,
    OPTIMIZERS,
    STARTS,
    Mnist,
    Regression,
    Row,
    Run,
    Sources,
    Trained,
    by_seed,
    learned,
    make_missing,
    mean_and_error,
    perceptron,
    rows_of_prices,
    shuffling,
    train,
)
from obbo_lightning import OBBO, Hyperparameters, Interval, OnSimplex, Positive, Real
from obbo_lightning.core.parameter_groups import ParameterGroup
from obbo_lightning.streams import ForgettingStream

SEARCHED = 200  # validation examples of the grid search, and of training on them as well
JOINED = "validation examples in training"
AUTO, SHARES, BOUNDED = "auto", "auto, as shares", "auto, between 0.1 and 3"  # the last two in `auxiliary` only
DIGITS_LABELLED = 500  # images in `auxiliary`
TEST_NOISE, TEST_SHIFT = 0.5, 4.0  # of the test images, in `augmentation`
FAILED = 10.0  # points of accuracy that a tuned run loses
BATCHES = (30, 100, 300, 1000)  # in `length`


class Comparison(NamedTuple):
    """What one training gets.

    Attributes:
        seed: of data, weights and order.
        setting: of the data.
        optimizer: a key of ``OPTIMIZERS``.
        examples: for validation.
        rule: ``auto`` or one that starts so, ``validation examples in training``, ``fixed VALUE`` or another baseline.
    """

    seed: int
    setting: str
    optimizer: str
    examples: int
    rule: str

    @property
    def tunes(self) -> bool:
        """Whether a tuner is used."""
        return self.rule.startswith(AUTO)

    def fixed(self, start: float) -> float:
        """Return the value to train with, or to start from."""
        return float(self.rule.removeprefix("fixed ")) if self.rule.startswith("fixed ") else start

    def group(self, start: float, learned_group: ParameterGroup) -> ParameterGroup:
        """Return the group that is learned, or a constant, which may be 0."""
        return learned_group if self.tunes else Real(self.fixed(start))


class Data(NamedTuple):
    """Examples for training, validation and testing; the first tensor of each are inputs, the second one labels."""

    training: tuple[Tensor, ...]
    validation: tuple[Tensor, ...]
    test: tuple[Tensor, ...]

    def joined(self, run: Comparison) -> "Data":
        """Return the same data, with the validation examples in training where the rule says so."""
        if run.rule != JOINED:
            return self
        return self._replace(training=tuple(map(torch.cat, zip(self.training, self.validation, strict=True))))


def tested(mnist: Mnist) -> tuple[Tensor, Tensor]:
    """Return the 10,000 test images and their labels."""
    return mnist.x[mnist.test], mnist.y[mnist.test]


def trained(run: Comparison, data: Data, module: Trained, epochs: int = 5, batch: int = 64) -> None:
    """Train once, with the tuner or at fixed values."""
    loader = DataLoader(TensorDataset(*data.validation), 64, shuffle=True)
    train(module, shuffling(run.seed, batch, *data.training), epochs, learned()(loader) if run.tunes else None)


def classified(network: nn.Module, data: Data, learned_values: Tensor) -> Row:
    """Return accuracy and log loss on test images, the loss on validation examples, and the learned values."""
    with torch.no_grad():
        logits, y = network(data.test[0])[:, :10], data.test[1]
        held_out, labels = network(data.validation[0])[:, :10], data.validation[1]
    right = (logits.argmax(-1) == y).double()
    values = [float(f"{value:.3g}") for value in learned_values.flatten().tolist()]
    return {
        "accuracy": float(right.mean()),
        "balanced": statistics.fmean(float(right[y == k].mean()) for k in range(10)),  # mean over classes
        "log_loss": float(functional.cross_entropy(logits, y)),
        "validation": float(functional.cross_entropy(held_out, labels)),
        "validation_accuracy": float((held_out.argmax(-1) == labels).double().mean()),
        "learned": str(values),
    }


# -- class weights -----------------------------------------------------------------------------------------------------


class Classes(Trained):
    """A perceptron with a weight for every class."""

    def training_loss(self, batch: Any, hyper: Any) -> Tensor:
        weights = hyper["classes"][batch[1]]
        losses = functional.cross_entropy(self.network(batch[0]), batch[1], reduction="none")
        return (weights * losses).sum() / weights.sum()  # torch's weighted cross-entropy


def classes(mnist: Mnist, run: Comparison) -> Row:
    """Train on 5,000 images, of which class k has a share that is proportional to ratio^k."""
    ratio = {"10 times rarer": 0.1 ** (1 / 9), "100 times rarer": 0.01 ** (1 / 9)}[run.setting]
    rows = mnist.shuffled(torch.Generator().manual_seed(run.seed))
    by_class = [rows[mnist.y[rows] == k] for k in range(10)]
    shares = torch.tensor([ratio**k for k in range(10)])
    counts = (5000 * shares / shares.sum()).round().int().tolist()
    each = run.examples // 10
    clean = torch.cat([of_class[:each] for of_class in by_class])
    # what one number of validation examples leaves over is not used with another
    most = max(EXAMPLES) // 10
    kept = torch.cat([of_class[most : most + n] for of_class, n in zip(by_class, counts, strict=True)])
    data = Data((mnist.x[kept], mnist.y[kept]), (mnist.x[clean], mnist.y[clean]), tested(mnist))
    network = perceptron(run.seed, 784, 128, 10)
    start = None
    if run.rule == "inverse to frequency":
        inverse = 1 / torch.tensor(counts, dtype=torch.float64)
        start = inverse / inverse.sum()
    hyper = Hyperparameters(classes=OnSimplex(10, start))
    module = Classes(network, hyper, OPTIMIZERS[run.optimizer](network.parameters()))
    trained(run, data.joined(run), module)
    return classified(network, data, hyper["classes"])


# -- the weight of an auxiliary loss -----------------------------------------------------------------------------------


class Auxiliary(Trained):
    """A perceptron with ten outputs for digits and others for an auxiliary task."""

    def training_loss(self, batch: Any, hyper: Any) -> Tensor:
        labelled, y, x, other = batch
        outputs = self.network(x)[:, 10:]
        if outputs.shape[1] == x.shape[1]:
            extra = functional.binary_cross_entropy_with_logits(outputs, x)
        else:
            extra = functional.cross_entropy(outputs, other)
        own = self.validation_loss((labelled, y), hyper)
        if "shares" in hyper:
            return 2 * (hyper["shares"] * torch.stack([own, extra])).sum()
        return own + hyper["weight"] * extra

    def validation_loss(self, batch: Any, hyper: Any) -> Tensor:
        return functional.cross_entropy(self.network(batch[0])[:, :10], batch[1])


def auxiliary(mnist: Mnist, run: Comparison) -> Row:
    """Train on 500 images with digit labels, and 5,000 with labels of another task."""
    generator = torch.Generator().manual_seed(run.seed)
    rows = mnist.shuffled(generator)
    kept, clean = rows[:5000], rows[5000 : 5000 + run.examples]
    outputs = {"parity of the digit": 2, "random labels": 10, "reconstruction": 784}[run.setting]
    other = mnist.y[kept] % 2 if outputs == 2 else torch.randint(0, 10, kept.shape, generator=generator)
    few = torch.cat([kept[:DIGITS_LABELLED], clean]) if run.rule == JOINED else kept[:DIGITS_LABELLED]
    few = few[torch.arange(5000) % len(few)]  # a batch has 64 images of each kind
    columns = mnist.x[few], mnist.y[few], mnist.x[kept], other
    data = Data(columns, (mnist.x[clean], mnist.y[clean]), tested(mnist))
    network = perceptron(run.seed, 784, 128, 10 + outputs)
    shares = run.rule == SHARES
    weight = Positive(1.0, 0.1, 3.0) if run.rule == BOUNDED else Positive(1.0)
    hyper = Hyperparameters(shares=OnSimplex(2)) if shares else Hyperparameters(weight=run.group(1.0, weight))
    module = Auxiliary(network, hyper, OPTIMIZERS[run.optimizer](network.parameters()))
    trained(run, data, module)
    return classified(network, data, hyper["shares" if shares else "weight"])


# -- the strength of an augmentation -----------------------------------------------------------------------------------


def noisy(x: Tensor, strength: Tensor | float, generator: torch.Generator | None = None) -> Tensor:
    """Return x + σ ε, which is differentiable in σ."""
    return x + strength * torch.randn(x.shape, generator=generator)


def shifted(x: Tensor, strength: Tensor | float, generator: torch.Generator | None = None) -> Tensor:
    """Return images shifted by up to so many pixels in both directions, by linear interpolation."""
    offsets = (2 * torch.rand(len(x), 2, generator=generator) - 1) * strength / 14  # 2 is the width of an image
    turn = torch.eye(2).expand(len(x), 2, 2)
    grid = functional.affine_grid(torch.cat([turn, offsets[..., None]], -1), [len(x), 1, 28, 28], align_corners=False)
    return functional.grid_sample(x.view(-1, 1, 28, 28), grid, align_corners=False).flatten(1)


class Augmented(Trained):
    """A perceptron on augmented images."""

    def __init__(self, augment: Callable[..., Tensor], *arguments: Any) -> None:
        super().__init__(*arguments)
        self.augment = augment

    def training_loss(self, batch: Any, hyper: Any) -> Tensor:
        return functional.cross_entropy(self.network(self.augment(batch[0], hyper["strength"])), batch[1])


def augmentation(mnist: Mnist, run: Comparison) -> Row:
    """Train on 5,000 clean images; those for validation and testing are augmented, or not."""
    generator = torch.Generator().manual_seed(run.seed)
    rows = mnist.shuffled(generator)
    kept, clean = rows[:5000], rows[5000 : 5000 + run.examples]
    kind, where = run.setting.split(", ")
    augment = {"noise": noisy, "shifts": shifted}[kind]
    strength = {"noise": TEST_NOISE, "shifts": TEST_SHIFT}[kind] if where == "test images too" else 0.0
    (x, y), held_out = tested(mnist), mnist.x[clean]
    if strength:
        x, held_out = augment(x, strength, generator), augment(held_out, strength, generator)
    data = Data((mnist.x[kept], mnist.y[kept]), (held_out, mnist.y[clean]), (x, y))
    network = perceptron(run.seed, 784, 128, 10)
    start, upper = {"noise": (0.1, 10.0), "shifts": (0.5, 14.0)}[kind]  # no image is wider than 28 pixels
    hyper = Hyperparameters(strength=run.group(start, Positive(start, upper=upper)))
    module = Augmented(augment, network, hyper, OPTIMIZERS[run.optimizer](network.parameters()))
    trained(run, data.joined(run), module)
    return classified(network, data, hyper["strength"])


# -- label smoothing ---------------------------------------------------------------------------------------------------


class Smoothed(Trained):
    """A perceptron with label smoothing."""

    def training_loss(self, batch: Any, hyper: Any) -> Tensor:
        logs = functional.log_softmax(self.network(batch[0]), -1)
        return (1 - hyper["smoothing"]) * functional.nll_loss(logs, batch[1]) - hyper["smoothing"] * logs.mean()


def smoothing(mnist: Mnist, run: Comparison) -> Row:
    """Train on 5,000 images for 10 epochs, all labels correct or 40 % of them wrong; the others are correct."""
    generator = torch.Generator().manual_seed(run.seed)
    rows = mnist.shuffled(generator)
    kept, clean = rows[:5000], rows[5000 : 5000 + run.examples]
    y = mnist.y[kept]
    if run.setting != "clean labels":
        wrong = torch.rand(5000, generator=generator) < 0.4
        y = torch.where(wrong, (y + torch.randint(1, 10, y.shape, generator=generator)) % 10, y)
    data = Data((mnist.x[kept], y), (mnist.x[clean], mnist.y[clean]), tested(mnist))
    network = perceptron(run.seed, 784, 128, 10)
    hyper = Hyperparameters(smoothing=run.group(0.1, Interval(0.0, 0.9, start=0.1)))
    module = Smoothed(network, hyper, OPTIMIZERS[run.optimizer](network.parameters()))
    trained(run, data.joined(run), module, epochs=10)
    return classified(network, data, hyper["smoothing"])


# -- several weight decays ---------------------------------------------------------------------------------------------


class Decays(Regression):
    """A perceptron with a weight decay for every column of the first layer, and one for the second layer."""

    def training_loss(self, batch: Any, hyper: Any) -> Tensor:
        first, second = (layer for layer in self.network.children() if isinstance(layer, nn.Linear))
        columns = torch.cat([first.weight.square().sum(0), first.bias.square().sum()[None]])
        last = second.weight.square().sum() + second.bias.square().sum()
        decay = hyper["decay"]
        if decay.ndim == 0:
            penalty = decay * (columns.sum() + last)
        elif len(decay) == 2:
            penalty = decay[0] * columns.sum() + decay[1] * last
        else:
            penalty = (decay * torch.cat([columns, last[None]])).sum()
        return self.validation_loss(batch, hyper) + penalty


def decays(run: Comparison) -> Row:
    """Train on 150 patients with 10 columns of measurements and 30 of noise; 100 others are for validation."""
    from sklearn.datasets import load_diabetes

    generator = torch.Generator().manual_seed(run.seed)
    x, y = (torch.tensor(values, dtype=torch.float32) for values in load_diabetes(return_X_y=True))
    x, y = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()
    x = torch.cat([x, torch.randn(len(x), 30, generator=generator)], 1)
    order = torch.randperm(len(x), generator=generator)
    rows, clean, test = order[:150], order[150:250], order[250:]
    data = Data((x[rows], y[rows]), (x[clean], y[clean]), (x[test], y[test]))
    network = perceptron(run.seed, 40, 64, 1)
    size = {"one for all weights": 1, "one per layer": 2, "one per input": 42}[run.setting]
    hyper = Hyperparameters(decay=run.group(DECAYS[0], Positive(DECAYS[0], size=size)))
    sgd = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    optimizer = sgd if run.optimizer == "sgd" else OPTIMIZERS[run.optimizer](network.parameters())
    module = Decays(network, hyper, optimizer)
    trained(run, data.joined(run), module, epochs=150, batch=32)
    with torch.no_grad():
        losses = [float(module.validation_loss(part, {})) for part in (data.test, data.validation)]
    values = [float(f"{value:.3g}") for value in hyper["decay"].flatten().tolist()]
    return {"log_loss": losses[0], "validation": losses[1], "learned": str(values)}


# -- short trainings ---------------------------------------------------------------------------------------------------


def length(mnist: Mnist, run: Comparison) -> Row:
    """Train on five sources of 1,000 images, of which two have 80 % wrong labels, for a number of batches."""
    generator = torch.Generator().manual_seed(run.seed)
    rows = mnist.shuffled(generator)
    kept, clean = rows[:5000], rows[5000 : 5000 + run.examples]
    y, source = mnist.y[kept], torch.arange(5000) % 5
    wrong = (torch.rand(5000, generator=generator) < 0.8) & (source < 2)
    y = torch.where(wrong, (y + torch.randint(1, 10, y.shape, generator=generator)) % 10, y)
    batches = int(run.setting.split()[0])
    data = Data((mnist.x[kept], y, source), (mnist.x[clean], mnist.y[clean], clean % 5), tested(mnist))
    x, y, source = data.joined(run).training
    order = [torch.randperm(len(x), generator=generator) for _ in range(math.ceil(batches * 64 / len(x)))]
    taken = torch.cat(order)[: batches * 64]
    weights = torch.tensor([0, 0, 1, 1, 1], dtype=torch.float64) / 3 if run.rule == "wrong sources left out" else None
    network = perceptron(run.seed, 784, 128, 10)
    hyper = Hyperparameters(sources=OnSimplex(5, weights))
    module = Sources(network, hyper, OPTIMIZERS[run.optimizer](network.parameters()))
    validation = DataLoader(TensorDataset(*data.validation[:2]), 64, shuffle=True)
    loader = DataLoader(TensorDataset(x[taken], y[taken], source[taken]), 64)
    train(module, loader, 1, learned()(validation) if run.tunes else None)
    return classified(network, data, hyper["sources"])


# -- forgetting --------------------------------------------------------------------------------------------------------


def forgetting_runs(data: Path, seeds: list[int]) -> Iterator[Run]:
    """Yield the runs of ``forgetting``, on the tables of ``benchmarks.steps``."""

    def best(stream: ForgettingStream, rounds: int | None) -> Row:
        found = stream.baselines(stream.problem(), OBBO(), len(stream.train) if rounds is None else rounds)
        name = next(name for name in found if name.startswith("best fixed"))
        return {"factor": name.split("(")[1].rstrip(")"), "loss": statistics.fmean(found[name])}

    def stock(ticker: str) -> Row:
        with tempfile.TemporaryDirectory() as folder:
            file = rows_of_prices(data / "market" / "prices.parquet", ticker, Path(folder) / "rows.csv")
            return best(ForgettingStream(str(file), target="next", block=35), None)

    yield {"table": "Elec2"}, lambda: best(ForgettingStream(str(data / "elec2.csv"), target="class"), None)
    for seed in seeds:
        yield {"table": f"generated rows, seed {seed}"}, partial(lambda s: best(ForgettingStream(seed=s), 600), seed)
    for ticker in ("AMD", "MSFT", "XOM"):
        yield {"table": ticker}, partial(stock, ticker)


# -- jobs --------------------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """Where training starts, without tuning and with it, and the fixed values of a grid."""

    start: str = "equal weights"
    grid: Sequence[float] = ()


class Job(NamedTuple):
    """What is compared.

    Attributes:
        name: of the hyperparameter, in the table.
        run: makes one run.
        settings: of the data, by name.
        baselines: other rules.
        metrics: ``accuracy`` and ``balanced`` are better where they are higher, ``log_loss`` where it is lower.
        examples: numbers of validation examples of tuned runs.
        rules: of tuned runs.
        one_grid: fixed values and baselines are the same in all settings, and run in the first only.
    """

    name: str
    run: Callable[[Mnist, Comparison], Row]
    settings: dict[str, Setting]
    baselines: Sequence[str] = (JOINED,)
    metrics: Sequence[str] = ("accuracy",)
    examples: Sequence[int] = (SEARCHED,)
    rules: Sequence[str] = (AUTO,)
    one_grid: bool = False

    @property
    def searched(self) -> int:
        """Number of validation examples of a grid search, and of the tuned runs in the first table."""
        return SEARCHED if SEARCHED in self.examples else self.examples[0]

    def grid_of(self, setting: str) -> str:
        """Return the setting in which fixed values and baselines are run."""
        return next(iter(self.settings)) if self.one_grid else setting


WEIGHT = Setting("fixed 1", (0, 0.3, 1, 3, 10))
NOISE, SHIFT = Setting("fixed 0.1", (0, 0.1, 0.3, 0.5, 1)), Setting("fixed 0.5", (0, 0.5, 1, 2, 4))
SMOOTHING = Setting("fixed 0.1", (0, 0.1, 0.3, 0.5))
DECAY = Setting(f"fixed {DECAYS[0]:g}", DECAYS)
JOBS = {
    "classes": Job(
        "class weights",
        classes,
        {"10 times rarer": Setting(), "100 times rarer": Setting()},
        baselines=("inverse to frequency", JOINED),
        metrics=("balanced",),
        examples=EXAMPLES,
    ),
    "auxiliary": Job(
        "weight of an auxiliary loss",
        auxiliary,
        {"parity of the digit": WEIGHT, "random labels": WEIGHT, "reconstruction": WEIGHT},
        rules=(AUTO, BOUNDED, SHARES),
    ),
    "augmentation": Job(
        "strength of an augmentation",
        augmentation,
        {
            "noise, test images too": NOISE,
            "shifts, test images too": SHIFT,
            "shifts, clean test images": SHIFT,
        },
    ),
    "smoothing": Job(
        "label smoothing",
        smoothing,
        {"clean labels": SMOOTHING, "40 % wrong labels": SMOOTHING},
        metrics=("accuracy", "log_loss"),
    ),
    "decays": Job(
        "weight decay",
        lambda _, run: decays(run),
        {"one for all weights": DECAY, "one per layer": DECAY, "one per input": DECAY},
        metrics=("log_loss",),
        examples=(100,),
        one_grid=True,
    ),
    "length": Job(
        "source weights",
        length,
        {f"{batches} batches": Setting() for batches in BATCHES},
        baselines=("wrong sources left out", JOINED),
    ),
}


def runs_of(name: str, data: Path, seeds: list[int]) -> Iterator[Run]:
    """Yield the runs of a job."""
    if name == "forgetting":
        yield from forgetting_runs(data, seeds)
        return
    job, mnist = JOBS[name], Mnist(data / "mnist.npz")
    for seed, (setting, values), optimizer in product(seeds, job.settings.items(), OPTIMIZERS):
        rules = dict.fromkeys([values.start, *(f"fixed {value:g}" for value in values.grid), *job.baselines])
        compared = [(job.searched, rule) for rule in rules if setting == job.grid_of(setting)]
        for examples, rule in (*compared, *product(job.examples, job.rules)):
            run = Comparison(seed, setting, optimizer, examples, rule)
            yield run._asdict(), partial(job.run, mnist, run)


# -- tables ------------------------------------------------------------------------------------------------------------

Values = dict[int, float]  # by seed, or by table
UNITS = {"accuracy": "accuracy, %", "balanced": "balanced accuracy, %", "log_loss": "log loss"}
LEARNED_BY_STEPS = {  # what `benchmarks.steps` has run
    "sources": Job(
        "source weights",
        length,
        {"five good sources": Setting("none"), "two of five 80 % wrong": Setting("none")},
        baselines=(),
        examples=EXAMPLES,
    ),
    "regularizers": Job(
        "weight decay and label smoothing",
        smoothing,
        {f"from {decay:g} and {smooth:g}, clean labels": Setting("none") for decay, smooth in STARTS},
        baselines=(),
        metrics=("accuracy", "log_loss"),
        examples=EXAMPLES,
    ),
}


class Line(NamedTuple):
    """One line of the table: accuracies in percent or losses, paired."""

    name: str
    setting: str
    metric: str
    start: Values
    tuned: Values
    fixed: dict[str, Values]
    baselines: dict[str, Values]

    def gain(self, values: Values, over: Values) -> tuple[float, float]:
        """Return the mean improvement and its standard error."""
        sign = -1 if "loss" in self.metric else 1
        return mean_and_error(sign * (values[s] - over[s]) for s in self.tuned)

    def shown(self, values: Values) -> str:
        """Return the mean."""
        mean = statistics.fmean(values[s] for s in self.tuned)
        return f"{mean:.3f}" if "loss" in self.metric else f"{mean:.1f}"

    def change(self) -> str:
        """Return what tuning changes; a loss that falls is negative."""
        mean, error = self.gain(self.tuned, self.start)
        change = f"{-mean:+.3f}" if "loss" in self.metric else f"{mean:+.2f}"
        return change if math.isnan(error) else f"{change} ± {error:{'.3f' if 'loss' in self.metric else '.2f'}}"

    def verdict(self) -> str:
        """Return what differs by more than two standard errors."""
        mean, error = self.gain(self.tuned, self.start)
        if math.isnan(error):
            return "one run"
        lost = sum(self.start[s] - self.tuned[s] > FAILED for s in self.tuned) if "loss" not in self.metric else 0
        if lost:
            return f"**fails in {lost} of {len(self.tuned)} seeds**"
        found = "helps" if mean > 2 * error else "**harms**" if mean < -2 * error else "no gain"
        gains = {rule: self.gain(values, self.tuned) for rule, values in self.baselines.items()}
        better = [rule for rule, (mean, error) in gains.items() if mean > 2 * error]
        return f"{found}; better: {', '.join(better)}" if better else found

    def print(self) -> None:
        """Print it in Markdown."""
        ranked = sorted(self.fixed, key=lambda rule: self.gain(self.fixed[rule], self.tuned)[0])
        best = [f"{self.shown(self.fixed[rule])} ({rule.removeprefix('fixed ')})" for rule in ranked[-1:]]
        others = [f"{self.shown(values)} ({rule})" for rule, values in self.baselines.items()]
        cells = [self.name, self.setting, UNITS.get(self.metric, self.metric), self.shown(self.start)]
        cells += [self.shown(self.tuned), self.change(), *(best or [""]), "; ".join(others), self.verdict()]
        print(f"| {' | '.join(cells)} |")


def searched(grid: dict[str, Values], frame: pl.DataFrame, setting: str, metric: str) -> Values:
    """Return the test values where, in each seed, the fixed value is best on validation examples."""
    losses = {rule: by_seed(frame, "validation", setting=setting, rule=rule) for rule in grid}
    first = losses
    if metric != "log_loss":
        rights = {rule: by_seed(frame, "validation_accuracy", setting=setting, rule=rule) for rule in grid}
        first = {rule: {seed: -value for seed, value in values.items()} for rule, values in rights.items()}
    found = {}
    for seed in next(iter(losses.values())):
        found[seed] = grid[min((first[rule][seed], losses[rule][seed], rule) for rule in grid)[2]][seed]
    return found


def lines(command: str, job: Job, frame: pl.DataFrame, examples: int) -> Iterator[Line]:
    """Yield the lines of a job; ``command`` is what has made its runs."""
    for (setting, values), optimizer, metric in product(job.settings.items(), OPTIMIZERS, job.metrics):
        factor = 1 if metric == "log_loss" else 100
        own = frame.filter(pl.col("optimizer") == optimizer)

        def of(rule: str, where: str, frame: pl.DataFrame, metric: str = metric, factor: int = factor) -> Values:
            found = by_seed(frame, metric, setting=where, rule=rule)
            return {seed: factor * value for seed, value in found.items()}

        fixed = own.filter(~pl.col("rule").is_in(job.rules))
        where = job.grid_of(setting)
        grid = {f"fixed {value:g}": of(f"fixed {value:g}", where, fixed) for value in values.grid}
        baselines = {rule: of(rule, where, fixed) for rule in job.baselines}
        if grid:
            baselines[f"grid search, {len(grid)} trainings"] = searched(grid, fixed, where, metric)
        start = of(values.start, where, fixed)
        for rule in job.rules:
            tuned = of(rule, setting, own.filter(pl.col("examples") == examples))
            label = f"{setting}{rule.removeprefix(AUTO)}, {optimizer}"
            yield Line(f"{job.name} (`{command}`)", label, metric, start, tuned, grid, baselines)


def of_steps(name: str, folder: Path) -> pl.DataFrame:
    """Return a table of ``benchmarks.steps`` with the columns of the tables here."""
    frame = pl.read_csv(folder / f"{name}.csv")
    settings = list(LEARNED_BY_STEPS[name].settings)
    second = pl.col("wrong") == 2 if name == "sources" else pl.col("decay") == STARTS[1][0]
    return frame.with_columns(setting=pl.when(second).then(pl.lit(settings[1])).otherwise(pl.lit(settings[0])))


def other_lines(folder: Path, steps: Path) -> Iterator[Line]:
    """Yield the lines of drift and of forgetting."""
    frame = pl.read_csv(steps / "drift.csv")
    values = {
        rule: {seed: 100 * value for seed, value in by_seed(frame, "accuracy", rule=rule).items()}
        for rule in ("equal weights", "every 5 batches", "true weights")
    }
    start, tuned, truth = values.values()
    setting = "six of ten wrong, others in each phase, sgd"
    yield Line("source weights (`steps drift`)", setting, "accuracy", start, tuned, {"true weights": truth}, {})
    frame, fixed = pl.read_csv(steps / "tables.csv"), pl.read_csv(folder / "forgetting.csv")
    names = fixed["table"].to_list()
    parts = {
        "Elec2": ("log loss", names[:1]),
        "generated rows": ("log loss", [n for n in names if n.startswith("generated")]),
        "absolute returns of three stocks": ("squared loss", [n for n in names if n in ("AMD", "MSFT", "XOM")]),
    }
    for part, (metric, tables) in parts.items():

        def of(frame: pl.DataFrame, tables: list[str] = tables) -> Values:
            rows = dict(zip(frame["table"].to_list(), frame["loss"].to_list(), strict=True))
            return {i: rows[table] for i, table in enumerate(tables)}

        by_rule = {rule: of(frame.filter(pl.col("rule") == rule)) for rule in ("equal", "auto")}
        factors = fixed.filter(pl.col("table").is_in(tables))["factor"].unique(maintain_order=True).to_list()
        rule = f"factor {' or '.join(f'{factor:g}' for factor in sorted(factors))}"
        yield Line(
            "forgetting (`steps tables`, `forgetting`)",
            part,
            metric,
            by_rule["equal"],
            by_rule["auto"],
            {rule: of(fixed)},
            {},
        )


def report(folder: Path, steps: Path) -> None:
    """Print the two tables of docs/tunable.md."""
    found = {name: (job, pl.read_csv(folder / f"{name}.csv")) for name, job in JOBS.items()}
    found |= {f"steps {name}": (job, of_steps(name, steps)) for name, job in LEARNED_BY_STEPS.items()}
    columns = "without tuning", "tuned", "change", "best fixed in hindsight", "other baselines", "verdict"
    print(f"| hyperparameter | setting | metric | {' | '.join(columns)} |")
    print("|---|---|---|---|---|---|---|---|---|")
    for command, (job, frame) in found.items():
        for line in lines(command, job, frame, job.searched):
            line.print()
    for line in other_lines(folder, steps):
        line.print()
    print(f"\n| hyperparameter | setting | metric | {' | '.join(f'{n} examples' for n in EXAMPLES)} |")
    print("|---|---|---|---|---|---|")
    for command, (job, frame) in found.items():
        if len(job.examples) > 1:
            for row in zip(*(lines(command, job, frame, examples) for examples in EXAMPLES), strict=True):
                name, setting, metric, *_ = row[0]
                print(f"| {name} | {setting} | {UNITS[metric]} | {' | '.join(line.change() for line in row)} |")


def main() -> None:
    """Make every run that is missing in the output, or print tables of all that there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=[*JOBS, "forgetting", "report"])
    parser.add_argument("--data", type=Path, default=Path(), help="folder with the data files")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument(
        "--output", type=Path, required=True, help="a CSV file, one row per run; of report: their folder"
    )
    parser.add_argument("--steps", type=Path, default=Path("docs/experiments/steps"), help="of report: tables of steps")
    asked = parser.parse_args()
    if asked.job == "report":
        report(asked.output, asked.steps)
        return
    make_missing(runs_of(asked.job, asked.data, asked.seeds), asked.output)


if __name__ == "__main__":
    main()
