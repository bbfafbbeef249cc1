"""Tables whose rows are in the order of time: a model of the last blocks, each with a weight, predicts the next one."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import derive_seed
from obbo_lightning.core.validation import at_least, one_of, positive
from obbo_lightning.problems.forgetting import Forgetting
from obbo_lightning.streams.fingerprints import digest_arrays
from obbo_lightning.streams.readers import finite_columns, listed, parse_numbers, read_table, require_file, require_rows
from obbo_lightning.streams.stream import Metric, Stream, TaskSequence

Numbers = NDArray[np.float64]
FACTORS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 1.0)  # of fixed exponential forgetting
LEAST_PROBABILITY = 0.001  # of a class, for the baseline that predicts by frequency
GENERATED_ROWS = 48 * 630  # 600 rounds of 48 rows, after 30 blocks
SPEEDS = (0.0, 0.02, 0.2)  # radians by which the true coefficients turn in 48 rows; each for 4800 rows, repeated


class Rows(NamedTuple):
    """Rows of a table in the order of time."""

    names: Sequence[str]
    features: Numbers  # [rows, features], finite
    target: Numbers  # [rows]; 0 and 1 for a classification
    kind: str  # classification or regression
    classes: Sequence[str] = ("0", "1")  # values of the file that 0 and 1 stand for
    skipped: Sequence[str] = ()  # columns without numbers


def read_rows(path: Path, target: str | None, features: Sequence[str] | None = None, kind: str = "auto") -> Rows:
    """Read the rows of a CSV file, in the order of time, with arguments of `ForgettingStream`."""
    table = _read_text(path, "data.csv")
    if target not in table.columns:
        raise ValueError(f"data.target must be a column of {path}, which are {listed(table.columns)}, got {target!r}")
    others = [name for name in table.columns if name != target]
    if features is not None and (not features or len(set(features) & set(others)) < len(features)):
        raise ValueError(
            f"data.features must name columns of {path} once each, of {listed(others)}, got {list(features)}"
        )
    # A column without any number, such as dates, is no feature; one with some numbers must have them in all rows.
    used = features or [name for name in others if parse_numbers(table[name]).count()]
    if not used:
        raise ValueError(f"data.csv must have a column of numbers besides {target!r}, got {path}, which has none")
    # in the order of rows, as the sums over blocks are
    stacked = np.ascontiguousarray(finite_columns(f"data.csv {path}", table.select(used)))
    skipped = [] if features else [name for name in others if name not in used]
    return Rows(used, stacked, *_parse_target(path, table[target], kind), skipped)


def read_queries(path: Path, names: Sequence[str], target: str | None) -> tuple[Numbers, pl.Series | None]:
    """Return features ``[rows, features]`` of a CSV file, and targets if all of them are known."""
    table = _read_text(path, "--query")
    missing = [name for name in names if name not in table.columns]
    if missing:
        raise ValueError(f"--query must have the columns {listed(names)}, got {path} without {missing[0]!r}")
    features = finite_columns(f"--query {path}", table.select(names))
    known = table[target].str.strip_chars() if target in table.columns else None
    return features, None if known is None or known.null_count() else known


def _read_text(path: Path, key: str) -> pl.DataFrame:
    """Return a CSV table as text, so that what is not a number can be named with its row."""
    require_file(key, path, "a CSV file")
    table = read_table(path, is_csv=True, infer_schema=False)
    if table.is_empty():
        raise ValueError(f"{key} must have rows, got {path}, which has none")
    if len(table.columns) == 1 and any(sign in table.columns[0] for sign in ";\t|"):
        raise ValueError(f"{key} must have its columns separated by commas, got {path} with {table.columns[0]!r}")
    return table


def _parse_target(path: Path, text: pl.Series, kind: str) -> tuple[Numbers, str, Sequence[str]]:
    """Return the target as numbers, its kind, and the values that 0 and 1 stand for."""
    where = f"data.csv {path}"
    require_rows(where, text.is_not_null(), text, "have a value (rows without a target go to `predict --query`)")
    text = text.str.strip_chars()
    numbers = parse_numbers(text)
    values = text if numbers.null_count() else numbers
    different = values.unique().sort()
    classify = len(different) == 2 and kind != "regression"
    if len(different) == 1 or (not classify and (kind == "classification" or not numbers.count())):
        raise ValueError(
            f"data.target must have two values, or numbers that vary and data.kind not classification, "
            f"got {text.name!r} with {len(different)} different values"
        )
    if not classify:
        return finite_columns(where, text.to_frame())[:, 0], "regression", ()
    if values is numbers:
        finite_columns(where, text.to_frame())
    ones = values == different[1]
    return ones.cast(pl.Float64).to_numpy(), "classification", (text.filter(~ones)[0], text.filter(ones)[0])


def generate_rows(kind: str, seed: int) -> Rows:
    """Generate rows whose true coefficients turn at three speeds, each of which needs another forgetting factor."""
    kind = "classification" if kind == "auto" else kind
    rng = np.random.default_rng(derive_seed(seed, "forgetting"))
    # The true coefficients turn in the plane of the first two features; the others are noise.
    features = rng.normal(size=(GENERATED_ROWS, 4))
    phase = np.arange(GENERATED_ROWS) // 4800 % len(SPEEDS)
    angle = np.cumsum(np.array(SPEEDS)[phase]) / 48
    signal = 2 * (np.cos(angle) * features[:, 0] + np.sin(angle) * features[:, 1])
    if kind == "classification":
        target = (rng.random(GENERATED_ROWS) < 1 / (1 + np.exp(-signal))).astype(np.float64)
    else:
        target = signal + 2 * rng.normal(size=GENERATED_ROWS)
    return Rows(("a", "b", "c", "d"), features, target, kind)


class PastAndNext(TaskSequence):
    """Task t: the blocks t … t + n − 1, the newest first, and block t + n to be evaluated on.

    All values are scaled by the mean and deviation of the rows before block t + n; features are then clipped, and a
    constant 1 is added to them. Rows after the last complete block are not used.
    """

    def __init__(self, rows: Rows, block: int, past: int, clip: float) -> None:
        self.length = len(rows.target) // block - past
        self.past, self.clip, self.kind = past, clip, rows.kind
        blocks, used = past + self.length, (past + self.length) * block
        self.features = rows.features[:used].reshape(blocks, block, -1)
        self.target = rows.target[:used].reshape(blocks, block)
        self._feature_scales = running_scales(self.features)
        self._target_scales = running_scales(self.target[..., None])

    def task(self, t: int) -> Task:
        now = t + self.past
        mean, deviation = self.target_scale(t)
        y_new = torch.from_numpy((self.target[now] - mean) / deviation)
        return {**self.known(t), "x_new": self.scaled(self.features[now], t), "y_new": y_new}

    def known(self, t: int) -> Task:
        """Return the task without block t + n, which need not exist yet: t may be the length."""
        mean, deviation = self.target_scale(t)
        y = torch.from_numpy((self.target[t : t + self.past] - mean) / deviation)
        return {"x": self.scaled(self.features[t : t + self.past], t).flip(0), "y": y.flip(0)}

    def scaled(self, features: Numbers, t: int) -> Tensor:
        """Return rows ``[…, columns]`` as the model for block t + n takes them."""
        mean, deviation = (values[t + self.past - 1] for values in self._feature_scales)
        scaled = np.clip((features - mean) / deviation, -self.clip, self.clip)
        return torch.from_numpy(np.concatenate([scaled, np.ones((*scaled.shape[:-1], 1))], axis=-1))

    def target_scale(self, t: int) -> tuple[float, float]:
        """Return mean and deviation by which the target of block t + n is scaled; classes are not scaled."""
        if self.kind == "classification":
            return 0.0, 1.0
        mean, deviation = self._target_scales
        return float(mean[t + self.past - 1, 0]), float(deviation[t + self.past - 1, 0])

    def frequency(self, t: int) -> float:
        """Return the mean of the target in all rows before block t + n."""
        return float(self._target_scales[0][t + self.past - 1, 0])


def running_scales(blocks: Numbers) -> tuple[Numbers, Numbers]:
    """Return mean and deviation of all rows of ``[blocks, rows, columns]`` up to and including each block.

    >>> mean, deviation = running_scales(np.array([[[1.0], [1.0]], [[3.0], [3.0]]]))
    >>> mean[:, 0].tolist(), deviation[:, 0].tolist()
    ([1.0, 2.0], [1.0, 1.0])
    """
    rows = blocks.shape[1]
    means, squares = blocks.mean(1), ((blocks - blocks.mean(1, keepdims=True)) ** 2).sum(1)
    mean, square = means[0], squares[0]
    found = [(mean, square)]
    for b in range(1, len(blocks)):
        # moments of the union of b blocks and one more, without differences of large sums
        apart = means[b] - mean
        mean = mean + apart / (b + 1)
        square = square + squares[b] + apart**2 * (rows * b / (b + 1))
        found.append((mean, square))
    mean, square = (np.stack(values) for values in zip(*found, strict=True))
    deviation = np.sqrt(square / (rows * np.arange(1, len(blocks) + 1)[:, None]))
    deviation[deviation <= 1e-12 * np.abs(mean)] = 1.0  # the deviation of a constant is a rounding error
    return mean, deviation


class ForgettingStream(Stream):
    """Forgetting: weights of the last blocks of a table for a model that is evaluated on the next block.

    Round t fits a linear or logistic model to the blocks t … t + past − 1 with the weights λ_t; block t + past
    evaluates it, and only then gives the hypergradient. Scaling uses the rows before that block only.

    Args:
        csv: a CSV file with one row per observation, in the order of time; None generates rows whose drift changes its
            speed.
        target: column to predict: two different values, or numbers.
        block: rows per block: a day, a week.
        past: n, number of blocks to learn from, each with its weight.
        features: columns to predict from; None: all that are numbers.
        kind: ``classification``, ``regression``, or ``auto``: a target with two different values is classified.
        clip: largest absolute value of a feature, in standard deviations of the rows so far.
        seed: of generated rows.
    """

    metric = Metric("loss")
    problem_type = Forgetting
    derived_arguments = ("past", "kind")
    train: PastAndNext

    def __init__(
        self,
        csv: str | None = None,
        target: str | None = None,
        block: int = 48,
        past: int = 30,
        features: list[str] | None = None,
        kind: str = "auto",
        clip: float = 3.0,
        seed: int = 0,
    ) -> None:
        one_of("data.kind", kind, ("auto", "classification", "regression"))
        at_least("data.block", block, 1)
        at_least("data.past", past, 2)
        positive("data.clip", clip)
        if csv is None and (target or features):
            raise ValueError(
                f"data.target and data.features need data.csv, got {target!r} and {features!r} without any"
            )
        rows = generate_rows(kind, seed) if csv is None else read_rows(Path(csv).expanduser(), target, features, kind)
        least, count = (past + 1) * block, len(rows.target)
        if count < least:
            raise ValueError(
                f"data.csv must have at least {least} rows, data.past {past} + 1 blocks of data.block {block}, "
                f"got {count} {'generated ones' if csv is None else f'in {csv}'}"
            )
        if rows.skipped:
            warnings.warn(f"columns without numbers are not used as features: {listed(rows.skipped)}", stacklevel=2)
        self.skipped = [{"column": name, "reason": "it has no numbers"} for name in rows.skipped]
        self.columns, self.classes = rows.names, rows.classes
        self.train = PastAndNext(rows, block, past, clip)
        columns = zip((*rows.names, str(target)), (*rows.features.T, rows.target), strict=True)
        self._digests = {} if csv is None else {name: digest_arrays(values) for name, values in columns}

    def task_spec(self) -> dict[str, Any]:
        return {"past": self.train.past, "kind": self.train.kind}

    def start(self, problem: Problem, seed: int) -> Tensor:
        """Return λ_1, equal weights, in float64 like the tasks."""
        outer = super().start(problem, seed).double()
        return outer / outer.sum(-1, keepdim=True)  # sums to 1 in float64, too

    def describe(self, t: int) -> str:
        rows = self.train.target.shape[1]
        last = (t + self.train.past + 1) * rows
        return f"rows {last - rows + 1 if t else 1} to {last}"

    def source_digests(self) -> dict[str, str]:
        """Return a digest of each column that is used."""
        return self._digests

    def baselines(self, problem: Problem, algorithm: Algorithm, rounds: int) -> dict[str, list[float]]:
        """Solve fixed weights, as lanes of one problem, and predict without a model."""
        if not isinstance(problem, Forgetting):
            return {}
        age = torch.arange(self.train.past, dtype=torch.float64)
        weights = torch.stack([*(factor**age for factor in FACTORS), (age == 0).double()])
        weights = weights / weights.sum(-1, keepdim=True)
        fixed, plain = [], []
        for t in range(rounds):
            task = self.train[t]
            fixed.append(problem.outer_loss(weights, problem.solution(weights, task), task))
            plain.append(self._without_model(t, task))
        *by_factor, last = torch.stack(fixed).T
        best = min(range(len(FACTORS)), key=lambda i: float(by_factor[i].mean()))
        return {
            f"best fixed forgetting ({FACTORS[best]:g})": by_factor[best].tolist(),
            "equal weights": by_factor[-1].tolist(),
            "last block only": last.tolist(),
            **{name: [losses[name] for losses in plain] for name in plain[0]},
        }

    def _without_model(self, t: int, task: Task) -> dict[str, float]:
        y = task["y_new"]
        if self.train.kind == "regression":
            last = task["y"][0, -1]
            return {"last value": float((y - last).square().mean()), "mean so far": float(y.square().mean())}
        chance = torch.tensor(self.train.frequency(t), dtype=y.dtype).clamp(LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)
        return {"majority class": float(-(y * chance.log() + (1 - y) * (1 - chance).log()).mean())}
