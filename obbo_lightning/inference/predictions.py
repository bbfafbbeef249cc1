"""Predictions for files: classes of examples with an adapted classifier, and targets of the next rows of a table."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from obbo_lightning.config.build import build_problem, build_stream
from obbo_lightning.config.parse import complete_config, component_class
from obbo_lightning.config.registry import untrusted_source
from obbo_lightning.escaping import escape_mathtext, escape_table
from obbo_lightning.inference.inputs import ExampleInputs, ImageInputs, Inputs
from obbo_lightning.inference.model import AdaptedClassifier
from obbo_lightning.problems.forgetting import Forgetting
from obbo_lightning.runs.directory import RunDirectory, read_config, replacing, write_atomically
from obbo_lightning.runs.provenance import read_checkpoint, usable_checkpoint
from obbo_lightning.streams import readers
from obbo_lightning.streams.tabular import ForgettingStream, read_queries

SHOWN = 20  # queries in the figure


class Predictions(NamedTuple):
    """Predictions for some examples.

    Attributes:
        table: one row per example: its ``file`` or ``row``, ``actual`` where that is known, ``predicted``, and for
            classes their probabilities.
        title: what made them, in a few words.
    """

    table: pl.DataFrame
    title: str

    @property
    def accuracy(self) -> float | None:
        """Share of examples whose class was predicted; None for numbers, or where the classes are not known."""
        if "actual" not in self.table.columns or self.table["predicted"].dtype.is_numeric():
            return None
        return float(np.mean((self.table["predicted"] == self.table["actual"]).to_numpy()))

    @property
    def mean_absolute_error(self) -> float | None:
        """Mean absolute error in the units of the target; None for classes, or where the target is not known."""
        if "actual" not in self.table.columns or not self.table["predicted"].dtype.is_numeric():
            return None
        return float(np.mean((self.table["predicted"] - self.table["actual"]).abs().to_numpy()))

    def write(self, path: Path) -> None:
        """Write the table as a CSV file."""
        write_atomically(path, escape_table(self.table).write_csv())


class ExampleSet(NamedTuple):
    """Examples from a folder or a file."""

    unit: str  # ``file`` or ``row``: what a name is
    names: list[str]  # path of each file in the folder, or number of each row, counted from 1
    examples: Any  # as `LearnedClassifier.adapt` takes them
    labels: list[str] | None  # None where they are not known


def read_support(path: Path, inputs: Inputs) -> ExampleSet:
    """Read a folder with a folder of images for each class, or a file with labels."""
    if isinstance(inputs, ImageInputs) and path.is_dir():
        files = [file for folder in readers.class_folders(path) for file in readers.find_images(folder)]
        found = _read_files(path, files, inputs)
    else:
        found = _read_rows("--support", path, inputs)
    if found.labels is None:
        raise ValueError(f"{path} must have labels to adapt to, and has none")
    classes = sorted(set(found.labels))
    if len(classes) < 2:
        raise ValueError(f"{path} must hold 2 classes or more, and has {', '.join(map(repr, classes)) or 'none'}")
    return found


def read_query(path: Path, inputs: Inputs, classes: set[str]) -> ExampleSet:
    """Read a folder of images or a file; images have labels if they are in folders with the names of ``classes``."""
    if isinstance(inputs, ImageInputs) and path.is_dir():
        found = _read_files(path, readers.find_images(path), inputs)
        if not classes & set(found.labels or []):
            return found._replace(labels=None)
    else:
        found = _read_rows("--query", path, inputs)
    for name, label in zip(found.names, found.labels or [], strict=False):
        if label not in classes:
            known = ", ".join(sorted(classes))
            raise ValueError(f"{path} must have examples of the classes {known}, got {label!r} for {found.unit} {name}")
    return found


def _read_files(path: Path, files: list[Path], inputs: ImageInputs) -> ExampleSet:
    """Read images; the label of each is the folder in ``path`` that it is in, or empty."""
    names = [file.relative_to(path) for file in files]
    labels = [name.parts[0] if len(name.parts) > 1 else "" for name in names]
    images = [inputs.resize(readers.read_image(file)) for file in files]
    return ExampleSet("file", list(map(str, names)), images, labels)


def _read_rows(key: str, path: Path, inputs: Inputs) -> ExampleSet:
    """Read an npz file, or a table of vectors."""
    examples: NDArray[np.generic]
    labels: NDArray[np.generic] | None
    if isinstance(inputs, ImageInputs):
        readers.require_file(key, path, "a folder of images or an npz file", (".npz",))
        examples, labels = readers.read_images(path)
    elif isinstance(inputs, ExampleInputs):
        examples, labels, _ = readers.read_examples(path, inputs.label, key, inputs.columns)
        if list(examples.shape[1:]) != list(inputs.shape):
            raise ValueError(f"{path} must hold examples of shape {list(inputs.shape)}, got {list(examples.shape[1:])}")
    else:
        raise ValueError(f"{key} needs a run whose stream describes its inputs, and this one does not, got {path}")
    names = [str(row) for row in range(1, len(examples) + 1)]
    return ExampleSet("row", names, examples, None if labels is None else labels.astype(str).tolist())


def predict_classes(adapted: AdaptedClassifier, queries: ExampleSet, transductive: bool, title: str) -> Predictions:
    """Predict the classes of queries; a column ``p(class)`` holds the probability of each class."""
    probabilities = adapted.probabilities(queries.examples, transductive)
    classes = [str(name) for name in adapted.classes]
    columns: dict[str, Any] = {queries.unit: queries.names}
    if queries.labels is not None:
        columns["actual"] = queries.labels
    columns["predicted"] = [classes[i] for i in probabilities.argmax(-1).tolist()]
    columns |= {f"p({name})": probabilities[:, i].numpy() for i, name in enumerate(classes)}
    return Predictions(pl.DataFrame(columns), title)


def draw_predictions(predictions: Predictions, images: list[NDArray[np.uint8]], path: Path) -> None:
    """Draw some evenly spaced images, each with its predicted class, and its actual one where that is another."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    from obbo_lightning.runs.figures import BLUE, ORANGE

    count = min(SHOWN, len(images))
    columns = min(5, count)
    rows = -(-count // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(1.9 * columns, 2.2 * rows), squeeze=False)
    figure.subplots_adjust(0.01, 0.01, 0.99, 1 - 0.4 / (2.2 * rows), wspace=0.05, hspace=0.3)
    for panel in axes.flat:
        panel.set_axis_off()
    for panel, i in zip(axes.flat, np.linspace(0, len(images) - 1, count).astype(int).tolist(), strict=False):
        row = predictions.table.row(i, named=True)
        correct = row.get("actual", row["predicted"]) == row["predicted"]
        name = row["predicted"]
        title = f"{name}  {row[f'p({name})']:.2f}" + ("" if correct else f"\nis {row['actual']}")
        panel.set_title(escape_mathtext(title), fontsize=9, color=BLUE if correct else ORANGE)
        panel.imshow(images[i] if images[i].shape[2] == 3 else images[i][:, :, 0], cmap="gray", vmin=0, vmax=255)
    with replacing(path) as aside:
        figure.savefig(aside, dpi=120, format="png")
    plt.close(figure)


def predict_rows(
    run: str | Path,
    query: str | Path,
    csv: str | Path | None = None,
    checkpoint: str | Path | None = None,
    trust: bool = False,
) -> Predictions:
    """Predict rows of a file with the model that the run's next round would fit: the last blocks, weighted by λ.

    The table of the `Predictions` has ``row``, ``actual`` where the target of all rows is known, ``predicted``, and for
    classes the ``probability`` of the predicted one.

    Args:
        run: directory of a run with ``data.csv``, or a folder above it, for its newest run.
        query: a CSV file with the same features; the target may be missing.
        csv: the run's table, where it has moved or grown.
        checkpoint: of the run; None for its newest.
        trust: import classes that the run names (``file.py:Class``) although no installed package has them.
    """
    with untrusted_source(None if trust else f"predict_rows({str(run)!r}, …, trust=True)"):
        return predict_with_run(RunDirectory.newest(run), Path(query), csv, Path(checkpoint) if checkpoint else None)


def predict_with_run(
    run: RunDirectory, query: Path, csv: str | Path | None = None, checkpoint: Path | None = None
) -> Predictions:
    """Do what `predict_rows` does, where it has been decided already whether the run is trusted."""
    file = usable_checkpoint(run, checkpoint)
    config = complete_config(read_config(run))
    for key, needed in (("data", ForgettingStream), ("problem", Forgetting)):
        found = component_class(config, key)
        if found is None or not issubclass(found, needed):
            name = "none" if found is None else found.__name__
            raise ValueError(
                f"predict_rows needs a run on a table (--config forgetting), got {run.path} with the {key} {name}"
            )
    data = config["data"] | ({} if csv is None else {"csv": str(csv)})
    if data.get("csv") is None:
        raise ValueError(f"predict_rows needs a run with data.csv, got {run.path}, whose rows are synthetic")
    stream = build_stream({**config, "data": data})
    problem = build_problem(config, stream)
    assert isinstance(stream, ForgettingStream)
    assert isinstance(problem, Forgetting)
    features, actual = read_queries(query.expanduser(), stream.columns, data["target"])
    tasks, weights = stream.train, read_checkpoint(file)["state_dict"]["outer"].double()
    # β̂(λ) on the blocks before the one that comes next
    inner = problem.solution(weights, tasks.known(len(tasks)))
    fitted = tasks.scaled(features, len(tasks)) @ inner[0]
    if tasks.kind == "regression":
        mean, deviation = tasks.target_scale(len(tasks))
        predicted = {"predicted": pl.Series((mean + deviation * fitted).tolist())}
        actual = None if actual is None else actual.cast(pl.Float64, strict=False)
    else:
        probability = fitted.sigmoid()
        predicted = {
            "predicted": pl.Series([stream.classes[int(one)] for one in (probability > 0.5).tolist()]),
            "probability": pl.Series(torch.maximum(probability, 1 - probability).tolist()),
        }
    columns = {"row": pl.Series(range(1, len(features) + 1))}
    if actual is not None and not actual.null_count():
        columns["actual"] = actual
    fitted_rows = tasks.past * tasks.target.shape[1]
    title = f"{data['target']}, fitted to the last {fitted_rows} rows with learned weights"
    return Predictions(pl.DataFrame(columns | predicted), title)
