"""Write tables, figures and report.html from finished runs, and tables of ranks over several comparisons."""

import base64
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from jinja2 import Environment, PackageLoader
from matplotlib.figure import Figure

from obbo_lightning import __version__
from obbo_lightning.config.parse import flatten
from obbo_lightning.config.registry import short_name
from obbo_lightning.escaping import unescape_table
from obbo_lightning.experiments.comparison import Comparison, read_comparison
from obbo_lightning.experiments.market import MarketComparison, has_events, read_market
from obbo_lightning.experiments.rates import Rates, has_rates, read_rates
from obbo_lightning.experiments.report_data import (
    INK,
    ReportData,
    ReportFigure,
    Score,
    Table,
    format_with_error,
    report_style,
    sorted_labels,
)
from obbo_lightning.experiments.runs import Run, find_finished_runs, format_setting, label_runs
from obbo_lightning.experiments.tune import read_search

SETTINGS = "Settings that decide the results; empty where an algorithm has none."
# On a screen figures follow the reader's theme; on paper they are always light.
THEME = (
    f"<style>svg {{ color: {INK} }} "
    "@media screen and (prefers-color-scheme: dark) { svg { color: #e4e4e1 } }</style>"
)


class Report(NamedTuple):
    """What was written, and the runs that are not in it."""

    page: Path
    written: list[Path]
    tables: Sequence[Table]
    left_out: Sequence[str]


def write_report(paths: list[Path], output: Path, title: str, reference: str | None = None) -> Report:
    """Write report.html, its tables and figures as files, and the CSV files that all of it is made from.

    ``paths`` are folders with finished runs somewhere below; or one with those CSV files, of which the rest is made
    again. The others are compared with the algorithm ``reference``; None: the first.
    """
    if (output / "config.yaml").exists():
        raise ValueError(f"--output must not be a run directory, got {str(output)!r}")
    found, runs, left_out = _read_data(paths)
    shown, search = [found.as_reported(reference)], read_search(paths)
    shown += [search] if search else []
    settings = [settings_table(runs)] if runs else []
    if not runs and (earlier := paths[0] / "settings.csv").is_file():
        content = unescape_table(pl.read_csv(earlier, infer_schema=False)).fill_null("")
        settings = [Table("settings", SETTINGS, content.columns, content.rows())]
    tables = [table for data in shown for table in data.tables()]
    with report_style():
        figures = [figure for data in shown for figure in data.figures(title)]
    written = write_page(output, title, [*tables, *settings], figures, left_out)
    written += [path for data in shown for path in data.write(output)]
    return Report(output / "report.html", written, tables, left_out)


def plot_comparison(*runs: str | Path) -> dict[str, Figure]:
    """Draw the figures of `report`, of several algorithms on the same stream; returns them by name.

    Args:
        runs: folders with finished runs somewhere below, such as ``runs/compare/default``.
    """
    paths = [Path(run) for run in runs]
    with report_style():
        figures = _read_data(paths)[0].as_reported().figures(", ".join(path.resolve().name for path in paths))
    return {figure.name: figure.figure for figure in figures}


def _read_data(paths: list[Path]) -> tuple[ReportData, list[Run], list[str]]:
    """Return an earlier report, or the data of runs with these runs and those left out.

    What kind of report runs make follows from their files and their stream.
    """
    if len(paths) == 1 and not any(paths[0].rglob("config.yaml")):
        for kind in (Comparison, MarketComparison, Rates):
            earlier: ReportData | None = kind.read(paths[0])
            if earlier is not None:
                return earlier, [], []
    runs, left_out = find_finished_runs(paths)
    if has_rates(runs):
        rates, unused = read_rates(runs)
        return rates, runs, left_out + unused
    runs, repeated_seeds = label_runs(runs)
    left_out += repeated_seeds
    if any(map(has_events, runs)):
        market, unused = read_market(runs)
        return market, runs, left_out + unused
    return read_comparison(runs), runs, left_out


def settings_table(runs: Sequence[Run]) -> Table:
    """Return the settings of each algorithm, one row per configuration key."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        flat = dict(flatten(run.config))
        found.setdefault(run.label or short_name(flat["algorithm.name"]), []).append(flat)
    keys = dict.fromkeys(key for configs in found.values() for config in configs for key in config)
    rows = [
        [key, *(_distinct(config.get(key) for config in configs) for configs in found.values())]
        for key in keys
        if key.startswith(("data.", "problem.", "algorithm.", "rounds", "seed", "regret_window", "evaluation.tasks"))
    ]
    return Table("settings", SETTINGS, ["setting", *found], [row for row in rows if any(row[1:])])


def _distinct(values: Iterable[Any]) -> str:
    """Return each value once, in order; of paths the last part, because folders of a machine are private.

    >>> _distinct([0.5, 0.5]), _distinct([1, None, 2]), _distinct(["/home/me/data.npz"])
    ('0.5', '1, 2', 'data.npz')
    """
    known = (Path(value).name if isinstance(value, str) and "/" in value else value for value in values)
    return ", ".join(dict.fromkeys(format_setting(value) for value in known if value is not None))


def write_page(
    output: Path, title: str, tables: Sequence[Table], figures: Sequence[ReportFigure], left_out: Sequence[str] = ()
) -> list[Path]:
    """Write tables and figures as files, and report.html, which contains all of them."""
    output.mkdir(parents=True, exist_ok=True)
    written = [output / "report.html", *(path for table in tables for path in table.write(output))]
    images = []
    for figure in figures:
        png, svg = figure.save(output)
        written += [png, svg]
        text = svg.read_text(encoding="utf-8")
        head, _, body = text[text.index("<svg") :].partition(">")
        themed = f"{head}>{THEME}{body.replace(INK, 'currentColor')}"
        source = "data:image/svg+xml;base64," + base64.b64encode(themed.encode()).decode()
        width, height = (round(96 * inches) for inches in figure.figure.get_size_inches())
        images.append({**figure._asdict(), "source": source, "width": width, "height": height})
    content = {"title": title, "tables": tables, "figures": images, "left_out": left_out}
    templates = Environment(loader=PackageLoader("obbo_lightning.experiments", "."), autoescape=True)
    page = templates.get_template("page.html").render(**content, version=__version__)
    (output / "report.html").write_text(page + "\n", encoding="utf-8")
    return written


def write_ranks(paths: Sequence[Path], output: Path, title: str) -> Report:
    """Write a page with the rank of each method in several comparisons: folders of reports, or with runs below."""
    names = [path.resolve().parent.name if path.resolve().name == "report" else path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        raise ValueError(f"--by_folder needs folders of different names, got {', '.join(names)}")
    found = {name: _read_data([path])[0].as_reported().scores() for name, path in zip(names, paths, strict=True)}
    table = ranks_table(found)
    return Report(output / "report.html", write_page(output, title, [table], []), [table], [])


def ranks_table(comparisons: dict[str, tuple[str, bool, dict[str, Score]]]) -> Table:
    """Return ranks from the `ReportData.scores` of each comparison."""
    ranks: dict[str, list[int]] = {}
    cells = {}
    for name, (_, higher, scores) in comparisons.items():
        sign = -1 if higher else 1
        cost = {m: sign * mean if math.isfinite(mean) else math.inf for m, (mean, _) in scores.items()}
        first = min(cost, key=cost.__getitem__)
        best, best_error = scores[first]
        for method, (mean, error) in scores.items():
            near = method == first
            if error is not None and best_error is not None:
                near |= abs(mean - best) < 2 * math.hypot(error, best_error)
            rank = 1 + sum(other < cost[method] for other in cost.values())
            shown = format_with_error(mean, error, 3) if math.isfinite(mean) else "not finite"
            cells[method, name] = f"{'• ' if near else ''}{shown} ({rank})"
            ranks.setdefault(method, []).append(rank)
    rows = []
    for method in sorted(sorted_labels(sorted(ranks)), key=lambda m: (-len(ranks[m]), np.mean(ranks[m]))):
        count = f" (in {len(ranks[method])})" if len(ranks[method]) < len(comparisons) else ""
        mean_rank = f"{np.mean(ranks[method]):.1f}{count}"
        rows.append([method, *(cells.get((method, name), "") for name in comparisons), mean_rank])
    caption = (
        "One row per method, one column per comparison: score ± standard error, and the rank. •: the first, and those "
        "whose difference to it is below twice its standard error, as if the two were independent: no difference was "
        "shown. The mean rank is over the comparisons that a method is in; those in most of them come first."
    )
    columns = [f"{name}: {measure}" for name, (measure, _, _) in comparisons.items()]
    return Table("ranks", caption, ["method", *columns, "mean rank"], rows)
