"""The numbers of a run that people compare, as a file and as a small table."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import torch
from rich.console import Console
from rich.table import Table

from obbo_lightning.core.statistics import mean_and_error
from obbo_lightning.parts import short_name
from obbo_lightning.settings.files import Settings
from obbo_lightning.streams.stream import Metric

REGRETS = ("euclidean", "generalized", "exact")


class Judgement(NamedTuple):
    """Scores of the same test tasks (and lanes), before and after.

    Attributes:
        metric: what they are, and which direction is better.
        untrained: with λ_1.
        trained: with the last λ.
    """

    metric: Metric
    untrained: Sequence[float]
    trained: Sequence[float]

    def gains(self) -> list[float]:
        """How much better each became."""
        better = 1 if self.metric.higher_is_better else -1
        return [better * (after - before) for before, after in zip(self.untrained, self.trained, strict=True)]


def summarise(settings: Settings, rounds: pl.DataFrame, judged: Judgement, seconds: float) -> dict[str, Any]:
    """From the rows of metrics.csv and the test scores."""
    metric = judged.metric.name
    untrained, final, gain = (mean_and_error(v) for v in (judged.untrained, judged.trained, judged.gains()))
    # As Python sums them: the same digits wherever it was summed before.
    stream = [math.nan if value is None else value for value in rounds[metric].to_list()]
    last = rounds.row(-1, named=True)
    return {
        "experiment": settings["experiment"],
        "algorithm": short_name(settings["algorithm"]["name"]),
        "seed": settings["seed"],
        "rounds": int(last["round"]),
        "metric": metric,
        "higher_is_better": judged.metric.higher_is_better,
        "test_tasks": len(judged.trained),
        f"untrained_test_{metric}": _known(untrained[0]),
        f"untrained_test_{metric}_se": untrained[1],
        f"test_{metric}": _known(final[0]),
        f"test_{metric}_se": final[1],
        **_middle(f"test_{metric}", judged.trained),
        "gain": _known(gain[0]),
        "gain_se": gain[1],
        f"stream_{metric}": _known(sum(stream) / len(stream)),
        f"stream_{metric}_last_100": _known(sum(stream[-100:]) / len(stream[-100:])),
        **{f"regret_{name}": _known(last[f"regret/{name}"]) for name in REGRETS},
        "skipped": int(sum(rounds["skipped"].to_list())),
        "seconds": round(seconds, 3),
    }


def _middle(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Median and median absolute deviation, which outliers do not move."""
    if not values:
        return {f"{name}_median": None, f"{name}_mad": None}
    numbers = torch.tensor(values, dtype=torch.float64)
    median = numbers.quantile(0.5)
    deviation = (numbers - median).abs().quantile(0.5)
    return {f"{name}_median": _known(float(median)), f"{name}_mad": _known(float(deviation))}


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def print_summary(console: Console, settings: Settings, summary: dict[str, Any], figures: list[Path]) -> None:
    """A small table, and where the figures are."""
    metric = summary["metric"]
    table = Table(title=title_of(settings), show_header=False)
    if summary["test_tasks"]:
        _add_tests(table, summary, metric)
    recent = min(100, summary["rounds"])
    table.add_row(f"stream {metric}, last {recent} rounds", _shown(summary[f"stream_{metric}_last_100"]))
    for name in REGRETS:
        if summary[f"regret_{name}"] is not None:
            table.add_row(f"{name} regret", f"{summary[f'regret_{name}']:.4g}")
    if summary["skipped"]:
        table.add_row("rounds skipped as not finite", str(summary["skipped"]))
    for name, note in summary.get("notes", {}).items():
        table.add_row(name, str(note))
    table.add_row("seconds", f"{summary['seconds']:.0f}")
    console.print(table)
    for path in figures:
        console.print(f"figure {path}", soft_wrap=True)


def _add_tests(table: Table, summary: dict[str, Any], metric: str) -> None:
    table.add_row(f"untrained test {metric}", _with_error(summary, f"untrained_test_{metric}"))
    table.add_row(f"test {metric} after {summary['rounds']} rounds", _with_error(summary, f"test_{metric}"))
    if not summary["higher_is_better"]:  # errors have long tails
        median, deviation = summary[f"test_{metric}_median"], summary[f"test_{metric}_mad"]
        table.add_row("its median ± median absolute deviation", f"{_shown(median)} ± {_shown(deviation)}")
    table.add_row(f"gain, paired on {summary['test_tasks']} test tasks", _with_error(summary, "gain"))


def title_of(settings: Settings) -> str:
    """What was run, in a line."""
    algorithm = settings["algorithm"]
    window = f", w = {algorithm['window']}" if "window" in algorithm else ""
    name, data = short_name(algorithm["name"]), short_name(settings["data"]["name"])
    return f"{name}{window}, {data} stream, seed {settings['seed']}"


def _with_error(summary: dict[str, Any], key: str) -> str:
    error = summary[f"{key}_se"]
    return _shown(summary[key]) + ("" if error is None else f" ± {error:.3f}")


def _shown(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3f}"
