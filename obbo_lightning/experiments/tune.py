"""`tune`: each method of a comparison gets the same search, and the comparison is played with what was found."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import yaml

from obbo_lightning.config.build import build_stream
from obbo_lightning.config.parse import Config, ConfigError, complete_config, nested, overlay
from obbo_lightning.experiments.compare import Failure, prepare
from obbo_lightning.experiments.grid import Cell, Grid
from obbo_lightning.experiments.names import unused
from obbo_lightning.experiments.runs import JOURNAL, read_run, tell_apart
from obbo_lightning.experiments.search import Result, Search, Trial, open_journal
from obbo_lightning.experiments.slurm import JOB
from obbo_lightning.experiments.tune_request import Range, Request
from obbo_lightning.runs.directory import RunDirectory, read_config, write_atomically
from obbo_lightning.runs.status import RunStatus
from obbo_lightning.streams.stream import Metric, Stream, has_random_access
from obbo_lightning.training.run import build

Play = Callable[[Sequence[Cell], Sequence[RunDirectory]], list[Failure]]


class TrialsFailedError(Exception):
    """Trials that could not be played; the search goes on when they can."""

    exit_code = 1

    def __init__(self, failed: Sequence[Failure]) -> None:
        first = failed[0]
        super().__init__(f"{len(failed)} trials failed, the first is {first.cell}: {first.reason}")


class Method(NamedTuple):
    """What is tuned: the cells of a comparison that differ in their seed alone.

    Attributes:
        name: of its trials' folders.
        label: in tables and legends.
        cells: a seed each.
        ranges: where its settings are looked for.
        untuned: what they are without a search.
    """

    name: str
    label: str
    cells: list[Cell]
    ranges: dict[str, Range]
    untuned: dict[str, Any]


def methods_of(grid: Grid, request: Request) -> list[Method]:
    """The methods of a comparison, each with the settings of the search that it takes."""
    groups: dict[str, list[Cell]] = {}
    for cell in grid.cells:
        groups.setdefault(yaml.safe_dump({**cell.settings, "seed": None}), []).append(cell)
    names: list[str] = []
    for cells in groups.values():
        names.append(unused(re.sub(r"-seed_\d+", "", cells[0].name), names))
    labels = tell_apart([cells[0].settings["algorithm"] for cells in groups.values()])
    labels = labels if len(set(labels)) == len(labels) else names
    methods = []
    for name, label, cells in zip(names, labels, groups.values(), strict=True):
        untuned = {key: _at(cells[0].settings, key) for key in request.search}
        ranges = {key: given for key, given in request.search.items() if untuned[key] is not _ABSENT}
        methods.append(Method(name, label, cells, ranges, {key: untuned[key] for key in ranges}))
    for key in request.search:
        if not any(key in method.ranges for method in methods):
            raise ConfigError(f"tune.search.{key} must be taken by one of {', '.join(names)}, got {key!r}")
    return methods


_ABSENT = object()


def _at(settings: Config, key: str) -> Any:
    """A setting by its dotted key; a part stands for its name."""
    found: Any = settings
    for word in key.split("."):
        found = found.get(word, _ABSENT) if isinstance(found, dict) else _ABSENT
    return found.get("name", _ABSENT) if isinstance(found, dict) else found


def trial_rounds(method: Method, request: Request) -> int:
    """How long a whole trial is."""
    rounds: int = request.rounds or method.cells[0].settings["rounds"]
    return rounds


def trial_cell(method: Method, request: Request, trial: Trial, seed: int, rounds: int) -> Cell:
    """One seed of a trial, up to some round; it sees no test task, and its last digits depend on no other's."""
    settings = overlay(method.cells[0].settings, request.settings)
    settings = overlay(settings, nested(trial.values))
    tasks = request.tasks or settings["evaluation"]["tasks"]
    split = "validation" if request.judge == "validation" else "none"
    judged = {"every": trial_rounds(method, request), "tasks": tasks, "split": split, "baselines": False}
    # A step that is too long is a result, and no accident.
    fixed = {"seed": seed, "rounds": rounds, "on_nonfinite": "skip", "logger": "csv", "evaluation": judged}
    threads = 1 if settings["threads"] == "auto" else settings["threads"]
    name = f"{method.name}-trial_{trial.number:03d}" + (f"-seed_{seed}" if len(request.seeds) > 1 else "")
    return Cell(name, complete_config({**settings, **fixed, "threads": threads}))


class Tuning(NamedTuple):
    """A search that is over.

    Attributes:
        methods: what was tuned.
        searches: by their names.
    """

    methods: list[Method]
    searches: dict[str, Search]

    def found(self, method: Method) -> dict[str, Any]:
        """The settings of the best trial; those that it had where every trial blew up."""
        best = self.searches[method.name].best
        return dict(method.untuned if best is None else best.values)


def tune(grid: Grid, request: Request, folder: Path, play: Play) -> Tuning:
    """Search for all methods, or go on with that; the trials of all methods are played together.

    Args:
        grid: the comparison.
        request: what to search.
        folder: where the trials and Optuna's journal are.
        play: plays cells, and returns what failed.
    """
    methods = methods_of(grid, request)
    metric = _require_possible(methods, request)
    folder.mkdir(parents=True, exist_ok=True)
    with RunStatus().own(RunDirectory(folder)):  # one search at a time
        _require_same(folder, grid, request)
        journal = open_journal(folder / JOURNAL)
        searches = {
            m.name: Search(journal, m.name, request, m.ranges, m.untuned, trial_rounds(m, request), metric)
            for m in methods
        }
        while [trial for search in searches.values() for trial in search.generation()]:
            for stage in range(len(request.rungs) + 1):
                _play_stage(Tuning(methods, searches), request, stage, folder, play)
    return Tuning(methods, searches)


def _play_stage(tuning: Tuning, request: Request, stage: int, folder: Path, play: Play) -> None:
    """The trials that are not over, up to the next round at which they are judged; in the order of their numbers."""
    waiting: list[tuple[Method, Trial, int]] = []
    for method in tuning.methods:
        until = (*request.rungs, trial_rounds(method, request))[stage]
        waiting += [(method, trial, until) for trial in tuning.searches[method.name].trials if not trial.ended]
    cells = {
        (method.name, trial.number): [trial_cell(method, request, trial, seed, until) for seed in request.seeds]
        for method, trial, until in waiting
        if until not in trial.results
    }
    asked = [cell for several in cells.values() for cell in several]
    if asked:
        for cell in asked:
            lengthen(RunDirectory(folder / cell.name), cell.settings["rounds"])
        failed = play(asked, prepare(Grid("", asked), folder))
        if failed:
            raise TrialsFailedError(failed)
    for method, trial, until in waiting:
        result = Result(trial.results.get(until), trial.rounds, trial.calls)
        if result.value is None:
            runs = [RunDirectory(folder / cell.name) for cell in cells[method.name, trial.number]]
            result = _result(runs, method, request)
        tuning.searches[method.name].report(trial, until, result)


def lengthen(run: RunDirectory, rounds: int) -> None:
    """Let a trial that ended at an earlier rung be resumed further; killed in between it is finished as it was."""
    if run.finished and (settings := read_config(run))["rounds"] < rounds:
        (run.path / JOB).unlink(missing_ok=True)  # Slurm's job of the earlier rung may still be leaving the queue
        run.summary.unlink()
        write_atomically(run.config, yaml.safe_dump({**settings, "rounds": rounds}, sort_keys=False))


def _result(runs: Sequence[RunDirectory], method: Method, request: Request) -> Result:
    """The mean over seeds; None where one of them blew up, or would have in the comparison."""
    played = [read_run(run) for run in runs]
    prefix = "validation" if request.judge == "validation" else "stream"
    values = [run.summary[f"{prefix}_{run.summary['metric']}"] for run in played]
    calls = sum(int(run.metrics.select(pl.sum("gradients") + pl.sum("products")).item()) for run in played)
    rounds = sum(run.summary["rounds"] for run in played)
    raises = method.cells[0].settings["on_nonfinite"] == "raise"
    blown = any(value is None for value in values) or (raises and any(run.summary["skipped"] for run in played))
    return Result(None if blown else sum(values) / len(values), rounds, calls)


def _require_possible(methods: Sequence[Method], request: Request) -> Metric:
    """Refuse what cannot be searched fairly, before anything is written; returns what trials are judged by."""
    for method in methods:
        played = {cell.settings["seed"] for cell in method.cells} & set(request.seeds)
        if played:
            raise ConfigError(f"tune.seeds must be others than those of the comparison, got {min(played)} in both")
        rounds, cost = trial_rounds(method, request), trial_rounds(method, request) * len(request.seeds)
        if request.rungs and request.rungs[-1] >= rounds:
            raise ConfigError(f"tune.rungs must be before the last of the {rounds} rounds, got {request.rungs[-1]}")
        trials = 1
        for given in method.ranges.values() if request.sampler == "grid" else ():
            trials *= len(given.values)
        if request.unit == "rounds" and request.budget < trials * cost:
            raise ConfigError(
                f"tune.budget.rounds must be at least {trials * cost} for {trials} trials of {cost} rounds of "
                f"{method.name}, got {request.budget}"
            )
    first = methods[0]
    cell = trial_cell(first, request, Trial(0, first.untuned, {}, False, False, 0, 0), request.seeds[0], 1)
    stream = build(cell.settings).stream
    if request.judge == "stream" and _same_rounds(stream, build_stream(first.cells[0].settings)):
        raise ConfigError(
            f"tune.settings must name other data for tune.judge stream: the rounds of {cell.settings['data']['name']} "
            "are the same for every seed here, and the comparison plays them"
        )
    return stream.metric


def _same_rounds(one: Stream, other: Stream) -> bool:
    """Whether two streams begin with the same task; of those that arrive nobody knows."""
    if not (has_random_access(one.train) and has_random_access(other.train)):
        return False
    return one.fingerprint(0, one.train[0]) == other.fingerprint(0, other.train[0])


def _require_same(folder: Path, grid: Grid, request: Request) -> None:
    """A search that was begun goes on as it was begun."""
    asked = yaml.safe_dump({"tune": _as_plain(request), "cells": {c.name: c.settings for c in grid.cells}})
    file = folder / "request.yaml"
    if not file.is_file():
        write_atomically(file, asked)
    elif file.read_text() != asked:
        raise ValueError(f"{folder} was begun with another search: give --output another folder, or delete it")


def _as_plain(request: Request) -> dict[str, Any]:
    ranges = {key: [given.low, given.high, *given.values] for key, given in request.search.items()}
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in request._asdict().items()}
    return {**plain, "search": ranges}


def tuned_grid(grid: Grid, tuning: Tuning) -> tuple[Grid, dict[str, str]]:
    """The comparison and, beside its cells, the same with what was found; and which cell is which's tuned one.

    Where the search found what was there before, a cell is its own tuned one.
    """
    cells, pairs = [], {}
    for method in tuning.methods:
        for cell in method.cells:
            settings = complete_config(overlay(cell.settings, nested(tuning.found(method))))
            same = settings == cell.settings
            pairs[cell.name] = cell.name if same else f"{cell.name}-tuned"
            cells += [cell] if same else [cell, Cell(pairs[cell.name], settings)]
    return Grid(grid.name, cells), pairs
