"""`predict` and `export`: use what a run has learned, here or in other programs."""

import argparse
import os
from collections import Counter

from rich.console import Console
from rich.table import Table

from obbo_lightning.inference.artifact import read_artifact
from obbo_lightning.inference.model import LearnedClassifier, export_model, model_from
from obbo_lightning.inference.predictions import (
    Predictions,
    draw_predictions,
    predict_classes,
    predict_with_run,
    read_query,
    read_support,
)
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.runs.summary import PlainConsole

FIRST_ROWS = 8  # rows of a table that are printed


def export(arguments: argparse.Namespace) -> int:
    """Write what a run has learned as files that other programs read, and print their names."""
    model, console = export_model(arguments.run, arguments.out, arguments.checkpoint, arguments.kind), PlainConsole()
    lines = [f"{arguments.out}: {model.title}"]
    lines += [f"  {file.name}  {file.stat().st_size / 1000:.1f} kB" for file in sorted(arguments.out.iterdir())]
    if isinstance(model, LearnedClassifier):
        lines.append(f"next: python -m obbo_lightning predict {arguments.out} --support DIR --query DIR")
    elif "note" in model.metadata:
        lines.append(f"λ has no names: {model.metadata['note']}")
    console.print("\n".join(lines), soft_wrap=True, highlight=False)
    return 0


def predict(arguments: argparse.Namespace) -> int:
    """Predict classes of examples, or rows of a table; print a table, and write all predictions to a CSV file."""
    output = arguments.output
    if output.suffix != ".csv" or not os.access(output.absolute().parent, os.W_OK):
        raise ValueError(f"--output must be a csv file in a folder that can be written, got {str(output)!r}")
    model = model_from(read_artifact(arguments.source, arguments.checkpoint))
    if isinstance(model, LearnedClassifier):
        _classify(model, arguments)
    else:
        _predict_rows(arguments)
    return 0


def _classify(model: LearnedClassifier, arguments: argparse.Namespace) -> None:
    if arguments.support is None:
        raise ValueError("predict: the following arguments are required: --support")
    _refuse_flags(arguments, {"csv": "--data.csv"}, "a run on a table")
    support = read_support(arguments.support, model.inputs)
    labels = support.labels or []
    queries = read_query(arguments.query, model.inputs, set(labels))
    console = PlainConsole()
    with console.status(f"adapting to {len(labels)} examples, predicting {len(queries.names)} queries"):
        adapted = model.adapt(support.examples, labels, arguments.steps, arguments.lr)
        way = "transductive" if arguments.transductive else "inductive"
        predictions = predict_classes(adapted, queries, arguments.transductive, f"{model.title}, {way}")
    predictions.write(arguments.output)
    print_classes(console, predictions, list(map(str, adapted.classes)))
    ways = model.metadata["init_args"]["network"]["init_args"].get("ways")
    if arguments.steps is None and ways is not None and len(adapted.classes) > ways:
        console.print(f"{len(adapted.classes)} classes, and {ways} in training: more --steps may help", highlight=False)
    console.print(str(arguments.output), soft_wrap=True, highlight=False)
    if queries.unit == "file":
        figure = arguments.output.with_suffix(".png")
        draw_predictions(predictions, queries.examples, figure)
        console.print(str(figure), soft_wrap=True, highlight=False)


def print_classes(console: Console, predictions: Predictions, classes: list[str]) -> None:
    """Print how often each class was predicted; where the classes are known, the confusion matrix and the accuracy."""
    predicted = predictions.table["predicted"].to_list()
    if predictions.accuracy is None:
        table = Table("predicted", "queries", title=predictions.title)
        for name in classes:
            table.add_row(name, str(predicted.count(name)))
        console.print(table)
        return
    table = Table("actual", *classes, title=f"{predictions.title}: actual in rows, predicted in columns")
    counts = Counter(zip(predictions.table["actual"], predicted, strict=True))
    for actual in classes:
        table.add_row(actual, *(str(counts[actual, name] or "·") for name in classes))
    console.print(table)
    console.print(f"accuracy {predictions.accuracy:.3f} on {len(predicted)} queries", highlight=False)


def _predict_rows(arguments: argparse.Namespace) -> None:
    from obbo_lightning.training.run import format_warnings

    few_shot_flags = {name: f"--{name}" for name in ("support", "steps", "lr", "transductive")}
    _refuse_flags(arguments, few_shot_flags, "a few-shot run")
    format_warnings()
    predictions = predict_with_run(
        RunDirectory.newest(arguments.source), arguments.query, arguments.csv, arguments.checkpoint
    )
    predictions.write(arguments.output)
    first = predictions.table.head(FIRST_ROWS)
    table = Table(*first.columns, title=predictions.title)
    for row in first.iter_rows():
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row))
    if len(predictions.table) > len(first):
        table.add_row("…")
    console = PlainConsole()
    console.print(table)
    for name in ("accuracy", "mean_absolute_error"):
        score = getattr(predictions, name)
        if score is not None:
            text = f"{name.replace('_', ' ')} {score:.4g} on {len(predictions.table)} rows"
            console.print(text, highlight=False)
    console.print(str(arguments.output), soft_wrap=True, highlight=False)


def _refuse_flags(arguments: argparse.Namespace, flags: dict[str, str], needed: str) -> None:
    for name, flag in flags.items():
        if getattr(arguments, name):
            raise ValueError(f"predict: {flag} needs {needed}, got {arguments.source}")
