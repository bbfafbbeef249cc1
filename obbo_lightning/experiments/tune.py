"""`tune`: one Optuna study per method of a comparison, each with the same budget; then the comparison with the result.

A trial is a run like any other. The search is deterministic: its studies are made again from the trials on disk.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal

import polars as pl
import yaml
from rich.console import Console

from obbo_lightning.config.build import build_stream
from obbo_lightning.config.parse import ConfigError, complete_config, flatten, nested, overlay
from obbo_lightning.core.randomness import derive_seed
from obbo_lightning.core.validation import at_least
from obbo_lightning.escaping import escape_mathtext
from obbo_lightning.experiments.grid import Grid, PlannedRun, unused_name
from obbo_lightning.experiments.launch import SLURM_JOB, GridError, Launcher, run_all
from obbo_lightning.experiments.report_data import (
    ReportData,
    ReportFigure,
    Table,
    finish_figure,
    line_style,
    new_figure,
    report_style,
)
from obbo_lightning.experiments.runs import STUDY, distinct_labels, format_setting
from obbo_lightning.runs.directory import RunDirectory, read_config, write_atomically
from obbo_lightning.runs.provenance import require_intact
from obbo_lightning.runs.status import RunStatus
from obbo_lightning.runs.table import read_rounds
from obbo_lightning.streams.stream import Metric, has_random_access
from obbo_lightning.training.run import build

FOLDER = "tune"  # of a search, in that of its comparison
RUNG_SUMMARY = "summary-{:08d}.json"  # of a trial that went on after a rung
STEP_SIZES = {"algorithm.lr": "step α", "algorithm.scale": "scale of the step"}  # one of them is always searched
SPACE = ("method", "setting", "range", "untuned", "found", "trials", "pruned", "not finite", "result", "budget")


@dataclass(frozen=True)
class TuneConfig:
    """Section ``tune`` of a comparison file: a search for each method, the same for all.

    Attributes:
        search: for each key an interval ``{low: , high: }``, in which logarithms are uniform, or a list of values; a
            method that does not take a key is searched without it.
        budget: of each method, all its trials together: ``{rounds: }`` or ``{gradient_evaluations: }``.
        rounds: of a trial; 0: those of the comparison.
        evaluate_on: validation tasks, or prequential: the mean score of a trial's rounds before they are learned from.
        tasks: number of validation tasks; 0: as many as the comparison evaluates.
        seeds: of the trials; the result of a trial is the mean over them.
        sampler: Optuna's tpe or random; grid: every combination of lists once.
        rungs: rounds after which a trial below the median is pruned; its rounds go to further trials.
        at_once: trials of a method that are chosen together, and can run in parallel.
        seed: of the search.
        settings: what trials have and the comparison has not, such as other data.
    """

    search: dict[str, Any]
    budget: dict[str, int]
    rounds: int = 0
    evaluate_on: Literal["validation", "prequential"] = "validation"
    tasks: int = 0
    seeds: list[int] = field(default_factory=lambda: [1000])
    sampler: Literal["tpe", "random", "grid"] = "tpe"
    rungs: list[int] = field(default_factory=list)
    at_once: int = 4
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, values in self.search.items():
            make_distribution(f"tune.search.{key}", values)
            if self.sampler == "grid" and not isinstance(values, list):
                raise ConfigError(f"tune.search.{key} must be a list with tune.sampler grid, got {values!r}")
        if len(set(STEP_SIZES) & set(self.search)) != 1:
            wanted, keys = " or (where that is auto) ".join(STEP_SIZES), ", ".join(self.search)
            raise ConfigError(f"tune.search must have {wanted}, which every method is tuned by, got {keys}")
        if len(self.budget) != 1 or not set(self.budget) <= {"rounds", "gradient_evaluations"}:
            raise ConfigError(f"tune.budget must have rounds or gradient_evaluations, got {self.budget}")
        at_least("tune.budget", next(iter(self.budget.values())), 1)
        for key, least in (("rounds", 0), ("tasks", 0), ("at_once", 1)):
            at_least(f"tune.{key}", getattr(self, key), least)
        if not self.seeds:
            raise ConfigError("tune.seeds must have at least one seed, got none")
        if sorted({max(1, rung) for rung in self.rungs}) != self.rungs:
            raise ConfigError(f"tune.rungs must be positive and increase, got {self.rungs}")


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ValueError("tune needs optuna, which is not installed: pip install 'obbo_lightning[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def make_distribution(key: str, values: Any) -> Any:
    """Return Optuna's distribution of a setting; whole numbers where both ends of an interval are."""
    distributions = _optuna().distributions
    if isinstance(values, list) and values and len(set(map(repr, values))) == len(values):
        return distributions.CategoricalDistribution(values)
    if isinstance(values, dict) and all(type(end) in (int, float) for end in values.values()):
        low, high = values.get("low", 0), values.get("high", 0)
        whole = isinstance(low, int) and isinstance(high, int)
        if len(values) == 2 and 0 < low < high < math.inf:
            return (distributions.IntDistribution if whole else distributions.FloatDistribution)(low, high, log=True)
    raise ConfigError(f"{key} must be a list of different values, or have 0 < low < high, got {values!r}")


def in_range(value: Any, values: Any) -> bool:
    """Return whether a search can find a value."""
    if isinstance(values, list):
        return value in values
    return isinstance(value, (int, float)) and not isinstance(value, bool) and values["low"] <= value <= values["high"]


def format_range(values: Any) -> str:
    """Return the values of a list, or the ends of an interval, in words."""
    if isinstance(values, list):
        return ", ".join(map(format_setting, values))
    return f"{values['low']:g} to {values['high']:g}"


class Method:
    """What is tuned, runs of a comparison that differ in their seed only, and its study; its name is in folders."""

    def __init__(self, name: str, label: str, runs: list[PlannedRun], config: TuneConfig) -> None:
        self.name, self.label, self.runs, self.config = name, label, runs, config
        settings = dict(flatten(runs[0].config))
        keys = {key: where for key in config.search for where in (key, f"{key}.name") if where in settings}
        self.untuned = {key: settings[where] for key, where in keys.items()}
        self.search = {key: config.search[key] for key in keys}
        self.rounds: int = config.rounds or runs[0].config["rounds"]
        ((self.unit, self.budget),) = config.budget.items()
        self.running: list[Any] = []  # Optuna's trials
        self._asked = 0

    def plan(self, trial: int, values: dict[str, Any], stage: int) -> list[PlannedRun]:
        """Return the runs of a trial up to a rung, or to its end after the last rung; they see no test task."""
        config = self.config
        settings = overlay(overlay(self.runs[0].config, config.settings), nested(values))
        # A step size that is too large is a result, not a failure. One thread, so that the last digits of a trial do
        # not depend on the number of parallel runs.
        threads = 1 if settings["threads"] == "auto" else settings["threads"]
        settings |= {"on_nonfinite": "skip", "logger": "csv", "threads": threads}
        settings |= {"rounds": (*config.rungs, self.rounds)[stage]}
        tasks = config.tasks or settings["evaluation"]["tasks"]
        split = "validation" if config.evaluate_on == "validation" else "none"
        settings["evaluation"] = {"every": self.rounds, "tasks": tasks, "split": split, "baselines": False}
        planned = []
        for seed in config.seeds:
            name = f"{self.name}-trial_{trial:03d}" + (f"-seed_{seed}" if len(config.seeds) > 1 else "")
            planned.append(PlannedRun(name, complete_config(settings | {"seed": seed})))
        return planned

    def start_study(self, metric: Metric, storage: Any) -> None:
        """Start the study, with the first trial, or all combinations of a grid, enqueued."""
        optuna = _optuna()
        direction = "maximize" if metric.higher_is_better else "minimize"
        pruner = optuna.pruners.MedianPruner(n_startup_trials=1)
        self.study = optuna.create_study(storage=storage, study_name=self.name, direction=direction, pruner=pruner)
        self._distributions = {key: make_distribution(key, values) for key, values in self.search.items()}
        # The first trial is the method as it was: on what trials are evaluated on, tuning cannot make it worse.
        planned = [self.untuned] if all(in_range(self.untuned[k], values) for k, values in self.search.items()) else []
        if self.config.sampler == "grid":
            planned = [dict(zip(self.search, values, strict=True)) for values in product(*self.search.values())]
        for values in planned:
            self.study.enqueue_trial(values)
        self._limit = len(planned) if self.config.sampler == "grid" else math.inf

    def ask(self) -> int:
        """Choose the trials of the next generation; returns how many the budget allows, all of them whole."""
        spent = [trial.user_attrs for trial in self.trials]
        dearest = max((one[self.unit] / one["rounds"] for one in spent), default=1.0)
        cost = dearest * self.rounds * len(self.config.seeds)
        affordable = (self.budget - sum(one[self.unit] for one in spent)) // cost
        if self.unit == "gradient_evaluations" and not spent:
            affordable = 1  # the cost of a trial is not known yet
        samplers = _optuna().samplers
        tpe = {"n_startup_trials": self.config.at_once, "multivariate": False, "constant_liar": True}
        for _ in range(int(min(self.config.at_once, affordable, self._limit - self._asked))):
            # A sampler of its own for each trial, so that a search depends on no sampler's state.
            seed = derive_seed(self.config.seed, self.name, self._asked) % 2**32
            use_tpe = self.config.sampler == "tpe"
            self.study.sampler = samplers.TPESampler(seed=seed, **tpe) if use_tpe else samplers.RandomSampler(seed)
            self.running.append(self.study.ask(self._distributions))
            self._asked += 1
        return len(self.running)

    def tell(self, stage: int, folder: Path) -> None:
        """Take the results at a rung or at the end; end trials that are pruned or not finite."""
        for trial in list(self.running):
            runs = self.plan(trial.number, trial.params, stage)
            rounds = runs[0].config["rounds"]
            value, evaluations = self._result([RunDirectory(folder / run.name) for run in runs], rounds)
            trial.set_user_attr("rounds", rounds * len(runs))
            trial.set_user_attr("gradient_evaluations", evaluations)
            if value is not None:
                trial.report(value, rounds)
            if value is not None and rounds == self.rounds:
                self.study.tell(trial, value)
            elif value is None or trial.should_prune():
                self.study.tell(trial, state=_optuna().trial.TrialState.PRUNED)
            else:
                continue
            self.running.remove(trial)

    def _result(self, runs: Sequence[RunDirectory], rounds: int) -> tuple[float | None, int]:
        """Return the mean over seeds, None where one is not finite or would have failed; and gradient evaluations."""
        values, skipped, diverged, evaluations = [], 0, False, 0
        for run in runs:
            summary = read_rung(run, rounds) or {}
            if run.finished:
                require_intact(run)
            values.append(summary[f"{self.config.evaluate_on}_{summary['metric']}"])
            skipped += summary["skipped"]
            diverged |= summary.get("diverged", False)
            metrics = read_rounds(run.metrics).head(rounds)
            evaluations += int(metrics.select(pl.sum("gradients") + pl.sum("products")).item())
        fails = diverged or (skipped and self.runs[0].config["on_nonfinite"] == "raise")
        return None if fails or None in values else sum(values) / len(values), evaluations

    @property
    def trials(self) -> list[Any]:
        """Trials that have run."""
        return [trial for trial in self.study.trials if trial.user_attrs]

    @property
    def best(self) -> Any:
        """The best complete trial, the first of equals; None where none is complete."""
        return self.study.best_trial if any(trial.state.name == "COMPLETE" for trial in self.trials) else None

    @property
    def found(self) -> dict[str, Any]:
        """Settings of the best trial; the untuned ones where no trial is complete."""
        return dict(self.best.params if self.best else self.untuned)


def find_methods(grid: Grid, config: TuneConfig) -> list[Method]:
    """Return the methods of a comparison, each with the settings of the search that it takes."""
    groups: dict[str, list[PlannedRun]] = {}
    for run in grid.runs:
        groups.setdefault(yaml.safe_dump({**run.config, "seed": None}), []).append(run)
    names: list[str] = []
    for runs in groups.values():
        names.append(unused_name(re.sub(r"-seed_\d+", "", runs[0].name), names))
    labels = distinct_labels([runs[0].config["algorithm"] for runs in groups.values()])
    labels = labels if len(set(labels)) == len(labels) else names
    methods = [Method(*given, config) for given in zip(names, labels, groups.values(), strict=True)]
    for key in set(config.search).difference(*(method.search for method in methods)):
        raise ConfigError(f"tune.search.{key} must be taken by one of {', '.join(names)}, got {key!r}")
    return methods


def read_rung(run: RunDirectory, rounds: int) -> dict[str, Any] | None:
    """Return the summary of a trial after some rounds; None where it has not come that far."""
    for path in (run.path / RUNG_SUMMARY.format(rounds), run.summary):
        if path.is_file() and (summary := json.loads(path.read_text()))["rounds"] == rounds:
            return dict(summary)
    return None


def extend_trial(run: RunDirectory, rounds: int) -> None:
    """Let a trial that ended at a rung run further; keep the summary of the rung.

    The configuration is changed first: a process that is killed in between finds the rung as it was.
    """
    if run.finished and (done := json.loads(run.summary.read_text())["rounds"]) < rounds:
        write_atomically(run.config, yaml.safe_dump({**read_config(run), "rounds": rounds}, sort_keys=False))
        (run.path / SLURM_JOB).unlink(missing_ok=True)  # the job of the rung may still be in the queue
        run.summary.rename(run.path / RUNG_SUMMARY.format(done))


def tune(grid: Grid, config: TuneConfig, root: Path, launcher: Launcher, console: Console) -> Grid:
    """Search the settings of all methods, or continue that; trials of all methods run together.

    Returns the comparison with each run also tuned, where that changes it.
    """
    methods, folder = find_methods(grid, config), root / FOLDER
    metric, storages = require_fair(methods, config), _optuna().storages
    folder.mkdir(parents=True, exist_ok=True)
    with RunStatus().own(RunDirectory(folder)):  # one search at a time
        for path in (folder / STUDY, folder / f"{STUDY}.lock"):  # a killed process leaves Optuna's lock
            path.unlink(missing_ok=True)
        storage = storages.JournalStorage(storages.journal.JournalFileBackend(str(folder / STUDY)))
        for method in methods:
            method.start_study(metric, storage)
        while sum(method.ask() for method in methods):
            for stage in range(len(config.rungs) + 1):
                _run_stage(methods, stage, folder, launcher, console)
        write_search(methods, metric, folder, grid.name)
    runs = []
    for method in methods:
        found = ", ".join(f"{key} {format_setting(value)}" for key, value in method.found.items())
        console.print(f"{method.label}: {found}", soft_wrap=True, highlight=False)
        for run in method.runs:
            tuned = complete_config(overlay(run.config, nested(method.found)))
            runs += [run] if tuned == run.config else [run, PlannedRun(f"{run.name}-tuned", tuned)]
    return Grid(grid.name, runs)


def _run_stage(methods: Sequence[Method], stage: int, folder: Path, launcher: Launcher, console: Console) -> None:
    """Run the trials of a generation up to a rung, or to their end, and tell the studies."""
    planned = [run for m in methods for trial in m.running for run in m.plan(trial.number, trial.params, stage)]
    missing = [run for run in planned if read_rung(RunDirectory(folder / run.name), run.config["rounds"]) is None]
    for run in missing:
        extend_trial(RunDirectory(folder / run.name), run.config["rounds"])
    failed = run_all(missing, folder, launcher, console) if missing else {}
    for name, reason in failed.items():  # the search continues when they can run
        raise GridError(f"{len(failed)} trials failed, the first is {name}: {reason}", 1)
    for method in methods:
        method.tell(stage, folder)


def require_fair(methods: Sequence[Method], config: TuneConfig) -> Metric:
    """Refuse what cannot be searched fairly, before anything is written; returns what trials are evaluated by."""
    for method in methods:
        shared = {run.config["seed"] for run in method.runs} & set(config.seeds)
        if shared:
            raise ConfigError(f"tune.seeds must be others than those of the comparison, got {min(shared)} in both")
        rounds, cost = method.rounds, method.rounds * len(config.seeds)
        if config.rungs and config.rungs[-1] >= rounds:
            raise ConfigError(f"tune.rungs must be before the last of the {rounds} rounds, got {config.rungs[-1]}")
        trials = math.prod(map(len, method.search.values())) if config.sampler == "grid" else 1
        if config.budget.get("rounds", math.inf) < trials * cost:
            raise ConfigError(
                f"tune.budget.rounds must be at least {trials * cost} for {trials} trials of {cost} rounds of "
                f"{method.name}, got {config.budget['rounds']}"
            )
    first = methods[0]
    trial = first.plan(0, first.untuned, 0)[0]
    streams = build(trial.config).stream, build_stream(first.runs[0].config)
    # What arrives is not known before.
    tasks = {s.fingerprint(0, s.train[0]) if has_random_access(s.train) else str(id(s)) for s in streams}
    if config.evaluate_on == "prequential" and len(tasks) == 1:
        raise ConfigError(
            "tune.settings must name other data for tune.evaluate_on prequential: the rounds of "
            f"{trial.config['data']['name']} are the same for every seed here, and the comparison learns from them"
        )
    return streams[0].metric


def describe_search(grid: Grid, config: TuneConfig) -> list[str]:
    """Return what would be searched, one line per method."""
    lines = []
    for method in find_methods(grid, config):
        ranges = "; ".join(f"{key} in {format_range(values)}" for key, values in method.search.items())
        lines.append(f"{method.label}: {method.budget:,} {method.unit}, evaluated on {config.evaluate_on}; {ranges}")
    return lines


@dataclass(frozen=True)
class SearchResults(ReportData):
    """Results of a search."""

    columns: ClassVar[dict[str, dict[str, Any]]] = {
        "trials": {
            **dict.fromkeys(("label", "state"), pl.String),
            **dict.fromkeys(("trial", "rounds", "gradient_evaluations"), pl.Int64),
            "chosen": pl.Boolean,
            "result": pl.Float64,
        },
        "search_space": dict.fromkeys(SPACE, pl.String),
    }

    trials: pl.DataFrame  # one row per trial, with a column for each setting; its last result, null if not finite
    search_space: pl.DataFrame  # one row per method and setting, as text

    def tables(self) -> list[Table]:
        """Return what was searched; the figure shows each trial."""
        caption = "What was searched; no trial saw a test task. Beyond an end of a range there may be better values."
        return [Table("search_space", caption, self.search_space.columns, self.search_space.rows())]

    def figures(self, title: str) -> list[ReportFigure]:
        """Return the results against the step size, one curve per method."""
        figure, (axes,) = new_figure(3.6)
        step = next(key for key in STEP_SIZES if key in self.trials.columns)
        for label in self.labels:
            look = line_style(self.labels, label)
            trials = self.trials.filter(label=label, state="complete").drop_nulls([step]).sort(step)
            ring = {**look, "fillstyle": "none", "linestyle": "none", "label": None, "marker": "o", "markersize": 11}
            for some, style in ((trials, look), (trials.filter("chosen"), ring)):
                axes.plot(some[step].to_list(), some["result"].to_list(), **style)
        quantity = escape_mathtext(self.search_space["result"][0]).replace(" (", "\n(")
        axes.set(xscale="log", xlabel=STEP_SIZES[step], ylabel=quantity)
        caption = (
            f"Result of each complete trial against its {STEP_SIZES[step]}; rings are the chosen ones. Where other "
            "settings are searched, too, a curve goes through trials that differ in them."
        )
        return [finish_figure(figure, "sensitivity", caption, f"{title}: sensitivity to the {STEP_SIZES[step]}")]


def write_search(methods: Sequence[Method], metric: Metric, folder: Path, title: str) -> None:
    """Write trials.csv, search_space.csv, best.yaml and the figure into the folder of a search."""
    trials, space = [], []
    direction = "higher is better" if metric.higher_is_better else "lower is better"
    for method in methods:
        states = []
        for trial in method.trials:
            values = trial.intermediate_values
            states.append("complete" if trial.state.name == "COMPLETE" else "pruned" if values else "not finite")
            row = {"label": method.label, "trial": trial.number, "state": states[-1], "chosen": trial == method.best}
            row |= {**trial.user_attrs, "result": values[max(values)] if values else None}
            trials.append(row | {key: trial.params.get(key) for key in method.config.search})
        counts = (str(len(states)), str(states.count("pruned")), str(states.count("not finite")))
        about = f"{method.config.evaluate_on} {metric.name} ({direction})", f"{method.budget} {method.unit}"
        for key, values in method.search.items():
            chosen = (format_setting(one[key]) for one in (method.untuned, method.found))
            space.append((method.label, key, format_range(values), *chosen, *counts, *about))
    results = SearchResults(pl.DataFrame(trials, infer_schema_length=None), pl.DataFrame(space, SPACE, orient="row"))
    results.write(folder)
    write_atomically(folder / "best.yaml", yaml.safe_dump({m.name: m.found for m in methods}, sort_keys=False))
    with report_style():
        for figure in results.figures(title):
            figure.save(folder)


def read_search(paths: Sequence[Path]) -> SearchResults | None:
    """Return the search in the folder of a comparison, or in that of a report about it; None where there is none."""
    found = (SearchResults.read(folder) for path in paths for folder in (path / FOLDER, path))
    return next((one for one in found if one is not None), None)
