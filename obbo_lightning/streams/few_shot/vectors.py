"""Few-shot tasks from anybody's labelled vectors, sequences or tables: an npz, CSV or parquet file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from obbo_lightning.networks.mlp import MLP
from obbo_lightning.streams.few_shot.classes import Division, StoredClasses
from obbo_lightning.streams.few_shot.stream import Drawing, FewShotStream
from obbo_lightning.streams.readers.npz import read_arrays
from obbo_lightning.streams.readers.parquet import read_parquet

TABLES = {".csv": "CSV", ".parquet": "parquet"}


@dataclass(frozen=True)
class Features:
    """Numbers of examples made into numbers with mean 0 and deviation 1.

    Args:
        mean: of each feature; subtracted.
        deviation: of each feature; divided by.
    """

    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]

    @classmethod
    def of(cls, examples: NDArray[np.float64]) -> "Features":
        """Those of these examples."""
        mean, deviation = examples.mean(0), examples.std(0)
        deviation[deviation <= 1e-12 * np.abs(mean)] = 1.0  # a constant has rounding, and no deviation
        return cls(mean, deviation)

    def __call__(self, examples: NDArray[np.float64]) -> Tensor:
        """Examples ``[n, …]`` as a network wants them."""
        return torch.from_numpy((examples - self.mean) / self.deviation).float()


class ExampleStream(FewShotStream):
    """Few-shot tasks from labelled examples of any shape; kept in memory.

    Classes are divided, not examples: by the lists where they are given, and by ratio for the others. Every number of
    an example is a feature, standardised with its mean and deviation in the training classes. The division does not
    depend on ``seed``.

    Args:
        path: an npz file that holds ``examples`` (numbers [n, ...]) and ``labels`` (numbers or words), or a table (csv
            or parquet) with an example a row: a column of labels, and columns of numbers.
        label: the column of a table that has the labels.
        ratios: shares of train, validation and test among the classes that no list names.
        train_classes: classes to train on; None for a share of the unnamed ones. Quote names like '010', which YAML
            takes for numbers.
        validation_classes: the same for validation.
        test_classes: the same for test.
        ways: classes of a task.
        shots: examples of each class to adapt on.
        queries: examples of each class to be judged on.
        order: ``iid``, or ``drift``: the mix of classes, in the order of their names, moves with the rounds.
        period: rounds of one turn of the drift.
        seed: of the training tasks.
    """

    network_type = MLP

    def __init__(
        self,
        path: str,
        label: str = "label",
        ratios: list[float] = [0.6, 0.2, 0.2],  # noqa: B006 never changed
        train_classes: list[str | int] | None = None,
        validation_classes: list[str | int] | None = None,
        test_classes: list[str | int] | None = None,
        ways: int = 5,
        shots: int = 5,
        queries: int = 5,
        order: str = "iid",
        period: int = 1000,
        seed: int = 0,
    ) -> None:
        examples, labels = read_examples(Path(path).expanduser(), label)
        division = Division.of(labels, ratios, (train_classes, validation_classes, test_classes))
        self.features = Features.of(examples[division.trained])
        super().__init__(
            StoredClasses(self.features(examples), division.numbers, names=division.names),
            division.splits,
            Drawing(ways, shots, queries, order, period),
            seed,
        )
        self.names, self.label = division.names, label
        self.columns = feature_columns(Path(path).expanduser(), label)
        self._sources = division.digests(examples)

    def source_digests(self) -> dict[str, str]:
        """Of each class's examples, as they are in the file."""
        return self._sources

    def inputs(self) -> dict[str, Any]:
        return {
            "kind": "examples",
            "shape": list(self.train.source.shape),
            "label": self.label,
            "columns": self.columns,
            "mean": self.features.mean.flatten().tolist(),
            "deviation": self.features.deviation.flatten().tolist(),
            "trained_on": [self.names[c] for c in self.train.classes.tolist()],
        }


def read_examples(path: Path, label: str) -> tuple[NDArray[np.float64], NDArray[np.generic]]:
    """Finite examples ``[n, …]`` and their labels ``[n]``."""
    examples, labels = read_features(path, label)
    if labels is None and path.suffix.lower() == ".npz":
        raise ValueError(f"{path} must hold examples and labels, and has no labels")
    if labels is None:
        columns = _listed(_open_table(path, label).columns)
        raise ValueError(f"data.label must be a column of {path}, which are {columns}, got {label!r}")
    return examples, labels


def feature_columns(path: Path, label: str) -> list[str] | None:
    """What the features of a table are called; None for an npz file."""
    if path.suffix.lower() == ".npz":
        return None
    return [name for name in _open_table(path, label).columns if name != label]


def read_features(
    path: Path, label: str, key: str = "data.path", columns: Sequence[str] | None = None
) -> tuple[NDArray[np.float64], NDArray[np.generic] | None]:
    """Finite examples ``[n, …]``, and their labels ``[n]`` where there are some.

    Args:
        path: of an npz file or a table.
        label: the column that has the labels.
        key: who asked for the file.
        columns: the features of a table, in their order; all but the label where this is None.
    """
    if path.suffix.lower() not in (".npz", *TABLES) or not path.is_file():
        raise ValueError(f"{key} must be an npz, csv or parquet file that exists, got {str(path)!r}")
    examples, labels = _read_npz(path) if path.suffix.lower() == ".npz" else _read_table(path, label, columns)
    bad = np.flatnonzero(~np.isfinite(examples).reshape(len(examples), -1).all(1))
    if len(bad):
        raise ValueError(f"{path}: examples must be finite numbers, got NaN or infinity in example {bad[0] + 1}")
    return examples, labels


def _read_npz(path: Path) -> tuple[NDArray[np.float64], NDArray[np.generic] | None]:
    found, _ = read_arrays(path, ("examples", "labels"))
    if "examples" not in found:
        raise ValueError(f"{path} must hold examples and labels, and has no examples")
    examples, labels = found["examples"], found.get("labels")
    if examples.dtype.kind not in "biuf" or examples.ndim < 2 or not examples.size:
        raise ValueError(
            f"{path}: examples must be numbers [n, …], and some, got {examples.dtype} {list(examples.shape)}"
        )
    if labels is not None and (labels.shape != (len(examples),) or labels.dtype.kind not in "iuUS"):
        raise ValueError(
            f"{path}: labels must be numbers or words [{len(examples)}], got {labels.dtype} {list(labels.shape)}"
        )
    return examples.astype(np.float64), labels


def _open_table(path: Path, label: str) -> pl.DataFrame:
    kind = TABLES[path.suffix.lower()]
    try:
        if kind == "parquet":
            return read_parquet(path)
        words = {label: pl.String} if label in pl.read_csv(path, n_rows=0).columns else None
        # A label 010 is a word; and a column may begin with whole numbers.
        return pl.read_csv(path, schema_overrides=words, infer_schema_length=None)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise ValueError(f"{path} cannot be read as {kind}: {str(error).splitlines()[0]}") from None


def _read_table(
    path: Path, label: str, columns: Sequence[str] | None
) -> tuple[NDArray[np.float64], NDArray[np.generic] | None]:
    table = _open_table(path, label)
    labelled = label in table.columns
    missing = [name for name in columns or () if name not in table.columns]
    if missing:
        raise ValueError(f"{path} must have the column {missing[0]!r}, which the run was trained with, and has not")
    if columns is not None:
        table = table.select(*columns, *([label] if labelled else []))
    features = table.drop(label) if labelled else table
    if table.is_empty() or not features.columns:
        raise ValueError(f"{path} must have rows, and columns besides {label!r}, got {list(table.shape)}")
    words = [c for c in features.columns if not (features.schema[c].is_numeric() or features.schema[c] == pl.Boolean)]
    if words:
        raise ValueError(f"{path}: columns besides {label!r} must be numbers, got {_listed(words)}")
    if labelled and not (
        table.schema[label].is_integer() or table.schema[label] in (pl.String, pl.Categorical, pl.Enum)
    ):
        raise ValueError(f"{path}: {label!r} must be whole numbers or words, got {table.schema[label]}")
    for column in table.columns:
        if table[column].null_count():
            row = int(table[column].is_null().arg_true()[0]) + 1
            raise ValueError(f"{path}, row {row}: {column!r} must be there, and is not")
    labels = table[label].cast(pl.String).to_numpy().astype(str) if labelled else None
    return features.cast(pl.Float64).to_numpy(), labels


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (", …" if len(names) > 5 else "")
