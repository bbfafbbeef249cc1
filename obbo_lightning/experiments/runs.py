"""Finished runs on disk: find and read them, leave out what cannot be compared, and label them."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mode
from typing import Any, NamedTuple

import polars as pl

from obbo_lightning.config.parse import Config, flatten
from obbo_lightning.config.registry import UntrustedError, find_component
from obbo_lightning.experiments.grid import distinct_names
from obbo_lightning.runs.directory import RunDirectory, read_config
from obbo_lightning.runs.provenance import require_intact
from obbo_lightning.runs.status import find_run_directories
from obbo_lightning.runs.table import read_rounds
from obbo_lightning.streams.stream import Stream

STUDY = "study.journal"  # Optuna's storage; the runs beside it are trials, which reports leave out
DAMAGE = (OSError, ValueError, KeyError, TypeError, pl.exceptions.PolarsError)


class Run(NamedTuple):
    """A finished run."""

    directory: RunDirectory
    config: Config
    summary: dict[str, Any]
    metrics: pl.DataFrame  # one row per round
    stream: type[Stream]  # knows in what runs may differ and still be compared
    label: str = ""  # in tables and legends; runs that differ in their seed only share it


def find_finished_runs(paths: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Return the finished runs below ``paths`` that can be compared with most of the others, and why not the rest."""
    found, left_out = [], []
    for directory in find_run_directories(paths):
        if (directory.path.parent / STUDY).is_file():
            continue
        try:
            found.append(read_run(directory))
        except UntrustedError:
            raise
        except ValueError as refusal:
            left_out.append(f"{directory.path} is left out: {refusal}")
    if not found:
        why = f": {left_out[0]}" if left_out else ""
        raise ValueError(f"report needs finished runs, and found none in {', '.join(map(str, paths))}{why}")
    experiments = [_experiment(run) for run in found]
    usual = max(experiments, key=experiments.count)
    first = found[experiments.index(usual)].directory.path
    comparable = []
    for run, experiment in zip(found, experiments, strict=True):
        keys = ", ".join(key for key in usual if experiment[key] != usual[key])
        if keys:
            reason = f"it is of another experiment, with another {keys} than {first}"
            left_out.append(f"{run.directory.path} is left out: {reason}")
        else:
            comparable.append(run)
    return comparable, left_out


def read_run(directory: RunDirectory) -> Run:
    """Return a finished run; refuse one that is damaged or not finished, in one line."""
    if not directory.finished:
        raise ValueError("it is not finished")
    try:
        config, summary = read_config(directory), json.loads(directory.summary.read_text())
        require_intact(directory)
        metrics = read_rounds(directory.metrics)
    except DAMAGE as damage:
        raise ValueError(describe_damage(damage)) from None
    try:
        stream = find_component("data", config["data"]["name"])
    except UntrustedError:
        raise
    except ValueError:  # data that cannot be loaded any more
        stream = Stream
    return Run(directory, config, summary, metrics, stream)


def has_diverged(directory: RunDirectory) -> bool:
    """Return whether the last rounds of a finished run were all skipped as not finite; a report names damage."""
    try:
        return bool(json.loads(directory.summary.read_text())["diverged"])
    except DAMAGE:
        return False


def describe_damage(damage: BaseException) -> str:
    """Return an error of reading a run in one line."""
    return f"it is damaged: {type(damage).__name__} {' '.join(str(damage).split())}"


def _experiment(run: Run) -> dict[str, Any]:
    """Return what runs must share to be compared; where rates are fitted, w_R follows what they are fitted over."""
    config, over = run.config, run.stream.rates_over
    return {
        "data": {k: v for k, v in config["data"].items() if k not in (*run.stream.may_differ, over)},
        "problem": config.get("problem"),
        "regret_window": None if over else config["regret_window"],
        "evaluation.tasks": config["evaluation"]["tasks"],
    }


def label_runs(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Return runs with labels: each seed of a label once, all of the same length; and those left out.

    A run equal to another seed's, as on rows of a file, which are the same for every seed, is not counted.
    """
    settings = []
    for run in runs:
        chosen = {key: run.config["data"].get(key) for key in run.stream.may_differ}
        chosen = {key: value for key, value in chosen.items() if not isinstance(value, str)}  # texts name files
        settings.append({**run.config["algorithm"], **chosen})
    labelled = [run._replace(label=label) for run, label in zip(runs, distinct_labels(settings), strict=True)]
    kept: dict[tuple[str, int], Run] = {}
    left_out = []
    for run in labelled:
        rounds, key = run.config["rounds"], (run.label, run.config["seed"])
        usual = mode(other.config["rounds"] for other in labelled if other.label == run.label)
        if rounds != usual:
            reason = f"{rounds} rounds, where the other seeds of {run.label} have {usual}"
            left_out.append(f"{run.directory.path} is left out: {reason}")
        elif key in kept:
            reason = f"{run.label} with seed {key[1]} is in {kept[key].directory.path} already"
            left_out.append(f"{run.directory.path} is left out: {reason}")
        elif not any(run.label == other.label and run.metrics.equals(other.metrics) for other in kept.values()):
            kept[key] = run
    return list(kept.values()), left_out


def distinct_labels(algorithms: Sequence[dict[str, Any]]) -> list[str]:
    """Return names of algorithms, followed by the settings in which those of one name differ.

    >>> distinct_labels([{"name": "obbo", "lr": 0.1}, {"name": "obbo", "lr": 0.2}, {"name": "adam", "lr": 0.1}])
    ['obbo, lr = 0.1', 'obbo, lr = 0.2', 'adam']
    >>> distinct_labels([{"name": "/home/me/mine.py:Sparse"}, {"name": "package.theirs.Sparse"}])
    ['Sparse_mine', 'Sparse_theirs']
    """
    flat = [dict(flatten(algorithm)) for algorithm in algorithms]
    for key in {key for one in flat for key in one if key.rpartition(".")[2] == "name"}:
        words = distinct_names(sorted({one[key] for one in flat if one.get(key)}))
        flat = [one | ({key: words[one[key]]} if one.get(key) else {}) for one in flat]
    short = [_label(one, flat, absent_differs=False) for one in flat]
    if len(set(short)) == len({str(sorted(one.items(), key=str)) for one in flat}):
        return short
    return [_label(one, flat, absent_differs=True) for one in flat]


def _label(one: dict[str, Any], flat: Sequence[dict[str, Any]], absent_differs: bool) -> str:
    """Return a label; settings that only some geometries have are left out where the geometry's name says enough."""
    same = [other for other in flat if other["name"] == one["name"]]
    words = [one["name"]]
    for key, value in one.items():
        if any(other.get(key) != value for other in same if absent_differs or key in other):
            words.append(f"{key.removesuffix('.name')} = {format_setting(value)}")
    return ", ".join(words)


def format_setting(value: Any) -> str:
    """Return a value of a configuration as text; empty for None."""
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
