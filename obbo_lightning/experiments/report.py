"""`report`: tables and figures of finished runs."""

from pathlib import Path

import polars as pl

from obbo_lightning.experiments.comparison import (
    ROUND_COLUMNS,
    RUN_COLUMNS,
    Comparison,
    as_markdown,
    final_table,
    finished_runs,
    read_comparison,
    read_settings,
)
from obbo_lightning.experiments.comparison_figures import draw_comparison
from obbo_lightning.experiments.market_report import (
    MarketComparison,
    draw_event,
    draw_market,
    market_markdown,
    read_market,
)


def write_report(
    paths: list[Path], output: Path, title: str, event: tuple[str, str] | None = None, reference: str | None = None
) -> list[Path]:
    """Write two CSV files, table.md and the figures; returns what was written.

    The CSV files hold everything that the rest is made of: ``report`` on a folder with them draws it again.

    Args:
        paths: folders with finished runs somewhere below, or one folder with an earlier report.
        output: where to write.
        title: of the figures.
        event: ticker and day of a market event to draw by itself.
        reference: which of the market's algorithms the others are compared with; the first where this is None.
    """
    if (output / "config.yaml").exists():
        raise ValueError(f"--output must not be a run directory, got {str(output)!r}")
    found = _earlier(paths[0]) if len(paths) == 1 and not any(paths[0].rglob("config.yaml")) else None
    runs = finished_runs(paths) if found is None else []
    if found is None:
        market = read_settings(runs[0])["data"]["name"] == "market"
        found = read_market(runs) if market else read_comparison(runs)
    if isinstance(found, MarketComparison) and reference:
        found = found.facing(reference)
    elif reference:
        raise ValueError(f"--reference is for market runs, got {reference!r}")
    if event and not (runs and isinstance(found, MarketComparison)):
        raise ValueError(f"--event needs market runs with their prices, got {' '.join(event)!r} without them")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output must be a folder that can be made, got {str(output)!r}: {error.strerror}") from None
    extra = draw_event(runs, *event, output) if event else []
    written = []
    for name, table in found._asdict().items():
        six_digits = table.with_columns(pl.col(pl.Float64).round_sig_figs(6))
        six_digits.write_csv(output / f"{name}.csv")
        written.append(output / f"{name}.csv")
    table_file = output / "table.md"
    if isinstance(found, MarketComparison):
        table_file.write_text(market_markdown(found))
        figures = draw_market(found, output, title)
    else:
        table_file.write_text(as_markdown(final_table(found), found.metric))
        figures = draw_comparison(found, output, title)
    return [*written, table_file, *figures, *extra]


def _earlier(path: Path) -> Comparison | MarketComparison | None:
    """What an earlier report left, where there is one."""
    if (path / "runs.csv").is_file():
        return Comparison(
            pl.read_csv(path / "runs.csv", schema_overrides=RUN_COLUMNS),
            pl.read_csv(path / "rounds.csv", schema_overrides=ROUND_COLUMNS),
        )
    if (path / "regret.csv").is_file():
        return MarketComparison(
            pl.read_csv(path / "events.csv", try_parse_dates=True), pl.read_csv(path / "regret.csv")
        )
    return None
