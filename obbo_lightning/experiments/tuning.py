"""What a search found: its files, its tables, and the figure of results against α."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import yaml

from obbo_lightning.core.statistics import mean_and_error
from obbo_lightning.escaping import escape_mathtext, escape_table, unescape_table
from obbo_lightning.experiments.drawing import Drawing, finish, house_style, look_of, new_figure, save_drawing
from obbo_lightning.experiments.runs import read_run
from obbo_lightning.experiments.tables import Table, plain
from obbo_lightning.experiments.tune import Tuning
from obbo_lightning.experiments.tune_request import STEPS, Request
from obbo_lightning.runs.directory import RunDirectory, write_atomically

FOLDER = "tune"  # of a comparison
TRIALS, SEARCHED, TUNED = "trials.csv", "searched.csv", "tuned.csv"
OF_TRIALS = ("method", "trial", "state", "chosen", "rounds", "calls", "result")  # the others are settings
OF_SEARCHED = [
    "method",
    "setting",
    "range",
    "untuned",
    "found",
    "ends",
    "judged_on",
    "name",
    "higher_is_better",
    "budget",
]
MEASURES = ("test", "stream", "regret")


class Found(NamedTuple):
    """What is known of a search.

    Attributes:
        trials: a row a trial; ``result`` is the last that was measured, nothing where it blew up.
        searched: a row a method and setting: where it was looked for, what it was, what was found.
        tuned: a row a method and seed of the comparison, untuned and tuned; None where it is not played yet.
    """

    trials: pl.DataFrame
    searched: pl.DataFrame
    tuned: pl.DataFrame | None

    @property
    def labels(self) -> list[str]:
        """Of the methods, in order."""
        return self.trials["method"].unique(maintain_order=True).to_list()

    @property
    def step(self) -> str:
        """Which step every method was tuned by; a damaged table has none, and is refused for its want of α."""
        return next((key for key in STEPS if key in self.trials.columns), next(iter(STEPS)))


def write_search(tuning: Tuning, request: Request, folder: Path, title: str) -> None:
    """trials.csv, searched.csv, best.yaml and the figure in the folder of a search."""
    found = _found(tuning, request)
    write_found(found, folder)
    best = {method.name: tuning.found(method) for method in tuning.methods}
    write_atomically(folder / "best.yaml", yaml.safe_dump(best, sort_keys=False))
    with house_style():
        for drawing in draw_found(found, title):
            save_drawing(drawing, folder)


def _found(tuning: Tuning, request: Request) -> Found:
    trials, searched = [], []
    for method in tuning.methods:
        search, found = tuning.searches[method.name], tuning.found(method)
        for trial in search.trials:
            state = "blown up" if trial.pruned and not trial.results else "given up" if trial.pruned else "whole"
            row = {"method": method.label, "trial": trial.number, "state": state, "chosen": trial == search.best}
            result = list(trial.results.values())[-1] if trial.results else None
            measured = {"rounds": trial.rounds, "calls": trial.calls, "result": result}
            trials.append({**row, **measured, **{key: trial.values.get(key) for key in request.search}})
        searched += [
            {
                "method": method.label,
                "setting": key,
                "range": str(given),
                "untuned": str(method.untuned[key]),
                "found": str(found[key]),
                "ends": given.ends_at(found[key]),
                "judged_on": request.judge,
                **search.metric._asdict(),
                "budget": f"{request.budget} {request.unit}",
            }
            for key, given in method.ranges.items()
        ]
    return Found(pl.DataFrame(trials, infer_schema_length=None), pl.DataFrame(searched), None)


def write_tuned(tuning: Tuning, pairs: Mapping[str, str], root: Path) -> None:
    """tuned.csv, from the finished runs of the comparison: which of them are tuned ones is in ``pairs``."""
    rows = [
        {
            "method": method.label,
            "seed": cell.settings["seed"],
            **{f"{name}_untuned": value for name, value in _measures(root / cell.name).items()},
            **{f"{name}_tuned": value for name, value in _measures(root / pairs[cell.name]).items()},
        }
        for method in tuning.methods
        for cell in method.cells
    ]
    escape_table(pl.DataFrame(rows, infer_schema_length=None)).write_csv(root / FOLDER / TUNED)


def _measures(path: Path) -> dict[str, Any]:
    run = read_run(RunDirectory(path))
    metric = run.summary["metric"]
    lr = run.settings["algorithm"].get("lr")
    return {
        "lr": lr if isinstance(lr, (int, float)) else None,
        "test": run.summary[f"test_{metric}"],
        "stream": run.summary[f"stream_{metric}_last_100"],
        "regret": run.summary["regret_euclidean"],
    }


def read_found(paths: Sequence[Path]) -> Found | None:
    """What a search left in the folder of a comparison, or in that of an earlier report about it."""
    for path in paths:
        for folder in (path / FOLDER, path):
            if (folder / TRIALS).is_file() and (folder / SEARCHED).is_file():
                return _read(folder)
    return None


def _read(folder: Path) -> Found:
    try:
        tables = [
            unescape_table(pl.read_csv(folder / name, infer_schema_length=None)) if (folder / name).is_file() else None
            for name in (TRIALS, SEARCHED, TUNED)
        ]
        found = Found(*tables)  # type: ignore[arg-type]
        found.trials.select(*OF_TRIALS, found.step), found.searched.select(OF_SEARCHED)
    except (OSError, pl.exceptions.PolarsError) as damage:
        reason = " ".join(str(damage).split())
        raise ValueError(f"{folder} holds a damaged search: {type(damage).__name__} {reason}") from None
    return found


def write_found(found: Found | None, folder: Path) -> list[Path]:
    """The same files again, beside a report; none where nothing was searched."""
    written = []
    for name, table in zip((TRIALS, SEARCHED, TUNED), found or (), strict=False):
        if isinstance(table, pl.DataFrame):
            escape_table(table).write_csv(folder / name)
            written.append(folder / name)
    return written


def found_tables(found: Found | None) -> list[Table]:
    """Untuned against tuned, what was searched, and each trial; none where nothing was."""
    return [] if found is None else [*_side_by_side(found), _searched(found), _trials(found)]


def _side_by_side(found: Found) -> list[Table]:
    if found.tuned is None:
        return []
    known = [name for name in MEASURES if found.tuned[f"{name}_untuned"].dtype.is_numeric()]
    numbered = found.tuned["lr_tuned"].dtype.is_numeric()  # it is no number where it is auto
    rows = []
    for label in found.labels:
        runs = found.tuned.filter(pl.col("method") == label)
        steps = [shown(runs[f"lr_{which}"][0]) for which in ("untuned", "tuned")] if numbered else []
        means = [_mean(runs[f"{name}_{which}"]) for name in known for which in ("untuned", "tuned")]
        rows.append([label, *steps, *means])
    columns = [f"{name}, {which}" for name in ("α", *known)[not numbered :] for which in ("untuned", "tuned")]
    return [
        Table(
            "untuned_against_tuned",
            "Every method as the comparison has it, and with what the search found for it: means ± standard error over "
            "seeds; the stream's score is of the last 100 rounds.",
            ["method", *columns],
            rows,
        )
    ]


def _searched(found: Found) -> Table:
    first = found.searched.row(0, named=True)
    better = "higher" if first["higher_is_better"] else "lower"
    judged = "validation tasks" if first["judged_on"] == "validation" else "rounds of another stream, before they learn"
    return Table(
        "search_space",
        f"What was searched, with {first['budget']} for each method, by the {first['name']} on {judged} ({better} is "
        "better); no trial saw a test task. What was found at an end of its range may be better still beyond it.",
        ["method", "setting", "range", "untuned", "found", "trials", "given up", "blown up"],
        [
            [
                *(row["method"], row["setting"], str(row["range"]), _text(row["untuned"])),
                _text(row["found"]) + (", an end" if row["ends"] else ""),
                *_counts(found, row["method"]),
            ]
            for row in found.searched.iter_rows(named=True)
        ],
    )


def _counts(found: Found, label: str) -> list[str]:
    states = found.trials.filter(pl.col("method") == label)["state"].to_list()
    return [str(len(states)), str(states.count("given up")), str(states.count("blown up"))]


def _trials(found: Found) -> Table:
    keys = [name for name in found.trials.columns if name not in OF_TRIALS]
    return Table(
        "all_trials",
        "Every trial; the chosen one is marked. A trial that was given up has its last result.",
        ["method", "trial", *keys, "rounds", "calls", "result", "state"],
        [
            [
                row["method"],
                str(row["trial"]),
                *(shown(row[key]) for key in keys),
                *(str(row["rounds"]), str(row["calls"]), shown(row["result"])),
                "chosen" if row["chosen"] else row["state"],
            ]
            for row in found.trials.iter_rows(named=True)
        ],
    )


def draw_found(found: Found | None, title: str) -> list[Drawing]:
    """Results against the step, a curve a method; none where nothing was searched."""
    if found is None:
        return []
    figure, (axes,) = new_figure(3.6)
    first, step = found.searched.row(0, named=True), found.step
    for label in found.labels:
        look = look_of(found.labels, label)
        trials = found.trials.filter(pl.col("method") == label).drop_nulls(["result", step]).sort(step)
        whole, given_up = (trials.filter(test) for test in (pl.col("state") == "whole", pl.col("state") == "given up"))
        axes.plot(whole[step].to_list(), whole["result"].to_list(), **look)
        hollow = {"color": look["color"], "marker": look["marker"], "fillstyle": "none", "linestyle": "none"}
        axes.plot(given_up[step].to_list(), given_up["result"].to_list(), markersize=4, **hollow)
        chosen = trials.filter("chosen")
        axes.plot(chosen[step].to_list(), chosen["result"].to_list(), **{**hollow, "marker": "o", "markersize": 11})
    judged = "validation" if first["judged_on"] == "validation" else "stream"
    better = "higher is better" if first["higher_is_better"] else "lower is better"
    axes.set(xscale="log", xlabel=STEPS[step], ylabel=f"{judged} {escape_mathtext(first['name'])}\n({better})")
    caption = (
        f"What each trial gave, against its {STEPS[step]}; large rings are the chosen ones, hollow marks were given up "
        "early. "
        "Where other settings are searched, too, a curve goes through trials that differ in them."
    )
    return [finish(figure, axes, "sensitivity", caption, f"{title}: sensitivity to the {STEPS[step]}")]


def _mean(values: pl.Series) -> str:
    if values.null_count() or not values.is_finite().all():
        return "not finite"
    mean, error = mean_and_error(values.to_numpy())
    digits = 3 if abs(mean) >= 0.1 else 5
    return plain(mean, digits) + ("" if error is None else f" ± {plain(error, digits)}")


def shown(value: Any) -> str:
    """A setting, or a result, with the digits that matter."""
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _text(value: Any) -> str:
    try:
        return f"{float(value):.4g}"
    except (TypeError, ValueError):
        return str(value)
