"""`predict` for a run on a table: rows whose target is not known yet."""

from rich.table import Table

from obbo_lightning.cli.flags import Flags, require_csv
from obbo_lightning.runs.console import PlainConsole
from obbo_lightning.serving.rows import predict_rows


def run(arguments: list[str]) -> int:
    """A CSV file, and a few of its rows."""
    from obbo_lightning.training.run import warn_in_lines

    asked = Flags("predict", "rows").parse_args(arguments)
    warn_in_lines()
    output = require_csv(asked.output)
    found = predict_rows(asked.directory, asked.query, asked.csv, asked.checkpoint)
    console = PlainConsole()
    first = found.table.head(8)
    table = Table(*first.columns, title=f"{found.target}, from the last {found.learned_from} rows, weighted as learned")
    for row in first.iter_rows():
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row))
    if len(found.table) > len(first):
        table.add_row("…")
    console.print(table)
    if found.right is not None:
        console.print(f"accuracy {found.right:.3f} on {len(found.table)} rows", highlight=False)
    if found.error is not None:
        console.print(f"mean absolute error {found.error:.4g} on {len(found.table)} rows", highlight=False)
    console.print(str(found.write(output)), soft_wrap=True, highlight=False)
    return 0
