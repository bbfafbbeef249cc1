"""`report`: tables, figures and one page of finished runs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from obbo_lightning.escaping import escape_table, unescape_table
from obbo_lightning.experiments.comparison import (
    BASELINE_COLUMNS,
    ROUND_COLUMNS,
    RUN_COLUMNS,
    TASK_COLUMNS,
    TIME_COLUMNS,
    Comparison,
    read_comparison,
)
from obbo_lightning.experiments.comparison_figures import draw_comparison
from obbo_lightning.experiments.comparison_tables import comparison_tables
from obbo_lightning.experiments.comparison_weights import WEIGHT_COLUMNS
from obbo_lightning.experiments.drawing import Drawing, house_style, save_drawing
from obbo_lightning.experiments.facts import facts_of, read_facts, settings_table, write_facts
from obbo_lightning.experiments.market_comparison import MarketComparison, has_events, market_tables, read_market
from obbo_lightning.experiments.market_figures import draw_event, draw_market
from obbo_lightning.experiments.page import write_page
from obbo_lightning.experiments.rates import BEFORE, Rates, draw_rates, has_rates, rates_tables, read_rates
from obbo_lightning.experiments.runs import LeftOut, Run, find_runs, label_runs, without_repetitions
from obbo_lightning.experiments.tables import Table, write_table
from obbo_lightning.experiments.tuning import draw_found, found_tables, read_found, write_found

Found = Comparison | MarketComparison | Rates
DIGITS = 8  # of what is written
MAY_LACK = ("tasks", "baselines", "weights")  # tables that some comparisons have no rows of


class Report(NamedTuple):
    """What was written, and which runs are not in it."""

    page: Path
    written: list[Path]
    tables: list[Table]
    left_out: list[LeftOut]


def write_report(
    paths: list[Path], output: Path, title: str, event: tuple[str, str] | None = None, reference: str | None = None
) -> Report:
    """Write report.html, its tables and figures as files, and the CSV files that all of it is made of.

    ``report`` on a folder with those CSV files makes the rest again.

    Args:
        paths: folders with finished runs somewhere below, or one folder with an earlier report.
        output: where to write.
        title: of the page and the figures.
        event: ticker and day of a market event to draw by itself.
        reference: which of the algorithms the others are compared with; the first where this is None.
    """
    if (output / "config.yaml").exists():
        raise ValueError(f"--output must not be a run directory, got {str(output)!r}")
    earlier = _earlier(paths)
    runs, left_out = ([], []) if earlier else find_runs(paths)
    repeated = 0
    if earlier:
        found = earlier
    else:
        every = runs
        found, runs, unused = _read(every)
        left_out, repeated = left_out + unused, len(every) - len(runs) - len(unused)
    if event and not (runs and isinstance(found, MarketComparison)):
        raise ValueError(f"--event needs market runs with their prices, got {' '.join(event)!r} without them")
    found = _rounded(found.facing(reference))
    tables, draw = _contents(found)
    facts, settings = (
        (facts_of(found.labels, runs, repeated), settings_table(runs)) if runs else read_facts(found.labels, paths[0])
    )
    tables += found_tables(searched := read_found(paths))
    with house_style():
        drawings = draw(title) + (draw_event(runs, *event) if event else []) + draw_found(searched, title)
    written = [*_write_data(found, output), write_facts(facts, output), *write_found(searched, output)]
    beside = [settings] if settings else []
    written += [path for table in (*tables, *beside) for path in write_table(table, output)]
    with house_style():
        written += [path for drawing in drawings for path in save_drawing(drawing, output)]
    page = write_page(output / "report.html", title, facts, tables, drawings, [str(one) for one in left_out], settings)
    return Report(page, [page, *written], tables, left_out)


def read_any(paths: list[Path]) -> Found:
    """What finished runs gave, or an earlier report of them, as its CSV files have it."""
    return _rounded((_earlier(paths) or _read(find_runs(paths)[0])[0]).facing(None))


def draw_runs(paths: list[Path], title: str) -> list[Drawing]:
    """The drawings of `write_report` alone, of finished runs."""
    found, _, _ = _read(find_runs(paths)[0])
    with house_style():
        return _contents(found)[1](title)


def _write_data(found: Found, output: Path) -> list[Path]:
    """What everything is made of, as CSV files."""
    make_folder(output)
    kept = {output / f"{name}.csv": data for name, data in found._asdict().items() if len(data) or name not in MAY_LACK}
    for path, data in kept.items():
        escape_table(data).write_csv(path)
    return list(kept)


def make_folder(output: Path) -> None:
    """Where a report goes."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output must be a folder that can be made, got {str(output)!r}: {error.strerror}") from None


def _rounded(found: Found) -> Found:
    """As its CSV files have it: what is made of them again is the same to the last digit."""
    rounded = [data.with_columns(pl.col(pl.Float64).round_sig_figs(DIGITS)) for data in found]
    return type(found)(*rounded)


def _read(runs: Sequence[Run]) -> tuple[Found, list[Run], list[LeftOut]]:
    """What kind of comparison these runs make follows from what they hold and what their stream says."""
    if has_rates(runs):
        rates, left_out = read_rates(runs)
        return rates, list(runs), left_out
    labelled, left_out = label_runs(runs)
    if any(map(has_events, labelled)):
        market, unused = read_market(labelled)
        return market, labelled, left_out + unused
    once = without_repetitions(labelled)
    return read_comparison(once), once, left_out


def _contents(found: Found) -> tuple[list[Table], Callable[[str], list[Drawing]]]:
    if isinstance(found, MarketComparison):
        return market_tables(found), lambda title: draw_market(found, title)
    if isinstance(found, Rates):
        return rates_tables(found), lambda title: draw_rates(found, title)
    return comparison_tables(found), lambda title: draw_comparison(found, title)


def _earlier(paths: list[Path]) -> Found | None:
    """What an earlier report left, where there is one, and no runs below it."""
    path = paths[0]
    if len(paths) > 1 or any(path.rglob("config.yaml")):
        return None
    try:
        found = _read_earlier(path)
        return found and type(found)(*map(unescape_table, found))
    except (OSError, pl.exceptions.PolarsError) as damage:
        reason = " ".join(str(damage).split())
        raise ValueError(f"{path} holds a damaged report: {type(damage).__name__} {reason}") from None


def _read_earlier(path: Path) -> Found | None:
    if (path / "runs.csv").is_file():
        return Comparison(
            _frame(path / "runs.csv", RUN_COLUMNS),
            _frame(path / "rounds.csv", ROUND_COLUMNS),
            _frame(path / "timings.csv", TIME_COLUMNS),
            _frame(path / "tasks.csv", TASK_COLUMNS),
            _frame(path / "baselines.csv", BASELINE_COLUMNS),
            _frame(path / "weights.csv", WEIGHT_COLUMNS),
        )
    if (path / "regret.csv").is_file():
        return MarketComparison(
            pl.read_csv(path / "events.csv", try_parse_dates=True), pl.read_csv(path / "regret.csv")
        )
    if (path / "streams.csv").is_file():
        streams = pl.read_csv(path / "streams.csv", schema_overrides=BEFORE)
        return Rates(streams.select(*BEFORE, pl.exclude(*BEFORE).cast(pl.Float64)))
    return None


def _frame(path: Path, columns: dict[str, Any]) -> pl.DataFrame:
    """A table of an earlier report; a version before this one may not have had it, or all of its columns."""
    if path.stem in MAY_LACK and not path.is_file():
        return pl.DataFrame(schema=columns)
    found = pl.read_csv(path, schema_overrides=columns)
    missing = [name for name in columns if name == "higher_is_better" and name not in found.columns]
    return found.with_columns(pl.lit(None, columns[name]).alias(name) for name in missing)
