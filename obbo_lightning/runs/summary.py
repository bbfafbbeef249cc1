"""The numbers of a run that people compare: summary.json and the closing table in the terminal."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from obbo_lightning.config.parse import Config, component_class
from obbo_lightning.config.registry import short_name
from obbo_lightning.core.parameter_groups import FEW_COORDINATES, ParameterGroup
from obbo_lightning.core.regret import REGRETS
from obbo_lightning.core.statistics import mean_and_error
from obbo_lightning.core.tuning_result import SIGNIFICANT, TuningResult
from obbo_lightning.escaping import escape_terminal
from obbo_lightning.problems.few_shot import FewShot
from obbo_lightning.problems.forgetting import Forgetting
from obbo_lightning.streams.stream import Stream

RECENT = 100  # rounds
FEW = 3  # values that a line shows
LAST_ROUNDS = 10  # a run in which all of these were skipped has diverged
# Regrets in the closing table. With steps that adapt to each coordinate the generalized one in the Euclidean norm is
# about coordinates times rounds; in the geometry's own norm it has the units of f.
SHOWN_REGRETS = {
    "euclidean": "regret: squared norms of windowed hypergradients, summed over rounds",
    "geometry": "generalized regret: squared lengths of the outer steps over α in the geometry's norm, summed",
    "exact": "exact regret: squared norms of windowed true gradients, summed over rounds",
}


def summarise(
    config: Config,
    stream: Stream,
    rounds: Mapping[str, Sequence[float]],
    last: Mapping[str, Any],
    initial: Mapping[str, Sequence[float]],
    final: Mapping[str, Sequence[float]],
    validation_tasks: int = 0,
    baselines: Mapping[str, Sequence[float]] | None = None,
    lanes: int = 1,
) -> dict[str, Any]:
    """Return the summary of a run, but for its seconds, the notes of its problem and what it has tuned.

    ``rounds`` are columns of metrics.csv and ``last`` its last row; ``initial`` and ``final`` are the scores of the
    test tasks (and lanes) by name, with λ_1 and with the last λ; ``baselines`` have the metric of each round by name;
    ``lanes`` is the number of lanes, of which each round has skipped some.
    """
    name, higher_is_better = stream.metric
    sign = 1 if higher_is_better else -1
    gains = [sign * (after - before) for before, after in zip(initial[name], final[name], strict=True)]
    values = list(rounds[name])
    summary: dict[str, Any] = {
        "experiment": config["experiment"],
        "algorithm": short_name(config["algorithm"]["name"]),
        "seed": config["seed"],
        "rounds": int(last["round"]),
        "metric": name,
        "higher_is_better": higher_is_better,
        "test_tasks": len(final[name]),
        **_middle(f"test_{name}", final[name]),
        # As Python sums them: the same digits wherever they are summed.
        f"prequential_{name}": sum(values) / len(values),
        f"prequential_{name}_last_100": sum(values[-RECENT:]) / len(values[-RECENT:]),
        **{f"regret_{kind}": _number(last.get(f"regret/{kind}")) for kind in REGRETS},
        "skipped": int(sum(rounds["skipped"])),
        "rounds_with_skips": sum(count > 0 for count in rounds["skipped"]),
        "diverged": all(count == lanes for count in rounds["skipped"][-LAST_ROUNDS:]),
    }
    scores = {**{f"initial_test_{one}": initial[one] for one in initial}, "gain": gains}
    for one, numbers in (scores | {f"test_{one}": final[one] for one in final}).items():
        summary[one], summary[f"{one}_se"] = mean_and_error(numbers)
    if validation_tasks:
        scores_of_last = {f"validation_{name}{end}": _number(last[f"validation/{name}{end}"]) for end in ("", "_se")}
        summary |= {"validation_tasks": validation_tasks, **scores_of_last}
    if baselines:
        summary["baselines"] = {baseline: statistics.fmean(values) for baseline, values in baselines.items()}
    if stream.lanes is not None:
        summary |= {"events": len(stream.lanes), "events_skipped": len(stream.skipped)}
        if f"naive_{name}" in stream.lanes.columns:  # how well the last value forecasts
            naive = stream.lanes[f"naive_{name}"].drop_nulls().to_list()
            median = _middle("", naive)["_median"]
            summary |= {f"last_value_{name}": mean_and_error(naive)[0], f"last_value_{name}_median": median}
    return summary


def summarise_tuning(
    result: TuningResult,
    groups: Sequence[ParameterGroup],
    rounds: Mapping[str, Sequence[float]],
    last: Mapping[str, Any],
    start: Tensor,
    final: Tensor,
) -> dict[str, dict[str, Any]]:
    """Return whether it helped to learn λ, for each named parameter group and whatever has automatic steps.

    Groups without named coordinates, and a λ without groups, have no values: their gain is that of all steps,
    −Σ_t ⟨d_t, λ_t − λ_{t−1}⟩, with the standard error of independent rounds.

    Args:
        result: of the groups with named coordinates.
        groups: with the settings of the algorithm; one without a name where λ has none, which is called ``outer``.
        rounds: columns of metrics.csv with the gains of steps.
        last: the last row of metrics.csv.
        start: λ_1 ``[lanes, d]``.
        final: the last λ.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, one in result.summary().items():
        left_out = () if len(one["start"]) <= FEW_COORDINATES else ("start", "final")  # they are in outer.csv
        found[name] = {key: value for key, value in one.items() if key not in left_out}
    for group in groups:
        suffix = f"/{group.name}" if group.name else ""
        if group.name in found or f"lr{suffix}" not in last:
            continue
        gains = rounds[f"held_out_gain{suffix}"]
        gain, error = sum(gains), mean_and_error(gains)[1]
        error = math.inf if error is None else error * len(gains)
        helped = result.held_out and gain > SIGNIFICANT * error
        found[group.name or "outer"] = {
            "gain": gain,
            "gain_se": error,
            "moved": _relative_change(*(outer[:, group.where].double().cpu() for outer in (start, final))),
            "helped": helped,
            "verdict": "helped" if helped else "no evidence that it helped",
        }
    return {name: {**one, "held_out": result.held_out} for name, one in found.items()}


def _relative_change(start: Tensor, final: Tensor) -> str:
    """Return in words how far many unnamed numbers have moved: the median over lanes."""
    change, norm = (float(values.norm(dim=-1).quantile(0.5)) for values in (final - start, start))
    return f"by {100 * change / norm:.2g} % of its norm" if norm else f"by {change:.3g}"


def _middle(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return median and median absolute deviation, which are robust to outliers."""
    numbers = torch.tensor(values or [math.nan], dtype=torch.float64)
    median = numbers.quantile(0.5)
    return {f"{name}_median": float(median), f"{name}_mad": float((numbers - median).abs().quantile(0.5))}


def _number(value: Any) -> float | None:
    """Return a number of a table, which is text where it was read back."""
    return None if value in (None, "") else float(value)


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
    """Print the closing table, where the figures are, and how to continue."""
    table = Table(title=run_title(config), show_header=False)
    better = "higher is better" if summary["higher_is_better"] else "lower is better"
    for label, value in (*_test_rows(summary, better), *_other_rows(summary, better)):
        table.add_row(label, value)
    for name, one in summary.get("tuning", {}).items():
        table.add_row(*_tuning_row(name, one))
    if summary["skipped"]:
        label = "rounds skipped as not finite: each counts as the one before it, and regrets are lower bounds"
        table.add_row(label, describe_skips(summary), style="bold red")
    table.add_row("seconds", f"{summary['seconds']:.0f}")
    console.print(table)
    for name, note in summary.get("notes", {}).items():
        console.print(f"{name}: {note}", soft_wrap=True)
    for path in figures:
        console.print(f"figure {path}", soft_wrap=True)
    for command in _next_commands(config, run) if run else ():
        console.print(f"next   python -m obbo_lightning {command}", soft_wrap=True, highlight=False)


def _next_commands(config: Config, run: Path) -> list[str]:
    problem, resume = component_class(config, "problem"), f"resume {run} --rounds N"
    if problem is not None and issubclass(problem, FewShot):
        return [f"predict {run} --support DIR --query DIR", f"export {run} OUT", resume]
    if problem is not None and issubclass(problem, Forgetting) and config["data"].get("csv") is not None:
        return [f"predict {run} --query FILE.csv", resume]
    return [resume]


def _test_rows(summary: dict[str, Any], better: str) -> Iterator[tuple[str, str]]:
    metric, tasks, naive = summary["metric"], summary["test_tasks"], f"last_value_{summary['metric']}"
    score, on = metric, f"{tasks} test tasks"
    if naive in summary:
        score, on = f"forecast error ({metric})", f"{summary['events']} events"
    if tasks:
        yield f"{score} on {on} before learning; {better}", _format(summary, f"initial_test_{metric}")
        yield f"{score} on the same after {summary['rounds']} rounds", _format(summary, f"test_{metric}")
        if summary.get("test_inductive_accuracy") is not None:
            inductive = _format(summary, "test_inductive_accuracy")
            yield "the same where each query is predicted by itself (inductive)", inductive
        if not summary["higher_is_better"]:  # errors have long tails
            middle = " ± ".join(_format(summary, f"test_{metric}_{end}") for end in ("median", "mad"))
            yield "its median ± median absolute deviation", middle
        if naive in summary:
            value = f"{_format(summary, naive)}; {_format(summary, f'{naive}_median')}"
            yield f"baseline: {score} of the last price as the forecast; its median", value
        yield "gain by learning, paired; above 0 is better", _format(summary, "gain")


def _other_rows(summary: dict[str, Any], better: str) -> Iterator[tuple[str, str]]:
    metric, rounds, baselines = summary["metric"], summary["rounds"], summary.get("baselines", {})
    if "validation_tasks" in summary:
        label = f"{metric} on {summary['validation_tasks']} validation tasks after {rounds} rounds; {better}"
        yield label, _format(summary, f"validation_{metric}")
    label = f"prequential {metric} (before learning from the round), last {min(RECENT, rounds)} rounds; {better}"
    yield label, _format(summary, f"prequential_{metric}_last_100")
    if baselines:
        yield "the same, all rounds", _format(summary, f"prequential_{metric}")
    for name in baselines:
        yield f"    baseline: {name}", _format(baselines, name)
    for name, meaning in SHOWN_REGRETS.items():
        if summary.get(f"regret_{name}") is not None:
            yield f"{meaning}; lower is better", f"{summary[f'regret_{name}']:.4g}"


def _tuning_row(name: str, one: dict[str, Any]) -> tuple[str, str]:
    """Return how far a parameter group has moved, and whether that helped."""
    start, final = (", ".join(f"{value:.3g}" for value in one.get(key, ())) for key in ("start", "final"))
    values = f" {start} → {final}" if 0 < len(one.get("start", ())) <= FEW else ""
    gain, error = ("unknown" if value is None else f"{value:.2g}" for value in (one["gain"], one["gain_se"]))
    kind = "held-out gain" if one["held_out"] else "gain on the examples that produced it"
    return f"{name}{values} ({one['moved']})", f"{kind} {gain} ± {error}: {one['verdict']}"


def describe_skips(summary: Mapping[str, Any]) -> str:
    """Return how many rounds were skipped, in how many lanes if in several, and whether the last ones were.

    >>> describe_skips({"skipped": 6, "rounds_with_skips": 3, "rounds": 20, "diverged": False})
    '3 of 20, 6 in all lanes'
    >>> describe_skips({"skipped": 15, "rounds_with_skips": 15, "rounds": 20, "diverged": True})
    '15 of 20, and all of the last 10: the run has diverged'
    """
    skipped, rounds = summary["rounds_with_skips"], summary["rounds"]
    lanes = f", {summary['skipped']} in all lanes" if summary["skipped"] > skipped else ""
    end = f", and all of the last {min(LAST_ROUNDS, rounds)}: the run has diverged" if summary["diverged"] else ""
    return f"{skipped} of {rounds}{lanes}{end}"


def _format(values: dict[str, Any], key: str) -> str:
    value, error = values[key], values.get(f"{key}_se")
    return ("not finite" if value is None else f"{value:.3f}") + ("" if error is None else f" ± {error:.3f}")


def run_title(config: Config) -> str:
    """Return algorithm, window, stream and seed of a run in one line."""
    algorithm = config["algorithm"]
    window = f", w = {algorithm['window']}" if "window" in algorithm else ""
    name, data = short_name(algorithm["name"]), short_name(config["data"]["name"])
    return f"{name}{window}, {data} stream, seed {config['seed']}"
