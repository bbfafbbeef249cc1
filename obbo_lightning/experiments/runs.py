"""Finished runs on disk: found, read, told apart; what cannot be used is named and left out."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import yaml

from obbo_lightning.training.run_directory import RunDirectory

NEEDED = ("algorithm", "data", "seed", "rounds", "regret_window", "evaluation")
MAY_DIFFER = ("root", "start")  # of the data of runs that are compared
# In tables and legends: the paper's, then the others'.
ORDER = ("obbo", "sobbo", "sobow", "oagd", "adam", "sgdm", "maml", "anil")
DAMAGE = (OSError, ValueError, KeyError, TypeError, pl.exceptions.PolarsError)


class Run(NamedTuple):
    """A finished run."""

    directory: RunDirectory
    settings: dict[str, Any]
    summary: dict[str, Any]
    metrics: pl.DataFrame
    label: str = ""


class LeftOut(NamedTuple):
    """A run that a report could not use."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path} is left out: {self.reason}"


def find_runs(paths: Sequence[Path]) -> tuple[list[Run], list[LeftOut]]:
    """The finished runs of one experiment, wherever they are under ``paths``, and what was left out and why."""
    found, left_out = [], []
    for directory in _directories(paths):
        try:
            found.append(read_run(directory))
        except ValueError as reason:
            left_out.append(LeftOut(directory.path, str(reason)))
    if found:
        usual = Counter(_fingerprint(run) for run in found).most_common(1)[0][0]
        first = next(run for run in found if _fingerprint(run) == usual)
        strangers = [run for run in found if _fingerprint(run) != usual]
        left_out += [LeftOut(run.directory.path, _what_differs(run, first)) for run in strangers]
        found = [run for run in found if _fingerprint(run) == usual]
    if not found:
        why = f": {left_out[0].path} {left_out[0].reason}" if left_out else ""
        raise ValueError(f"report needs finished runs, and found none in {', '.join(map(str, paths))}{why}")
    return found, left_out


def _directories(paths: Sequence[Path]) -> Iterator[RunDirectory]:
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"report needs directories, got {str(path)!r}")
        yield from (RunDirectory(config.parent) for config in sorted(path.rglob("config.yaml")))


def read_run(directory: RunDirectory) -> Run:
    """A finished run's files; refuses damaged ones in one line."""
    settings = read_settings(directory)
    if not directory.finished:
        raise ValueError("it is not finished")
    try:
        summary = json.loads(directory.summary.read_text())
        metrics = pl.read_csv(directory.metrics, infer_schema_length=None)
        rounds, metric = summary["rounds"], summary["metric"]
        # A column without any number is read as text: an exact regret that nobody knows, an error of one task.
        numbers = [name for name in metrics.columns if metrics[name].null_count() < len(metrics)]
        metrics = metrics.with_columns(pl.col(name).cast(pl.Float64) for name in numbers)
        if metrics["round"].to_list() != list(range(1, rounds + 1)):
            raise ValueError(f"metrics.csv must have the rounds 1 to {rounds}, got {len(metrics)} rows")
        for name in (metric, f"test_{metric}", "regret/euclidean", "hypergradient_norm", "gradients", "products"):
            metrics[name].cast(pl.Float64)
    except DAMAGE as damage:
        raise ValueError(f"it is damaged: {type(damage).__name__} {' '.join(str(damage).split())}") from None
    return Run(directory, settings, summary, metrics)


def read_settings(directory: RunDirectory) -> dict[str, Any]:
    """A run's configuration."""
    try:
        found = yaml.safe_load(directory.config.read_text())
    except (OSError, ValueError, yaml.YAMLError) as damage:
        raise ValueError(f"its config.yaml cannot be read: {type(damage).__name__}") from None
    for key in NEEDED:
        if not isinstance(found, dict) or key not in found:
            raise ValueError(f"its config.yaml has no {key}")
    return dict(found)


def label_runs(runs: Sequence[Run]) -> tuple[list[Run], list[LeftOut]]:
    """With the algorithm's name and whatever tells it from others of that name; each seed once, of equal length."""
    labels = tell_apart([{**r.settings["algorithm"], "start": r.settings["data"].get("start")} for r in runs])
    labelled = [run._replace(label=label) for run, label in zip(runs, labels, strict=True)]
    kept: dict[tuple[str, int], Run] = {}
    left_out = []
    for run in labelled:
        lengths = Counter(other.settings["rounds"] for other in labelled if other.label == run.label)
        (usual, _), *_ = lengths.most_common(1)
        other = kept.setdefault((run.label, run.settings["seed"]), run)
        if run.settings["rounds"] != usual:
            reason = f"{run.settings['rounds']} rounds, where the other seeds of {run.label} have {usual}"
        elif other is not run:
            reason = f"{run.label} with seed {run.settings['seed']} is in {other.directory.path} already"
        else:
            continue
        left_out.append(LeftOut(run.directory.path, reason))
        if other is run:
            del kept[run.label, run.settings["seed"]]
    return list(kept.values()), left_out


def tell_apart(algorithms: Sequence[dict[str, Any]]) -> list[str]:
    """Names, followed by the settings in which those of the same name differ.

    >>> tell_apart([{"name": "obbo", "lr": 0.1}, {"name": "obbo", "lr": 0.2}, {"name": "adam", "lr": 0.1}])
    ['obbo, lr = 0.1', 'obbo, lr = 0.2', 'adam']
    """
    flat = [dict(_leaves(a)) for a in algorithms]
    short = [_label(one, flat, absent_differs=False) for one in flat]
    kinds = {str(sorted(one.items(), key=str)) for one in flat}
    return short if len(set(short)) == len(kinds) else [_label(one, flat, absent_differs=True) for one in flat]


def _label(one: dict[str, Any], flat: Sequence[dict[str, Any]], absent_differs: bool) -> str:
    """A geometry's own settings are not worth mentioning where the others have another geometry."""
    same = [other for other in flat if other["name"] == one["name"]]
    words = [one["name"]]
    for key, value in one.items():
        if any(other.get(key) != value for other in same if absent_differs or key in other):
            words.append(f"{key.removesuffix('.name')} = {f'{value:g}' if isinstance(value, float) else value}")
    return ", ".join(words)


def sorted_labels(labels: Sequence[str]) -> list[str]:
    """The paper's algorithms first, numbers in their order."""
    return sorted(labels, key=lambda label: (_place(label.partition(",")[0]), _natural(label)))


def _place(algorithm: str) -> int:
    return ORDER.index(algorithm) if algorithm in ORDER else len(ORDER)


def _natural(label: str) -> list[tuple[float, str]]:
    words = label.replace(",", " ").split()
    return [(float(word), "") if _is_number(word) else (0.0, word) for word in words]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _yardstick(settings: dict[str, Any]) -> dict[str, Any]:
    """What runs must share to be compared; quadratic streams may differ in what their rates are taken over."""
    free = (*MAY_DIFFER, "condition_number") if settings["data"]["name"] == "quadratic" else MAY_DIFFER
    return {
        "data": {k: v for k, v in settings["data"].items() if k not in free},
        "problem": settings.get("problem"),
        "regret_window": None if settings["data"]["name"] == "quadratic" else settings["regret_window"],
        "evaluation.tasks": settings["evaluation"]["tasks"],
    }


def _fingerprint(run: Run) -> str:
    return json.dumps(_yardstick(run.settings), sort_keys=True, default=str)


def _what_differs(run: Run, first: Run) -> str:
    mine, theirs = _yardstick(run.settings), _yardstick(first.settings)
    keys = ", ".join(key for key in mine if mine[key] != theirs[key])
    return f"it is of another experiment, with another {keys} than {first.directory.path}"


def _leaves(settings: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        where = f"{path}.{key}" if path else key
        if isinstance(value, dict):
            yield from _leaves(value, where)
        else:
            yield where, value
