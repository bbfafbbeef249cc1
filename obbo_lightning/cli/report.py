"""`report`: tables, figures and a page of finished runs."""

import sys
from pathlib import Path

from rich.table import Table

from obbo_lightning.cli.flags import Flags
from obbo_lightning.escaping import PlainConsole
from obbo_lightning.experiments.report import write_report
from obbo_lightning.experiments.tables import Table as Written


def shown_table(table: Written, width: int) -> Table:
    """On a screen that is too narrow for it, a table that has fewer rows than columns lies on its side."""
    rows = [list(table.columns), *map(list, table.rows)]
    if sum(max(map(len, column)) + 3 for column in zip(*rows, strict=True)) > width and len(rows) < len(table.columns):
        rows = [list(row) for row in zip(*rows, strict=True)]
    shown = Table(title=table.name, caption=table.caption if table.name == "paired" else None)
    for i, name in enumerate(rows[0]):
        shown.add_column(name, overflow="fold", justify="right" if i else "left")
    for row in rows[1:]:
        shown.add_row(*row)
    return shown


def run(arguments: list[str]) -> int:
    """Tables, figures and a page of finished runs."""
    asked = Flags("report").parse_args(arguments)
    output = Path(asked.output or asked.directories[0] / "report")
    ticker, _, day = (asked.event or "").partition(" ")
    title = asked.title or asked.directories[0].resolve().name
    report = write_report(asked.directories, output, title, (ticker, day) if asked.event else None, asked.reference)
    console = PlainConsole()
    for table in report.tables:
        console.print(shown_table(table, console.width))
    files = ", ".join(sorted(path.name for path in report.written if path != report.page))
    console.print(f"\n{report.page}\nbeside it: {files}", soft_wrap=True, highlight=False)
    for one in report.left_out:
        print(f"obbo: {one}", file=sys.stderr)
    return 1 if report.left_out else 0
