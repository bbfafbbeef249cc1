"""The numbers of a run that people compare: summary.json and the closing table in the terminal."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from obbo_lightning.config.parse import Config, component_class
from obbo_lightning.config.registry import short_name
from obbo_lightning.core.regret import REGRETS
from obbo_lightning.core.statistics import mean_and_error
from obbo_lightning.escaping import escape_terminal
from obbo_lightning.problems.few_shot import FewShot
from obbo_lightning.problems.forgetting import Forgetting
from obbo_lightning.streams.stream import Metric

RECENT = 100  # rounds
# Regrets in the closing table. With steps that adapt to each coordinate the generalized one in the Euclidean norm is
# about coordinates times rounds; in the geometry's own norm it has the units of f.
SHOWN_REGRETS = {
    "euclidean": "regret: squared norms of windowed hypergradients, summed over rounds",
    "geometry": "generalized regret: squared lengths of the outer steps over α in the geometry's norm, summed",
    "exact": "exact regret: squared norms of windowed true gradients, summed over rounds",
}


def summarise(
    config: Config,
    metric: Metric,
    rounds: Mapping[str, Sequence[float]],
    last: Mapping[str, Any],
    initial: Mapping[str, Sequence[float]],
    final: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """Return the summary of a run, but for its seconds and what only some runs have.

    Args:
        config: of the run.
        metric: what the scores are, and which direction is better.
        rounds: columns of metrics.csv: the metric and ``skipped``.
        last: the last row of metrics.csv.
        initial: scores of the test tasks (and lanes) by name with λ_1, the metric among them.
        final: the same with the last λ.
    """
    name = metric.name
    sign = 1 if metric.higher_is_better else -1
    gains = [sign * (after - before) for before, after in zip(initial[name], final[name], strict=True)]
    values = list(rounds[name])
    return {
        "experiment": config["experiment"],
        "algorithm": short_name(config["algorithm"]["name"]),
        "seed": config["seed"],
        "rounds": int(last["round"]),
        "metric": name,
        "higher_is_better": metric.higher_is_better,
        "test_tasks": len(final[name]),
        **{key: number for one in initial for key, number in _with_error(f"initial_test_{one}", initial[one]).items()},
        **{key: number for one in final for key, number in _with_error(f"test_{one}", final[one]).items()},
        **_middle(f"test_{name}", final[name]),
        **_with_error("gain", gains),
        # As Python sums them: the same digits wherever they are summed.
        f"prequential_{name}": _finite(sum(values) / len(values)),
        f"prequential_{name}_last_100": _finite(sum(values[-RECENT:]) / len(values[-RECENT:])),
        **{f"regret_{kind}": _finite(last.get(f"regret/{kind}")) for kind in REGRETS},
        "skipped": int(sum(rounds["skipped"])),
    }


def summarise_validation(metric: str, last: Mapping[str, Any], tasks: int) -> dict[str, Any]:
    """Return the scores of the validation tasks after the last round; empty where there are none."""
    if not tasks:
        return {}
    key = f"validation_{metric}"
    mean, error = (_finite(last.get(f"validation/{metric}{end}")) for end in ("", "_se"))
    return {"validation_tasks": tasks, key: mean, f"{key}_se": error}


def summarise_lanes(lanes: pl.DataFrame, metric: str) -> dict[str, Any]:
    """Return how well the last value forecasts, where each lane has that, as a baseline."""
    name = f"naive_{metric}"
    if name not in lanes.columns:
        return {}
    values = [value for value in lanes[name].to_list() if value is not None]
    mean, _ = mean_and_error(values)
    return {f"last_value_{metric}": _finite(mean), f"last_value_{metric}_median": _middle("", values)["_median"]}


def summarise_baselines(baselines: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the mean of each baseline; empty where there are none."""
    means = {name: statistics.fmean(values) for name, values in baselines.items()}
    return {"baselines": means} if means else {}


def _with_error(name: str, values: Sequence[float]) -> dict[str, float | None]:
    mean, error = mean_and_error(values)
    return {name: _finite(mean), f"{name}_se": error}


def _middle(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Return median and median absolute deviation, which are robust to outliers."""
    if not values:
        return {f"{name}_median": None, f"{name}_mad": None}
    numbers = torch.tensor(values, dtype=torch.float64)
    median = numbers.quantile(0.5)
    deviation = (numbers - median).abs().quantile(0.5)
    return {f"{name}_median": _finite(float(median)), f"{name}_mad": _finite(float(deviation))}


def _finite(value: Any) -> float | None:
    """Return a finite number; None for what is not finite or missing."""
    number = None if value in (None, "") else float(value)
    return number if number is not None and math.isfinite(number) else None


def replace_nonfinite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None.

    >>> replace_nonfinite({"gain": float("nan"), "baselines": {"fixed": [1.0, float("inf")]}})
    {'gain': None, 'baselines': {'fixed': [1.0, None]}}
    """
    if isinstance(value, dict):
        return {key: replace_nonfinite(below) for key, below in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_nonfinite(below) for below in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class PlainConsole(Console):
    """Rich console that escapes every string: ``[red]`` in a name and escape sequences are shown as text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape a string; Rich calls this for everything it prints, cells and titles of tables included."""
        return super().render_str(escape_terminal(text), **{**options, "markup": False, "emoji": False})


def print_summary(
    console: Console, config: Config, summary: dict[str, Any], figures: list[Path], run: Path | None = None
) -> None:
    """Print the closing table, where the figures are, and which commands may follow."""
    metric = summary["metric"]
    better = "higher is better" if summary["higher_is_better"] else "lower is better"
    table = Table(title=run_title(config), show_header=False)
    if summary["test_tasks"]:
        _add_test_rows(table, summary, metric, better)
    if "validation_tasks" in summary:
        label = f"{metric} on {summary['validation_tasks']} validation tasks after {summary['rounds']} rounds; {better}"
        table.add_row(label, _format_with_error(summary, f"validation_{metric}"))
    recent = min(RECENT, summary["rounds"])
    prequential = f"prequential {metric} (before learning from the round), last {recent} rounds; {better}"
    table.add_row(prequential, _format(summary[f"prequential_{metric}_last_100"]))
    if summary.get("baselines"):
        table.add_row("the same, all rounds", _format(summary[f"prequential_{metric}"]))
    for name, value in summary.get("baselines", {}).items():
        table.add_row(f"    baseline: {name}", _format(_finite(value)))
    for name, meaning in SHOWN_REGRETS.items():
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
    for command in _next_commands(config, run) if run else ():
        console.print(f"next   python -m obbo_lightning {command}", soft_wrap=True, highlight=False)


def _add_test_rows(table: Table, summary: dict[str, Any], metric: str, better: str) -> None:
    score, on = metric, f"{summary['test_tasks']} test tasks"
    if f"last_value_{metric}" in summary:
        score, on = f"forecast error ({metric})", f"{summary['events']} events"
    table.add_row(f"{score} on {on} before learning; {better}", _format_with_error(summary, f"initial_test_{metric}"))
    after = f"{score} on the same after {summary['rounds']} rounds"
    table.add_row(after, _format_with_error(summary, f"test_{metric}"))
    if summary.get("test_inductive_accuracy") is not None:
        inductive = "the same where each query is predicted by itself (inductive)"
        table.add_row(inductive, _format_with_error(summary, "test_inductive_accuracy"))
    if not summary["higher_is_better"]:  # errors have long tails
        median, deviation = summary[f"test_{metric}_median"], summary[f"test_{metric}_mad"]
        table.add_row("its median ± median absolute deviation", f"{_format(median)} ± {_format(deviation)}")
    if f"last_value_{metric}" in summary:
        mean, middle = (_format(summary[f"last_value_{metric}{end}"]) for end in ("", "_median"))
        table.add_row(f"baseline: {score} of the last price as the forecast; its median", f"{mean}; {middle}")
    table.add_row("gain by learning, paired; above 0 is better", _format_with_error(summary, "gain"))


def _next_commands(config: Config, run: Path) -> list[str]:
    problem = component_class(config, "problem")
    resume = f"resume {run} --rounds N"
    if problem is not None and issubclass(problem, FewShot):
        return [f"predict {run} --support DIR --query DIR", f"export {run} OUT", resume]
    if problem is not None and issubclass(problem, Forgetting) and config["data"].get("csv") is not None:
        return [f"predict {run} --query FILE.csv", resume]
    return [resume]


def run_title(config: Config) -> str:
    """Return algorithm, window, stream and seed of a run in one line."""
    algorithm = config["algorithm"]
    window = f", w = {algorithm['window']}" if "window" in algorithm else ""
    name, data = short_name(algorithm["name"]), short_name(config["data"]["name"])
    return f"{name}{window}, {data} stream, seed {config['seed']}"


def _format_with_error(summary: dict[str, Any], key: str) -> str:
    error = summary[f"{key}_se"]
    return _format(summary[key]) + ("" if error is None else f" ± {error:.3f}")


def _format(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3f}"
