"""`leaderboard`: several comparisons on one page."""

from obbo_lightning.cli.flags import Flags
from obbo_lightning.cli.report import shown_table
from obbo_lightning.escaping import PlainConsole
from obbo_lightning.experiments.leaderboard import write_leaderboard


def run(arguments: list[str]) -> int:
    """A table of who is where, as text and as a page."""
    asked = Flags("leaderboard").parse_args(arguments)
    report = write_leaderboard(asked.directories, asked.output, asked.title)
    console = PlainConsole()
    for table in report.tables:
        console.print(shown_table(table, console.width))
    console.print(f"\n{report.page}", soft_wrap=True, highlight=False)
    return 0
