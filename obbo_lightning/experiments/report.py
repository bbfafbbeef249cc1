"""`report`: tables and figures of finished runs."""

from pathlib import Path

import polars as pl

from obbo_lightning.experiments.comparison import as_markdown, final_table, read_comparison
from obbo_lightning.experiments.comparison_figures import draw_comparison


def write_report(paths: list[Path], output: Path, title: str) -> list[Path]:
    """Write runs.csv, rounds.csv, table.md and the figures; returns what was written.

    The two CSV files hold everything that the rest is made of: ``report`` on a folder with them draws it again.
    """
    comparison = read_comparison(paths)
    output.mkdir(parents=True, exist_ok=True)
    written = []
    for name, table in comparison._asdict().items():
        six_digits = table.with_columns(pl.col(pl.Float64).round_sig_figs(6))
        six_digits.write_csv(output / f"{name}.csv")
        written.append(output / f"{name}.csv")
    table = output / "table.md"
    table.write_text(as_markdown(final_table(comparison), comparison.metric))
    return [*written, table, *draw_comparison(comparison, output, title)]
