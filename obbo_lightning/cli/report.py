"""`report`: tables, figures and a page of finished runs."""

import argparse
import sys
from pathlib import Path

from rich.table import Table

from obbo_lightning.experiments.report import write_ranks, write_report
from obbo_lightning.experiments.report_data import Table as ReportTable
from obbo_lightning.runs.summary import PlainConsole


def terminal_table(table: ReportTable, width: int) -> Table:
    """Return a table for a terminal; one that is too wide and has fewer rows than columns is transposed."""
    rows = [list(table.columns), *map(list, table.rows)]
    if sum(max(map(len, column)) + 3 for column in zip(*rows, strict=True)) > width and len(rows) < len(table.columns):
        rows = [list(row) for row in zip(*rows, strict=True)]
    shown = Table(title=table.name, caption=table.caption if table.name == "paired" else None)
    for i, name in enumerate(rows[0]):
        shown.add_column(name, overflow="fold", justify="right" if i else "left")
    for row in rows[1:]:
        shown.add_row(*row)
    return shown


def run(arguments: argparse.Namespace) -> int:
    """Write tables, figures and a page of finished runs, or the ranks of methods in several comparisons."""
    if arguments.by_folder:
        report = write_ranks(arguments.directories, arguments.output or Path("ranks"), arguments.title or "Ranks")
    else:
        output = arguments.output or arguments.directories[0] / "report"
        title = arguments.title or arguments.directories[0].resolve().name
        report = write_report(arguments.directories, output, title, arguments.reference)
    console = PlainConsole()
    for table in report.tables:
        console.print(terminal_table(table, console.width))
    files = ", ".join(sorted({path.name for path in report.written if path != report.page}))
    console.print(f"\n{report.page}\nbeside it: {files}", soft_wrap=True, highlight=False)
    for one in report.left_out:
        print(f"obbo: {one}", file=sys.stderr)
    return 1 if report.left_out else 0
