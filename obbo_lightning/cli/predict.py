"""`predict`: what a run has learned, on data of yours."""

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from obbo_lightning.cli.flags import Flags, require_csv
from obbo_lightning.core.validation import at_least, positive
from obbo_lightning.parts import short_name
from obbo_lightning.runs.console import PlainConsole
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.runs.earlier import read_settings
from obbo_lightning.serving.events import is_market
from obbo_lightning.serving.inputs import ImageInputs
from obbo_lightning.serving.learned import LearnedNetwork, learned
from obbo_lightning.serving.parcel import ABOUT, read_parcel, title_of
from obbo_lightning.serving.predictions import Predictions, predict_in_batches
from obbo_lightning.serving.rows import is_table
from obbo_lightning.serving.sets import read_query, read_support
from obbo_lightning.settings.files import Settings


def run(arguments: list[str]) -> int:
    """Adapt to the support examples and say what the queries are; each kind of problem has its own way to predict."""
    asked, others = Flags("predict").parse_known_args(arguments)
    settings = _settings_of(asked.source)
    if settings is not None and is_market(settings):
        from obbo_lightning.cli import market_forecast  # which needs more than a network does

        return market_forecast.run(arguments)
    if settings is not None and is_table(settings):
        from obbo_lightning.cli import row_forecast

        return row_forecast.run(arguments)
    parcel = read_parcel(asked.source, asked.checkpoint)
    found = learned(parcel)
    if not isinstance(found, LearnedNetwork):
        what = short_name(found.about["problem"] or "a problem that could not be written down")
        raise ValueError(f"predict needs a few-shot, a table's or a market run, and {asked.source} is of {what}")
    if others:
        raise ValueError(f"predict: unrecognized arguments: {' '.join(others)}")
    return _classify(found, asked, title_of(parcel))


def _settings_of(source: Path) -> Settings | None:
    """Of a run; an export or a checkpoint is of a network, or of no use here."""
    if not source.is_dir() or (source / ABOUT).is_file() or not any(source.rglob("config.yaml")):
        return None
    return read_settings(RunDirectory.newest(source))


def _classify(found: LearnedNetwork, asked: argparse.Namespace, title: str) -> int:
    for name in ("support", "query"):
        if getattr(asked, name) is None:
            raise ValueError(f"predict: the following arguments are required: --{name}")
    steps = None if asked.steps is None else at_least("--steps", asked.steps, 1)
    lr = None if asked.lr is None else positive("--lr", asked.lr)
    require_csv(asked.output)
    support = read_support(asked.support, found.inputs)
    assert support.labels is not None
    queries = read_query(asked.query, found.inputs, set(support.labels))
    console = PlainConsole()
    with Progress(console=console, transient=True) as progress:
        progress.add_task(f"adapting to {len(support.labels)} examples", total=None)
        adapted = found.adapt(support.given, support.labels, steps, lr)
    with Progress(console=console) as progress:
        bar = progress.add_task(f"predicting {len(queries.names)} queries", total=len(queries.names))
        parts = []
        for part in predict_in_batches(adapted, queries, asked.transductive):
            parts.append(part)
            progress.advance(bar, len(part))
    predictions = Predictions([str(name) for name in adapted.classes], queries, torch.cat(parts))
    written = predictions.write(asked.output, "file" if isinstance(found.inputs, ImageInputs) else "row")
    _print(console, predictions, f"{title}, {'transductive' if asked.transductive else 'inductive'}")
    ways = found.about["ways"]
    if ways is not None and len(adapted.classes) > ways and steps is None:
        console.print(f"{len(adapted.classes)} classes, and {ways} in training: more --steps may help", highlight=False)
    for path in written:
        console.print(str(path), soft_wrap=True, highlight=False)
    return 0


def _print(console: Console, found: Predictions, title: str) -> None:
    """How many of what; with labels, accuracy and confusion."""
    accuracy, classes = found.accuracy(), found.classes
    if accuracy is None:
        table = Table("predicted", "queries", title=title)
        for name in classes:
            table.add_row(name, str(found.predicted.count(name)))
    else:
        table = Table("actual", *classes, title=f"{title}: actual in rows, predicted in columns")
        for name, counts in zip(classes, found.confusion(), strict=True):
            table.add_row(name, *(str(count) if count else "·" for count in counts))
    console.print(table)
    if accuracy is not None:
        console.print(f"accuracy {accuracy:.3f} on {len(found.queries.names)} queries", highlight=False)
