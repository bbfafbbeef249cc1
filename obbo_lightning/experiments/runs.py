"""Finished runs on disk: found, read, told apart; what cannot be used is named and left out."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from obbo_lightning.config.parse import Config
from obbo_lightning.config.registry import UntrustedError, find_component
from obbo_lightning.experiments.names import distinct_names
from obbo_lightning.runs.directory import RunDirectory, read_config
from obbo_lightning.runs.provenance import require_intact
from obbo_lightning.runs.table import read_rounds
from obbo_lightning.streams.stream import Stream

NEEDED = ("algorithm", "data", "seed", "rounds", "regret_window", "evaluation")
# Of metrics.csv, besides those of the metric.
COLUMNS = ("regret/euclidean", "hypergradient_norm", "residual", "gradients", "products")
# In tables and legends: the paper's, then the others'.
ORDER = ("obbo", "sobbo", "sobow", "oagd", "adam", "sgdm", "maml", "anil")
JOURNAL = "study.journal"  # Optuna's, in the folder of a search; what lies beside it are trials
DAMAGE = (OSError, ValueError, KeyError, TypeError, pl.exceptions.PolarsError)


class Run(NamedTuple):
    """A finished run.

    Attributes:
        directory: where it is.
        settings: its complete configuration.
        summary: the numbers that people compare; ``summary["metric"]`` says what it is judged by.
        metrics: a row a round.
        stream: the class of its data, which says what runs must share to be compared.
        label: what it is called among others.
    """

    directory: RunDirectory
    settings: Config
    summary: dict[str, Any]
    metrics: pl.DataFrame
    stream: type[Stream]
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
        except UntrustedError:
            raise
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
        for config in sorted(path.rglob("config.yaml")):
            if not (config.parents[1] / JOURNAL).is_file():  # a search's trials are not compared
                yield RunDirectory(config.parent)


def read_run(directory: RunDirectory) -> Run:
    """A finished run's files; refuses damaged ones in one line."""
    settings = _read_settings(directory)
    if not directory.finished:
        raise ValueError("it is not finished")
    try:
        summary = json.loads(directory.summary.read_text())
        require_intact(directory)
        metrics = read_rounds(directory.metrics)
        rounds, metric = summary["rounds"], summary["metric"]
        if metrics["round"].to_list() != list(range(1, rounds + 1)):
            raise ValueError(f"metrics.csv must have the rounds 1 to {rounds}, got {len(metrics)} rows")
        metrics.select(metric, f"test_{metric}", f"test_{metric}_se", *COLUMNS)
    except DAMAGE as damage:
        raise ValueError(f"it is damaged: {type(damage).__name__} {' '.join(str(damage).split())}") from None
    return Run(directory, settings, summary, metrics, _stream_class(settings["data"]["name"]))


def _stream_class(name: str) -> type[Stream]:
    """Of a run's data; of data that cannot be loaded any more nothing is known but that it is a stream."""
    try:
        return find_component("data", name)
    except UntrustedError:
        raise
    except ValueError:
        return Stream


def _read_settings(directory: RunDirectory) -> Config:
    try:
        found = read_config(directory)
    except ValueError:
        raise ValueError("its config.yaml cannot be read") from None
    for key in NEEDED:
        if key not in found:
            raise ValueError(f"its config.yaml has no {key}")
    return found


def label_runs(runs: Sequence[Run]) -> tuple[list[Run], list[LeftOut]]:
    """With the algorithm's name and whatever tells it from others of that name; each seed once, of equal length."""
    labels = tell_apart([{**run.settings["algorithm"], **_chosen_data(run)} for run in runs])
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


def without_repetitions(runs: Sequence[Run]) -> list[Run]:
    """Seeds that gave the same run, number for number, count once: rows of a file are the same for every seed."""
    kept: list[Run] = []
    for run in runs:
        if not any(run.label == other.label and run.metrics.equals(other.metrics) for other in kept):
            kept.append(run)
    return kept


def _chosen_data(run: Run) -> dict[str, Any]:
    """What runs on the same data may choose, such as where λ starts; a text only says where the data lie."""
    chosen = {key: run.settings["data"].get(key) for key in run.stream.may_differ}
    return {key: value for key, value in chosen.items() if not isinstance(value, str)}


def tell_apart(algorithms: Sequence[dict[str, Any]]) -> list[str]:
    """Names, followed by the settings in which those of the same name differ.

    >>> tell_apart([{"name": "obbo", "lr": 0.1}, {"name": "obbo", "lr": 0.2}, {"name": "adam", "lr": 0.1}])
    ['obbo, lr = 0.1', 'obbo, lr = 0.2', 'adam']
    >>> tell_apart([{"name": "/home/me/mine.py:Sparse"}, {"name": "package.theirs.Sparse"}])
    ['Sparse_mine', 'Sparse_theirs']
    """
    flat = _with_short_names([dict(_leaves(a)) for a in algorithms])
    short = [_label(one, flat, absent_differs=False) for one in flat]
    kinds = {str(sorted(one.items(), key=str)) for one in flat}
    return short if len(set(short)) == len(kinds) else [_label(one, flat, absent_differs=True) for one in flat]


def _with_short_names(flat: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Settings with their parts (``name``, ``geometry.name``, …) as tables and legends call them."""
    keys = {key for one in flat for key in one if key.rpartition(".")[2] == "name"}
    words = {key: distinct_names(sorted({one[key] for one in flat if one.get(key)})) for key in keys}
    return [{key: words.get(key, {}).get(value, value) for key, value in one.items()} for one in flat]


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


def _yardstick(run: Run) -> dict[str, Any]:
    """What runs must share to be compared; where rates are fitted, w_R follows what they are fitted over."""
    settings, over = run.settings, run.stream.rates_over
    return {
        "data": {k: v for k, v in settings["data"].items() if k not in (*run.stream.may_differ, over)},
        "problem": settings.get("problem"),
        "regret_window": None if over else settings["regret_window"],
        "evaluation.tasks": settings["evaluation"]["tasks"],
    }


def _fingerprint(run: Run) -> str:
    return json.dumps(_yardstick(run), sort_keys=True, default=str)


def _what_differs(run: Run, first: Run) -> str:
    mine, theirs = _yardstick(run), _yardstick(first)
    keys = ", ".join(key for key in mine if mine[key] != theirs[key])
    return f"it is of another experiment, with another {keys} than {first.directory.path}"


def _leaves(settings: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        where = f"{path}.{key}" if path else key
        if isinstance(value, dict):
            yield from _leaves(value, where)
        else:
            yield where, value
