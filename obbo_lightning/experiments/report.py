"""`report`: tables, figures and one HTML page of finished runs; ``--by_folder``: ranks in several comparisons."""

import base64
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from jinja2 import Environment, PackageLoader

from obbo_lightning import __version__
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
from obbo_lightning.experiments.runs import Run, find_finished_runs, flatten, label_runs
from obbo_lightning.experiments.tune import read_search

# Tables about the runs themselves, with their captions.
RUN_TABLES = {"facts": "What the runs share.", "settings": "Settings in which algorithms differ; empty: it has none."}
FACTS = ("experiment", "rounds", "seed", "regret_window", "evaluation.tasks")
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
    about = describe_runs(shown[0].labels, runs) if runs else _read_run_tables(paths[0])
    tables = [table for data in shown for table in data.tables()]
    with report_style():
        figures = [figure for data in shown for figure in data.figures(title)]
    written = write_page(output, title, [*tables, *about], figures, left_out)
    written += [path for data in shown for path in data.write(output)]
    return Report(output / "report.html", written, tables, left_out)


def draw_runs(paths: list[Path], title: str) -> list[ReportFigure]:
    """Return the figures of `write_report`, of finished runs."""
    with report_style():
        return _read_data(paths)[0].as_reported().figures(title)


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


def describe_runs(labels: Sequence[str], runs: Sequence[Run]) -> list[Table]:
    """Return a table of what all runs share, and one of the algorithms' settings that differ, where there are any."""
    flat = [dict(flatten(run.config)) for run in runs]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    shared = {key: _distinct([flat[0].get(key)]) for key in keys if len({str(one.get(key)) for one in flat}) == 1}
    facts = [("algorithms", "; ".join(labels)), ("runs", str(len(runs)))]
    facts += [(key, _distinct(one.get(key) for one in flat)) for key in FACTS]
    for section in ("data", "problem", "algorithm"):
        inside = {key.partition(".")[2]: shared[key] for key in shared if key.startswith(f"{section}.")}
        facts.append((section, ", ".join(f"{key} = {value}" for key, value in inside.items() if value)))
    tables = [Table("facts", RUN_TABLES["facts"], ["name", "value"], [fact for fact in facts if fact[1]])]
    differing = [key for key in keys if key.startswith("algorithm.") and key not in {*shared, "algorithm.name"}]
    if differing:
        by_label: dict[str, list[dict[str, Any]]] = {}
        for run, one in zip(runs, flat, strict=True):
            by_label.setdefault(run.label or short_name(one["algorithm.name"]), []).append(one)
        rows = [
            [label, *(_distinct(one.get(key) for one in by_label[label]) for key in differing)] for label in by_label
        ]
        columns = ["algorithm", *(key.partition(".")[2] for key in differing)]
        tables.append(Table("settings", RUN_TABLES["settings"], columns, rows))
    return tables


def _distinct(values: Iterable[Any]) -> str:
    """Return each value once, in order; of paths the last part, because folders of a machine are private.

    >>> _distinct([0.5, 0.5]), _distinct([1, None, 2]), _distinct(["/home/me/data.npz"])
    ('0.5', '1, 2', 'data.npz')
    """
    known = [value for value in values if value is not None]
    known = [Path(value).name if isinstance(value, str) and "/" in value else value for value in known]
    return ", ".join(dict.fromkeys(f"{value:g}" if isinstance(value, float) else str(value) for value in known))


def _read_run_tables(folder: Path) -> list[Table]:
    """Return the tables of `describe_runs` from an earlier report."""
    tables = []
    for name, caption in RUN_TABLES.items():
        if (folder / f"{name}.csv").is_file():
            content = unescape_table(pl.read_csv(folder / f"{name}.csv", infer_schema=False)).fill_null("")
            tables.append(Table(name, caption, content.columns, content.rows()))
    return tables


def write_page(
    output: Path, title: str, tables: Sequence[Table], figures: Sequence[ReportFigure], left_out: Sequence[str] = ()
) -> list[Path]:
    """Write tables and figures as files, and report.html, which contains all of them."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output must be a folder that can be made, got {str(output)!r}: {error.strerror}") from None
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


def rank_methods(higher: bool, scores: dict[str, Score]) -> dict[str, tuple[int, bool]]:
    """Return the rank of each method, and whether it is the first or the errors do not tell it from the first.

    Equal scores share the better rank, what is not finite is last; ``higher`` is better or not.
    """
    cost = {m: (-s.mean if higher else s.mean) if math.isfinite(s.mean) else math.inf for m, s in scores.items()}
    first = min(cost, key=cost.__getitem__)
    best, ranked = scores[first], {}
    for method, (mean, error) in scores.items():
        near = method == first
        if error is not None and best.error is not None:
            near |= abs(mean - best.mean) < 2 * math.hypot(error, best.error)
        ranked[method] = 1 + sum(other < cost[method] for other in cost.values()), near
    return ranked


def ranks_table(comparisons: dict[str, tuple[str, bool, dict[str, Score]]]) -> Table:
    """Return ranks from the `ReportData.scores` of each comparison."""
    ranks: dict[str, list[int]] = {}
    cells = {}
    for name, (_, higher, scores) in comparisons.items():
        for method, (rank, near) in rank_methods(higher, scores).items():
            mean, error = scores[method]
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
