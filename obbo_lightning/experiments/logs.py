"""What cells and their jobs said."""

from pathlib import Path

LOG = "log.txt"  # in a cell


def read_log(file: Path) -> str:
    """All of it; nothing where there is none."""
    return file.read_text(errors="replace") if file.is_file() else ""


def last_line(text: str) -> str:
    r"""That is not blank.

    >>> last_line("round 3\nstopped\n\n"), last_line("")
    ('stopped', 'it said nothing')
    """
    return next((line for line in reversed(text.splitlines()) if line.strip()), "it said nothing")
