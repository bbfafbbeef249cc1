"""`report`: tables, figures and one page of finished runs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from obbo_lightning.experiments.comparison import (
    ROUND_COLUMNS,
    RUN_COLUMNS,
    TIME_COLUMNS,
    Comparison,
    comparison_tables,
    read_comparison,
)
from obbo_lightning.experiments.comparison_figures import draw_comparison
from obbo_lightning.experiments.drawing import Drawing, house_style, save_drawing
from obbo_lightning.experiments.market_comparison import MarketComparison, has_events, market_tables, read_market
from obbo_lightning.experiments.market_figures import draw_event, draw_market
from obbo_lightning.experiments.page import write_page
from obbo_lightning.experiments.rates import BEFORE, Rates, draw_rates, has_rates, rates_tables, read_rates
from obbo_lightning.experiments.runs import LeftOut, Run, find_runs, label_runs
from obbo_lightning.experiments.tables import Table, write_table
from obbo_lightning.experiments.tuning import draw_found, found_tables, read_found, write_found
from obbo_lightning.foreign_text import cells, uncelled_table

Found = Comparison | MarketComparison | Rates


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
    earlier = _earlier(paths[0]) if len(paths) == 1 and not any(paths[0].rglob("config.yaml")) else None
    runs, left_out = ([], []) if earlier else find_runs(paths)
    if earlier:
        found = earlier
    else:
        found, runs, unused = _read(runs)
        left_out += unused
    if event and not (runs and isinstance(found, MarketComparison)):
        raise ValueError(f"--event needs market runs with their prices, got {' '.join(event)!r} without them")
    found = found.facing(reference)
    tables, draw = _contents(found)
    tables += found_tables(searched := read_found(paths))
    with house_style():
        drawings = draw(title) + (draw_event(runs, *event) if event else []) + draw_found(searched, title)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output must be a folder that can be made, got {str(output)!r}: {error.strerror}") from None
    written = []
    for name, data in found._asdict().items():
        cells(data.with_columns(pl.col(pl.Float64).round_sig_figs(6))).write_csv(output / f"{name}.csv")
        written.append(output / f"{name}.csv")
    written += write_found(searched, output)
    written += [path for table in tables for path in write_table(table, output)]
    with house_style():
        written += [path for drawing in drawings for path in save_drawing(drawing, output)]
    page = write_page(
        output / "report.html", title, _facts(found, runs), tables, drawings, [str(one) for one in left_out]
    )
    return Report(page, [page, *written], tables, left_out)


def _read(runs: Sequence[Run]) -> tuple[Found, list[Run], list[LeftOut]]:
    """What kind of comparison these runs make follows from what they hold and what their stream says."""
    if has_rates(runs):
        rates, left_out = read_rates(runs)
        return rates, list(runs), left_out
    labelled, left_out = label_runs(runs)
    if any(map(has_events, labelled)):
        market, unused = read_market(labelled)
        return market, labelled, left_out + unused
    return read_comparison(labelled), labelled, left_out


def _contents(found: Found) -> tuple[list[Table], Callable[[str], list[Drawing]]]:
    if isinstance(found, MarketComparison):
        return market_tables(found), lambda title: draw_market(found, title)
    if isinstance(found, Rates):
        return rates_tables(found), lambda title: draw_rates(found, title)
    return comparison_tables(found), lambda title: draw_comparison(found, title)


def _facts(found: Found, runs: Sequence[Run]) -> list[tuple[str, str]]:
    """What was run, in a few words."""
    facts = [("algorithms", "; ".join(found.labels))]
    if not runs:
        return [*facts, ("made from", "the CSV files of an earlier report")]
    settings = [run.settings for run in runs]
    shared = {k: v for k, v in settings[0]["data"].items() if all(s["data"].get(k) == v for s in settings)}
    places = {k for k in runs[0].stream.may_differ if isinstance(shared.get(k), str)}
    data = [f"{k} = {_without_folder(v)}" for k, v in shared.items() if v is not None and k not in places]
    facts += [
        ("experiment", ", ".join(sorted({str(s.get("experiment")) for s in settings}))),
        ("data", ", ".join(word.removeprefix("name = ") for word in data)),
        ("runs", str(len(runs))),
        ("rounds T", ", ".join(map(str, sorted({s["rounds"] for s in settings})))),
        ("seeds", ", ".join(map(str, sorted({s["seed"] for s in settings})))),
        ("regret window w_R", ", ".join(map(str, sorted({s["regret_window"] for s in settings})))),
    ]
    return facts


def _without_folder(value: Any) -> Any:
    """Whose machine it was is nobody's business."""
    return Path(value).name if isinstance(value, str) and "/" in value else value


def _earlier(path: Path) -> Found | None:
    """What an earlier report left, where there is one."""
    try:
        found = _read_earlier(path)
        return found and type(found)(*map(uncelled_table, found))
    except (OSError, pl.exceptions.PolarsError) as damage:
        reason = " ".join(str(damage).split())
        raise ValueError(f"{path} holds a damaged report: {type(damage).__name__} {reason}") from None


def _read_earlier(path: Path) -> Found | None:
    if (path / "runs.csv").is_file():
        return Comparison(
            pl.read_csv(path / "runs.csv", schema_overrides=RUN_COLUMNS),
            pl.read_csv(path / "rounds.csv", schema_overrides=ROUND_COLUMNS),
            pl.read_csv(path / "timings.csv", schema_overrides=TIME_COLUMNS),
        )
    if (path / "regret.csv").is_file():
        return MarketComparison(
            pl.read_csv(path / "events.csv", try_parse_dates=True), pl.read_csv(path / "regret.csv")
        )
    if (path / "streams.csv").is_file():
        streams = pl.read_csv(path / "streams.csv", schema_overrides=BEFORE)
        return Rates(streams.select(*BEFORE, pl.exclude(*BEFORE).cast(pl.Float64)))
    return None
