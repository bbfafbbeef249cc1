"""Runs side by side: one table of runs, one of their rounds, and what is said about both."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import yaml

from obbo_lightning.training.run_directory import RunDirectory

RUN_COLUMNS = {
    "label": pl.String,
    "algorithm": pl.String,
    "seed": pl.Int64,
    "lr": pl.Float64,
    "rounds": pl.Int64,
    "metric": pl.String,
    "test_tasks": pl.Int64,
    "untrained_test": pl.Float64,
    "test": pl.Float64,
    "test_se": pl.Float64,
    "gain": pl.Float64,
    "gain_se": pl.Float64,
    "stream_last_100": pl.Float64,
    "regret": pl.Float64,
    "skipped": pl.Int64,
    "calls": pl.Float64,
}
ROUND_COLUMNS = {
    "label": pl.String,
    "seed": pl.Int64,
    "round": pl.Int64,
    "score": pl.Float64,
    "test": pl.Float64,
    "test_se": pl.Float64,
    "regret": pl.Float64,
    "hypergradient_norm": pl.Float64,
    "residual": pl.Float64,
}
MAY_DIFFER = ("root", "start")  # of the data of runs that are compared
# In tables and legends: the paper's, then the others'.
ORDER = ("obbo", "sobbo", "sobow", "oagd", "adam", "sgdm", "maml", "anil")


class Comparison(NamedTuple):
    """What several runs of one experiment gave.

    Attributes:
        runs: a row a run.
        rounds: a row a round of a run.
    """

    runs: pl.DataFrame
    rounds: pl.DataFrame

    @property
    def metric(self) -> str:
        """Accuracy or loss."""
        return str(self.runs["metric"][0])

    @property
    def labels(self) -> list[str]:
        """Algorithms (and what tells two of the same apart), the paper's first."""
        return sorted_labels(self.runs["label"].unique(maintain_order=True).to_list())


def finished_runs(paths: Sequence[Path]) -> list[RunDirectory]:
    """All of them, wherever they are under ``paths``."""
    found = [run for run in _runs(paths) if run.finished]
    if not found:
        raise ValueError(f"report needs finished runs, and found none in {', '.join(map(str, paths))}")
    return found


def read_comparison(finished: Sequence[RunDirectory]) -> Comparison:
    """From finished run directories."""
    settings = [read_settings(run) for run in finished]
    labels = label_runs(finished, settings)
    rows, rounds = [], []
    for run, setting, label in zip(finished, settings, labels, strict=True):
        row, table = _read_run(run, setting, label)
        rows.append(row)
        rounds.append(table)
    return _sorted(Comparison(pl.DataFrame(rows, schema=RUN_COLUMNS), pl.concat(rounds)))


def _sorted(comparison: Comparison) -> Comparison:
    place = {label: i for i, label in enumerate(comparison.labels)}
    by_label = pl.col("label").replace_strict(place, return_dtype=pl.Int64)
    return Comparison(
        comparison.runs.sort(by_label, "seed"), comparison.rounds.sort(by_label, "seed", "round", maintain_order=True)
    )


def _runs(paths: Sequence[Path]) -> Iterator[RunDirectory]:
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"report needs directories, got {str(path)!r}")
        yield from (RunDirectory(config.parent) for config in sorted(path.rglob("config.yaml")))


def label_runs(runs: Sequence[RunDirectory], settings: Sequence[dict[str, Any]]) -> list[str]:
    """The algorithm's name, with whatever tells it from others of that name; refuses runs of several experiments."""
    first = _yardstick(settings[0])
    for run, setting in zip(runs, settings, strict=True):
        for key, value in _yardstick(setting).items():
            if value != first[key]:
                raise ValueError(
                    f"report needs runs of one experiment, got another {key} in {run.path} than in {runs[0].path}"
                )
    labels = tell_apart([{**s["algorithm"], "start": s["data"].get("start")} for s in settings])
    seen: dict[tuple[str, int], int] = {}
    for i, (label, setting) in enumerate(zip(labels, settings, strict=True)):
        other = seen.setdefault((label, setting["seed"]), i)
        if other != i:
            raise ValueError(
                f"report needs each seed once, got {label} with seed {setting['seed']} in {runs[i].path} and in "
                f"{runs[other].path}"
            )
        if setting["rounds"] != settings[labels.index(label)]["rounds"]:
            raise ValueError(
                f"report needs the same rounds for all seeds of {label}, got {setting['rounds']} in {runs[i].path}"
            )
    return labels


def _yardstick(settings: dict[str, Any]) -> dict[str, Any]:
    """What runs must share to be compared."""
    return {
        "data": {k: v for k, v in settings["data"].items() if k not in MAY_DIFFER},
        "problem": settings.get("problem"),
        "regret_window": settings["regret_window"],
        "evaluation.tasks": settings["evaluation"]["tasks"],
    }


def read_settings(run: RunDirectory) -> dict[str, Any]:
    """A run's configuration."""
    found = yaml.safe_load(run.config.read_text())
    for key in ("algorithm", "data", "seed", "rounds", "regret_window", "evaluation"):
        if not isinstance(found, dict) or key not in found:
            raise ValueError(f"{run.path} cannot be reported: its config.yaml has no {key}")
    return dict(found)


def tell_apart(algorithms: Sequence[dict[str, Any]]) -> list[str]:
    """Names, followed by the settings in which those of the same name differ.

    >>> tell_apart([{"name": "obbo", "lr": 0.1}, {"name": "obbo", "lr": 0.2}, {"name": "adam", "lr": 0.1}])
    ['obbo, lr = 0.1', 'obbo, lr = 0.2', 'adam']
    """
    flat = [dict(_leaves(a)) for a in algorithms]
    labels = []
    for one in flat:
        same = [other for other in flat if other["name"] == one["name"]]
        different = [key for key in one if any(other.get(key) != one[key] for other in same)]
        values = {key: f"{one[key]:g}" if isinstance(one[key], float) else str(one[key]) for key in different}
        labels.append(", ".join([one["name"], *(f"{key} = {value}" for key, value in values.items())]))
    return labels


def sorted_labels(labels: Sequence[str]) -> list[str]:
    """The paper's algorithms first."""
    return sorted(labels, key=lambda label: (_place(label.partition(",")[0]), label))


def _read_run(run: RunDirectory, settings: dict[str, Any], label: str) -> tuple[dict[str, Any], pl.DataFrame]:
    try:
        summary = json.loads(run.summary.read_text())
        metric = summary["metric"]
        table = pl.read_csv(run.metrics, infer_schema_length=None)
        rounds = table.select(
            pl.lit(label).alias("label"),
            pl.lit(summary["seed"], pl.Int64).alias("seed"),
            pl.col("round").cast(pl.Int64),
            pl.col(metric).cast(pl.Float64).alias("score"),
            pl.col(f"test_{metric}").cast(pl.Float64).alias("test"),
            pl.col(f"test_{metric}_se").cast(pl.Float64).alias("test_se"),
            pl.col("regret/euclidean").cast(pl.Float64).alias("regret"),
            pl.col("hypergradient_norm").cast(pl.Float64),
            pl.col("residual").cast(pl.Float64),
        )
        calls = float((table["gradients"] + table["products"]).mean())  # type: ignore[arg-type]
        row = {
            **{name: summary[name] for name in ("algorithm", "seed", "rounds", "metric", "test_tasks", "skipped")},
            "label": label,
            "lr": settings["algorithm"].get("lr"),
            "untrained_test": summary[f"untrained_test_{metric}"],
            "test": summary[f"test_{metric}"],
            "test_se": summary[f"test_{metric}_se"],
            "gain": summary["gain"],
            "gain_se": summary["gain_se"],
            "stream_last_100": summary[f"stream_{metric}_last_100"],
            "regret": summary["regret_euclidean"],
            "calls": calls,
        }
    except (OSError, ValueError, KeyError, TypeError, pl.exceptions.PolarsError) as damage:
        raise ValueError(f"{run.path} cannot be reported: {type(damage).__name__} {damage}") from None
    return row, rounds


def final_table(comparison: Comparison) -> pl.DataFrame:
    """Means over seeds, each with its standard error where there is more than one seed."""
    means = [pl.col(c).mean().alias(c) for c in ("regret", "stream_last_100", "test", "gain", "calls")]
    errors = [
        (pl.col(c).std() / pl.len().sqrt()).alias(f"{c}_over_seeds")
        for c in ("regret", "stream_last_100", "test", "gain")
    ]
    counts = [pl.len().alias("seeds"), pl.col("rounds").min(), pl.col("lr").first(), pl.col("skipped").sum()]
    return comparison.runs.group_by("label", maintain_order=True).agg(*counts, *means, *errors)


def as_markdown(table: pl.DataFrame, metric: str) -> str:
    """The final table, as people read it."""
    lines = [
        f"| algorithm | α | rounds | seeds | regret | stream {metric}, last 100 | test {metric} | gain | calls |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in table.iter_rows(named=True):
        cells = [row["label"], f"{row['lr']:g}", str(row["rounds"]), str(row["seeds"])]
        cells += [
            _with_error(row, name, digits)
            for name, digits in (("regret", 1), ("stream_last_100", 3), ("test", 3), ("gain", 3))
        ]
        lines.append("| " + " | ".join([*cells, f"{row['calls']:.0f}"]) + " |")
    return "\n".join(lines) + "\n"


def _with_error(row: dict[str, Any], name: str, digits: int) -> str:
    error = row[f"{name}_over_seeds"]
    if row[name] is None:
        return "not finite"
    return f"{row[name]:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def _place(algorithm: str) -> int:
    return ORDER.index(algorithm) if algorithm in ORDER else len(ORDER)


def _leaves(settings: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        where = f"{path}.{key}" if path else key
        if isinstance(value, dict):
            yield from _leaves(value, where)
        else:
            yield where, value
