"""What was predicted: as a table, a confusion matrix, files and a picture."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from obbo_lightning.foreign_text import cell, drawn
from obbo_lightning.runs.directory import write_atomically
from obbo_lightning.serving.learned import BATCH, Adapted
from obbo_lightning.serving.sets import Examples

SHOWN = 20  # queries in the picture


class Predictions(NamedTuple):
    """Of some queries.

    Attributes:
        classes: in the order of ``probabilities``.
        queries: what was asked.
        probabilities: ``[queries, classes]``.
    """

    classes: list[str]
    queries: Examples
    probabilities: Tensor

    @property
    def predicted(self) -> list[str]:
        """The likeliest class of each query."""
        return [self.classes[i] for i in self.probabilities.argmax(-1).tolist()]

    def accuracy(self) -> float | None:
        """The share of queries that are what they were predicted to be; None where nobody knows."""
        if self.queries.labels is None:
            return None
        hits = [a == b for a, b in zip(self.predicted, self.queries.labels, strict=True)]
        return sum(hits) / len(hits)

    def confusion(self) -> list[list[int]]:
        """How many queries of each class (rows) were predicted to be of each (columns)."""
        counts = torch.zeros(len(self.classes), len(self.classes), dtype=torch.long)
        for actual, predicted in zip(self.queries.labels or [], self.predicted, strict=True):
            counts[self.classes.index(actual), self.classes.index(predicted)] += 1
        return counts.tolist()

    def write(self, path: Path, what: str) -> list[Path]:
        """The CSV at once or not at all, and a picture beside it; ``what`` a query is: a file, or a row."""
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        actual, chances = self.queries.labels, [f"p({name})" for name in self.classes]
        rows.writerow(map(cell, [what, *(["actual"] if actual else []), "predicted", *chances]))
        for i, (name, predicted) in enumerate(zip(self.queries.names, self.predicted, strict=True)):
            chances = [f"{p:.6f}" for p in self.probabilities[i].tolist()]
            rows.writerow(map(cell, [name, *([actual[i]] if actual else []), predicted, *chances]))
        write_atomically(path, text.getvalue())
        return [path, draw_predictions(self, path.with_suffix(".png"))]


def predict_in_batches(adapted: Adapted, queries: Examples, transductive: bool) -> Iterator[Tensor]:
    """Probabilities, some queries at a time; all at once where predictions depend on one another."""
    size = len(queries.names) if transductive else BATCH
    for start in range(0, len(queries.names), size):
        yield adapted.probabilities(queries.given[start : start + size], transductive)


def draw_predictions(found: Predictions, path: Path) -> Path:
    """Some queries, evenly taken, with what they are predicted to be: images, or bars of their probabilities."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    from obbo_lightning.runs.figures import BLUE, ORANGE

    count = min(SHOWN, len(found.queries.names))
    chosen = np.linspace(0, len(found.queries.names) - 1, count).astype(int).tolist()
    columns = min(5, count)
    rows = -(-count // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(1.9 * columns, 2.2 * rows), squeeze=False)
    figure.subplots_adjust(0.01, 0.01, 0.99, 1 - 0.4 / (2.2 * rows), wspace=0.05, hspace=0.3)
    for place in axes.flat:
        place.set_axis_off()
    for place, i in zip(axes.flat, chosen, strict=False):
        _draw_one(place, found, i)
        predicted, known = found.predicted[i], found.queries.labels
        right = known is None or known[i] == predicted
        title = f"{predicted}  {found.probabilities[i].max():.2f}" + ("" if right else f"\nis {known[i]}")  # type: ignore[index]
        place.set_title(drawn(title), fontsize=9, color=BLUE if right else ORANGE)
    aside = path.with_name(f".{path.name}")
    figure.savefig(aside, dpi=120, format="png")
    plt.close(figure)
    aside.replace(path)
    return path


def _draw_one(place: Any, found: Predictions, i: int) -> None:
    one = np.asarray(found.queries.given[i])
    if one.dtype == np.uint8 and one.ndim == 3:
        place.imshow(one if one.shape[2] == 3 else one[:, :, 0], cmap="gray", vmin=0, vmax=255)
    else:
        place.barh(range(len(found.classes)), found.probabilities[i].numpy(), color="#999999")
        place.text(0, -0.9, drawn(f"row {found.queries.names[i]}"), fontsize=7, va="top")
        place.set(xlim=(0, 1), ylim=(len(found.classes), -1))
