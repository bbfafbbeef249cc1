"""`report`: tables, figures and one HTML page of finished runs; ``--by_folder``: ranks in several comparisons."""

import base64
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from jinja2 import Environment, PackageLoader

from obbo_lightning.config.registry import short_name
from obbo_lightning.escaping import escape_table, unescape_table
from obbo_lightning.experiments.comparison import Comparison, read_comparison
from obbo_lightning.experiments.market import MarketComparison, draw_event, has_events, read_market
from obbo_lightning.experiments.rates import Rates, has_rates, read_rates
from obbo_lightning.experiments.report_data import (
    INK,
    ReportData,
    ReportFigure,
    Score,
    Table,
    report_style,
    sorted_labels,
)
from obbo_lightning.experiments.runs import LeftOut, Run, find_finished_runs, label_runs, without_repetitions
from obbo_lightning.experiments.tune import read_search

SETTINGS_CAPTION = "Settings that decide the results, with the paper's letters; empty where an algorithm has none."
# Settings of an algorithm in that table, with their keys.
SETTINGS = {
    "outer step α": "lr",
    "scale of auto": "scale",
    "window w": "window",
    "geometry": "geometry.name",
    "ρ": "geometry.rho",
    "bias correction": "geometry.bias_correction",
    "inner solver": "inner.name",
    "inner steps K": "inner.steps",
    "inner step η": "inner.lr",
    "samples s": "inner.batch_size",
    "hypergradient": "hypergradient.name",
    "iterations J": "hypergradient.steps",
    "terms m": "hypergradient.max_terms",
    "clip": "clip",
}
RANKS_CAPTION = (
    "One row per method, one column per comparison: score ± standard error, and the rank. •: the first, and those "
    "whose difference to it is below twice its standard error, as if the two were independent: no difference was "
    "shown. The mean rank is over the comparisons that a method is in; those in most of them come first."
)
# On a screen figures follow the reader's theme; on paper they are always light.
THEME = (
    f"<style>svg {{ color: {INK} }} "
    "@media screen and (prefers-color-scheme: dark) { svg { color: #e4e4e1 } }</style>"
)
Facts = list[tuple[str, str]]


class Report(NamedTuple):
    """What was written, and the runs that are not in it."""

    page: Path
    written: list[Path]
    tables: Sequence[Table]
    left_out: Sequence[LeftOut]


class _Source(NamedTuple):
    """What a report is made from: its data, the runs (none for an earlier report) and those left out."""

    data: ReportData
    runs: Sequence[Run] = ()
    left_out: Sequence[LeftOut] = ()
    repeated: int = 0


def write_report(
    paths: list[Path], output: Path, title: str, event: tuple[str, str] | None = None, reference: str | None = None
) -> Report:
    """Write report.html, its tables and figures as files, and the CSV files that all of it is made from.

    `report` on a folder with those CSV files makes the rest again.

    Args:
        paths: folders with finished runs somewhere below, or one folder with an earlier report.
        output: where to write.
        title: of the page and the figures.
        event: ticker and day of a market event to draw by itself.
        reference: algorithm that the others are compared with; None: the first.
    """
    if (output / "config.yaml").exists():
        raise ValueError(f"--output must not be a run directory, got {str(output)!r}")
    source = _read_source(paths)
    if event and not (source.runs and isinstance(source.data, MarketComparison)):
        raise ValueError(f"--event needs market runs with their prices, got {' '.join(event)!r} without them")
    data, search = source.data.sorted(reference).rounded(), read_search(paths)
    tables = [*data.tables(), *(search.tables() if search else [])]
    if source.runs:
        facts, settings = describe_runs(data.labels, source.runs, source.repeated), [settings_table(source.runs)]
    else:
        facts, settings = _read_facts(data.labels, paths[0])
    with report_style():
        figures = data.figures(title) + (draw_event(source.runs, *event) if event else [])
        figures += search.figures(title) if search else []
    _make_folder(output)
    written = [*data.write(output), *(search.write(output) if search else []), output / "facts.csv"]
    escape_table(pl.DataFrame(facts, ["name", "value"], orient="row")).write_csv(output / "facts.csv")
    page = Page(title, facts, tables, figures, source.left_out, settings)
    return Report(output / "report.html", [*written, *page.write(output)], tables, source.left_out)


def draw_runs(paths: list[Path], title: str) -> list[ReportFigure]:
    """Return the figures of `write_report`, of finished runs."""
    with report_style():
        return _read_source(paths).data.sorted().figures(title)


def _read_source(paths: list[Path]) -> _Source:
    """Read an earlier report, or runs; what kind of report they make follows from their files and their stream."""
    if len(paths) == 1 and not any(paths[0].rglob("config.yaml")):
        for kind in (Comparison, MarketComparison, Rates):
            earlier: ReportData | None = kind.read(paths[0])
            if earlier is not None:
                return _Source(earlier)
    runs, left_out = find_finished_runs(paths)
    if has_rates(runs):
        rates, unused = read_rates(runs)
        return _Source(rates, runs, left_out + unused)
    labelled, repeated_seeds = label_runs(runs)
    left_out += repeated_seeds
    if any(map(has_events, labelled)):
        market, unused = read_market(labelled)
        return _Source(market, labelled, left_out + unused)
    once = without_repetitions(labelled)
    return _Source(read_comparison(once), once, left_out, len(labelled) - len(once))


def describe_runs(labels: Sequence[str], runs: Sequence[Run], repeated: int = 0) -> Facts:
    """Return what all runs share, in words; ``repeated`` is the number of runs that equal one of them."""
    configs = [run.config for run in runs]
    shared = {k: v for k, v in configs[0]["data"].items() if all(c["data"].get(k) == v for c in configs)}
    places = {k for k in runs[0].stream.may_differ if isinstance(shared.get(k), str)}
    data = {key: value for key, value in shared.items() if key not in places}
    facts = [
        ("algorithms", "; ".join(labels)),
        ("experiment", ", ".join(sorted({str(c.get("experiment")) for c in configs}))),
        ("data", _in_words(data)),
        ("problem", "; ".join(dict.fromkeys(_in_words(c.get("problem") or {}) for c in configs))),
        ("runs", str(len(runs))),
        ("not counted", f"{repeated} whose seed changed nothing: no errors over seeds" if repeated else ""),
        ("rounds T", _distinct([c["rounds"] for c in configs])),
        ("seeds", _distinct([c["seed"] for c in configs])),
        ("regret window w_R", _distinct([c["regret_window"] for c in configs])),
        ("test tasks", _distinct([c.get("evaluation", {}).get("tasks") for c in configs])),
    ]
    return [(name, value) for name, value in facts if value]


def _in_words(config: dict[str, Any]) -> str:
    """Return settings in words; of paths the last part, because folders of a machine are private."""
    words = []
    for key, value in config.items():
        if isinstance(value, dict):
            words.append(f"{key} {_in_words(value)}")
        elif value is not None:
            shown = Path(value).name if isinstance(value, str) and "/" in value else value
            words.append(str(shown) if key == "name" else f"{key} = {shown}")
    return ", ".join(words)


def settings_table(runs: Sequence[Run]) -> Table:
    """Return the settings of each algorithm that decide its result; only columns that one of them has."""
    by_label: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        label = run.label or short_name(run.config["algorithm"]["name"])
        by_label.setdefault(label, []).append(run.config["algorithm"])
    rows = [
        [label, *(_distinct([_setting(one, key) for one in found]) for key in SETTINGS.values())]
        for label, found in by_label.items()
    ]
    header = ["algorithm", *SETTINGS]
    used = [i for i in range(len(header)) if any(row[i] not in ("", "False") for row in rows)]
    return Table("settings", SETTINGS_CAPTION, [header[i] for i in used], [[row[i] for i in used] for row in rows])


def _setting(algorithm: dict[str, Any], key: str) -> Any:
    if key == "scale" and algorithm.get("lr") != "auto":  # it scales nothing else
        return None
    value: Any = algorithm
    for word in key.split("."):
        value = value.get(word) if isinstance(value, dict) else None
    return short_name(value) if key.endswith("name") and value else value


def _distinct(values: Sequence[Any]) -> str:
    """Return each value once, in order; of many numbers the first and the last.

    >>> _distinct([0.5, 0.5]), _distinct([3, 1, 2]), _distinct([None, 2]), _distinct([50, 100, 200, 400, 800, 1600])
    ('0.5', '1, 2, 3', '2', '50 to 1600')
    """
    known = list(dict.fromkeys(value for value in values if value is not None and not isinstance(value, dict)))
    numbers = all(isinstance(value, (int, float)) for value in known)
    shown = [f"{v:g}" if isinstance(v, float) else str(v) for v in (sorted(known) if numbers else known)]
    return f"{shown[0]} to {shown[-1]}" if numbers and len(shown) > 5 else ", ".join(shown)


def _read_facts(labels: Sequence[str], folder: Path) -> tuple[Facts, list[Table]]:
    """Return the facts and the settings of an earlier report."""
    frames = [
        unescape_table(pl.read_csv(path, infer_schema=False)).fill_null("")
        for path in (folder / "facts.csv", folder / "settings.csv")
    ]
    facts = [(name, value) for name, value in frames[0].rows() if name not in ("algorithms", "made from")]
    facts = [("algorithms", "; ".join(labels)), *facts, ("made from", "the CSV files of an earlier report")]
    return facts, [Table("settings", SETTINGS_CAPTION, frames[1].columns, [list(row) for row in frames[1].rows()])]


def _make_folder(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output must be a folder that can be made, got {str(output)!r}: {error.strerror}") from None


class Page(NamedTuple):
    """Content of an HTML page."""

    title: str
    facts: Facts
    tables: Sequence[Table]
    figures: Sequence[ReportFigure] = ()
    left_out: Sequence[LeftOut] = ()
    settings: Sequence[Table] = ()

    def write(self, output: Path) -> list[Path]:
        """Write tables and figures as files, and report.html, which contains all of them."""
        from obbo_lightning import __version__

        written = [path for table in (*self.tables, *self.settings) for path in table.write(output)]
        written += [path for figure in self.figures for path in figure.save(output)]
        template = Environment(loader=PackageLoader("obbo_lightning.experiments", "."), autoescape=True)
        embedded = {"figures": [_embed(figure, output) for figure in self.figures], "version": __version__}
        content = template.get_template("page.html").render({**self._asdict(), **embedded})
        (output / "report.html").write_text(content + "\n", encoding="utf-8")
        return [output / "report.html", *written]


def _embed(figure: ReportFigure, folder: Path) -> dict[str, Any]:
    """Return a figure for the page: its SVG file as a data URL, in the colours of the reader's theme."""
    text = (folder / f"{figure.name}.svg").read_text(encoding="utf-8")
    start = text.index("<svg")
    head = text.index(">", start) + 1
    themed = text[start:head] + THEME + text[head:].replace(INK, "currentColor")
    width, height = (round(96 * inches) for inches in figure.figure.get_size_inches())
    source = "data:image/svg+xml;base64," + base64.b64encode(themed.encode()).decode()
    return {"name": figure.name, "caption": figure.caption, "source": source, "width": width, "height": height}


class Ranking(NamedTuple):
    """Scores of the methods of one comparison.

    Attributes:
        name: of its folder.
        measure: what the scores are, and their direction.
        higher: whether higher is better.
        scores: by method.
    """

    name: str
    measure: str
    higher: bool
    scores: dict[str, Score]

    @property
    def ranks(self) -> dict[str, int]:
        """Rank of each method: 1 is the best, equal scores share the better rank, what is not finite is last."""
        sign = -1 if self.higher else 1
        key = {m: sign * s.mean if math.isfinite(s.mean) else math.inf for m, s in self.scores.items()}
        return {method: 1 + sum(other < value for other in key.values()) for method, value in key.items()}

    @property
    def not_told_apart(self) -> set[str]:
        """The first method, and those that the errors do not tell from it."""
        first = min(self.ranks, key=self.ranks.__getitem__)
        best = self.scores[first]
        near = {first}
        for method, (mean, error) in self.scores.items():
            known = best.error is not None and error is not None
            if known and abs(mean - best.mean) < 2 * math.hypot(error or 0.0, best.error or 0.0):
                near.add(method)
        return near

    def cell(self, method: str) -> str:
        """Return score, standard error and rank of a method; empty where it is not in the comparison."""
        if method not in self.scores:
            return ""
        mean, error = self.scores[method]
        if not math.isfinite(mean):
            return f"not finite ({self.ranks[method]})"
        shown = f"{mean:.3f}" + ("" if error is None else f" ± {error:.3f}")
        return f"{'• ' if method in self.not_told_apart else ''}{shown} ({self.ranks[method]})"


def write_ranks(paths: Sequence[Path], output: Path, title: str) -> Report:
    """Write report.html with the rank of each method in several comparisons, and its table.

    Args:
        paths: one folder per comparison: of a report, or with finished runs below.
        output: where to write.
        title: of the page.
    """
    names = [path.resolve().parent.name if path.resolve().name == "report" else path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        raise ValueError(f"--by_folder needs folders of different names, got {', '.join(names)}")
    rankings = [read_ranking(name, path) for name, path in zip(names, paths, strict=True)]
    _make_folder(output)
    tables = [ranks_table(rankings)]
    written = Page(title, [(one.name, one.measure) for one in rankings], tables).write(output)
    return Report(output / "report.html", written, tables, [])


def read_ranking(name: str, path: Path) -> Ranking:
    """Return the ranking of the methods in one folder."""
    return Ranking(name, *_read_source([path]).data.sorted().rounded().scores())


def ranks_table(rankings: Sequence[Ranking]) -> Table:
    """Return ranks: methods that are in most comparisons first, and among them by their mean rank."""
    methods = sorted_labels(sorted({method for one in rankings for method in one.scores}))
    ranks = {m: [one.ranks[m] for one in rankings if m in one.scores] for m in methods}
    rows = []
    for method in sorted(methods, key=lambda m: (-len(ranks[m]), np.mean(ranks[m]))):
        count = f" (in {len(ranks[method])})" if len(ranks[method]) < len(rankings) else ""
        mean = f"{np.mean(ranks[method]):.1f}{count}"
        rows.append([method, *(one.cell(method) for one in rankings), mean])
    return Table("ranks", RANKS_CAPTION, ["method", *(one.name for one in rankings), "mean rank"], rows)
