"""Few-shot tasks from your own labelled vectors, sequences or tables: an npz, CSV or parquet file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from obbo_lightning.networks.mlp import MLP
from obbo_lightning.streams.few_shot.stream import StoredClasses, StoredFewShotStream
from obbo_lightning.streams.readers import read_examples


@dataclass(frozen=True)
class FeatureScaler:
    """Standardises the features of examples.

    Args:
        mean: of each feature; subtracted.
        deviation: of each feature; divided by.
    """

    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]

    @classmethod
    def fit(cls, examples: NDArray[np.float64]) -> "FeatureScaler":
        """Return the scaler of examples ``[n, …]``."""
        mean, deviation = examples.mean(0), examples.std(0)
        deviation[deviation <= 1e-12 * np.abs(mean)] = 1.0  # the deviation of a constant is a rounding error
        return cls(mean, deviation)

    def __call__(self, examples: NDArray[np.float64]) -> Tensor:
        """Return examples ``[n, …]`` with mean 0 and deviation 1."""
        return torch.from_numpy((examples - self.mean) / self.deviation).float()


@dataclass(eq=False, repr=False)
class ExampleStream(StoredFewShotStream):
    """Few-shot tasks from labelled examples of any shape; kept in memory.

    Classes are split, not examples: by the lists where they are given, and by ratio for the others; the split does not
    depend on ``seed``. Every number of an example is a feature, standardised with its mean and deviation in the
    training classes. With order ``drift`` the mix of classes, in the order of their names, moves with the rounds.

    Args:
        path: an npz file that holds ``examples`` (numbers [n, ...]) and ``labels`` (integers or text), or a table (csv
            or parquet) with one row per example: a column of labels, and columns of numbers.
        label: column of a table that holds the labels.
    """

    label: str = "label"

    network_type = MLP

    def __post_init__(self) -> None:
        values, labels, self.columns = read_examples(Path(self.path).expanduser(), self.label, require_labels=True)
        assert labels is not None
        self.scaler = FeatureScaler.fit(values[self.split_examples(values, labels)])
        self.make_tasks(StoredClasses(self.scaler(values), self.numbers, self.names), self.splits)

    def inputs(self) -> dict[str, Any]:
        return {
            "kind": "examples",
            "shape": list(self.train.source.shape),
            "label": self.label,
            "columns": self.columns,
            "mean": self.scaler.mean.flatten().tolist(),
            "deviation": self.scaler.deviation.flatten().tolist(),
            "trained_on": self.trained_on,
        }
