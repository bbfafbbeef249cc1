"""The numbers of a run that people compare, as a file and as a small table."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import torch
from rich.console import Console
from rich.table import Table

from obbo_lightning.core.statistics import mean_and_error
from obbo_lightning.parts import short_name
from obbo_lightning.problems.few_shot import FewShot
from obbo_lightning.problems.forgetting import Forgetting
from obbo_lightning.problems.spline import SmoothingSpline
from obbo_lightning.settings.files import Settings
from obbo_lightning.settings.layers import part_class
from obbo_lightning.streams.stream import Metric

REGRETS = ("euclidean", "generalized", "exact")
# Those that a reader is shown. With steps that adapt to each coordinate the generalized one in the Euclidean norm
# counts little but coordinates times rounds; in the geometry's own norm it has the units of f.
MEANINGS = {
    "euclidean": "regret: squared norms of windowed hypergradients, summed over rounds",
    "geometry": "generalized regret: squared lengths of the outer steps over α in the geometry's own norm, summed",
    "exact": "exact regret: the first of the true gradients",
}


class Judgement(NamedTuple):
    """Scores of the same test tasks (and lanes), before and after.

    Attributes:
        metric: what they are, and which direction is better.
        untrained: with λ_1.
        trained: with the last λ.
        further_untrained: other scores of the same tasks by their names, with λ_1.
        further: with the last λ.
    """

    metric: Metric
    untrained: Sequence[float]
    trained: Sequence[float]
    further_untrained: Mapping[str, Sequence[float]] = {}
    further: Mapping[str, Sequence[float]] = {}

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
        **_further("untrained_test", judged.further_untrained),
        **_further("test", judged.further),
        "gain": _known(gain[0]),
        "gain_se": gain[1],
        f"stream_{metric}": _known(sum(stream) / len(stream)),
        f"stream_{metric}_last_100": _known(sum(stream[-100:]) / len(stream[-100:])),
        **{f"regret_{name}": _known(last[f"regret/{name}"]) for name in REGRETS},
        **({"regret_geometry": _known(last["regret/geometry"])} if "regret/geometry" in last else {}),
        "skipped": int(sum(rounds["skipped"].to_list())),
        "seconds": round(seconds, 3),
    }


def _further(prefix: str, scores: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name, values in scores.items():
        mean, error = mean_and_error(values)
        found |= {f"{prefix}_{name}": _known(mean), f"{prefix}_{name}_se": error}
    return found


def validated(rounds: pl.DataFrame, metric: str, tasks: int) -> dict[str, Any]:
    """What the validation tasks said after the last round, which is always judged; nothing where there were none."""
    if not tasks:
        return {}
    mean, error = rounds.select(f"validation/{metric}", f"validation/{metric}_se").row(-1)
    return {"validation_tasks": tasks, f"validation_{metric}": _known(mean), f"validation_{metric}_se": error}


def _middle(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Median and median absolute deviation, which outliers do not move."""
    if not values:
        return {f"{name}_median": None, f"{name}_mad": None}
    numbers = torch.tensor(values, dtype=torch.float64)
    median = numbers.quantile(0.5)
    deviation = (numbers - median).abs().quantile(0.5)
    return {f"{name}_median": _known(float(median)), f"{name}_mad": _known(float(deviation))}


def last_value(lanes: pl.DataFrame, metric: str) -> dict[str, Any]:
    """How well the last value forecasts, where each lane has that; what a learned forecast must beat."""
    name = f"naive_{metric}"
    if name not in lanes.columns:
        return {}
    values = [value for value in lanes[name].to_list() if value is not None]
    mean, _ = mean_and_error(values)
    return {f"last_value_{metric}": _known(mean), f"last_value_{metric}_median": _middle("", values)["_median"]}


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def without_nonfinite(value: Any) -> Any:
    """The same as JSON has it, which knows neither NaN nor infinity: null.

    >>> without_nonfinite({"gain": float("nan"), "baselines": {"fixed": [1.0, float("inf")]}})
    {'gain': None, 'baselines': {'fixed': [1.0, None]}}
    """
    if isinstance(value, dict):
        return {key: without_nonfinite(below) for key, below in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nonfinite(below) for below in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_summary(
    console: Console, settings: Settings, summary: dict[str, Any], figures: list[Path], run: Path | None = None
) -> None:
    """What a run came to in plain words, where its figures are, and what can be done with it next."""
    metric = summary["metric"]
    better = "higher is better" if summary["higher_is_better"] else "lower is better"
    table = Table(title=title_of(settings), show_header=False)
    if summary["test_tasks"]:
        _add_tests(table, summary, metric, better)
    if "validation_tasks" in summary:
        judged = (
            f"{metric} on {summary['validation_tasks']} validation tasks after {summary['rounds']} rounds; {better}"
        )
        table.add_row(judged, _with_error(summary, f"validation_{metric}"))
    recent = min(100, summary["rounds"])
    stream = f"{metric} on the stream, last {recent} rounds, each judged before it is learned from; {better}"
    table.add_row(stream, _shown(summary[f"stream_{metric}_last_100"]))
    if summary.get("baselines"):
        table.add_row("the same, all rounds", _shown(summary[f"stream_{metric}"]))
    for name, value in summary.get("baselines", {}).items():
        table.add_row(f"    with {name}", _shown(_known(value)))
    for name, meaning in MEANINGS.items():
        if summary.get(f"regret_{name}") is not None:
            table.add_row(f"{meaning}; lower is better", f"{summary[f'regret_{name}']:.4g}")
    if summary["skipped"]:
        skipped = "rounds skipped as not finite: each counts as the one before it, and regrets are lower bounds"
        table.add_row(skipped, str(summary["skipped"]))
    table.add_row("seconds", f"{summary['seconds']:.0f}")
    console.print(table)
    for name, note in summary.get("notes", {}).items():
        console.print(f"{name}: {note}", soft_wrap=True)
    for path in figures:
        console.print(f"figure {path}", soft_wrap=True)
    for step in _next_steps(settings, run) if run else ():
        console.print(f"next   python -m obbo_lightning {step}", soft_wrap=True, highlight=False)


def _add_tests(table: Table, summary: dict[str, Any], metric: str, better: str) -> None:
    judged, on = metric, f"{summary['test_tasks']} test tasks"
    if f"last_value_{metric}" in summary:
        judged, on = f"forecast error ({metric})", f"{summary['events']} events"
    table.add_row(f"{judged} on {on} before learning; {better}", _with_error(summary, f"untrained_test_{metric}"))
    table.add_row(f"{judged} on the same after {summary['rounds']} rounds", _with_error(summary, f"test_{metric}"))
    if summary.get("test_inductive_accuracy") is not None:
        inductive = "the same where each query is predicted by itself (inductive)"
        table.add_row(inductive, _with_error(summary, "test_inductive_accuracy"))
    if not summary["higher_is_better"]:  # errors have long tails
        median, deviation = summary[f"test_{metric}_median"], summary[f"test_{metric}_mad"]
        table.add_row("its median ± median absolute deviation", f"{_shown(median)} ± {_shown(deviation)}")
    if f"last_value_{metric}" in summary:
        mean, middle = (_shown(summary[f"last_value_{metric}{end}"]) for end in ("", "_median"))
        table.add_row(f"{judged} of the last price as the forecast; its median", f"{mean}; {middle}")
    table.add_row("gain by learning, paired; above 0 is better", _with_error(summary, "gain"))


def _next_steps(settings: Settings, run: Path) -> list[str]:
    problem = part_class(settings, "problem")
    steps = [f"resume {run} --rounds N"]
    if problem is not None and issubclass(problem, FewShot):
        return [f"predict {run} --support DIR --query DIR", f"export {run} OUT", *steps]
    if problem is not None and issubclass(problem, Forgetting) and settings["data"].get("csv") is not None:
        return [f"predict {run} --query FILE.csv", *steps]
    return [f"predict {run}", *steps] if problem is not None and issubclass(problem, SmoothingSpline) else steps


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
